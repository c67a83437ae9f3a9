"""Which values of the forward pass the backward pass reads from memory, and which it computes again.

A value that is computed again costs neither a write in the forward pass nor memory until the backward pass. As in
rematerialisation by minimum cut (Chen et al., arXiv 1604.06174; the partitioner of AOTAutograd), only operations that add no
memory traffic are repeated: elementwise operations and views of values that the backward pass has anyway.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass, replace
from functools import lru_cache

from mtmc_lsp.capture.neutral_operations import changed_tensors, earlier_tensor
from mtmc_lsp.core.dtypes import itemsize
from mtmc_lsp.core.graph import Graph, GraphInput, InputKind, Node, Ref, TensorType
from mtmc_lsp.ir.lower import GraphBox, lower
from mtmc_lsp.ir.primitives import CHEAP, KernelIR

AGAIN = "_again"
"""Suffix of a node that computes a value of the forward pass again."""


def computing_again(graph: Graph) -> Graph:
    """The graph with copies of the nodes whose values the backward pass computes again. Only the backward pass reads them."""
    backward = graph.backward_nodes
    if not backward:
        return graph
    choice = _Choice(lower(graph))
    again = choice.made_again()
    replacements = {
        Ref(name, i): Ref(f"{name}{AGAIN}", i) for name in again for i in range(len(graph.node(name).outputs))
    }
    rounded = choice.rounded(again)

    def marked(node: Node) -> Node:
        return replace(node, rounds=True) if node.name in rounded else node

    copies = [replace(marked(graph.node(name)).reading(replacements), name=f"{name}{AGAIN}") for name in again]
    forward = [marked(node) for node in graph.nodes if node.name not in backward]
    later = [node.reading(replacements) for node in graph.nodes if node.name in backward]
    outputs = (*graph.forward_outputs, *(replacements.get(ref, ref) for ref in graph.gradients))
    return replace(graph, nodes=(*forward, *copies, *later), outputs=outputs)


class _Choice:
    def __init__(self, ir: KernelIR) -> None:
        self._ir, self._graph = ir, ir.graph
        self._saved: set[str] = set()
        """Nodes whose values are in memory during the backward pass."""
        self._changed = changed_tensors(self._graph)
        """Tensors that have other values during the backward pass."""

    def made_again(self) -> list[str]:
        """The nodes to compute again, in execution order."""
        again, alone = set[str](), list[str]()
        needed = self._needed()
        # Other results than those that autograd's formulas read are not saved: the user may change them in place.
        results = {ref.name for ref in self._graph.forward_outputs}
        self._saved |= {node.name for node in needed if node.name in results or not self._is_cheap(node)}
        for node in needed:
            if node.name in self._saved:
                continue
            frontier = self._frontier(node.name)
            if self._total(frontier) < self._bytes(node.name) or not frontier:
                self._saved |= frontier
                again |= self._between(node.name)
            else:
                self._saved.add(node.name)
                alone.append(node.name)
        for group in self._groups(alone):
            again |= self._made_again_together(group)
        return [node.name for node in self._graph.nodes if node.name in again]

    def _groups(self, names: Sequence[str]) -> list[set[str]]:
        """Saved values that follow from the same values, such as the softmax of the rows and of the columns of one product."""
        groups: list[tuple[set[str], set[str]]] = []
        for name in names:
            members, sources = {name}, self._frontier(name, {name})
            for other in [group for group in groups if group[1] & sources]:
                members, sources = members | other[0], sources | other[1]
                groups.remove(other)
            groups.append((members, sources))
        return [members for members, _ in groups if len(members) > 1]

    def _made_again_together(self, group: set[str]) -> set[str]:
        """Save what the values of a group follow from instead of them, if that is less; returns what is then computed again."""
        frontier = {source for name in group for source in self._frontier(name, group)}
        if self._total(frontier - self._saved) >= self._total(group):
            return set()
        self._saved = (self._saved - group) | frontier
        return {each for name in group for each in self._between(name)}

    def rounded(self, again: Sequence[str]) -> set[str]:
        """Values of both passes from which another saved value follows, such as the mean square of a row.

        Kernels compute 16-bit values in float32. If one pass rounds such a value and the other does not, it no longer fits the
        saved one, and terms of a gradient that should cancel do not.
        """
        before: set[str] = set()
        for name in self._saved:
            pending = list(self._graph.node(name).inputs())
            while pending:
                node = self._graph.named.get(pending.pop().name)
                if node is not None and node.name not in before:
                    before.add(node.name)
                    pending += node.inputs()
        return before & {*again, *self._saved}

    def _needed(self) -> list[Node]:
        """The nodes of the forward pass whose values the backward pass reads."""
        graph, backward = self._graph, self._graph.backward_nodes
        read = {ref.name for name in backward for ref in graph.node(name).inputs()}
        read |= {ref.name for ref in graph.gradients}
        return [node for node in graph.nodes if node.name in read and node.name not in backward]

    def _is_cheap(self, node: Node) -> bool:
        if node.name in self._ir.tables.nodes:
            return True  # each pass keeps its tables from call to call
        if self._changed & {Ref(node.name), *node.inputs()}:
            return False
        return node.name not in self._ir.opaque and all(prim.op in CHEAP for prim in self._ir.of_node(node.name))

    def _walk(self, name: str, dropped: Set[str] = frozenset()) -> Iterator[tuple[str, bool]]:
        """The node and what it is computed from, each with whether the walk ends there: at saved values that are not dropped."""
        pending, seen = [name], set[str]()
        while pending:
            current = pending.pop()
            node = self._graph.named.get(current)
            if node is None or current in seen:
                continue
            seen.add(current)
            ends = current in self._saved - dropped or not self._is_cheap(node)
            yield current, ends
            if not ends:
                pending += [ref.name for ref in node.inputs()]

    def _frontier(self, name: str, dropped: Set[str] = frozenset()) -> set[str]:
        """The values that must be saved in addition, to compute a value again; with saved ones if some are dropped."""
        ends = {current for current, ends in self._walk(name, dropped) if ends}
        return ends if dropped else ends - self._saved

    def _between(self, name: str) -> set[str]:
        return {current for current, ends in self._walk(name) if not ends}

    def _total(self, names: Set[str]) -> float:
        return sum(map(self._bytes, names))

    def _bytes(self, name: str) -> float:
        kinds = self._graph.node(name).outputs
        return sum(kind.numel.value(self._graph.sizes) * itemsize(kind.dtype) for kind in kinds)


@dataclass(frozen=True)
class Passes:
    """The two halves of a graph with a backward pass."""

    whole: Graph
    forward: Graph
    """Its outputs are the target's, followed by the values to save."""
    backward: Graph
    """Its inputs are graph inputs, saved values and the gradients of the results, in this order."""
    saved: tuple[Ref, ...]
    """What the backward pass reads, in the order of its inputs: graph inputs, and values of the forward pass."""


