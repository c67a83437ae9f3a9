"""The primitive form of a graph: every ATen operation as a few pointwise, view, reduction and product primitives.

Legality and cost are decided on this form, and the built-in coder renders it. Each primitive keeps the ATen node it came
from (``origin``), so regions are still spoken of in the user's own operations and lines.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property

from mtmc_lsp.core.dtypes import is_float
from mtmc_lsp.core.graph import Graph, Ref
from mtmc_lsp.core.sizes import Size, SizeLike, product

ONE = Size.of(1)


class PrimOp(Enum):
    """What a primitive does with its inputs."""

    INPUT = "input"
    """A graph input."""
    OPAQUE = "opaque"
    """The result of an ATen call that stays a torch call."""
    CONSTANT = "constant"
    """``attrs["value"]`` (a number or a Size), broadcast."""
    IOTA = "iota"
    """Its own index along ``attrs["dim"]``, times ``attrs["step"]`` plus ``attrs["start"]``."""
    RANDOM = "random"
    """Uniform in [0, 1) by Philox; ``attrs["stream"]`` numbers the random operations of the graph."""
    POINTWISE = "pointwise"
    """``attrs["fn"]`` of the broadcast inputs."""
    RESHAPE = "reshape"
    PERMUTE = "permute"
    """``attrs["dims"][i]`` is the input dimension that becomes dimension i."""
    EXPAND = "expand"
    ALIAS = "alias"
    """The same values, walked along loop axes of their own: the other operand of a product of a tensor with itself."""
    SLICE = "slice"
    """``attrs``: ``dim``, ``start`` (Size), ``step`` (int)."""
    FLIP = "flip"
    """``attrs["dims"]``."""
    CAT = "cat"
    """``attrs["dim"]``."""
    PAD = "pad"
    """``attrs``: ``before`` (int per dimension) and ``value``."""
    WINDOW = "window"
    """Overlapping windows along ``attrs["dim"]``: element ``i`` of the dimension and ``t`` of a new last one is the input's
    ``i * step + t * dilation``."""
    CROP = "crop"
    """The first elements of dimensions of a product, which the product's kernel leaves unwritten beyond them."""
    GATHER = "gather"
    """Element of input 0 whose index along ``attrs["dim"]`` is input 1 (of the result's shape, broadcast)."""
    ADD_AT = "add-at"
    """Input 0 with the elements of input 2 added, each where input 1 (broadcast) says along ``attrs["dim"]``, in no order."""
    REDUCE = "reduce"
    """``attrs``: ``fn`` and ``dims``; reduced dimensions are kept with size 1."""
    FOLD = "fold"
    """Like ``REDUCE``, of few elements: each is taken one after another, wherever the result is asked for."""
    SCAN = "scan"
    """``attrs``: ``fn`` and ``dim``: inclusive, along one dimension; from its end where ``reverse`` is set."""
    RECURRENT = "recurrent"
    """Result ``attrs["index"]`` of the recurrent layers ``attrs["form"]`` (:mod:`mtmc_lsp.ir.recurrence`)."""
    MATMUL = "matmul"
    """``[batch, rows, summed] @ [batch, summed, columns]``; ``attrs["dims"]`` where any of these are several dimensions.

    With four inputs the first two are high halves and the others the low ones: the products of low halves are left out."""


TERM_BY_TERM = {"sum": "add", "sum_exp": "add", "prod": "mul", "max": "maximum", "min": "minimum"}
"""Reductions, and the function of two operands that each is made of."""
FEW_TERMS = 4
"""Elements of a reduction that are taken one by one."""
CENTRED = "centred"
"""In the ``attrs`` of a sum of squared deviations from a mean: the sum of differences from the row's first element that this
mean was made of, so that one walk finds both (Welford, Technometrics 4, 1962; Chan, Golub & LeVeque, 1983)."""
VIEW_OPS = frozenset(
    {PrimOp.RESHAPE, PrimOp.PERMUTE, PrimOp.EXPAND, PrimOp.ALIAS, PrimOp.SLICE, PrimOp.FLIP, PrimOp.WINDOW},
)
"""Primitives that move no data and compute nothing."""

IN_PLACE = frozenset({PrimOp.PERMUTE, PrimOp.RESHAPE, PrimOp.ALIAS})
"""Those of them that show all elements of a tensor, each once."""


@dataclass(frozen=True)
class Prim:
    """One primitive."""

    name: str
    op: PrimOp
    inputs: tuple[str, ...]
    shape: tuple[Size, ...]
    dtype: str
    origin: str
    """ATen node it came from; empty for graph inputs."""
    attrs: Mapping[str, object] = field(default_factory=dict)

    @property
    def fn(self) -> str:
        """The function's name, for those that have one."""
        return str(self.attrs.get("fn", ""))


