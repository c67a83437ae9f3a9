"""Derives the loop axes that a set of primitives shares.

Every dimension of every primitive is unified with the dimensions that it must equal through broadcasting, permutation and
reshaping. The resulting classes, split as finely as the reshapes require, are the *atomic axes* of a kernel. Two operations
can run in one kernel if they use the same axes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from mtmc_lsp.core.sizes import Size
from mtmc_lsp.ir.primitives import ONE, Prim, PrimOp, ProductDims


@dataclass(frozen=True)
class Axis:
    """One atomic loop axis."""

    id: int
    size: Size

    def __hash__(self) -> int:
        return self.id


@dataclass(frozen=True)
class RolesOfAxes:
    """The axes of a matrix product by their role."""

    batch: tuple[Axis, ...]
    m: tuple[Axis, ...]
    """Rows."""
    n: tuple[Axis, ...]
    """Columns."""
    k: tuple[Axis, ...]
    """Summed axes."""


class _Class:
    """A set of dimensions known to be equal, possibly split into smaller ones. A union-find node."""

    __slots__ = ("_axis", "id", "parent", "parts", "size")

    def __init__(self, number: int, size: Size) -> None:
        self.id = number
        self.size = size
        self.parent: _Class | None = None
        self.parts: list[_Class] | None = None
        self._axis: Axis | None = None

    @property
    def axis(self) -> Axis:
        """The axis of these dimensions. Most classes become part of another one and need none."""
        if self._axis is None:
            self._axis = Axis(self.id, self.size)
        return self._axis

    def root(self) -> _Class:
        node = self
        if node.parent is None:
            return node
        while node.parent is not None:
            node = node.parent
        # Path compression: in a long chain of operations, lookups would otherwise be quadratic.
        last = self
        while last.parent is not None:
            last.parent, last = node, last.parent
        return node


class AxisTable:
    """Atomic axes of a set of primitives."""

    def __init__(self, prims: Mapping[str, Prim], names: Iterable[str], extents: Mapping[str, int]) -> None:
        """Unify the dimensions of the primitives ``names`` and of their inputs.

        Args:
            names: the primitives of the kernel, in execution order.
            extents: value of each symbolic size in the workload, only used to compare two sizes.
        """
        self._classes: list[_Class] = []
        self._dims: dict[str, list[_Class | None]] = {}
        self._extents = extents
        self._axes_of: dict[str, tuple[Axis, ...]] = {}
        members = list(names)
        for name in members:
            for each in (*prims[name].inputs, name):
                if each not in self._dims:
                    self._dims[each] = [self._new(size) if size != ONE else None for size in prims[each].shape]
        for name in members:
            self._tie(prims[name], prims)

    def __contains__(self, name: object) -> bool:
        """Whether one of the primitives is or reads ``name``."""
        return name in self._dims

    def axes(self, name: str, dim: int) -> tuple[Axis, ...]:
        """The atomic axes whose product is dimension ``dim``, outermost first; empty for size 1."""
        item = self._dims[name][dim]
        return tuple(self._leaves(item)) if item is not None else ()

    def all_axes(self, name: str) -> tuple[Axis, ...]:
        """The atomic axes of every dimension of ``name``."""
        if name not in self._axes_of:
            self._axes_of[name] = tuple(
                axis for item in self._dims[name] if item is not None for axis in self._leaves(item)
            )
        return self._axes_of[name]

    def of_product(self, prim: Prim) -> RolesOfAxes:
        """The axes of a matrix product."""
        dims, left = ProductDims.of(prim), prim.inputs[0]
        rows = dims.batch + dims.rows

        def within(name: str, first: int, end: int) -> tuple[Axis, ...]:
            return tuple(axis for dim in range(first, end) for axis in self.axes(name, dim))

        return RolesOfAxes(
            batch=within(prim.name, 0, dims.batch),
            m=within(prim.name, dims.batch, rows),
            n=within(prim.name, rows, len(prim.shape)),
            k=within(left, rows, rows + dims.summed),
        )

    def tie(self, left: tuple[Axis, ...], right: tuple[Axis, ...]) -> None:
        """Unify two sequences of axes of equal sizes that the primitives do not relate."""
        self._axes_of.clear()
        for a, b in zip(left, right, strict=True):
            self._same(self._classes[a.id], self._classes[b.id])

    def align(self, left: tuple[Axis, ...], right: tuple[Axis, ...]) -> None:
        """Unify two sequences of axes with equal products of sizes; one may be split more finely."""
        self._axes_of.clear()
        self._reshape([self._classes[a.id] for a in left], [self._classes[b.id] for b in right])

    def _leaves(self, item: _Class) -> list[Axis]:
        node = item.root()
        if node.parts is None:
            return [node.axis]
        return [axis for part in node.parts for axis in self._leaves(part)]

    def _new(self, size: Size) -> _Class:
        dim_class = _Class(len(self._classes), size)
        self._classes.append(dim_class)
        return dim_class

    def _tie(self, prim: Prim, prims: Mapping[str, Prim]) -> None:
        out = self._dims[prim.name]
        if prim.op in (PrimOp.POINTWISE, PrimOp.EXPAND):
            for source in prim.inputs:
                dims = self._dims[source]
                for i, source_dim in enumerate(dims, start=len(out) - len(dims)):
                    self._same(source_dim, out[i])
        elif prim.op is PrimOp.PERMUTE:
            order = prim.attrs["dims"]
            assert isinstance(order, tuple)
            for i, d in enumerate(order):
                self._same(self._dims[prim.inputs[0]][d], out[i])
        elif prim.op is PrimOp.RESHAPE:
            self._reshape(self._dims[prim.inputs[0]], out)
        elif prim.op is PrimOp.REDUCE:
            for source in prim.inputs:
                for source_dim, result_dim in zip(self._dims[source], out, strict=True):
                    self._same(source_dim, result_dim)
        elif prim.op is PrimOp.SCAN:
            for source_dim, result_dim in zip(self._dims[prim.inputs[0]], out, strict=True):
                self._same(source_dim, result_dim)
        elif prim.op in (PrimOp.SLICE, PrimOp.CAT, PrimOp.PAD, PrimOp.FLIP, PrimOp.GATHER, PrimOp.WINDOW):
            self._partial(prim, prims)
        elif prim.op is PrimOp.UNROLLED_REDUCE:
            folded = prim.attrs["dims"]
            assert isinstance(folded, tuple)
            remaining = [source_dim for i, source_dim in enumerate(self._dims[prim.inputs[0]]) if i not in folded]
            for source_dim, result_dim in zip(remaining, out, strict=True):
                self._same(source_dim, result_dim)
        elif prim.op is PrimOp.SCATTER_ADD:
            # Each source row has one index. The target row is data-dependent and not a loop axis.
            for source_dim, result_dim in zip(self._dims[prim.inputs[1]], self._dims[prim.inputs[2]], strict=True):
                self._same(source_dim, result_dim)
        elif prim.op is PrimOp.CROP:
            for source_dim, result_dim in zip(self._dims[prim.inputs[0]], out, strict=True):
                self._same(source_dim, result_dim)
        elif prim.op is PrimOp.MATMUL:
            self._product(prim)

    def _product(self, prim: Prim) -> None:
        first, dims = self._dims[prim.inputs[0]], ProductDims.of(prim)
        for left, right in zip(prim.inputs[::2], prim.inputs[1::2], strict=True):
            self._factors(prim, self._dims[left], self._dims[right])
            for i in range(dims.batch + dims.rows, len(first)):
                # The low parts of split operands are reduced over the same axes as the high parts.
                self._same(self._dims[left][i], first[i])

    def _factors(self, prim: Prim, a: list[_Class | None], b: list[_Class | None]) -> None:
        out, dims = self._dims[prim.name], ProductDims.of(prim)
        for operand in (a, b):
            for i in range(dims.batch):
                self._same(operand[i], out[i])
        rows = dims.batch + dims.rows
        for i in range(dims.batch, rows):
            self._same(a[i], out[i])
        for i in range(dims.columns):
            self._same(b[dims.batch + dims.summed + i], out[rows + i])
        for i in range(dims.summed):
            self._same(a[rows + i], b[dims.batch + i])

    def _partial(self, prim: Prim, prims: Mapping[str, Prim]) -> None:
        """Unify the dimensions that these operations do not change; the others need index arithmetic."""
        out = self._dims[prim.name]
        dim, dims = prim.attrs.get("dim"), prim.attrs.get("dims")
        changed: set[object] = {dim} if dims is None else set(dims if isinstance(dims, tuple) else ())
        if prim.op is PrimOp.PAD:
            changed = set(range(len(out)))
        for position, source in enumerate(prim.inputs):
            for i, source_dim in enumerate(self._dims[source]):
                index_operand = prim.op is PrimOp.GATHER and position == 1
                if (
                    i not in changed
                    or index_operand
                    or (prims[source].shape[i] == prim.shape[i] and prim.op is PrimOp.PAD)
                ):
                    self._same(source_dim, out[i])

    def _same(self, left: _Class | None, right: _Class | None) -> None:
        if left is None or right is None:
            return
        a, b = left.root(), right.root()
        if a is b:
            return
        if a.parts is not None and b.parts is not None:
            self._reshape(list(a.parts), list(b.parts))
            b.parent = a
        elif a.parts is not None:
            b.parent = a
        else:
            a.parent = b

    def _reshape(self, source: list[_Class | None], target: list[_Class | None]) -> None:
        """Traverse both shapes from the left, splitting the larger of two dimensions by the smaller one.

        Stops if neither divides the other: the following dimensions stay separate and need index arithmetic.
        """
        left = [item for item in reversed(source) if item is not None]
        right = [item for item in reversed(target) if item is not None]
        while left and right:
            a, b = left.pop(), right.pop()
            if a.size == b.size:
                self._same(a, b)
                continue
            swap = self._extent(a.size) < self._extent(b.size)
            if swap:
                left, right, a, b = right, left, b, a
            rest = a.size.divide_exactly(b.size)
            if rest is None:
                return
            remainder = self._new(rest)
            self._split(a, [b, remainder])
            left.append(remainder)

    def _split(self, dim_class: _Class, parts: list[_Class]) -> None:
        root = dim_class.root()
        if any(part.root() is root for part in parts):
            return
        if root.parts is None:
            root.parts = list(parts)
        else:
            self._reshape(list(root.parts), list(parts))

    def _extent(self, size: Size) -> int:
        return size.value(self._extents)
