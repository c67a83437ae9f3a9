"""Lowers ATen operations to primitives: one function per family, registered by the ATen name without its overload."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

from mtmc_lsp.core.dtypes import ITEMSIZE, is_low_precision
from mtmc_lsp.core.graph import Argument, Graph, Node, Ref
from mtmc_lsp.core.sizes import Number, Size
from mtmc_lsp.ir.buffer_updates import call_counters
from mtmc_lsp.ir.constant_tables import constant_tables
from mtmc_lsp.ir.lower.positions import with_separate_positions
from mtmc_lsp.ir.lower.rounding_division import with_exact_divisions
from mtmc_lsp.ir.primitives import Builder, CannotLower, KernelIR, PrimOp, Scalar

Lowering = Callable[["Call"], "str | tuple[str, ...]"]
LOWERINGS: dict[str, Lowering] = {}


def lowering(*names: str) -> Callable[[Lowering], Lowering]:
    """Register a lowering for ATen operations, named without namespace and overload (``add``)."""

    def register(function: Lowering) -> Lowering:
        for name in names:
            LOWERINGS[name] = function
        return function

    return register


class Call:
    """One ATen call for a lowering: arguments by position or name, tensors as primitives."""

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
        """Whether the argument is present and not None."""
        return self.raw(position, name) is not None

    def tensor(self, position: int, name: str = "") -> str:
        """The primitive of a tensor argument.

        Raises:
            CannotLower: the argument is not a tensor.
        """
        value = self.raw(position, name)
        if not isinstance(value, Ref):
            raise CannotLower(f"{self.node.op}: argument {position} is not a tensor")
        return self.b.values[value.name, value.index]

    def optional(self, position: int, name: str = "") -> str | None:
        """The primitive of a tensor argument, or None."""
        return self.tensor(position, name) if self.has(position, name) else None

    def operand(self, position: int, name: str = "") -> str | Scalar:
        """A tensor's primitive or a number; a constant size becomes a number, a symbolic one a primitive."""
        value = self.raw(position, name)
        if isinstance(value, Ref):
            return self.tensor(position, name)
        if isinstance(value, Size) and value.is_constant:
            return value.constant
        if isinstance(value, Size):
            return self.b.size(value, self.out.dtype)
        if isinstance(value, (bool, int, float, Number)):
            return value
        raise CannotLower(f"{self.node.op}: argument {position} is neither a tensor nor a number")

    def scalar(self, position: int, name: str, default: float) -> Scalar:
        """A number that may be known only at run time."""
        value = self.raw(position, name, default)
        return value if isinstance(value, Number) else self.number(position, name, default)

    def number(self, position: int, name: str, default: float) -> float:
        """A Python number that is known now."""
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
        """A non-negative dimension."""
        if not rank:
            raise self.fail("a dimension of a scalar")
        value = self.integer(position, name, default)
        return value + rank if value < 0 else value

    def dims(self, position: int, name: str, rank: int) -> tuple[int, ...]:
        """Non-negative dimensions, sorted; all of them for None or an empty list, none for a scalar."""
        if not rank:
            return ()
        value = self.raw(position, name)
        items = value if isinstance(value, tuple) else (() if value is None else (value,))
        numbers = [v.constant if isinstance(v, Size) else v for v in items]
        dims_of = tuple(int(n) % rank for n in numbers if isinstance(n, int))
        return tuple(sorted(dims_of)) if dims_of else tuple(range(rank))

    def reject_other_results(self, what: str) -> None:
        """Reject a call if any result other than the first is used.

        Raises:
            CannotLower: another result is used; ``what`` describes these results.
        """
        graph = self.b.graph
        read = [ref for node in graph.readers(self.node.name) for ref in node.inputs()]
        if any(ref.name == self.node.name and ref.index for ref in (*read, *graph.escaping)):
            raise self.fail(f"{what} are used")

    def with_unused(self, value: str) -> str | tuple[str, ...]:
        """All results of a call of which only the first is used: the others are zeros, which are never computed."""
        unread = [self.b.expand(self.b.constant(0, kind.dtype), kind.shape) for kind in self.node.outputs[1:]]
        return (value, *unread) if unread else value

    def fail(self, why: str) -> CannotLower:
        """The exception for a call that cannot be lowered."""
        return CannotLower(f"{self.node.op}: {why}")


def _lower(graph: Graph) -> KernelIR:
    builder = Builder(graph)
    opaque: set[str] = set()
    counters, tables = call_counters(graph), constant_tables(graph)
    for item in graph.sources:
        name = builder.add(PrimOp.INPUT, (), item.type.shape, item.type.dtype, input=item.name)
        builder.values[item.name, 0] = name
    for node in graph.nodes:
        builder.origin = node.name
        mark, streams = len(builder.prims), builder.streams
        has_lowering = _base(node.op) in LOWERINGS and _has_supported_dtypes(graph, node)
        has_lowering = has_lowering and node.name not in counters and node.name not in tables.nodes
        try:
            lowered = LOWERINGS[_base(node.op)](Call(builder, node)) if has_lowering else None
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
            builder.values[node.name, i] = _rounded(builder, name) if node.rounds else name
    prims = with_exact_divisions(with_separate_positions(builder.prims))
    return KernelIR(graph, prims, builder.values, frozenset(opaque), tables)


def _rounded(builder: Builder, name: str) -> str:
    """A computed 16-bit value as memory would hold it."""
    prim = builder.prims[name]
    is_computed = prim.op is PrimOp.POINTWISE and is_low_precision(prim.dtype)
    return builder.pointwise("cast", name, dtype=prim.dtype, rounds=True) if is_computed else name


def _has_supported_dtypes(graph: Graph, node: Node) -> bool:
    """Whether kernels support the dtypes of a node's inputs and outputs; complex numbers are not supported."""
    kinds = (*node.outputs, *(graph.type_of(ref) for ref in node.inputs()))
    return all(kind.dtype in ITEMSIZE for kind in kinds)


class GraphBox:
    """Makes a graph hashable by identity, as a cache key."""

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
    """The kernel IR of ``graph``; an operation without a lowering becomes ``OPAQUE``. The IRs of the last graphs are kept."""
    return _kept(GraphBox(graph))


@lru_cache(maxsize=64)
def _kept(graph_box: GraphBox) -> KernelIR:
    return lower_once(graph_box.graph)


def lower_once(graph: Graph) -> KernelIR:
    """Like :func:`lower`, for one of thousands of graphs, which would displace the kept ones."""
    from mtmc_lsp.ir.lower import (  # noqa: F401 (registers the lowerings)
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
        special,
        views,
    )

    return _lower(graph)
