"""Products that split an operand into float16 halves as they load it, because that operand is read once or twice.

Splitting an operand before the product costs one more pass: it reads the operand and writes both halves. That pays where many
tiles reuse the halves. It does not pay in four cases; the times are from an H200.

- Few rows (or columns): each element of the other operand (mostly weights) is used by one or two tiles, so its bytes dominate. A
  program scales and splits each tile in registers, which tensor cores take as their left operand (PTX ISA, ``wgmma``). 128 rows
  by 32768 x 32768 weights took 2.1 ms, against 5.2 ms with a pass that splits the weights first (cuBLAS in float32: 5.3 ms).
  1024 rows by 8192 x 8192 took 1.15 ms, against 0.76 ms with that pass.
- Few rows and few columns, long K: a splitting pass has too few rows to fill the device (11 ms for 256 x 524288 by 524288 x 256;
  cuBLAS in float32: 1.3 ms). Programs that share K split both operands on load.
- Short sums: writing the results dominates. 32768 x 32 by 32 x 32768 took 2071 us with both operands split on load, in tiles of
  128 x 64, row by row; 2445 us with splitting passes; 2540 us in cuBLAS float32; writing alone takes 918 us. At 64 terms
  splitting each tile again costs too much.
- Convolutions with few channels: the halves of the unfolded windows would be many times the input. Four of them took 0.38, 0.83,
  0.45 and 2.1 ms, against 0.62, 1.9, 0.75 and 9.9 ms in cuDNN float32 (3 or 8 channels to 24, 64, 64 and 16; windows of 27, 27, 9
  and 64 positions).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from mtmc_lsp.core.device_model import DeviceModel
from mtmc_lsp.core.dtypes import ITEMSIZE
from mtmc_lsp.core.sizes import Size
from mtmc_lsp.ir.axes import AxisTable
from mtmc_lsp.ir.primitives import BIJECTIVE_VIEWS, KernelIR, Prim, ProductDims, ProductSizes, has_split_operands
from mtmc_lsp.ir.regions import Region
from mtmc_lsp.schedule.column_tiles import next_power_of_two
from mtmc_lsp.schedule.configs import MatmulConfig, PrecisionMode, SplitOnLoad
from mtmc_lsp.schedule.device_limits import default_elements, max_row_elements, min_programs, min_tiles

LEAST_CHANNELS = 16
"""Channels from which on a convolution loops over the positions of its kernel, with a block of channels each: the depth of a
tensor-core instruction."""
LEAST_SPLIT_ROWS = 32
"""Rows of a product from which on its operands are split: half a WGMMA. Measured on an H200."""
FEW_ROWS = 256
"""Rows up to which the other operand is split on load: two tiles of 128 rows, so each element is split twice at most."""
LEAST_RATIO = 4
"""How many times as many rows the other operand must have. Measured on an H200."""
UNIT_BYTES = 16
"""The Tensor Memory Accelerator takes strides that are multiples of this (CUDA C++ Programming Guide)."""
LEAST_PARTS = 4
"""Parts of K from which on splitting K pays for the kernel that adds them. Measured on an H200."""
FEW_TERMS = 32
"""Terms of a sum up to which splitting both operands on load takes less time than writing the results. Measured on an H200. With
more, the operands' blocks of both stages would not fit into the shared memory of every device."""
LEAST_RESULTS = 4
"""Results per operand element that this needs. Measured on an H200."""


