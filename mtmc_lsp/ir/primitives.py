"""The kernel IR: every ATen operation as a few pointwise, view, reduction and product primitives.

Legality and cost are decided on this form, and the built-in coder generates code from it. Each primitive keeps the ATen node
it came from (``origin``), so messages refer to the operations and lines of the user's code.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property
from typing import Union

from mtmc_lsp.core.dtypes import is_float
from mtmc_lsp.core.graph import Graph, Ref
from mtmc_lsp.core.sizes import Number, Size, SizeLike, product
from mtmc_lsp.ir.constant_tables import Tables

ONE = Size.of(1)
Scalar = Union[bool, int, float, Number]
"""A Python number, or one that is known at run time."""


class PrimOp(Enum):
    """The operation of a primitive."""

    INPUT = "input"
    """A graph input."""
    OPAQUE = "opaque"
    """The result of an ATen call that stays a torch call."""
    CONSTANT = "constant"
    """``attrs["value"]`` (a number, a Size, or a Number that is known at run time), broadcast."""
    IOTA = "iota"
    """``index * step + start``, with the index along ``attrs["dim"]``."""
    RANDOM = "random"
    """Uniform in [0, 1) by Philox; ``attrs["stream"]`` numbers the random operations of the graph."""
    POINTWISE = "pointwise"
    """``attrs["fn"]`` of the broadcast inputs."""
    RESHAPE = "reshape"
    PERMUTE = "permute"
    """``attrs["dims"][i]`` is the input dimension that becomes dimension i."""
    EXPAND = "expand"
    ALIAS = "alias"
    """The same values with separate loop axes: the second operand of a product of a tensor with itself."""
    SLICE = "slice"
    """``attrs``: ``dim``, ``start`` (Size), ``step`` (int)."""
    FLIP = "flip"
    """``attrs["dims"]``."""
    CAT = "cat"
    """``attrs["dim"]``."""
    PAD = "pad"
    """``attrs``: ``before`` (padding in front, int per dimension) and ``value``."""
    WINDOW = "window"
    """Sliding windows along ``attrs["dim"]``, with a new last dimension: element ``i`` of ``dim`` and ``t`` of the last
    dimension is the input at ``i * step + t * dilation``."""
    CROP = "crop"
    """The leading elements of some dimensions of a product; the product's kernel does not store the others."""
    GATHER = "gather"
    """Element of input 0 at the index in input 1 along ``attrs["dim"]``; input 1 broadcasts to the result's shape."""
    SCATTER_ADD = "scatter-add"
    """Input 0 with the elements of input 2 added at the indices in input 1 (broadcast) along ``attrs["dim"]``, in any order."""
    REDUCE = "reduce"
    """``attrs``: ``fn`` and ``dims``; reduced dimensions are kept with size 1."""
    UNROLLED_REDUCE = "unrolled-reduce"
    """Like ``REDUCE``, for few elements: computed by an unrolled loop wherever the result is used."""
    SCAN = "scan"
    """``attrs``: ``fn`` and ``dim``. Inclusive, along one dimension; starts from its end if ``reverse`` is set."""
    RECURRENT = "recurrent"
    """Result ``attrs["index"]`` of the recurrent layers ``attrs["form"]`` (:mod:`mtmc_lsp.ir.recurrence`)."""
    LOOP = "loop"
    """Result ``attrs["index"]`` of the loop over time steps ``attrs["form"]`` (:mod:`mtmc_lsp.ir.loops.form`)."""
    MATMUL = "matmul"
    """``[batch, rows, summed] @ [batch, summed, columns]``; ``attrs["dims"]`` if any of these is several dimensions.

    With four inputs, the operands are split: the first two are the high parts, the others the low parts, and the product of
    the two low parts is omitted."""


BINARY_FUNCTION = {"sum": "add", "sum_exp": "add", "prod": "mul", "max": "maximum", "min": "minimum"}
"""Maps each reduction to its binary function."""
MAX_EXPANDED_TERMS = 4
"""Reductions of at most this many elements are expanded into binary operations."""
CENTRED = "centred"
"""Key in the ``attrs`` of a sum of squared deviations: the sum of differences from the row's first element that the mean was
computed from. One pass can compute both sums (Welford, Technometrics 4, 1962; Chan, Golub & LeVeque, 1983)."""
VIEW_OPS = frozenset(
    {PrimOp.RESHAPE, PrimOp.PERMUTE, PrimOp.EXPAND, PrimOp.ALIAS, PrimOp.SLICE, PrimOp.FLIP, PrimOp.WINDOW},
)
"""Primitives that neither move data nor compute."""

