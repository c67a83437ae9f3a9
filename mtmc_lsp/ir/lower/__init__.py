"""ATen operations to primitives: one function per family, found by the ATen name without its overload."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

from mtmc_lsp.core.dtypes import ITEMSIZE
from mtmc_lsp.core.graph import Argument, Graph, Node, Ref
from mtmc_lsp.core.sizes import Size
from mtmc_lsp.ir.buffer_updates import call_counters
from mtmc_lsp.ir.lower.rounding_division import with_exact_divisions
from mtmc_lsp.ir.primitives import Builder, CannotLower, KernelIR, PrimOp

Lowering = Callable[["Call"], "str | tuple[str, ...]"]
LOWERINGS: dict[str, Lowering] = {}


def rule(*names: str) -> Callable[[Lowering], Lowering]:
    """Register a lowering for ATen operations, named without namespace and overload (``add``)."""

    def register(function: Lowering) -> Lowering:
        for name in names:
            LOWERINGS[name] = function
        return function

    return register


class Call:
    """One ATen call as a lowering rule sees it: arguments by position or name, tensors as primitives."""

    def __init__(self, builder: Builder, node: Node) -> None:
        self.b = builder
        self.node = node
        self.op = node.op.split(".")[1]
        self.overload = node.op.split(".")[2]
        self.out = node.outputs[0]

    def raw(self, position: int, name: str = "", default: Argument = None) -> Argument:
        """The argument at ``position`` or called ``name``."""
        if position < len(self.node.args):
            return self.node.args[position]
        return self.node.kwargs.get(name, default)

    def has(self, position: int, name: str = "") -> bool:
        """Whether the argument is there and not None."""
        return self.raw(position, name) is not None

    def tensor(self, position: int, name: str = "") -> str:
        """The primitive of a tensor argument.

        Raises:
            CannotLower: it is no tensor.
        """
        value = self.raw(position, name)
        if not isinstance(value, Ref):
            raise CannotLower(f"{self.node.op}: argument {position} is not a tensor")
        return self.b.values[value.name, value.index]

    def optional(self, position: int, name: str = "") -> str | None:
        """The primitive of a tensor argument, or None."""
        return self.tensor(position, name) if self.has(position, name) else None

    def operand(self, position: int, name: str = "") -> str | bool | int | float:
        """A tensor's primitive or a Python number; a constant size counts as a number, a named one is a primitive."""
        value = self.raw(position, name)
        if isinstance(value, Ref):
            return self.tensor(position, name)
        if isinstance(value, Size) and value.is_constant:
            return value.constant
        if isinstance(value, Size):
            return self.b.size(value, self.out.dtype)
        if isinstance(value, (bool, int, float)):
            return value
        raise CannotLower(f"{self.node.op}: argument {position} is neither a tensor nor a number")

    def number(self, position: int, name: str, default: float) -> float:
        """A Python number."""
        value = self.raw(position, name, default)
        if isinstance(value, Size) and value.is_constant:
            return value.constant
        if isinstance(value, (bool, int, float)):
            return value
        raise CannotLower(f"{self.node.op}: {name} is not a number")

    def integer(self, position: int, name: str, default: int = 0) -> int:
        """A Python integer."""
        return int(self.number(position, name, default))

    def flag(self, position: int, name: str, default: bool = False) -> bool:
        """A Python bool."""
        return bool(self.raw(position, name, default))

    def dim(self, position: int, name: str, rank: int, default: int = 0) -> int:
        """A dimension, made non-negative."""
        if not rank:
            raise self.fail("a dimension of a scalar")
        value = self.integer(position, name, default)
        return value + rank if value < 0 else value

    def dims(self, position: int, name: str, rank: int) -> tuple[int, ...]:
        """Dimensions, made non-negative; all of them for None or an empty list, none of a scalar."""
        if not rank:
            return ()
        value = self.raw(position, name)
        items = value if isinstance(value, tuple) else (() if value is None else (value,))
        numbers = [v.constant if isinstance(v, Size) else v for v in items]
        result = tuple(int(n) % rank for n in numbers if isinstance(n, int))
        return tuple(sorted(result)) if result else tuple(range(rank))

    def refuse_other_results(self, what: str) -> None:
        """Refuse a call of which more than the first result is wanted.

        Raises:
            CannotLower: it is; ``what`` says what the others are.
        """
        graph = self.b.graph
        read = [ref for node in graph.readers(self.node.name) for ref in node.inputs()]
        if any(ref.name == self.node.name and ref.index for ref in (*read, *graph.left)):
            raise self.fail(f"{what} are wanted")

    def alone(self, value: str) -> str | tuple[str, ...]:
        """The first result, where nobody wants the others."""
        unread = [self.b.expand(self.b.constant(0, kind.dtype), kind.shape) for kind in self.node.outputs[1:]]
        return (value, *unread) if unread else value

    def fail(self, why: str) -> CannotLower:
        """An exception to raise."""
        return CannotLower(f"{self.node.op}: {why}")


@lru_cache(maxsize=64)
def _lower(graph_box: GraphBox) -> KernelIR:
    graph = graph_box.graph
    builder = Builder(graph)
    opaque: set[str] = set()
    counted = call_counters(graph)
    for item in graph.inputs:
        name = builder.add(PrimOp.INPUT, (), item.type.shape, item.type.dtype, input=item.name)
        builder.values[item.name, 0] = name
    for node in graph.nodes:
        builder.origin = node.name
        mark, streams = len(builder.prims), builder.streams
        has_rule = _base(node.op) in LOWERINGS and node.name not in counted and _is_of_known_dtypes(graph, node)
        try:
            lowered = LOWERINGS[_base(node.op)](Call(builder, node)) if has_rule else None
        except CannotLower:
            lowered = None
            for extra in list(builder.prims)[mark:]:
                del builder.prims[extra]
            builder.streams = streams
        if lowered is None:
            opaque.add(node.name)
            lowered = tuple(
                builder.add(PrimOp.OPAQUE, (), output.shape, output.dtype, index=i)
                for i, output in enumerate(node.outputs)
            )
        for i, name in enumerate((lowered,) if isinstance(lowered, str) else lowered):
            builder.values[node.name, i] = name
    return KernelIR(graph, with_exact_divisions(builder.prims), builder.values, frozenset(opaque))


def _is_of_known_dtypes(graph: Graph, node: Node) -> bool:
    """Whether kernels compute with what a node reads and gives: with complex numbers they do not."""
    kinds = (*node.outputs, *(graph.type_of(ref) for ref in node.inputs()))
    return all(kind.dtype in ITEMSIZE for kind in kinds)


class GraphBox:
    """Makes a graph hashable by identity, for the cache."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph

    def __hash__(self) -> int:
        return id(self.graph)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, GraphBox) and other.graph is self.graph


def _base(op: str) -> str:
    parts = op.split(".")
    return parts[1] if parts[0] == "aten" else op


def lower(graph: Graph) -> KernelIR:
    """The primitive form of ``graph``; an operation without a rule becomes ``OPAQUE``."""
    from mtmc_lsp.ir.lower import (  # noqa: F401 (they register)
        convolution,
        losses,
        matmul,
        normalisation,
        pointwise,
        pooling,
        recurrent,
        reductions,
        resampling,
        scatter,
        views,
    )

    return _lower(GraphBox(graph))