@dataclass(frozen=True)
class ProductDims:
    """How many of a product's dimensions are which."""

    batch: int
    rows: int = 1
    summed: int = 1
    columns: int = 1
    kernel_positions: int = 0
    """How many of the summed ones, from the first on, are the few places of a window; channels follow."""

    @staticmethod
    def of(prim: Prim) -> ProductDims:
        """Those of a product."""
        own = prim.attrs.get("dims")
        return own if isinstance(own, ProductDims) else ProductDims(len(prim.shape) - 2)


@dataclass(frozen=True)
class ProductSizes:
    """A product's sizes."""

    batch: Size
    m: Size
    n: Size
    k: Size
    channels: Size
    """The part of ``k`` that is no place of a window."""

    @staticmethod
    def of(prims: Mapping[str, Prim], prim: Prim) -> ProductSizes:
        """Those of a product among ``prims``."""
        dims = ProductDims.of(prim)
        left = prims[prim.inputs[0]].shape
        first, second = dims.batch, dims.batch + dims.rows
        return ProductSizes(
            product(prim.shape[:first]),
            product(prim.shape[first:second]),
            product(prim.shape[second:]),
            product(left[second:]),
            product(left[second + dims.kernel_positions :]),
        )


def is_zero_padding(prim: Prim) -> bool:
    """Whether the primitive puts zeros around its input."""
    return prim.op is PrimOp.PAD and prim.attrs["value"] == 0


def has_split_operands(prim: Prim) -> bool:
    """Whether it is a product of operands that were split into halves before."""
    return prim.op is PrimOp.MATMUL and len(prim.inputs) > 2


class CannotLower(Exception):
    """An ATen operation that has no primitive form; it stays a torch call."""


@dataclass(frozen=True)
class KernelIR:
    """A graph in primitive form, in execution order."""

    graph: Graph
    prims: Mapping[str, Prim]
    values: Mapping[tuple[str, int], str]
    """``(node or input, output index)`` to the primitive that is its value."""
    opaque: frozenset[str]
    """ATen nodes that stay torch calls whatever the schedule."""

    def of(self, ref: Ref) -> Prim:
        """The primitive that ``ref`` names."""
        return self.prims[self.values[ref.name, ref.index]]

    def of_node(self, node: str) -> Iterator[Prim]:
        """The primitives that came from the ATen node."""
        return iter(self._by_origin.get(node, ()))

    def product_of_node(self, node: str) -> Prim | None:
        """The matrix product that an ATen node is lowered to; ``None`` where it is none."""
        return next((prim for prim in self.of_node(node) if prim.op is PrimOp.MATMUL), None)

    @cached_property
    def positions(self) -> Mapping[str, int]:
        """The place of each primitive in the order of execution."""
        return {name: i for i, name in enumerate(self.prims)}

    @cached_property
    def values_of(self) -> Mapping[str, tuple[Ref, ...]]:
        """Every ATen value that each primitive is."""
        found: dict[str, list[Ref]] = {}
        for (name, index), prim in self.values.items():
            found.setdefault(prim, []).append(Ref(name, index))
        return {prim: tuple(refs) for prim, refs in found.items()}

    @cached_property
    def value_of(self) -> Mapping[str, Ref]:
        """The first ATen value that each primitive is."""
        return {prim: Ref(name, index) for (name, index), prim in reversed(list(self.values.items()))}

    @cached_property
    def _by_origin(self) -> Mapping[str, list[Prim]]:
        found: dict[str, list[Prim]] = {}
        for prim in self.prims.values():
            found.setdefault(prim.origin, []).append(prim)
        return found