CHEAP = VIEW_OPS | {PrimOp.POINTWISE, PrimOp.CONSTANT, PrimOp.IOTA}
"""Primitives that can be computed again without more memory traffic than that of their operands."""

BIJECTIVE_VIEWS = frozenset({PrimOp.PERMUTE, PrimOp.RESHAPE, PrimOp.ALIAS})
"""The views that contain each element of their input exactly once."""


@dataclass(frozen=True)
class Prim:
    """One primitive."""

    name: str
    op: PrimOp
    inputs: tuple[str, ...]
    shape: tuple[Size, ...]
    dtype: str
    origin: str
    """Name of the ATen node; empty for graph inputs."""
    attrs: Mapping[str, object] = field(default_factory=dict)

    @property
    def fn(self) -> str:
        """Name of the function; empty for primitives without one."""
        return str(self.attrs.get("fn", ""))


@dataclass(frozen=True)
class ProductDims:
    """Number of dimensions of a product in each role."""

    batch: int
    rows: int = 1
    summed: int = 1
    columns: int = 1
    kernel_positions: int = 0
    """How many of the summed dimensions, counted from the first, are kernel positions; channels follow."""

    @staticmethod
    def of(prim: Prim) -> ProductDims:
        """The dimensions of a product."""
        dims = prim.attrs.get("dims")
        return dims if isinstance(dims, ProductDims) else ProductDims(len(prim.shape) - 2)


@dataclass(frozen=True)
class ProductSizes:
    """Sizes of a product, as in GEMM."""

    batch: Size
    m: Size
    n: Size
    k: Size
    channels: Size
    """The factor of ``k`` that is not kernel positions."""

    @staticmethod
    def of(prims: Mapping[str, Prim], prim: Prim) -> ProductSizes:
        """The sizes of the product ``prim``, which is among ``prims``."""
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
    """Whether the primitive pads its input with zeros."""
    return prim.op is PrimOp.PAD and prim.attrs["value"] == 0


def has_split_operands(prim: Prim) -> bool:
    """Whether the primitive is a product whose operands were split into high and low parts in memory."""
    return prim.op is PrimOp.MATMUL and len(prim.inputs) > 2


class CannotLower(Exception):
    """An ATen operation has no primitive form and stays a torch call."""


@dataclass(frozen=True)
class KernelIR:
    """A graph in primitive form, in execution order."""

    graph: Graph
    prims: Mapping[str, Prim]
    values: Mapping[tuple[str, int], str]
    """``(node or input, output index)`` to the primitive that computes the value."""
    opaque: frozenset[str]
    """ATen nodes that stay torch calls in every schedule."""
    tables: Tables = field(default_factory=Tables)
    """Those of them that torch computes once for each device and size."""

    def of(self, ref: Ref) -> Prim:
        """The primitive that computes ``ref``."""
        return self.prims[self.values[ref.name, ref.index]]

    def of_node(self, node: str) -> Iterator[Prim]:
        """The primitives that an ATen node is lowered to."""
        return iter(self._by_origin.get(node, ()))

    def product_of_node(self, node: str) -> Prim | None:
        """The matrix product of an ATen node; ``None`` if it has none."""
        return next((prim for prim in self.of_node(node) if prim.op is PrimOp.MATMUL), None)

    @cached_property
    def positions(self) -> Mapping[str, int]:
        """Index of each primitive in execution order."""
        return {name: i for i, name in enumerate(self.prims)}

    @cached_property
    def values_of(self) -> Mapping[str, tuple[Ref, ...]]:
        """All ATen values that each primitive computes."""
        refs_by_prim: dict[str, list[Ref]] = {}
        for (name, index), prim in self.values.items():
            refs_by_prim.setdefault(prim, []).append(Ref(name, index))
        return {prim: tuple(refs) for prim, refs in refs_by_prim.items()}

    @cached_property
    def value_of(self) -> Mapping[str, Ref]:
        """The first ATen value that each primitive computes."""
        return {prim: Ref(name, index) for (name, index), prim in reversed(list(self.values.items()))}

    @cached_property
    def _by_origin(self) -> Mapping[str, list[Prim]]:
        prims_by_origin: dict[str, list[Prim]] = {}
        for prim in self.prims.values():
            prims_by_origin.setdefault(prim.origin, []).append(prim)
        return prims_by_origin


