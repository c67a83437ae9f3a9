"""Tensor descriptors: operand tiles that the Tensor Memory Accelerator (TMA, Hopper and later) loads.

A descriptor describes a tensor's memory layout once. A tile load is then one instruction, without addresses and masks per
element, and elements outside the tensor are zero (CUDA C++ Programming Guide, "Tensor Memory Access"). Measured on an H200 for a
matmul of 4096 x 4096 bfloat16 matrices: 180 us with descriptors, 202 us with pointers and without masks, 264 us with pointers and
masks for dynamic sizes (cuBLAS: 177 us).

The hardware requires a dense last dimension, and multiples of 16 bytes for the address and all other strides.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mtmc_lsp.codegen.kernel.index import Index
from mtmc_lsp.codegen.kernel.parameters import Parameters
from mtmc_lsp.codegen.matmul.operands import ProductAxes, operand_accesses
from mtmc_lsp.codegen.tile.tile import merge_axes
from mtmc_lsp.core.dtypes import ITEMSIZE
from mtmc_lsp.core.graph import TensorType
from mtmc_lsp.core.protocols import CannotCode
from mtmc_lsp.core.sizes import Size
from mtmc_lsp.ir.axes import Axis
from mtmc_lsp.ir.primitives import BIJECTIVE_VIEWS
from mtmc_lsp.schedule.split_on_load import UNIT_BYTES

MAKE_DESCRIPTOR = "tl.make_tensor_descriptor"

ALLOCATOR = "_descriptor_memory"
ALLOCATOR_SOURCE = f'''def {ALLOCATOR}(size, alignment, stream):
    """Allocate memory for tensor descriptors that kernels create; Triton calls this."""
    return torch.empty(size, dtype=torch.int8, device="cuda")
'''
"""The allocator that generated code registers with Triton, which has no default allocator for descriptors."""


@dataclass(frozen=True)
class OperandLayout:
    """Memory layout of an operand that a tensor descriptor supports."""

    prim: str
    """The primitive that is loaded."""
    is_k_dense: bool
    """Whether K is the dense axis in memory; otherwise the rows (or columns) are."""
    stride: Size
    """Stride of the other axis, in elements."""
    batch_stride: Size
    conditions: tuple[str, ...]
    """Guard conditions on dynamic sizes (alignment of strides)."""


def operand_layout(axes: ProductAxes, buffers: Mapping[str, TensorType], operand: int) -> OperandLayout | None:
    """The layout of an operand, or ``None`` if a descriptor cannot express it: it must be unmodified and dense along one axis."""
    prim = _source_buffer(axes, operand)
    if prim is None or not axes.is_plain(operand) or axes.kernel_positions:
        return None
    try:
        accesses = operand_accesses(axes, buffers, operand)
    except CannotCode:
        return None
    if len(accesses) != 1 or accesses[0].constant.terms:
        return None
    zero, unit_stride = Size.of(0), Size.of(1)
    row, k = (_step(group, accesses) for group in ((axes.m, axes.n)[axes.side_of(operand)], axes.k))
    batch = _step(axes.batch, accesses) if axes.batch else zero
    if row is None or k is None or batch is None or zero in (row, k) or unit_stride not in (row, k):
        return None
    stride = row if k == unit_stride else k
    unit = UNIT_BYTES // ITEMSIZE[axes.ir.prims[prim].dtype]
    if any(step.value(axes.ir.graph.sizes) % unit for step in (stride, batch)):
        return None
    dynamic_strides = [step for step in (stride, batch) if any(coefficient % unit for _, coefficient in step.terms)]
    conditions = tuple(f"{step.as_factor()} % {unit} == 0" for step in dynamic_strides)
    return OperandLayout(prim, k == unit_stride, stride, batch, conditions)


def _source_buffer(axes: ProductAxes, operand: int) -> str | None:
    """The buffer that an operand reads through views; ``None`` if any element is computed or omitted."""
    name = axes.operands[operand]
    while name not in axes.region.inputs:
        inner = axes.ir.prims[name]
        if inner.op not in BIJECTIVE_VIEWS:
            return None
        name = inner.inputs[0]
    return name


def _step(axes: Sequence[Axis], accesses: Sequence[Index]) -> Size | None:
    """Stride of fused axes, in elements; ``None`` if they cannot be fused."""
    if not axes or len(merge_axes(axes, accesses)) > 1:
        return None
    steps = {variable.id: coefficient for variable, coefficient in accesses[0].terms if not variable.code}
    return steps.get(axes[-1].id, Size.of(0))


def descriptor_text(
    parameters: Parameters, pointer: str, operand: OperandLayout, rows: Size, k: Size, block: str
) -> str:
    """The expression that creates an operand's descriptor.

    Args:
        pointer: pointer to the first element of the matrix (of this program's batch entry).
        rows: length of the axis other than K.
        block: name of the tile size along the other axis.
    """
    lengths, blocks = (rows, k), (block, "BLOCK_K")
    if not operand.is_k_dense:
        lengths, blocks = (k, rows), ("BLOCK_K", block)
    rows_text, columns_text = (parameters.size(size).text for size in lengths)
    return descriptor_of_rows(pointer, (rows_text, columns_text), parameters.size(operand.stride).text, blocks)


def descriptor_of_rows(pointer: str, shape: tuple[str, str], stride: str, block: tuple[str, str]) -> str:
    """The expression that creates a row-major matrix's descriptor, from the texts of its shape, row stride and tile shape."""
    return f"{MAKE_DESCRIPTOR}({pointer}, [{', '.join(shape)}], [{stride}, 1], [{', '.join(block)}])"


def tile_load(descriptor: str, operand: OperandLayout, start: str, side: int) -> str:
    """The expression that loads a tile: rows by K for the left operand, K by columns for the right one.

    Args:
        start: first index of the tile along the axis other than K; along K it is the variable ``start``.
        side: 0 for the left operand, 1 for the right one.
    """
    text = f"{descriptor}.load([{start}, start])" if operand.is_k_dense else f"{descriptor}.load([start, {start}])"
    return text if operand.is_k_dense == (side == 0) else f"{text}.T"
