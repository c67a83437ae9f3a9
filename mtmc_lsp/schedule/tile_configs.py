"""First configurations of kernels, and variants worth measuring.

This module chooses the fields of :class:`mtmc_lsp.schedule.configs.TileConfig`. Other modules choose those of products,
attention and recurrent layers; :func:`default_config` and :func:`variants` serve all kinds.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import TypeVar

from mtmc_lsp.core.device_model import DeviceModel
from mtmc_lsp.core.dtypes import is_float
from mtmc_lsp.core.sizes import product
from mtmc_lsp.ir.axes import Axis
from mtmc_lsp.ir.loops.fusion import loop_in
from mtmc_lsp.ir.memory_order import column_axes, strided_columns, transposed_axis, windows_along_columns
from mtmc_lsp.ir.primitives import KernelIR, Prim, PrimOp, ProductDims
from mtmc_lsp.ir.recurrence import recurrence_in
from mtmc_lsp.ir.regions import Region, RegionKind, product_in, products_in
from mtmc_lsp.schedule.attention_configs import attention_config, attention_variants
from mtmc_lsp.schedule.column_tiles import column_block, next_power_of_two, single_columns
from mtmc_lsp.schedule.configs import (
    MOST_ELEMENTS,
    AttentionConfig,
    KernelConfig,
    LoopConfig,
    MatmulConfig,
    RecurrentConfig,
    TileConfig,
)
from mtmc_lsp.schedule.device_limits import (
    default_elements,
    max_looped_elements,
    max_row_elements,
    max_shared_row_elements,
    max_strided_columns,
    max_warps,
    min_reduction_programs,
    min_split_elements,
    resident_programs,
    short_row,
)
from mtmc_lsp.schedule.loop_configs import loop_config, loop_variants
from mtmc_lsp.schedule.matmul_configs import is_one_piece, product_config, product_variants
from mtmc_lsp.schedule.recurrent_configs import recurrent_config, recurrent_variants
from mtmc_lsp.schedule.reductions.column_sum_configs import column_sum_config, column_sum_variants

Config = TypeVar("Config", bound=KernelConfig)


def default_config(ir: KernelIR, region: Region, device: DeviceModel) -> KernelConfig:
    """A first configuration for the workload's sizes."""
    if region.kind is RegionKind.MATMUL:
        return product_config(ir, region, device)
    if region.kind in (RegionKind.ATTENTION, RegionKind.ATTENTION_GRADIENT):
        return attention_config(ir, region, device)
    if region.kind is RegionKind.RECURRENT:
        return recurrent_config(ir, recurrence_in(ir, region), device)
    if region.kind is RegionKind.LOOP:
        return loop_config(loop_in(ir, region), device)
    return tile_config(ir, region, device)


def tile_config(ir: KernelIR, region: Region, device: DeviceModel) -> TileConfig:
    """A first configuration of an elementwise kernel, a reduction or a scan."""
    if region.sums:
        return column_sum_config(ir, region, device)
    config = _first_config(ir, region, device)
    if region.kind in (RegionKind.MAP, RegionKind.REDUCE):
        return _with_small_tiles(ir, region, config, device)
    return config


LONG_KERNEL = 100
"""Primitives of a kernel from which on latency dominates, as in unrolled time steps."""


