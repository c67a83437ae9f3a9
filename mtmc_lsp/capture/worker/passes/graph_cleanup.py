"""Corrects an exported graph: the layout of results, returned inputs, dead nodes and unread inputs."""

from __future__ import annotations

from collections.abc import Container, Iterator
from dataclasses import replace

from mtmc_lsp.capture.result_structure import sizes_in
from mtmc_lsp.capture.worker.side_effects import is_random
from mtmc_lsp.core.graph import Argument, Graph, InputKind, Node, Ref
from mtmc_lsp.core.sizes import Size, names_in

Layout = tuple[tuple[int, ...], tuple[int, ...]]
"""Shape and strides."""


def with_layouts(graph: Graph, layouts: list[Layout]) -> Graph:
    """Set the strides of the results to those of the eager run.

    A dimension of size 1 leaves the order of dimensions open, and the export can choose another order than eager code.
    A graph that was traced with other flags can have results of other ranks, which keep their strides.
    """
    nodes = {node.name: node for node in graph.nodes}
    for ref, eager_layout in zip(graph.outputs, layouts, strict=False):
        if ref.name not in nodes:
            continue
        node = nodes[ref.name]
        kind = node.outputs[ref.index]
        strides = [stride.value(graph.sizes) for stride in kind.stride]
        if len(strides) != len(eager_layout[1]):
            continue
        if all(a == b or size == 1 for size, a, b in zip(eager_layout[0], strides, eager_layout[1], strict=True)):
            continue
        inner_first = sorted(range(len(strides)), key=lambda dim: (eager_layout[1][dim], eager_layout[0][dim], -dim))
        stride = list(kind.stride)
        dense_stride = Size.of(1)
        for dim in inner_first:
            stride[dim], dense_stride = dense_stride, dense_stride * kind.shape[dim]
        outputs = list(node.outputs)
        outputs[ref.index] = replace(kind, stride=tuple(stride))
        nodes[ref.name] = replace(node, outputs=tuple(outputs))
    return replace(graph, nodes=tuple(nodes[node.name] for node in graph.nodes))


def with_returned_inputs(graph: Graph, returned_inputs: list[str]) -> Graph:
    """Replace results that are modified inputs, or views of them, by these inputs. ``graph.returns`` describes the views.

    The caller gets the input's memory, not an equal tensor.

    Args:
        graph: exported graph, which does not distinguish a modified input from its new value.
        returned_inputs: for each result the name of the input that it is or views; empty if it is none.
    """
    modified = {mutation.input for mutation in graph.mutations}
    names = [*returned_inputs, *[""] * (len(graph.outputs) - len(returned_inputs))]
    outputs = [Ref(name) if name in modified else ref for ref, name in zip(graph.outputs, names, strict=True)]
    return replace(graph, outputs=tuple(outputs))


def remove_dead_nodes(graph: Graph) -> Graph:
    """Remove nodes that no result needs, for example of assertions. Random operations stay, to draw the same numbers."""
    needed = {ref.name for ref in graph.outputs} | {m.value.name for m in graph.mutations}
    live: list[Node] = []
    for node in reversed(graph.nodes):
        if node.name in needed or is_random(node.op):
            live.append(node)
            needed |= {ref.name for ref in node.inputs()}
    return replace(graph, nodes=tuple(reversed(live)))


def separate_unread_inputs(graph: Graph, accessed: Container[str], overwritten: Container[str] = ()) -> Graph:
    """Move inputs that no node reads to ``unread_inputs``. An input whose size is read, as in ``torch.arange(len(q))``, stays.

    Args:
        accessed: accesses of the module's tensors that the target read; other unread tensors are removed.
        overwritten: accesses of the attributes that the target assigned before it read them; they are removed.
    """
    used = {ref.name for node in graph.nodes for ref in node.inputs()}
    used |= {ref.name for ref in graph.outputs} | {name for m in graph.mutations for name in (m.input, m.value.name)}
    needed_sizes = {name for text in sizes_in(graph.returns) for name in Size.parse(text).symbols()}
    needed_sizes |= {name for node in graph.nodes for size in _sizes_of(node) for name in size.symbols()}
    needed_sizes |= {name for condition in graph.conditions for name in names_in(condition)}
    for item in sorted(graph.inputs, key=lambda item: item.name not in used):
        input_sizes = {name for size in item.type.shape for name in size.symbols()}
        used |= {item.name} if needed_sizes & input_sizes else set()
        needed_sizes -= input_sizes
    inputs = tuple(item for item in graph.inputs if item.name in used)
    candidates = (item for item in graph.inputs if item.name not in used)
    unread_inputs = tuple(
        item
        for item in candidates
        if (item.kind is InputKind.ARGUMENT or item.access in accessed) and item.access not in overwritten
    )
    # Sizes that occur only in unread parameters are removed.
    size_names = {name for item in inputs for size in (*item.type.shape, *item.type.stride) for name in size.symbols()}
    sizes = {name: size for name, size in graph.sizes.items() if name in size_names}
    return replace(graph, inputs=inputs, unread_inputs=unread_inputs, sizes=sizes)


def _sizes_of(node: Node) -> Iterator[Size]:
    """The sizes in a node's output types and arguments."""
    for kind in node.outputs:
        yield from (*kind.shape, *kind.stride)
    yield from _sizes_in((*node.args, *node.kwargs.values()))
    if node.loop is not None:
        yield from node.loop.sizes()


def _sizes_in(argument: Argument) -> Iterator[Size]:
    if isinstance(argument, Size):
        yield argument
    elif isinstance(argument, tuple) and not isinstance(argument, Ref):
        for item in argument:
            yield from _sizes_in(item)