def forward_part(graph: Graph) -> Graph:
    """The graph as the guard and the dispatch see it: without the backward pass."""
    if graph.backward is None:
        return graph
    nodes = tuple(node for node in graph.nodes if node.name not in graph.backward_nodes)
    return replace(graph, nodes=nodes, outputs=graph.forward_outputs, backward=None)


def split(graph: Graph) -> Passes:
    """Split a graph into its forward and its backward pass. The same graph gives the same objects, whose IR is then known."""
    return _split(GraphBox(graph))


def _with_sizes(
    graph: Graph, nodes: Sequence[Node], known: Sequence[TensorType], saved: Sequence[Ref], kept: Sequence[GraphInput]
) -> Iterator[GraphInput]:
    """Inputs of the graph that only tell the backward pass a size, such as that of an embedding's table."""
    types = [*known, *(graph.type_of(ref) for ref in saved)]
    present = {name for kind in types for size in kind.shape if size.is_symbol for name in size.symbols()}
    needed = {name for node in nodes for kind in node.outputs for size in kind.shape for name in size.symbols()}
    for item in graph.inputs:
        names = {name for size in item.type.shape if size.is_symbol for name in size.symbols()}
        if item not in kept and names & needed - present:
            present |= names
            yield item


@lru_cache(maxsize=64)
def _split(box: GraphBox) -> Passes:
    graph = box.graph
    assert graph.backward is not None
    later, gradients = graph.backward_nodes, graph.gradients
    nodes = [node for node in graph.nodes if node.name in later]
    read = [ref for node in nodes for ref in node.inputs()] + list(gradients)
    of_forward = [ref for ref in dict.fromkeys(read) if ref.name in graph.named and ref.name not in later]
    read_names = {ref.name for ref in read}
    kept = [item for item in graph.inputs if item.name in read_names]
    kept += _with_sizes(graph, nodes, [item.type for item in (*kept, *graph.backward.tangents)], of_forward, kept)
    used = {item.name for item in graph.sources} | set(graph.named)
    renamed: dict[Ref, Ref] = {}
    saved_inputs = []
    for ref in of_forward:
        name = graph.node(ref.name).name_of(ref.index)
        while name in used and name != ref.name:
            name += "_"
        used.add(name)
        renamed[ref] = Ref(name)
        saved_inputs.append(GraphInput(name, name, InputKind.ARGUMENT, graph.type_of(ref)))
    new_outputs = [ref for ref in of_forward if ref not in graph.forward_outputs]
    named = zip(gradients, graph.backward.gradients, strict=True)
    gradient_of = {earlier_tensor(graph, ref).name: f"grad_{name}" for ref, name in named}
    results = graph.forward_outputs
    names = {ref.name: "out" if len(results) == 1 else f"out_{i}" for i, ref in enumerate(results)}
    names |= {ref.name: graph.node(ref.name).word for ref in new_outputs}
    forward = replace(
        graph,
        nodes=tuple(
            replace(node, variable=node.variable or names.get(node.name, ""))
            for node in graph.nodes
            if node.name not in later
        ),
        outputs=(*graph.forward_outputs, *new_outputs),
        backward=None,
    )
    backward = replace(
        graph,
        inputs=(*kept, *saved_inputs, *graph.backward.tangents),
        nodes=tuple(
            replace(node.reading(renamed), variable=gradient_of.get(node.name, node.variable)) for node in nodes
        ),
        outputs=tuple(renamed.get(ref, ref) for ref in gradients),
        returns="tuple",
        mutations=(),
        state_attributes=(),
        unread_inputs=(),
        backward=None,
    )
    return Passes(graph, forward, backward, (*(Ref(item.name) for item in kept), *of_forward))
