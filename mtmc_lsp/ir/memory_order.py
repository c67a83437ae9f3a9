"""Memory layout of tensors relative to the axes of a kernel: which are contiguous along its rows or along its columns."""

from __future__ import annotations

from collections.abc import Sequence

from mtmc_lsp.core.dtypes import is_integer, itemsize
from mtmc_lsp.core.graph import TensorType
from mtmc_lsp.core.sizes import Size, product
from mtmc_lsp.ir.axes import Axis
from mtmc_lsp.ir.primitives import KernelIR, Prim, PrimOp
from mtmc_lsp.ir.regions import Region, RegionKind

MIN_TRANSPOSED_ELEMENTS = 4
"""Contiguous runs of at least this many elements are worth traversing in memory order."""
MIN_COLUMNS = 32
"""Contiguous elements that fill whole memory transactions."""
PACKED_PARTS = (2, 4, 8)
"""How many numbers one integer of a packed weight may hold: nibbles of a byte or of a 32-bit word."""


def transposed_axis(ir: KernelIR, region: Region) -> Axis | None:
    """The axis, other than the last one, along which the inputs of an elementwise kernel are contiguous.

    Such a kernel transposes: its tiles have this axis as rows, so that both loads and stores are coalesced. ``None`` for all
    other kernels.
    """
    if region.kind is not RegionKind.MAP or len(region.parallel_axes) < 2:
        return None
    sizes = ir.graph.sizes
    total = region.rows.value(sizes)
    bytes_along: dict[Axis, int] = {}
    padded_axes = _padded_axes(ir, region)
    windows = [ir.prims[name].shape[-1] for name in region.prims if ir.prims[name].op is PrimOp.WINDOW]
    kernel_positions = product(windows).value(sizes)
    for prim, kind in ((name, ir.graph.type_of(ref)) for name in region.inputs for ref in ir.values_of.get(name, ())):
        # Much smaller tensors, such as one number per channel, stay in cache. Overlapping windows read elements repeatedly.
        if 2 * kind.numel.value(sizes) * kernel_positions < total:
            continue
        for dim, inner in contiguous_axes(region, prim, kind).items():
            axis = padded_axes.get(inner, inner)
            if kind.shape[dim] != Size.of(1) and axis in region.parallel_axes[:-1]:
                bytes_along[axis] = bytes_along.get(axis, 0) + kind.numel.value(sizes) * itemsize(kind.dtype)
    best = max(bytes_along, key=lambda axis: bytes_along[axis], default=None)
    is_wide_enough = all(
        axis.size.value(sizes) >= MIN_TRANSPOSED_ELEMENTS
        for axis in (best, region.parallel_axes[-1])
        if axis is not None
    )
    return best if is_wide_enough else None


def _padded_axes(ir: KernelIR, region: Region) -> dict[Axis, Axis]:
    """Maps each axis that the region pads to the padded axis. Padding keeps neighbouring elements adjacent."""
    padded_axes: dict[Axis, Axis] = {}
    for prim in (ir.prims[name] for name in reversed(region.prims)):
        for dim in range(len(prim.shape)) if prim.op is PrimOp.PAD else ():
            inner, outer = region.table.axes(prim.inputs[0], dim), region.table.axes(prim.name, dim)
            if inner and outer and inner[-1] != outer[-1]:
                padded_axes[inner[-1]] = padded_axes.get(outer[-1], outer[-1])
    return padded_axes


def shifted_axes(ir: KernelIR, region: Region) -> dict[Axis, Axis]:
    """Maps the axes that concatenations and slices shift to those of their results. Neighbouring elements stay adjacent."""
    shifted: dict[Axis, Axis] = {}
    for prim in (ir.prims[name] for name in reversed(region.prims)):
        dim = prim.attrs.get("dim")
        if not isinstance(dim, int) or not (
            prim.op is PrimOp.CAT or (prim.op is PrimOp.SLICE and prim.attrs["step"] == 1)
        ):
            continue
        outer = region.table.axes(prim.name, dim)
        for source in prim.inputs if outer else ():
            if inner := region.table.axes(source, dim):
                shifted[inner[-1]] = shifted.get(outer[-1], outer[-1])
    return shifted


