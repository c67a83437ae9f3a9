"""Cost of loading a product's operands where neighbours in a tile are not contiguous in memory.

The compiler assigns neighbouring elements of a tile to each thread. If they are contiguous, one vector load fetches several of
them and overlaps with the tensor cores. If not, each element is a separate load and memory transaction, and the product waits
for it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from mtmc_lsp.core.device_model import DeviceModel
from mtmc_lsp.core.dtypes import ITEMSIZE
from mtmc_lsp.ir.axes import Axis
from mtmc_lsp.ir.memory_order import contiguous_axes, largest_source, packed_axis, shifted_axes
from mtmc_lsp.ir.primitives import KernelIR, Prim, ProductDims, ProductSizes, has_split_operands
from mtmc_lsp.ir.regions import Region, product_in, products_in
from mtmc_lsp.schedule.configs import SPLIT_PRECISION_MODES, MatmulConfig, PrecisionMode

APART_PER_CLOCK = 1.1 / 1.7
"""Single elements per clock that one multiprocessor loads. Measured on an H200 at 1.7 GHz: convolutions with such weights or
windows took 1.0 to 1.35 times the predicted time (40 times the time by bytes and operations)."""
OF_WINDOWS_PER_CLOCK = 7.6 / 1.7
"""Likewise for windows that are split on load without prefetching (four convolutions: 0.8 to 1.05 times the predicted time)."""
VECTOR_ELEMENTS = 4
"""Contiguous elements from which on a vector load is possible: asynchronous copies take four bytes or more (sm_80)."""


def loads_apart_us(ir: KernelIR, region: Region, config: MatmulConfig, device: DeviceModel) -> float:
    """The time of all loads of single elements that a product's kernel makes for its operands."""
    prim = product_in(ir, region)
    of_windows = config.split_on_load is not None and bool(ProductDims.of(prim).kernel_positions)
    is_split = config.precision in SPLIT_PRECISION_MODES and not has_split_operands(prim) and not of_windows
    if is_split or config.precision is PrecisionMode.FP16_SCALED:
        # The kernel before the product wrote the operands contiguously.
        return 0.0
    sizes, sized = ir.graph.sizes, ProductSizes.of(ir.prims, prim)
    tall, wide, deep = (config.block_m, config.block_n, config.block_k)
    m, n = (-(-size.value(sizes) // block) for size, block in ((sized.m, tall), (sized.n, wide)))
    k, channels = sized.k.value(sizes), sized.channels.value(sizes)
    walked = k // channels * -(-channels // deep) if config.kernel_positions else -(-k // deep)
    elements = float(sized.batch.value(sizes) * m * n * walked * deep)
    if of_windows:
        return elements * tall / device.per_sm(OF_WINDOWS_PER_CLOCK) * 1e6
    apart = sum(
        elements * (wide if side else tall)
        for side, operand in _operands_of_kernel(ir, region)
        if _together(ir, region, prim, side, operand, config) < VECTOR_ELEMENTS
    )
    return apart / device.per_sm(APART_PER_CLOCK) * 1e6


def loaded_bytes(ir: KernelIR, region: Region) -> int:
    """The largest element size, in bytes, that a product's kernel loads for an operand."""
    return max((_loaded(ir, region, side, name) for side, name in _operands_of_kernel(ir, region)), default=2)


def _loaded(ir: KernelIR, region: Region, side: int, operand: str) -> int:
    """Bytes of an element in memory, and of each number where it holds several."""
    tensor = largest_source(ir, region, operand)
    if tensor is None:
        return 2
    roles = region.table.of_product(product_in(ir, region))
    packed = (packed_axis(ir, region, operand, roles.k) or packed_axis(ir, region, operand, roles.n)) if side else None
    return -(-ITEMSIZE[tensor[1].dtype] // (packed.size.constant if packed else 1))


def _operands_of_kernel(ir: KernelIR, region: Region) -> Iterator[tuple[int, str]]:
    """Each operand with its side; low halves have the layout of the high halves. Products share their left operand."""
    first, *others = products_in(ir, region)
    yield from ((i % 2, name) for i, name in enumerate(first.inputs))
    yield from ((1, other.inputs[1]) for other in others)


def _together(ir: KernelIR, region: Region, prim: Prim, side: int, operand: str, config: MatmulConfig) -> int:
    """How many elements of an operand's tile are contiguous in memory, along K or along the tile's other side."""
    sizes, dims, table = ir.graph.sizes, ProductDims.of(prim), region.table
    tensor = largest_source(ir, region, operand)
    if tensor is None:
        return VECTOR_ELEMENTS
    name, kind = tensor
    dense = {axis for dim, axis in contiguous_axes(region, name, kind).items() if kind.shape[dim].value(sizes) > 1}
    shifted = shifted_axes(ir, region)
    dense |= {shifted[axis] for axis in dense if axis in shifted}
    dimensions = (region.table.axes(name, dim) for dim in kind.dense_dims)
    stored = [dimension for dimension in dimensions if dimension and dimension[-1] in dense]
    left = prim.inputs[0]
    first = dims.batch + dims.rows + (dims.kernel_positions if config.kernel_positions else 0)
    deep = _axes(region, left, first, dims.batch + dims.rows + dims.summed)
    if side == 1 and packed_axis(ir, region, operand, deep) is not None:
        # Each integer is loaded once for all of its numbers.
        deep = deep[:-1]
    rows = (dims.batch, dims.batch + dims.rows) if side == 0 else (dims.batch + dims.rows, len(prim.shape))
    along = _axes(region, prim.name, *rows)
    if side == 1 and packed_axis(ir, region, operand, along) is not None:
        along = along[:-1]
    tensor_axes = set(table.all_axes(name))
    best = 1
    for axes in (deep, along):
        if not axes:
            continue
        if axes[-1] in dense:
            best = max(best, _run(axes, stored, sizes))
        elif not dense & {*deep, *along} and axes is along and axes[-1] not in tensor_axes and side == 0:
            # Window positions: contiguous within one line.
            best = max(best, _power_of_two(axes[-1].size.value(sizes)))
    return best


def _axes(region: Region, prim: str, first: int, end: int) -> list[Axis]:
    return [axis for dim in range(first, end) for axis in region.table.axes(prim, dim)]


def _run(axes: list[Axis], stored: list[tuple[Axis, ...]], sizes: Mapping[str, int]) -> int:
    """Contiguous elements along merged axes: the largest power of two that divides the length of those that are stored so.

    Args:
        stored: the axes of each contiguous dimension of the tensor, outermost first.
    """
    dimension = next((each for each in stored if each[-1] == axes[-1]), tuple(axes[-1:]))
    length, count = 1, 0
    for ours, theirs in zip(reversed(axes), reversed(dimension), strict=False):
        if ours != theirs:
            break
        length, count = length * ours.size.value(sizes), count + 1
    return length if count == len(axes) else _power_of_two(length)


def _power_of_two(number: int) -> int:
    """The largest power of two that divides a number."""
    return number & -number
