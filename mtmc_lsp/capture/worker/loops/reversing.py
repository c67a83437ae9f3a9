"""Turns the backward passes of kept loops into loops that compute the values of an iteration again.

In the trace, the gradients of an iteration read values of the forward loop's body. Here they read copies of these values, whose
states are rows that the forward loop saved, and whose other reads go backwards over the iterations, as those of the gradients do.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from mtmc_lsp.capture.worker.loops.markers import NAMESPACE, mark_of
from mtmc_lsp.core.graph import Argument, Graph, Node, Ref, TensorType, contiguous_stride
from mtmc_lsp.core.sizes import Size

ONE = Size.of(1)


def with_bodies_again(graph: Graph) -> Graph:
    """The graph with all backward passes of loops as loops of their own."""
    graph = _without_copies_of_states(graph)
    while (node := next((each for each in graph.nodes if mark_of(each) == "reverse"), None)) is not None:
        graph = _Reversing(graph, node).result()
    return graph


def _without_copies_of_states(graph: Graph) -> Graph:
    """Read states instead of the copies that the trace has made for autograd."""
    marks = {node.name for node in graph.nodes if mark_of(node) == "enter"}
    copies = {
        Ref(node.name): source
        for node in graph.nodes
        if node.op == "aten.clone.default" and isinstance(source := node.args[0], Ref) and source.name in marks
    }
    nodes = [node.reading(copies) for node in graph.nodes if Ref(node.name) not in copies]
    return graph.of_nodes(nodes, copies)


class _Reversing:
    """One backward loop."""

    def __init__(self, graph: Graph, node: Node) -> None:
        self.graph, self.node = graph, node
        states, initial, rows, bases, saved, loop, forward, count, dims, firsts, steps = node.args
        assert isinstance(loop, int) and isinstance(forward, int) and isinstance(saved, tuple)
        assert isinstance(count, (int, Size))
        self.loop, self.forward, self.count, self.saved = loop, forward, Size.of(count), saved
        self.results = (*_refs(states), *_refs(rows))
        self.leave = replace(
            node,
            op=f"{NAMESPACE}.leave.default",
            args=(states, initial, rows, bases, (), loop, count, dims, firsts, steps),
        )
        self.taken = {each.name for each in graph.nodes} | {item.name for item in graph.sources}

    def result(self) -> Graph:
        """The graph with the backward loop. It reads no value inside the forward loop's body."""
        before, backwards = self._changing(self.forward), self._changing(self.loop)
        needed = needed_nodes(self.graph, self.results, before | backwards)
        copied = [each for each in self.graph.nodes if each.name in needed & before - backwards]
        renamed: dict[Ref, Ref] = {}
        copies: list[Node] = []
        for each in copied:
            copies += self._copies(each, renamed)
        nodes: list[Node] = []
        for each in self.graph.nodes:
            if each.name in backwards or each is self.node:
                nodes += copies
                copies = []
                nodes.append((self.leave if each is self.node else each).reading(renamed))
            else:
                nodes.append(each)
        return replace(self.graph, nodes=tuple(nodes))

    def _changing(self, loop: int) -> set[str]:
        """The nodes that change from iteration to iteration of a loop."""
        changing: set[str] = set()
        for node in self.graph.nodes:
            mark = mark_of(node)
            if mark in ("leave", "reverse") and node.args[5] == loop:
                continue
            is_mark = mark in ("enter", "read", "index") and node.args[1] == loop
            if is_mark or any(ref.name in changing for ref in node.inputs()):
                changing.add(node.name)
        return changing

    def _copies(self, node: Node, renamed: dict[Ref, Ref]) -> Iterator[Node]:
        """The nodes that compute a value of the forward loop's iteration again."""
        name, mark = self._unique(f"{node.name}_again"), mark_of(node)
        for i in range(len(node.outputs)):
            renamed[Ref(node.name, i)] = Ref(name, i)
        if mark == "enter":
            slot = node.args[2]
            assert isinstance(slot, int)
            source = self.saved[slot]
            shape = (ONE, *node.type.shape)
            row = Node(
                self._unique(f"{name}_row"),
                f"{NAMESPACE}.read.default",
                (source, self.loop, 0, self.count - 1, -1),
                {},
                (TensorType(shape, node.type.dtype, contiguous_stride(shape)),),
                node.line,
            )
            yield row
            yield Node(name, "aten.select.int", (Ref(row.name), 0, 0), {}, node.outputs, node.line)
        elif mark in ("read", "index"):
            *arguments, first, step = node.reading(renamed).args
            assert isinstance(first, (int, Size)) and isinstance(step, int)
            arguments[1] = self.loop
            last = Size.of(first) + (self.count - 1) * step
            yield replace(node, name=name, args=(*arguments, last, -step))
        else:
            yield replace(node.reading(renamed), name=name, variable="")

    def _unique(self, name: str) -> str:
        while name in self.taken:
            name += "_"
        self.taken.add(name)
        return name


def _refs(argument: Argument) -> tuple[Ref, ...]:
    assert isinstance(argument, tuple)
    return tuple(item for item in argument if isinstance(item, Ref))


def needed_nodes(graph: Graph, results: Iterable[Ref], changing: set[str]) -> set[str]:
    """Names of the nodes of ``changing`` that results depend on, along paths inside ``changing``."""
    needed: set[str] = set()
    pending = [ref.name for ref in results]
    while pending:
        name = pending.pop()
        if name in changing and name not in needed:
            needed.add(name)
            pending += [ref.name for ref in graph.node(name).inputs()]
    return needed