def column_axes(ir: KernelIR, region: Region) -> tuple[Axis, ...]:
    """The axes that form the columns of an elementwise kernel: usually the last axis.

    In a transposing kernel the columns are as many of the axes inside the transposed one as whole memory transactions need.
    """
    transposed = transposed_axis(ir, region)
    if transposed is None:
        return region.parallel_axes[-1:]
    inside = region.parallel_axes[region.parallel_axes.index(transposed) + 1 :]
    first = len(inside) - 1
    while first > 0 and product([axis.size for axis in inside[first:]]).value(ir.graph.sizes) < MIN_COLUMNS:
        first -= 1
    return inside[first:]


def windows_along_columns(ir: KernelIR, region: Region) -> Prim | None:
    """The windows of an elementwise kernel that slide along its columns; ``None`` if there are none.

    Neighbouring columns then read overlapping or strided elements, which a thread cannot load as one vector. With one column
    per thread, the threads of a load still read neighbouring elements.
    """
    if region.kind is not RegionKind.MAP or not region.parallel_axes:
        return None
    for name in reversed(region.prims):
        prim = ir.prims[name]
        if prim.op is PrimOp.WINDOW:
            axes = region.table.axes(name, int(str(prim.attrs["dim"])))
            if axes and axes[-1] == region.parallel_axes[-1]:
                return prim
    return None


def strided_columns(ir: KernelIR, region: Region) -> bool:
    """Whether the reduced axes are strided in memory while an independent axis is contiguous."""
    dense = _contiguous_input_axes(ir, region)
    return (
        bool(region.parallel_axes)
        and bool(region.reduced_axes)
        and not (dense & set(region.reduced_axes))
        and bool(dense & set(region.parallel_axes))
    )


def contiguous_axes(region: Region, prim: str, kind: TensorType) -> dict[int, Axis]:
    """The contiguous dimensions (stride 1) of a tensor, each with its innermost axis."""
    return {dim: axes[-1] for dim in kind.dense_dims if (axes := region.table.axes(prim, dim))}


def _contiguous_input_axes(ir: KernelIR, region: Region) -> set[Axis]:
    """Contiguous axes of the largest tensors that the region reads."""
    axes: set[Axis] = set()
    sizes = ir.graph.sizes
    largest = 0
    read = [(name, ref) for name in region.inputs for ref in ir.values_of.get(name, ())]
    for prim, ref in read:
        kind = ir.graph.type_of(ref)
        numel = kind.numel.value(sizes)
        if numel < largest:
            continue
        if numel > largest:
            axes, largest = set(), numel
        axes |= set(contiguous_axes(region, prim, kind).values())
    return axes


def largest_source(ir: KernelIR, region: Region, operand: str) -> tuple[str, TensorType] | None:
    """The largest tensor in memory that an operand of a product is computed from, as primitive and type."""
    pending, tensors = [operand], list[str]()
    while pending:
        name = pending.pop()
        if name in region.inputs:
            tensors.append(name)
        else:
            pending += ir.prims[name].inputs
    kinds = [(name, ir.graph.type_of(ir.value_of[name])) for name in tensors if name in ir.value_of]
    return max(kinds, key=lambda item: item[1].numel.value(ir.graph.sizes), default=None)


def packed_axis(ir: KernelIR, region: Region, operand: str, summed: Sequence[Axis]) -> Axis | None:
    """The innermost summed axis of an operand whose integers in memory hold several numbers along it; None for other operands.

    Likewise for the axes of its columns instead of ``summed``.

    In ``torch.stack([w & 15, w >> 4], -1).reshape(n, k)`` it is the stacked axis: ``w`` does not vary along it. Integers that are
    contiguous along another axis have vector loads anyway.
    """
    if len(summed) < 2 or not summed[-1].size.is_constant or summed[-1].size.constant not in PACKED_PARTS:
        return None
    source = largest_source(ir, region, operand)
    if source is None or not is_integer(source[1].dtype) or summed[-1] in region.table.all_axes(source[0]):
        return None
    dense = {axis for dim, axis in contiguous_axes(region, *source).items() if source[1].shape[dim] != Size.of(1)}
    return summed[-1] if dense & set(summed) else None
