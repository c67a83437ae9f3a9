"""Detects windows that are contiguous in memory, so that a product reads them like the rows of a matrix."""

from __future__ import annotations

from mtmc_lsp.core.sizes import Size
from mtmc_lsp.ir.primitives import ONE, KernelIR, Prim, PrimOp, ProductDims


def are_contiguous_windows(ir: KernelIR, prim: Prim) -> bool:
    """Whether the left operand of a product consists of windows, each contiguous in memory in the order of the reduction.

    This holds for one-row windows of an unpadded channels-last input; the windows overlap.
    """
    dims, name = ProductDims.of(prim), prim.inputs[0]
    strides = _strides(ir, name) if dims.kernel_positions else None
    if strides is None:
        return False
    expected, shape = ONE, ir.prims[name].shape
    for dim in reversed(range(dims.batch + dims.rows, len(shape))):
        if shape[dim] == ONE:
            continue
        if strides[dim] != expected:
            return False
        expected = expected * shape[dim]
    return True


def _strides(ir: KernelIR, name: str) -> tuple[Size, ...] | None:
    """Strides of a view, in elements; ``None`` if the primitive is not a view of a tensor in memory."""
    prim = ir.prims[name]
    is_view = prim.op in (PrimOp.PERMUTE, PrimOp.RESHAPE, PrimOp.SLICE, PrimOp.WINDOW)
    source = _strides(ir, prim.inputs[0]) if is_view else None
    strides = _view_strides(ir, prim, source) if source is not None else None
    if strides is None and name in ir.value_of:
        return ir.graph.type_of(ir.value_of[name]).stride
    return strides


def _view_strides(ir: KernelIR, prim: Prim, source: tuple[Size, ...]) -> tuple[Size, ...] | None:
    """Strides of a view of a tensor with the strides ``source``."""
    if prim.op is PrimOp.PERMUTE:
        dims = prim.attrs["dims"]
        assert isinstance(dims, tuple)
        return tuple(source[d] for d in dims)
    if prim.op is PrimOp.RESHAPE:
        input_shape = ir.prims[prim.inputs[0]].shape
        if [size for size in input_shape if size != ONE] != [size for size in prim.shape if size != ONE]:
            return None
        # The reshape only adds or removes dimensions of size 1.
        remaining = iter([step for step, size in zip(source, input_shape, strict=True) if size != ONE])
        return tuple(ONE if size == ONE else next(remaining) for size in prim.shape)
    dim, step = int(str(prim.attrs["dim"])), int(str(prim.attrs["step"]))
    strides = (*source[:dim], source[dim] * step, *source[dim + 1 :])
    return (*strides, source[dim] * int(str(prim.attrs["dilation"]))) if prim.op is PrimOp.WINDOW else strides
