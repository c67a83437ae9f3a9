"""Editing a functional graph: new nodes in the place of one, readers pointed elsewhere, what nobody reads dropped."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from mtmc_lsp.core.graph import Argument, Graph, Node, Ref, TensorType, contiguous_stride
from mtmc_lsp.core.sizes import Size

VIEWS = frozenset(
    "view reshape permute transpose t unsqueeze squeeze expand slice select alias detach _unsafe_view".split(),
)
"""ATen operations that may return another view of their first argument."""


class CannotRewrite(Exception):
    """The rewrite does not apply; the message says why, for people."""


@dataclass(frozen=True)
class Edit:
    """What stands for a node from now on."""

    node: str
    """The node that goes."""
    result: Ref
    """What its readers read instead."""
    added: tuple[Node, ...] = ()
    """New nodes, put in its place."""
    why: str = ""
    """A sentence for people."""
    text: str = ""
    """The action's one-line form, without the lines."""


@dataclass(frozen=True)
class AlgebraRule:
    """One exact rewrite."""

    name: str
    match: Callable[[Graph, Node], Edit | None]
    """The edit where the rule applies to the node."""
    proof: str
    """Why the result is the same."""
    changes_rounding: bool = False
    """Whether operands are rounded that were not: then a measurement on a GPU decides, and never under ``strict``."""


def base_name(node: Node) -> str:
    """The ATen operation without namespace and overload."""
    return node.op.split(".")[1]


def made_by(graph: Graph, value: Argument) -> Node | None:
    """The node that makes a value; None for inputs and numbers."""
    if not isinstance(value, Ref):
        return None
    return graph.named.get(value.name)


def readers(graph: Graph, name: str) -> list[Node]:
    """The nodes that read a node or input."""
    return list(graph.readers(name))


def is_returned(graph: Graph, name: str) -> bool:
    """Whether a node's value leaves the target, or is written into an input."""
    return any(ref.name == name for ref in graph.escaping)


def escapes(graph: Graph, name: str) -> bool:
    """Whether a node's memory may be seen by the caller: it is returned, perhaps through views."""
    if is_returned(graph, name):
        return True
    return any(base_name(node) in VIEWS and escapes(graph, node.name) for node in readers(graph, name))


def is_only_for(graph: Graph, name: str, reader: str) -> bool:
    """Whether nobody but ``reader`` reads the node."""
    return not is_returned(graph, name) and {node.name for node in readers(graph, name)} == {reader}


def uses_other_outputs(graph: Graph, node: Node) -> bool:
    """Whether anybody wants more than the first thing that a node returns."""
    read = [ref for other in graph.readers(node.name) for ref in other.inputs()]
    return any(ref.name == node.name and ref.index for ref in (*read, *graph.escaping))


def dense(shape: tuple[Size, ...], dtype: str) -> TensorType:
    """A contiguous tensor."""
    return TensorType(shape, dtype, contiguous_stride(shape))


def made(like: Node, suffix: str, op: str, args: tuple[Argument, ...], kind: TensorType, *, variable: str = "") -> Node:
    """A new node that stands on the line of ``like``."""
    return Node(f"{like.name}_{suffix}", op, args, {}, (kind,), like.line, variable)


def edited(graph: Graph, edit: Edit) -> Graph:
    """``graph`` after an edit; nodes that nobody needs any more are gone."""
    swap = {Ref(edit.node): edit.result}
    nodes: list[Node] = []
    for node in graph.nodes:
        if node.name == edit.node:
            nodes += edit.added
        else:
            nodes.append(node.reading(swap))
    return _without_dead(graph.of_nodes(nodes, swap))


def _without_dead(graph: Graph) -> Graph:
    wanted = {ref.name for ref in graph.outputs} | {m.value.name for m in graph.mutations}
    kept: list[Node] = []
    for node in reversed(graph.nodes):
        if node.name in wanted:
            kept.append(node)
            wanted |= {ref.name for ref in node.inputs()}
    return replace(graph, nodes=tuple(reversed(kept)))


def numbers_of(value: Argument, count: int) -> tuple[int, ...] | None:
    """An argument of a number per dimension, or of one for all ``count`` of them; ``None`` where they are not known."""
    items = value if isinstance(value, tuple) else (value,)
    numbers = [item.constant if isinstance(item, Size) and item.is_constant else item for item in items]
    if not all(isinstance(item, int) and not isinstance(item, bool) for item in numbers) or len(numbers) not in (
        1,
        count,
    ):
        return None
    whole = tuple(int(str(item)) for item in numbers)
    return whole * count if len(whole) == 1 else whole