class Builder:
    """Adds primitives; used by the lowering rules."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.prims: dict[str, Prim] = {}
        self.values: dict[tuple[str, int], str] = {}
        self.origin = ""
        self.streams = 0

    def add(
        self,
        op: PrimOp,
        inputs: Sequence[str],
        shape: Sequence[SizeLike],
        dtype: str,
        **attrs: object,
    ) -> str:
        """Append a primitive; returns its name."""
        name = f"p{len(self.prims)}"
        sizes = tuple(Size.of(size) for size in shape)
        self.prims[name] = Prim(name, op, tuple(inputs), sizes, dtype, self.origin, attrs)
        return name

    def shape(self, name: str) -> tuple[Size, ...]:
        """Shape of a primitive."""
        return self.prims[name].shape

    def dtype(self, name: str) -> str:
        """Dtype of a primitive."""
        return self.prims[name].dtype

    def constant(self, value: bool | int | float, dtype: str) -> str:
        """A scalar."""
        return self.add(PrimOp.CONSTANT, (), (), dtype, value=value)

    def size(self, size: Size, dtype: str) -> str:
        """A size as a scalar."""
        return self.add(PrimOp.CONSTANT, (), (), dtype, value=size.constant if size.is_constant else size)

    def pointwise(self, fn: str, *operands: str | bool | int | float, dtype: str, **attrs: object) -> str:
        """``fn`` of operands broadcast as in PyTorch; Python scalars become constants of ``dtype``."""
        names = [self.constant(x, self._scalar_dtype(x, dtype)) if not isinstance(x, str) else x for x in operands]
        shape = broadcast([self.shape(name) for name in names])
        return self.add(PrimOp.POINTWISE, names, shape, dtype, fn=fn, **attrs)

    @staticmethod
    def _scalar_dtype(value: bool | int | float, dtype: str) -> str:
        if isinstance(value, bool):
            return "bool"
        if isinstance(value, float) and not is_float(dtype):
            return "float32"
        return dtype if dtype != "bool" else ("float32" if isinstance(value, float) else "int64")

    def cast(self, name: str, dtype: str) -> str:
        """``name`` as ``dtype``; itself where it has that dtype."""
        return name if self.dtype(name) == dtype else self.pointwise("cast", name, dtype=dtype)

    def reduce(self, fn: str, name: str, dims: Sequence[int], dtype: str, *extra: str) -> str:
        """Reduce ``dims``, kept with size 1.

        Dimensions of size 1 have nothing to reduce, so no reduction is made of them; and few elements, as the coordinates of a
        point, are taken one by one: what is left is elementwise, and goes into any kernel.
        """
        dims = [d for d in dims if self.shape(name)[d] != ONE]
        if not dims:
            return self._of_single(fn, name, dtype, *extra)
        count = product([self.shape(name)[d] for d in dims])
        if fn in TERM_BY_TERM and count.is_constant and 1 < count.constant <= FEW_TERMS:
            return self._term_by_term(fn, name, dims, dtype, *extra)
        shape = [ONE if i in dims else size for i, size in enumerate(self.shape(name))]
        return self.add(PrimOp.REDUCE, (name, *extra), shape, dtype, fn=fn, dims=tuple(sorted(dims)))

    def _term_by_term(self, fn: str, name: str, dims: Sequence[int], dtype: str, *extra: str) -> str:
        terms = [name]
        for dim in dims:
            places = range(self.shape(name)[dim].constant)
            terms = [self.slice(term, dim, place, 1) for term in terms for place in places]
        if fn == "sum_exp":
            terms = [self._of_single(fn, term, dtype, *extra) for term in terms]
        total = terms[0]
        for term in terms[1:]:
            total = self.pointwise(TERM_BY_TERM[fn], total, term, dtype=dtype)
        return total

    def _of_single(self, fn: str, name: str, dtype: str, *extra: str) -> str:
        """What a reduction of one element each gives."""
        if fn.startswith("arg"):
            return self.expand(self.constant(0, dtype), self.shape(name))
        if fn == "sum_exp":
            return self.pointwise("exp", self.pointwise("sub", name, *extra, dtype=dtype), dtype=dtype)
        return self.cast(name, dtype)

    def fold(self, fn: str, name: str, dims: Sequence[int], dtype: str) -> str:
        """Reduce few elements along ``dims``, which go."""
        shape = [size for i, size in enumerate(self.shape(name)) if i not in dims]
        return self.add(PrimOp.FOLD, (name,), shape, dtype, fn=fn, dims=tuple(sorted(dims)))

    def reshape(self, name: str, shape: Sequence[SizeLike]) -> str:
        """``name`` with another shape of the same number of elements."""
        sizes = tuple(Size.of(size) for size in shape)
        return name if sizes == self.shape(name) else self.add(PrimOp.RESHAPE, (name,), sizes, self.dtype(name))

    def permute(self, name: str, dims: Sequence[int]) -> str:
        """Dimensions reordered."""
        if tuple(dims) == tuple(range(len(dims))):
            return name
        shape = [self.shape(name)[d] for d in dims]
        return self.add(PrimOp.PERMUTE, (name,), shape, self.dtype(name), dims=tuple(dims))

    def expand(self, name: str, shape: Sequence[SizeLike]) -> str:
        """Broadcast to ``shape``."""
        sizes = tuple(Size.of(size) for size in shape)
        return name if sizes == self.shape(name) else self.add(PrimOp.EXPAND, (name,), sizes, self.dtype(name))

    def slice(self, name: str, dim: int, start: SizeLike, length: SizeLike, step: int = 1) -> str:
        """``length`` elements of ``dim`` from ``start`` on."""
        shape = list(self.shape(name))
        if Size.of(length) == shape[dim] and step == 1 and Size.of(start) == Size.of(0):
            return name
        shape[dim] = Size.of(length)
        return self.add(PrimOp.SLICE, (name,), shape, self.dtype(name), dim=dim, start=Size.of(start), step=step)


def broadcast(shapes: Sequence[tuple[Size, ...]]) -> tuple[Size, ...]:
    """The shape that ``shapes`` broadcast to.

    Raises:
        CannotLower: two sizes are neither equal nor 1.
    """
    rank = max((len(shape) for shape in shapes), default=0)
    result = [ONE] * rank
    for shape in shapes:
        for i, size in enumerate(shape, start=rank - len(shape)):
            if size == ONE or size == result[i]:
                continue
            if result[i] != ONE:
                raise CannotLower(f"sizes {result[i]} and {size} do not broadcast")
            result[i] = size
    return tuple(result)
