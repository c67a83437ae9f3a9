"""A loop over time steps as one node of a graph: its body is captured once, and the number of iterations is a size."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from mtmc_lsp.core.graph import MATRIX_PRODUCTS, Graph, GraphInput, InputKind, Node, Ref, TensorType
from mtmc_lsp.core.sizes import Number, Size

LOOP = "mtmc.loop.default"
"""The operation of a node that is a loop."""
MATRIX_TILE = 128
"""Columns of the largest tile of a matrix in the kernel of a loop."""
MOST_MATRIX_TILES = 32
"""Tiles of matrices with which a program multiplies in one iteration. Each is a statement of the kernel."""
MOST_BLOCK = 2**14
"""Elements of the largest value that one program instance holds: 32 registers of each of 512 threads."""


@dataclass(frozen=True)
class Position:
    """Where iteration ``i`` reads or writes a tensor: at ``first + step * i`` along ``dim``."""

    dim: int
    first: Size
    step: int


@dataclass(frozen=True)
class LoopInput:
    """A value that the body reads: a state, the row of an iteration, a whole tensor, or the number of the iteration.

    A row has length 1 along its dimension. The number of the iteration has neither an argument nor a ``next``.
    """

    name: str
    """Unique in the body; the input's name as a :class:`Ref` of the body."""
    type: TensorType
    argument: int | None = None
    """The argument of the node that it comes from; for a state its value before the loop. ``None`` if it is a number."""
    position: Position | None = None
    """Where an iteration reads a row of the argument, or the number of the iteration."""
    initial: float | None = None
    """The number that all elements of a state are before the loop."""
    next: Ref | None = None
    """The value of a state after an iteration."""

    @property
    def is_state(self) -> bool:
        """Whether iterations carry it to the next one."""
        return self.next is not None

    @property
    def is_index(self) -> bool:
        """Whether it is the number of the iteration."""
        return self.position is not None and self.argument is None


@dataclass(frozen=True)
class LoopOutput:
    """A result of the loop: the last value of a state, or a tensor that gets a row in each iteration."""

    value: Ref
    """In the body."""
    position: Position | None = None
    """Where an iteration writes the value; ``None`` for the last value of a state."""
    base: int | None = None
    """The argument with the rows that no iteration writes."""


@dataclass(frozen=True)
class Loop:
    """The body of a loop, and how iterations are connected."""

    count: Size
    """Number of iterations."""
    inputs: tuple[LoopInput, ...]
    nodes: tuple[Node, ...]
    """The body in execution order. It reads inputs and its nodes alone."""
    outputs: tuple[LoopOutput, ...]
    """One for each output of the node."""

    def body(self, graph: Graph) -> Graph:
        """One iteration as a graph: from the inputs to the next states and then the written rows."""
        inputs = tuple(GraphInput(item.name, item.name, InputKind.ARGUMENT, item.type) for item in self.inputs)
        return Graph(
            inputs=inputs,
            nodes=self.nodes,
            outputs=self.results,
            returns="tuple",
            sizes=graph.sizes,
            conditions=graph.conditions,
            numbers=graph.numbers,
            fp32_matmul=graph.fp32_matmul,
        )

    @property
    def states(self) -> tuple[LoopInput, ...]:
        """The inputs that iterations carry."""
        return tuple(item for item in self.inputs if item.is_state)

    @property
    def results(self) -> tuple[Ref, ...]:
        """The values that the body must compute."""
        following = [item.next for item in self.states if item.next is not None]
        written = [item.value for item in self.outputs if item.position is not None]
        return tuple(dict.fromkeys([*following, *written]))

    def sizes(self) -> Iterator[Size]:
        """The sizes that the loop depends on, besides those of the arguments' types."""
        yield self.count
        positions = [item.position for item in self.inputs] + [item.position for item in self.outputs]
        yield from (position.first for position in positions if position is not None)

    def matrix_tiles(self, graph: Graph) -> int:
        """The tiles of the matrices that an iteration multiplies with."""
        body, total = self.body(graph), 0
        for node in self.nodes:
            position = MATRIX_PRODUCTS.get(node.op.split(".")[1])
            matrix = node.args[position + 1] if position is not None else None
            if isinstance(matrix, Ref):
                rows, columns = (size.value(graph.sizes) for size in body.type_of(matrix).shape[-2:])
                total += -(-rows // MATRIX_TILE) * -(-columns // MATRIX_TILE)
        return total

    def numbers(self) -> Iterator[Number]:
        """The run-time numbers that the body takes."""
        for node in self.nodes:
            for argument in (*node.args, *node.kwargs.values()):
                for item in argument if isinstance(argument, tuple) else (argument,):
                    if isinstance(item, Number):
                        yield item


def pruned(node: Node) -> Node:
    """A loop without what no output needs: states, nodes of the body, and arguments."""
    loop = node.loop
    assert loop is not None
    live = _live(loop, [item.value for item in loop.outputs])
    last = {item.value for item in loop.outputs if item.position is None}
    inputs = tuple(item for item in loop.inputs if item.name in live or item.next in last)
    numbers = [item.argument for item in inputs] + [item.base for item in loop.outputs]
    used = sorted({number for number in numbers if number is not None})
    new: Mapping[int | None, int | None] = {old: i for i, old in enumerate(used)} | {None: None}
    loop = replace(
        loop,
        inputs=tuple(replace(item, argument=new[item.argument]) for item in inputs),
        nodes=tuple(inner for inner in loop.nodes if inner.name in live),
        outputs=tuple(replace(item, base=new[item.base]) for item in loop.outputs),
    )
    return replace(node, args=tuple(node.args[i] for i in used), loop=loop)


def _live(loop: Loop, roots: Sequence[Ref]) -> set[str]:
    """The names of inputs and nodes that the roots need, in this iteration or in earlier ones."""
    nodes = {node.name: node for node in loop.nodes}
    states = {item.name: item.next for item in loop.inputs if item.next is not None}
    live: set[str] = set()
    pending = [ref.name for ref in roots]
    while pending:
        name = pending.pop()
        if name not in live:
            live.add(name)
            pending += [ref.name for ref in nodes[name].inputs()] if name in nodes else []
            pending += [states[name].name] if name in states else []
    return live