class Builder:
    """Appends primitives; used by the lowerings."""

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

    def constant(self, value: Scalar, dtype: str) -> str:
        """A scalar that is the same for all elements."""
        return self.add(PrimOp.CONSTANT, (), (), dtype, value=value)

    def size(self, size: Size, dtype: str) -> str:
        """A size as a scalar constant."""
        return self.add(PrimOp.CONSTANT, (), (), dtype, value=size.constant if size.is_constant else size)

    def pointwise(self, fn: str, *operands: str | Scalar, dtype: str, **attrs: object) -> str:
        """``fn`` of operands, broadcast as in PyTorch; Python scalars become constants of ``dtype``."""
        names = [self.constant(x, self._scalar_dtype(x, dtype)) if not isinstance(x, str) else x for x in operands]
        shape = broadcast([self.shape(name) for name in names])
        return self.add(PrimOp.POINTWISE, names, shape, dtype, fn=fn, **attrs)

    @staticmethod
    def _scalar_dtype(value: Scalar, dtype: str) -> str:
        if isinstance(value, bool):
            return "bool"
        is_float_number = value.kind == "float" if isinstance(value, Number) else isinstance(value, float)
        if is_float_number and not is_float(dtype):
            return "float32"
        return dtype if dtype != "bool" else ("float32" if is_float_number else "int64")

    def cast(self, name: str, dtype: str) -> str:
        """``name`` cast to ``dtype``; unchanged if it already has that dtype."""
        return name if self.dtype(name) == dtype else self.pointwise("cast", name, dtype=dtype)

    def reduce(self, fn: str, name: str, dims: Sequence[int], dtype: str, *extra: str) -> str:
        """Reduce ``dims``, which keep size 1.

        Dimensions of size 1 need no reduction. Reductions of few elements, such as the coordinates of a point, become binary
        operations, which fuse into any kernel.
        """
        dims = [d for d in dims if self.shape(name)[d] != ONE]
        if not dims:
            return self._reduced_single(fn, name, dtype, *extra)
        count = product([self.shape(name)[d] for d in dims])
        if fn in BINARY_FUNCTION and count.is_constant and 1 < count.constant <= MAX_EXPANDED_TERMS:
            return self._expanded_reduction(fn, name, dims, dtype, *extra)
        shape = [ONE if i in dims else size for i, size in enumerate(self.shape(name))]
        return self.add(PrimOp.REDUCE, (name, *extra), shape, dtype, fn=fn, dims=tuple(sorted(dims)))

    def _expanded_reduction(self, fn: str, name: str, dims: Sequence[int], dtype: str, *extra: str) -> str:
        terms = [name]
        for dim in dims:
            indices = range(self.shape(name)[dim].constant)
            terms = [self.slice(term, dim, index, 1) for term in terms for index in indices]
        if fn == "sum_exp":
            terms = [self._reduced_single(fn, term, dtype, *extra) for term in terms]
        total = terms[0]
        for term in terms[1:]:
            total = self.pointwise(BINARY_FUNCTION[fn], total, term, dtype=dtype)
        return total

    def _reduced_single(self, fn: str, name: str, dtype: str, *extra: str) -> str:
        """The result of a reduction over dimensions of size 1."""
        if fn.startswith("arg"):
            return self.expand(self.constant(0, dtype), self.shape(name))
        if fn == "sum_exp":
            return self.pointwise("exp", self.pointwise("sub", name, *extra, dtype=dtype), dtype=dtype)
        return self.cast(name, dtype)

    def unrolled_reduce(self, fn: str, name: str, dims: Sequence[int], dtype: str) -> str:
        """Reduce few elements along ``dims`` by an unrolled loop; the result lacks these dimensions."""
        shape = [size for i, size in enumerate(self.shape(name)) if i not in dims]
        return self.add(PrimOp.UNROLLED_REDUCE, (name,), shape, dtype, fn=fn, dims=tuple(sorted(dims)))

    def reshape(self, name: str, shape: Sequence[SizeLike]) -> str:
        """``name`` in another shape with the same number of elements."""
        sizes = tuple(Size.of(size) for size in shape)
        return name if sizes == self.shape(name) else self.add(PrimOp.RESHAPE, (name,), sizes, self.dtype(name))

    def permute(self, name: str, dims: Sequence[int]) -> str:
        """``name`` with its dimensions reordered."""
        if tuple(dims) == tuple(range(len(dims))):
            return name
        shape = [self.shape(name)[d] for d in dims]
        return self.add(PrimOp.PERMUTE, (name,), shape, self.dtype(name), dims=tuple(dims))

    def expand(self, name: str, shape: Sequence[SizeLike]) -> str:
        """Broadcast to ``shape``."""
        sizes = tuple(Size.of(size) for size in shape)
        return name if sizes == self.shape(name) else self.add(PrimOp.EXPAND, (name,), sizes, self.dtype(name))

    def slice(self, name: str, dim: int, start: SizeLike, length: SizeLike, step: int = 1) -> str:
        """``length`` elements of ``dim``, starting at ``start``."""
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