def side_to_split_on_load(ir: KernelIR, prim: Prim, device: DeviceModel) -> int | None:
    """The side of a float32 product whose operand should be split on load (0 left, 1 right); None for neither."""
    if has_split_operands(prim):
        return None
    sized, sizes = ProductSizes.of(ir.prims, prim), ir.graph.sizes
    m, n, k, batch = (size.value(sizes) for size in (sized.m, sized.n, sized.k, sized.batch))
    if ProductDims.of(prim).kernel_positions:
        if sized.channels.value(sizes) >= LEAST_CHANNELS or ir.prims[prim.inputs[0]].dtype != "float32":
            return None
        tile = window_config(m, n, batch, device)
        tiles = -(-m // tile.block_m) * -(-n // tile.block_n) * batch
        # Few tiles with a long sum need split K, which kernels that split windows on load do not support.
        return 0 if split_k_parts(tiles, k, tile.block_k, device) == 1 else None
    side, few = (1, m) if m <= n else (0, n)
    name = prim.inputs[side]
    if not LEAST_SPLIT_ROWS <= few <= FEW_ROWS or max(m, n) < LEAST_RATIO * few or ir.prims[name].dtype != "float32":
        return None
    return side if is_dense_along_sum(ir, prim, side) else None


def split_k_parts(tiles: int, depth: int, block_k: int, device: DeviceModel) -> int:
    """How many programs share the sum of each tile: a power of two, each with at least eight blocks of K; 1 for no split.

    An empty product has no tiles.
    """
    parts = min(min_tiles(device) // max(tiles, 1), depth // (8 * block_k))
    return 1 << (parts.bit_length() - 1) if parts >= LEAST_PARTS else 1


def split_programs(rows: int, k: Size, sizes: Mapping[str, int], device: DeviceModel) -> int:
    """About how many programs the kernel has that splits an operand of so many rows before its product."""
    depth = k.value(sizes)
    at_once = rows_held(rows, depth, device) if depth <= max_row_elements(device) else strided_rows(rows, device)
    return -(-rows // at_once)


def split_elements(device: DeviceModel) -> int:
    """Elements of a program that splits rows with contiguous K: 64 per thread of four warps (NVIDIA: 8192).

    Measured on an H200, 2048 x 2048 together with the other operand: 24 us; 27 us with single rows; 31 us with eight warps.
    """
    return 8 * default_elements(device)


def rows_held(rows: int, depth: int, device: DeviceModel) -> int:
    """Rows with contiguous K that a program splits in registers: fewer where there would be less than two programs per
    multiprocessor, down to 16 elements per thread."""
    most, fewest = max(1, split_elements(device) // depth), 2 * default_elements(device)
    fits = (n for n in _halved(most) if rows // n >= 2 * min_tiles(device) or n * depth <= fewest)
    return next(fits, 1)


def _halved(number: int) -> Iterator[int]:
    while number >= 1:
        yield number
        number //= 2


def strided_rows(rows: int, device: DeviceModel) -> int:
    """Rows that a program splits at a time where K is strided, or too long for registers.

    They cover two sectors of memory; one or half a sector where there would be less than one program per multiprocessor.
    """
    sector = device.sector_bytes // ITEMSIZE["float32"]
    return next((count for count in (2 * sector, sector) if rows // count >= min_tiles(device)), sector // 2)


def config_split_on_load(
    block_m: int,
    block_n: int,
    block_k: int,
    split_on_load: SplitOnLoad,
    *,
    warps: int,
    stages: int,
    group_m: int = 8,
    split_k: int = 1,
) -> MatmulConfig:
    """The configuration of a product with an operand that is split on load.

    Each block of K has its own scale, so fp32 units add the blocks.
    """
    mode = PrecisionMode.FP16X3_PROMOTED
    return MatmulConfig(
        block_m, block_n, block_k, group_m, warps, stages, mode, split_on_load=split_on_load, split_k=split_k
    )


def both_sides_config(ir: KernelIR, prim: Prim, device: DeviceModel) -> MatmulConfig | None:
    """The configuration of a float32 product whose operands are both split on load.

    For few tiles with long sums, or many results with short sums. ``None`` for others, and where an operand is not a tensor in
    memory.
    """
    if has_split_operands(prim) or ProductDims.of(prim).kernel_positions or ir.prims[prim.inputs[0]].dtype != "float32":
        return None
    sized, sizes = ProductSizes.of(ir.prims, prim), ir.graph.sizes
    m, n, k, batch = (size.value(sizes) for size in (sized.m, sized.n, sized.k, sized.batch))
    if min(m, n) < LEAST_SPLIT_ROWS or not all(_stored(ir, name)[-1] in ir.value_of for name in prim.inputs):
        return None
    if k <= FEW_TERMS and batch * m * n >= LEAST_RESULTS * batch * (m + n) * k:
        block_k = max(16, next_power_of_two(k))
        return config_split_on_load(128, 64, block_k, SplitOnLoad.BOTH, group_m=1, warps=4, stages=2)
    block_m, block_n = (min(128, next_power_of_two(size)) for size in (m, n))
    block_k = 32
    parts = split_k_parts(-(-m // block_m) * -(-n // block_n) * batch, k, block_k, device)
    if parts == 1:
        return None
    warps = 8 if block_m * block_n >= 128 * 128 else 4
    return config_split_on_load(block_m, block_n, block_k, SplitOnLoad.BOTH, warps=warps, stages=4, split_k=parts)


def one_side_config(m: int, n: int, batch: int, side: int, device: DeviceModel) -> MatmulConfig:
    """The configuration of a product whose operand at ``side`` is split on load, and the other one before the product."""
    few, many = (m, n) if side else (n, m)
    short = min(128, max(32, next_power_of_two(few)))
    fills = (n for n in (128, 64) if -(-many // n) * -(-few // short) * batch >= min_programs(device))
    long = next(fills, 64)
    block_m, block_n = (short, long) if side else (long, short)
    warps = 8 if short * long >= 128 * 128 else 4
    return config_split_on_load(block_m, block_n, 64, SplitOnLoad.of(side), warps=warps, stages=3)


def window_config(m: int, n: int, batch: int, device: DeviceModel) -> MatmulConfig:
    """The configuration of a convolution with few channels, whose windows are split on load.

    It has one stage: neither side of a tile is contiguous, and asynchronous copies would cause bank conflicts in shared memory.
    """
    block_n = min(128, max(16, next_power_of_two(n)))
    block_m = 128 if -(-m // 128) * -(-n // block_n) * batch >= min_programs(device) else 64
    warps = 8 if block_m * block_n >= 128 * 128 else 4
    return config_split_on_load(block_m, block_n, 32, SplitOnLoad.LEFT, warps=warps, stages=1)


def is_dense_along_sum(ir: KernelIR, prim: Prim, side: int) -> bool:
    """Whether the operand is a tensor in memory that is contiguous along K."""
    dims, name = ProductDims.of(prim), prim.inputs[side]
    chain = _stored(ir, name)
    stored = chain[-1]
    if stored not in ir.value_of:
        return False
    kind = ir.graph.type_of(ir.value_of[stored])
    table = AxisTable(ir.prims, chain[-2::-1], ir.graph.sizes) if len(chain) > 1 else None
    first = dims.batch + (dims.rows if side == 0 else 0)
    summed = range(first, first + dims.summed)
    inner = [dim for dim, step in enumerate(kind.stride) if step.is_constant and step.constant == 1]
    if table is None:
        return bool(set(inner) & set(summed))
    along = {axis for dim in summed for axis in table.axes(name, dim)}
    return any(axes[-1] in along for dim in inner if (axes := table.axes(stored, dim)))


def is_tma_loadable(ir: KernelIR, region: Region, prim: Prim, side: int) -> bool:
    """Whether TMA can load an operand: a tensor in memory that the region does not compute, contiguous along one axis, with all
    other strides multiples of 16 bytes."""
    chain = _stored(ir, prim.inputs[side])
    stored = chain[-1]
    if ProductDims.of(prim).kernel_positions or stored not in ir.value_of or not set(chain) & set(region.inputs):
        return False
    kind = ir.graph.type_of(ir.value_of[stored])
    sizes = ir.graph.sizes
    steps = [step.value(sizes) for step, size in zip(kind.stride, kind.shape, strict=True) if size.value(sizes) > 1]
    return 1 in steps and 0 not in steps and sum(step * ITEMSIZE[kind.dtype] % UNIT_BYTES != 0 for step in steps) == 1


def _stored(ir: KernelIR, name: str) -> list[str]:
    """An operand and the tensors that it is a view of, in turn; the last one is read from memory."""
    chain = [name]
    while ir.prims[chain[-1]].op in BIJECTIVE_VIEWS:
        chain.append(ir.prims[chain[-1]].inputs[0])
    return chain