def _with_small_tiles(ir: KernelIR, region: Region, config: TileConfig, device: DeviceModel) -> TileConfig:
    """The configuration with smaller tiles where a long kernel has few programs: more of them hide each other's latency."""
    if len(region.prims) < LONG_KERNEL or config.loop or config.is_split:
        return config
    sizes = ir.graph.sizes
    elements = product([axis.size for axis in (*region.parallel_axes, *region.reduced_axes)]).value(sizes)
    rows, block = config.rows, config.block
    # The smallest tile has four elements per thread of one warp.
    while rows * block > 4 * device.warp_size and elements < resident_programs(device) * rows * block:
        if rows > 1:
            rows //= 2
        elif region.kind is RegionKind.MAP:
            block //= 2
        else:
            break
    # At least eight elements per thread.
    warps = min(config.warps, max(1, rows * block // (8 * device.warp_size)))
    return replace(config, rows=rows, block=block, warps=warps)


def _first_config(ir: KernelIR, region: Region, device: DeviceModel) -> TileConfig:
    sizes = ir.graph.sizes
    elements = default_elements(device)
    if region.kind is RegionKind.MAP:
        columns = region.parallel_axes[-1].size.value(sizes) if region.parallel_axes else 1
        transposed = transposed_axis(ir, region)
        if transposed is not None:
            return _transposed_tiles(ir, region, transposed)[0]
        if windows_along_columns(ir, region) is not None:
            return single_columns(columns, 8, device)
        block = column_block(columns, device) if len(region.parallel_axes) > 1 else elements
        return TileConfig(max(1, elements // block), block)
    columns = region.columns.value(sizes)
    if strided_columns(ir, region):
        # Neighbouring rows are contiguous in memory, so a tile of many rows reads whole sectors.
        if (
            region.kind is RegionKind.REDUCE
            and _needs_second_pass(ir, region)
            and columns <= max_strided_columns(device)
        ):
            return _register_tiles(next_power_of_two(columns))[0]
        block = 32 if region.kind is RegionKind.REDUCE and columns >= 128 else 16
        return _with_split_columns(ir, region, TileConfig(64, block, loop=True), device)
    padded = next_power_of_two(columns)
    if region.kind is RegionKind.SCAN:
        return TileConfig(1, min(padded, MAX_RUNNING_FACTORS), loop=True)
    reads_one_tensor = _streamed_inputs(region) == 1
    # A row stays in registers; twice as long a row where it is the only streamed tensor.
    if padded > max_row_elements(device) * (2 if reads_one_tensor else 1):
        block = max_looped_elements(device) // (1 if reads_one_tensor else 2)
        return _with_split_columns(ir, region, TileConfig(1, block, loop=True, warps=_warps(block, device)), device)
    rows = max(1, min(MAX_SHORT_ROWS, elements // padded))
    return TileConfig(rows, padded, warps=_warps(rows * padded, device))


MAX_SHORT_ROWS = 128
"""Rows of a tile of few columns."""


def _with_split_columns(ir: KernelIR, region: Region, config: TileConfig, device: DeviceModel) -> TileConfig:
    return split_columns(ir, region, config, device) if region.kind is RegionKind.REDUCE else config


def split_columns(ir: KernelIR, region: Region, config: TileConfig, device: DeviceModel) -> TileConfig:
    """The configuration of a reduction with several programs per row; unchanged where the rows fill the device, or are short."""
    if region.sums:
        return config
    sizes = ir.graph.sizes
    rows, columns = region.rows.value(sizes), region.columns.value(sizes)
    programs = -(-rows // config.rows)
    # Tiles of neighbouring rows have few warps, so a multiprocessor needs more of them. The backward pass of a layer norm of
    # 4096 x 4096 took 66 and 75 us with 8 programs a row for the sums over rows, and 66 us with 16 (H200, middle commits).
    is_strided = bool(strided_columns(ir, region))
    enough, most = resident_programs(device), 2 * resident_programs(device)
    if not is_strided:
        enough, most = min_reduction_programs(device), enough
    if programs >= enough or rows * columns < min_split_elements(device):
        return config
    split, longest = config, max_shared_row_elements(device)
    if not config.loop:
        split = replace(config, block=min(config.block, longest // 2), warps=8)
    elif config.block > longest:
        split = replace(config, block=longest, warps=8)
    # Each part loops over several blocks, which amortises the start of a program.
    most_parts = columns // (4 * split.block)
    parts = min(most // programs, most_parts)
    return replace(split, split=1 << (parts.bit_length() - 1), persist=0) if parts >= 2 else config


def _warps(elements: int, device: DeviceModel) -> int:
    """Warps so that each thread holds about 16 elements."""
    most = max_warps(device) if elements > max_row_elements(device) else max_warps(device) // 2
    return max(1, min(most, next_power_of_two(elements // (16 * device.warp_size))))


def _streamed_inputs(region: Region) -> int:
    """Tensors that the region reads along its rows, except those that all rows share."""
    reduced, kept = set(region.reduced_axes), set(region.parallel_axes)
    axes = [set(region.table.all_axes(name)) for name in region.inputs]
    return sum(1 for input_axes in axes if input_axes & reduced and input_axes & kept)


def _register_tiles(columns: int) -> list[TileConfig]:
    """Tiles that hold all ``columns`` where neighbouring rows are contiguous; the default first."""
    tiles = (
        [(64, 4), (32, 4), (64, 8), (128, 8), (32, 8), (16, 4)]
        if columns <= 64
        else [(32, 8), (16, 4), (32, 4), (64, 8)]
    )
    return [TileConfig(rows, columns, warps=warps) for rows, warps in tiles]


def _needs_second_pass(ir: KernelIR, region: Region) -> bool:
    """Whether a tile that does not hold all columns may have to read them more than once."""
    reductions = sum(ir.prims[name].op is PrimOp.REDUCE for name in region.prims)
    reduced, table = set(region.reduced_axes), region.table
    return reductions > 1 or any(reduced & set(table.all_axes(name)) for _, name in region.stored(ir))


PARTIAL = frozenset({PrimOp.WINDOW, PrimOp.SLICE, PrimOp.PAD, PrimOp.CAT, PrimOp.FLIP, PrimOp.GATHER, PrimOp.CROP})
"""Operations that read a tensor at other indices, so that neighbouring axes cannot be merged."""


def _transposed_tiles(ir: KernelIR, region: Region, transposed: Axis) -> list[TileConfig]:
    """Tiles over the contiguous axis of the input and the contiguous axis of the output; the default first."""
    sizes = ir.graph.sizes
    has_indexing = any(ir.prims[name].op in PARTIAL for name in region.prims)
    inside = (
        column_axes(ir, region) if has_indexing else region.parallel_axes[region.parallel_axes.index(transposed) + 1 :]
    )
    most_rows = next_power_of_two(transposed.size.value(sizes))
    most_columns = next_power_of_two(product([axis.size for axis in inside]).value(sizes))
    return _unique(
        TileConfig(min(rows, most_rows), min(block, most_columns), warps=warps)
        for rows, block, warps in TRANSPOSED_TILES
    )


TRANSPOSED_TILES = (
    (64, 64, 8), (64, 64, 4), (32, 64, 4), (64, 32, 4), (32, 32, 4), (32, 128, 8), (128, 32, 8), (16, 128, 4), (128, 16, 4),
    (16, 256, 8), (16, 64, 4),
)  # fmt: skip
"""Rows, columns and warps; ordered by speed on an H200."""


def variants(ir: KernelIR, region: Region, config: KernelConfig, device: DeviceModel) -> list[KernelConfig]:
    """Other configurations worth measuring on a device, without the present one."""
    candidates: Iterable[KernelConfig]
    if isinstance(config, MatmulConfig):
        prim = product_in(ir, region)
        short = is_one_piece(ir, prim, config.precision)
        has_windows = bool(ProductDims.of(prim).kernel_positions)
        count = len(products_in(ir, region))
        candidates = product_variants(config, device, of_windows=has_windows, short=short, products=count)
    elif isinstance(config, AttentionConfig):
        candidates = attention_variants(ir, region, device)
    elif isinstance(config, RecurrentConfig):
        candidates = recurrent_variants(recurrence_in(ir, region), config, device)
    elif isinstance(config, LoopConfig):
        candidates = loop_variants(loop_in(ir, region), config, device)
    else:
        candidates = tile_variants(ir, region, config, device)
    return [item for item in _unique(candidates) if item != config and item.warps <= max_warps(device)]


def tile_variants(ir: KernelIR, region: Region, config: TileConfig, device: DeviceModel) -> Iterator[TileConfig]:
    """A tile kernel's configuration with other tiles."""
    if region.sums:
        yield from column_sum_variants(ir, region, device)
        return
    if (transposed := transposed_axis(ir, region)) is not None:
        tiles = [(tile.rows, tile.block, tile.warps) for tile in _transposed_tiles(ir, region, transposed)]
    elif region.kind is RegionKind.MAP:
        tiles = _map_tiles(ir, region, config, device)
    else:
        yield from _reduction_variants(ir, region, config, device)
        return
    for rows, block, warps in tiles:
        if rows * block <= MOST_ELEMENTS:
            yield replace(config, rows=rows, block=block, warps=warps)


def _map_tiles(ir: KernelIR, region: Region, config: TileConfig, device: DeviceModel) -> list[tuple[int, int, int]]:
    """Rows, columns and warps worth measuring for an elementwise kernel."""
    columns = region.parallel_axes[-1].size.value(ir.graph.sizes) if region.parallel_axes else 1
    several = len(region.parallel_axes) > 1
    tiles: list[tuple[int, int, int]] = []
    if windows_along_columns(ir, region) is not None:
        tiles += [
            (tile.rows, tile.block, tile.warps)
            for tile in (single_columns(columns, warps, device) for warps in (4, 8, 16))
        ]
    for total, warps in [(512, 4), (1024, 4), (1024, 8), (2048, 4), (2048, 8), (4096, 8), (4096, 4), (8192, 8)]:
        block = min(total, config.block)
        tiles.append((total // block, block if several else total, warps))
    return tiles + ([(1, 1024, 4), (1, 2048, 4), (1, 2048, 8), (1, 4096, 8)] if several else [])


def _unique(items: Iterable[Config]) -> list[Config]:
    return list(dict.fromkeys(items))


MAX_RUNNING_FACTORS = 1024
"""Factors from 0.75 to 1.5 whose product does not overflow float64."""


def is_wide_product(prim: Prim) -> bool:
    """Whether it is a running product of floats: its partial products may overflow where its results do not."""
    return prim.op is PrimOp.SCAN and prim.fn == "prod" and is_float(prim.dtype)


def _reduction_variants(ir: KernelIR, region: Region, config: TileConfig, device: DeviceModel) -> Iterator[TileConfig]:
    columns = region.columns.value(ir.graph.sizes)
    padded = next_power_of_two(columns)
    if strided_columns(ir, region):
        in_registers = region.kind is RegionKind.REDUCE and columns <= 2 * max_strided_columns(device)
        for tile in _register_tiles(padded) if in_registers else ():
            yield replace(config, rows=tile.rows, block=padded, loop=False, warps=tile.warps, stages=tile.stages)
        for rows, block, warps in STRIDED_TILES:
            yield replace(config, rows=rows, block=block, loop=True, warps=warps)
        return
    if region.kind is RegionKind.SCAN:
        products = any(is_wide_product(ir.prims[name]) for name in region.prims)
        for block, rows, warps in [(1024, 1, 4), (2048, 1, 8), (4096, 1, 8), (512, 4, 4), (256, 4, 4)]:
            if block <= MAX_RUNNING_FACTORS or not products:
                yield replace(config, rows=rows, block=block, warps=warps)
        return
    if padded <= MOST_ELEMENTS:
        for rows in (1, 2, 4, 8, 16, *((32, 64, 128) if padded < short_row(device) else ())):
            if rows * padded > MOST_ELEMENTS // 2 and rows > 1:
                continue
            for warps in (1, 2, 4, 8, 16, 32):
                if 8 <= rows * padded / (warps * device.warp_size) <= 64:
                    yield replace(config, rows=rows, block=padded, loop=False, warps=warps)
    if columns > 1024:
        for block, warps in LOOPED_TILES:
            if block < padded:
                yield replace(config, rows=1, block=block, loop=True, warps=warps)


STRIDED_TILES = (
    (32, 32, 4), (64, 32, 4), (64, 32, 8), (256, 16, 8), (256, 8, 4), (128, 16, 4), (128, 16, 8), (32, 16, 2), (64, 64, 8),
    (128, 32, 8),
)  # fmt: skip
"""Rows, columns and warps where neighbouring rows are contiguous; measured on an H200."""
LOOPED_TILES = (
    (1024, 4), (2048, 4), (2048, 8), (4096, 8), (4096, 16), (8192, 16), (8192, 8), (16384, 16), (16384, 32),
)  # fmt: skip
"""Columns and warps of a program that loops over its row; measured on an H200."""
