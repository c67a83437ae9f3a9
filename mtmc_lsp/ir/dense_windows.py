"""Windows that are one dense run of memory each, so that a product of them reads its rows as those of a matrix."""

from __future__ import annotations

from mtmc_lsp.core.sizes import Size
from mtmc_lsp.ir.primitives import ONE, KernelIR, Prim, PrimOp, ProductDims


def are_dense_runs(ir: KernelIR, prim: Prim) -> bool:
    """Whether a product's left operand is of windows, and what is summed for a row of it lies side by side, in its order.

    With channels densest and no zeros around the input, windows of one row are such runs, which overlap.
    """
    dims, name = ProductDims.of(prim), prim.inputs[0]
    steps = _steps(ir, name) if dims.kernel_positions else None
    if steps is None:
        return False
    expected, shape = ONE, ir.prims[name].shape
    for dim in reversed(range(dims.batch + dims.rows, len(shape))):
        if shape[dim] == ONE:
            continue
        if steps[dim] != expected:
            return False
        expected = expected * shape[dim]
    return True


def _steps(ir: KernelIR, name: str) -> tuple[Size, ...] | None:
    """How far apart in memory the neighbours along each dimension of a view are; ``None`` where it is none."""
    prim = ir.prims[name]
    moved = prim.op in (PrimOp.PERMUTE, PrimOp.RESHAPE, PrimOp.SLICE, PrimOp.WINDOW)
    source = _steps(ir, prim.inputs[0]) if moved else None
    found = _viewed(ir, prim, source) if source is not None else None
    if found is None and name in ir.value_of:
        return ir.graph.type_of(ir.value_of[name]).stride
    return found


def _viewed(ir: KernelIR, prim: Prim, source: tuple[Size, ...]) -> tuple[Size, ...] | None:
    """The steps of a view of what has the steps ``source``."""
    if prim.op is PrimOp.PERMUTE:
        dims = prim.attrs["dims"]
        assert isinstance(dims, tuple)
        return tuple(source[d] for d in dims)
    if prim.op is PrimOp.RESHAPE:
        own = ir.prims[prim.inputs[0]].shape
        if [size for size in own if size != ONE] != [size for size in prim.shape if size != ONE]:
            return None
        # Dimensions of a single element alone come or go.
        rest = iter([step for step, size in zip(source, own, strict=True) if size != ONE])
        return tuple(ONE if size == ONE else next(rest) for size in prim.shape)
    dim, step = int(str(prim.attrs["dim"])), int(str(prim.attrs["step"]))
    stepped = (*source[:dim], source[dim] * step, *source[dim + 1 :])
    return (*stepped, source[dim] * int(str(prim.attrs["dilation"]))) if prim.op is PrimOp.WINDOW else stepped
