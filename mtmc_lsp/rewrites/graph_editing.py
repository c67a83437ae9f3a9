"""Edits a functional graph: replaces a node by new nodes, redirects its readers and removes dead nodes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

from mtmc_lsp.core.graph import Argument, Graph, Node, Ref, TensorType, contiguous_stride
from mtmc_lsp.core.sizes import Size

VIEWS = frozenset(
    "view reshape permute transpose t unsqueeze squeeze expand slice select alias detach _unsafe_view".split(),
)
"""ATen operations that may return a view of their first argument."""
CONVOLUTIONS = frozenset(f"{name}{n}d" for name in ("conv", "conv_transpose") for n in (1, 2, 3))


class CannotRewrite(Exception):
    """The rewrite does not apply; the message tells the user why."""


@dataclass(frozen=True)
class Edit:
    """The replacement of one node."""

    node: str
    """The replaced node."""
    result: Ref
    """The value that readers of the node read instead."""
    added: tuple[Node, ...] = ()
    """New nodes, inserted at the position of the replaced one."""
    why: str = ""
    """One sentence for the user."""
    text: str = ""
    """The action in one line, without source lines."""


@dataclass(frozen=True)
class AlgebraRule:
    """One exact rewrite."""

    name: str
    match: Callable[[Graph, Node], Edit | None]
    """Returns the edit, or ``None`` if the rule does not apply to the node."""
    proof: str
    """Why the result is the same."""
    changes_rounding: bool = False
    """Whether the rule rounds operands: such a rule needs a measurement on a GPU and is never used under ``strict``."""


def base_name(node: Node) -> str:
    """The ATen operation without namespace and overload."""
    return node.op.split(".")[1]


def producer(graph: Graph, value: Argument) -> Node | None:
    """The node that computes a value; None for inputs and numbers."""
    if not isinstance(value, Ref):
        return None
    return graph.named.get(value.name)


def readers(graph: Graph, name: str) -> list[Node]:
    """The nodes that read a node or input."""
    return list(graph.readers(name))


def is_returned(graph: Graph, name: str) -> bool:
    """Whether the target returns a node's value or copies it into an input."""
    return any(ref.name == name for ref in graph.escaping)


def escapes(graph: Graph, name: str) -> bool:
    """Whether the caller can access a node's memory: the target returns it, possibly through views."""
    if is_returned(graph, name):
        return True
    return any(base_name(node) in VIEWS and escapes(graph, node.name) for node in readers(graph, name))


def is_only_reader(graph: Graph, name: str, reader: str) -> bool:
    """Whether ``reader`` is the only reader of the node."""
    return not is_returned(graph, name) and {node.name for node in readers(graph, name)} == {reader}


def uses_other_outputs(graph: Graph, node: Node) -> bool:
    """Whether any result of the node other than the first is used."""
    read = [ref for other in graph.readers(node.name) for ref in other.inputs()]
    return any(ref.name == node.name and ref.index for ref in (*read, *graph.escaping))


def contiguous_type(shape: tuple[Size, ...], dtype: str) -> TensorType:
    """The type of a contiguous tensor."""
    return TensorType(shape, dtype, contiguous_stride(shape))


def new_node(
    like: Node, suffix: str, op: str, args: tuple[Argument, ...], kind: TensorType, *, variable: str = ""
) -> Node:
    """A new node with the source line of ``like``; its name is that of ``like`` with a suffix."""
    return Node(f"{like.name}_{suffix}", op, args, {}, (kind,), like.line, variable)


@dataclass
class Chain:
    """Builds the nodes that replace one node."""

    like: Node
    graph: Graph
    suffix: str
    """Part of the new nodes' names, between the name of ``like`` and a number."""
    nodes: list[Node] = field(default_factory=list)

    def type_of(self, ref: Ref) -> TensorType:
        """The type of a value of the graph or of a new node."""
        return next((node.type for node in self.nodes if node.name == ref.name), None) or self.graph.type_of(ref)

    def add(self, op: str, args: tuple[Argument, ...], kind: TensorType, **kwargs: Argument) -> Ref:
        """Append an operation with a result of type ``kind``."""
        qualified = op if op.startswith("mtmc.") else f"aten.{op}"
        node = new_node(self.like, f"{self.suffix}{len(self.nodes)}", qualified, args, kind)
        self.nodes.append(replace(node, kwargs=kwargs))
        return Ref(node.name)

    def nodes_with_variable(self) -> list[Node]:
        """The new nodes; the last one has the user's variable for the value of the replaced node."""
        return [*self.nodes[:-1], replace(self.nodes[-1], variable=self.like.variable)]


def numbers(shape: Iterable[Size]) -> tuple[Argument, ...]:
    """A shape as an argument of a node."""
    return tuple(size.constant if size.is_constant else size for size in shape)


def apply_edit(graph: Graph, edit: Edit) -> Graph:
    """``graph`` after an edit, without dead nodes."""
    swap = {Ref(edit.node): edit.result}
    nodes: list[Node] = []
    for node in graph.nodes:
        if node.name == edit.node:
            nodes += edit.added
        else:
            nodes.append(node.reading(swap))
    return without_dead(graph.of_nodes(nodes, swap))


def replace_each(
    graph: Graph, applies: Callable[[Node], bool], replacement: Callable[[Node, Node], tuple[Sequence[Node], Ref]]
) -> Graph:
    """``graph`` with other nodes in place of each node to which the rewrite applies.

    Args:
        replacement: takes a node, and this node with operands that earlier replacements changed; returns the new nodes, and the
            value that replaces the node's.
    """
    nodes: list[Node] = []
    swap: dict[Ref, Ref] = {}
    for node in graph.nodes:
        node_now = node.reading(swap)
        if applies(node):
            added, swap[Ref(node.name)] = replacement(node, node_now)
            nodes += added
        else:
            nodes.append(node_now)
    return graph.of_nodes(nodes, swap)


def without_dead(graph: Graph) -> Graph:
    """The graph without nodes that no output and no mutation needs."""
    needed = {ref.name for ref in graph.outputs} | {m.value.name for m in graph.mutations}
    live: list[Node] = []
    for node in reversed(graph.nodes):
        if node.name in needed:
            live.append(node)
            needed |= {ref.name for ref in node.inputs()}
    return replace(graph, nodes=tuple(reversed(live)))


def constants_of(value: Argument, count: int) -> tuple[int, ...] | None:
    """An argument with one number per dimension, or one for all ``count`` dimensions; ``None`` if one is symbolic."""
    items = value if isinstance(value, tuple) else (value,)
    numbers = [item.constant if isinstance(item, Size) and item.is_constant else item for item in items]
    if not all(isinstance(item, int) and not isinstance(item, bool) for item in numbers) or len(numbers) not in (
        1,
        count,
    ):
        return None
    integers = tuple(int(str(item)) for item in numbers)
    return integers * count if len(integers) == 1 else integers
