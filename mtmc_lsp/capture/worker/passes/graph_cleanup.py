"""What an exported graph still needs to be the target's: the layout of its results, and what no result needs apart from it."""

from __future__ import annotations

from collections.abc import Container, Iterator
from dataclasses import replace

from mtmc_lsp.capture.result_structure import sizes_in
from mtmc_lsp.capture.worker.side_effects import is_random
from mtmc_lsp.core.graph import Argument, Graph, InputKind, Node, Ref
from mtmc_lsp.core.sizes import Size, names_in

Layout = tuple[tuple[int, ...], tuple[int, ...]]
"""Shape and strides."""


def laid_out_as(graph: Graph, returned: list[Layout]) -> Graph:
    """The graph with results laid out as the target laid them out.

    Where a dimension of size 1 leaves the order of dimensions open, the export may settle it otherwise than eager code does.
    """
    nodes = {node.name: node for node in graph.nodes}
    for ref, seen in zip(graph.outputs, returned, strict=False):
        if ref.name not in nodes:
            continue
        node = nodes[ref.name]
        kind = node.outputs[ref.index]
        own = [stride.value(graph.sizes) for stride in kind.stride]
        if all(a == b or size == 1 for size, a, b in zip(seen[0], own, seen[1], strict=True)):
            continue
        inner_first = sorted(range(len(own)), key=lambda dim: (seen[1][dim], seen[0][dim], -dim))
        stride = list(kind.stride)
        below = Size.of(1)
        for dim in inner_first:
            stride[dim], below = below, below * kind.shape[dim]
        outputs = list(node.outputs)
        outputs[ref.index] = replace(kind, stride=tuple(stride))
        nodes[ref.name] = replace(node, outputs=tuple(outputs))
    return replace(graph, nodes=tuple(nodes[node.name] for node in graph.nodes))


def returning(graph: Graph, given_back: list[str]) -> Graph:
    """The graph with results that are inputs, written into by the target, as these inputs and not as equal values.

    Args:
        graph: what was exported, which tells an input that was changed from its new value no more.
        given_back: for each result the input that it is; empty where it is none.
    """
    changed = {mutation.input for mutation in graph.mutations}
    names = [*given_back, *[""] * (len(graph.outputs) - len(given_back))]
    outputs = [Ref(name) if name in changed else ref for ref, name in zip(graph.outputs, names, strict=True)]
    return replace(graph, outputs=tuple(outputs))


def without_dead_nodes(graph: Graph) -> Graph:
    """Without what no result needs, such as what only an assertion looked at. Random numbers are drawn all the same."""
    wanted = {ref.name for ref in graph.outputs} | {m.value.name for m in graph.mutations}
    kept: list[Node] = []
    for node in reversed(graph.nodes):
        if node.name in wanted or is_random(node.op):
            kept.append(node)
            wanted |= {ref.name for ref in node.inputs()}
    return replace(graph, nodes=tuple(reversed(kept)))


def with_unread_apart(graph: Graph, seen: Container[str]) -> Graph:
    """The graph with the inputs that nothing reads apart: neither what they hold, nor their sizes, as ``torch.arange(len(q))``.

    Args:
        graph: what was exported.
        seen: accesses of the module's tensors that the target looked at; what it did not look at is left out.
    """
    used = {ref.name for node in graph.nodes for ref in node.inputs()}
    used |= {ref.name for ref in graph.outputs} | {name for m in graph.mutations for name in (m.input, m.value.name)}
    asked = {name for text in sizes_in(graph.returns) for name in Size.parse(text).symbols()}
    asked |= {name for node in graph.nodes for size in _sizes_of(node) for name in size.symbols()}
    asked |= {name for condition in graph.conditions for name in names_in(condition)}
    for item in sorted(graph.inputs, key=lambda item: item.name not in used):
        own = {name for size in item.type.shape for name in size.symbols()}
        used |= {item.name} if asked & own else set()
        asked -= own
    inputs = tuple(item for item in graph.inputs if item.name in used)
    others = (item for item in graph.inputs if item.name not in used)
    unread = tuple(item for item in others if item.kind is InputKind.ARGUMENT or item.access in seen)
    # The sizes of a parameter that is not read are none of the graph's.
    read = {name for item in inputs for size in (*item.type.shape, *item.type.stride) for name in size.symbols()}
    sizes = {name: size for name, size in graph.sizes.items() if name in read}
    return replace(graph, inputs=inputs, unread_inputs=unread, sizes=sizes)


def _sizes_of(node: Node) -> Iterator[Size]:
    """The sizes that making a node's tensors takes, and its other arguments."""
    for kind in node.outputs:
        yield from (*kind.shape, *kind.stride)
    yield from _sizes_in((*node.args, *node.kwargs.values()))


def _sizes_in(argument: Argument) -> Iterator[Size]:
    if isinstance(argument, Size):
        yield argument
    elif isinstance(argument, tuple) and not isinstance(argument, Ref):
        for item in argument:
            yield from _sizes_in(item)
