"""Tensor descriptors: tiles of a product's operands that the Tensor Memory Accelerator (TMA) of Hopper and later moves.

A descriptor says once how a tensor lies in memory; a tile of it is then one instruction, without addresses and masks for each of
its elements, and holds zeros beyond the tensor's ends (CUDA C++ Programming Guide, "Tensor Memory Access"). On an H200 a product
of 4096 x 4096 bfloat16 matrices took 180 us so, 202 us by pointers without any mask, and 264 us with the masks that sizes take
which are known at the call alone (cuBLAS: 177 us).

The hardware asks for a dense last dimension, and for the address and all other strides to be multiples of 16 bytes.
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

MAKE = "tl.make_tensor_descriptor"

MEMORY = "_descriptor_memory"
MEMORY_SOURCE = f'''def {MEMORY}(size, alignment, stream):
    """The memory in which kernels write down how tensors lie, as Triton asks for it; another allocator would do as well."""
    return torch.empty(size, dtype=torch.int8, device="cuda")
'''
"""What Triton calls for the descriptors that a kernel makes: it has no memory of its own."""


@dataclass(frozen=True)
class Described:
    """How an operand lies in memory."""

    prim: str
    """The primitive that is read."""
    is_k_dense: bool
    """Whether neighbours along K are neighbours in memory, rather than those along rows (or columns)."""
    stride: Size
    """Elements from one place to the next along the other axis."""
    batch_stride: Size
    conditions: tuple[str, ...]
    """What a guard must ask of sizes that differ from call to call."""


def described(axes: ProductAxes, buffers: Mapping[str, TensorType], side: int) -> Described | None:
    """How an operand lies, where a descriptor can say so: read as it is, dense along one of its two axes."""
    prim = _stored(axes, side)
    if prim is None or not axes.is_plain(side) or axes.kernel_positions:
        return None
    try:
        accesses = operand_accesses(axes, buffers, side)
    except CannotCode:
        return None
    if len(accesses) != 1 or accesses[0].constant.terms:
        return None
    none, one = Size.of(0), Size.of(1)
    row, k = (_step(group, accesses) for group in ((axes.m, axes.n)[side], axes.k))
    batch = _step(axes.batch, accesses) if axes.batch else none
    if row is None or k is None or batch is None or none in (row, k) or one not in (row, k):
        return None
    stride = row if k == one else k
    unit = UNIT_BYTES // ITEMSIZE[axes.ir.prims[prim].dtype]
    if any(step.value(axes.ir.graph.sizes) % unit for step in (stride, batch)):
        return None
    asked = [step for step in (stride, batch) if any(coefficient % unit for _, coefficient in step.terms)]
    conditions = tuple(f"{step.as_factor()} % {unit} == 0" for step in asked)
    return Described(prim, k == one, stride, batch, conditions)


def _stored(axes: ProductAxes, side: int) -> str | None:
    """The tensor that an operand is, seen otherwise perhaps; ``None`` where anything is computed or left out."""
    name = axes.prim.inputs[side]
    while name not in axes.region.inputs:
        inner = axes.ir.prims[name]
        if inner.op not in BIJECTIVE_VIEWS:
            return None
        name = inner.inputs[0]
    return name


def _step(axes: Sequence[Axis], accesses: Sequence[Index]) -> Size | None:
    """Elements from one place to the next along axes that are walked as one; ``None`` where they are not."""
    if not axes or len(merge_axes(axes, accesses)) > 1:
        return None
    steps = {variable.id: coefficient for variable, coefficient in accesses[0].terms if not variable.code}
    return steps.get(axes[-1].id, Size.of(0))


def made(parameters: Parameters, pointer: str, operand: Described, rows: Size, k: Size, block: str) -> str:
    """The expression of an operand's descriptor.

    Args:
        parameters: of the kernel.
        pointer: to the first element, of this program's matrix where there are several.
        operand: how it lies.
        rows: of the operand's other axis than K, its length.
        k: length of K.
        block: name of the tile's extent along the other axis.
    """
    lengths, blocks = (rows, k), (block, "BLOCK_K")
    if not operand.is_k_dense:
        lengths, blocks = (k, rows), ("BLOCK_K", block)
    rows_text, columns_text = (parameters.size(size).text for size in lengths)
    return descriptor_of_rows(pointer, (rows_text, columns_text), parameters.size(operand.stride).text, blocks)


def descriptor_of_rows(pointer: str, shape: tuple[str, str], stride: str, block: tuple[str, str]) -> str:
    """The expression of a matrix's descriptor, by the texts of its shape, of the step from row to row, and of a tile's shape."""
    return f"{MAKE}({pointer}, [{', '.join(shape)}], [{stride}, 1], [{', '.join(block)}])"


def loaded(descriptor: str, operand: Described, start: str, side: int) -> str:
    """The expression of the operand's tile: rows by K of the left one, K by columns of the right one.

    Args:
        descriptor: its name.
        operand: how it lies.
        start: where the tile begins along the other axis than K; along K it begins at ``start``.
        side: 0 for the left operand, 1 for the right one.
    """
    text = f"{descriptor}.load([{start}, start])" if operand.is_k_dense else f"{descriptor}.load([start, {start}])"
    return text if operand.is_k_dense == (side == 0) else f"{text}.T"
