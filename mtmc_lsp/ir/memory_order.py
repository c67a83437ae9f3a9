"""How tensors lie in memory beside the axes of a kernel: which of them are dense along its rows, and which along its columns."""

from __future__ import annotations

from mtmc_lsp.core.dtypes import itemsize
from mtmc_lsp.core.graph import TensorType
from mtmc_lsp.core.sizes import Size, product
from mtmc_lsp.ir.axes import Axis
from mtmc_lsp.ir.primitives import KernelIR, Prim, PrimOp
from mtmc_lsp.ir.regions import Region, RegionKind

LEAST_ACROSS = 4
"""Elements side by side from which on it pays to walk a tensor along them."""
LEAST_COLUMNS = 32
"""Elements side by side whose memory is written as a whole, whatever the rows beside them."""


def across(ir: KernelIR, region: Region) -> Axis | None:
    """The axis, other than the columns, along which tensors that an elementwise kernel reads lie dense.

    Such a kernel brings one memory order into another: its tiles have this axis as rows, so that they read and write
    neighbours together. ``None`` for all other kernels.
    """
    if region.kind is not RegionKind.MAP or len(region.kept) < 2:
        return None
    sizes = ir.graph.sizes
    whole = region.rows.value(sizes)
    amounts: dict[Axis, int] = {}
    longer = _padded(ir, region)
    windows = [ir.prims[name].shape[-1] for name in region.prims if ir.prims[name].op is PrimOp.WINDOW]
    kernel_positions = product(windows).value(sizes)
    for prim, kind in ((name, ir.graph.type_of(ref)) for name in region.inputs for ref in ir.values_of.get(name, ())):
        # What is much smaller (a number per channel) stays in caches; of windows that overlap elements are read more than once.
        if 2 * kind.numel.value(sizes) * kernel_positions < whole:
            continue
        for dim, inner in dense_axes(region, prim, kind).items():
            axis = longer.get(inner, inner)
            if kind.shape[dim] != Size.of(1) and axis in region.kept[:-1]:
                amounts[axis] = amounts.get(axis, 0) + kind.numel.value(sizes) * itemsize(kind.dtype)
    most = max(amounts, key=lambda axis: amounts[axis], default=None)
    wide = all(axis.size.value(sizes) >= LEAST_ACROSS for axis in (most, region.kept[-1]) if axis is not None)
    return most if wide else None


def _padded(ir: KernelIR, region: Region) -> dict[Axis, Axis]:
    """The axes that the region pads, each with the longer one that its elements are walked along: neighbours stay neighbours."""
    found: dict[Axis, Axis] = {}
    for prim in (ir.prims[name] for name in reversed(region.prims)):
        for dim in range(len(prim.shape)) if prim.op is PrimOp.PAD else ():
            inner, outer = region.table.axes(prim.inputs[0], dim), region.table.axes(prim.name, dim)
            if inner and outer and inner[-1] != outer[-1]:
                found[inner[-1]] = found.get(outer[-1], outer[-1])
    return found


def column_axes(ir: KernelIR, region: Region) -> tuple[Axis, ...]:
    """The axes that an elementwise kernel has as columns: the last one.

    Where its tiles have an axis that lies outside others as rows, the columns are as many of those as memory needs to write whole
    transactions.
    """
    turned = across(ir, region)
    if turned is None:
        return region.kept[-1:]
    inside = region.kept[region.kept.index(turned) + 1 :]
    first = len(inside) - 1
    while first > 0 and product([axis.size for axis in inside[first:]]).value(ir.graph.sizes) < LEAST_COLUMNS:
        first -= 1
    return inside[first:]


def windows_along_columns(ir: KernelIR, region: Region) -> Prim | None:
    """The windows of an elementwise kernel that slide along its columns; None where they slide across them, or there are none.

    Neighbouring columns then read places that overlap, or lie apart: no thread can load several of them at once. Each has one
    column, so that a load's threads read neighbours.
    """
    if region.kind is not RegionKind.MAP or not region.kept:
        return None
    for name in reversed(region.prims):
        prim = ir.prims[name]
        if prim.op is PrimOp.WINDOW:
            axes = region.table.axes(name, int(str(prim.attrs["dim"])))
            if axes and axes[-1] == region.kept[-1]:
                return prim
    return None


def strided_columns(ir: KernelIR, region: Region) -> bool:
    """Whether the reduced axes step over memory while an independent axis is dense."""
    dense = _dense_axes(ir, region)
    return (
        bool(region.kept)
        and bool(region.reduced)
        and not (dense & set(region.reduced))
        and bool(dense & set(region.kept))
    )


def dense_axes(region: Region, prim: str, kind: TensorType) -> dict[int, Axis]:
    """The dimensions of a tensor whose elements lie side by side, each with its innermost axis."""
    inner = [dim for dim, stride in enumerate(kind.stride) if stride.is_constant and stride.constant == 1]
    return {dim: axes[-1] for dim in inner if (axes := region.table.axes(prim, dim))}


def _dense_axes(ir: KernelIR, region: Region) -> set[Axis]:
    """Innermost axes of the large tensors that the region reads."""
    found: set[Axis] = set()
    sizes = ir.graph.sizes
    largest = 0
    read = [(name, ref) for name in region.inputs for ref in ir.values_of.get(name, ())]
    for prim, ref in read:
        kind = ir.graph.type_of(ref)
        numel = kind.numel.value(sizes)
        if numel < largest:
            continue
        if numel > largest:
            found, largest = set(), numel
        found |= set(dense_axes(region, prim, kind).values())
    return found
