"""How a kernel runs when it is first written, and which other ways are worth trying.

The choices of tile kernels are the fields of :class:`mtmc_lsp.schedule.configs.TileConfig`. Those of other kinds are in modules
of their own; :func:`default_config` and :func:`variants` are for all kinds.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import TypeVar

from mtmc_lsp.core.dtypes import is_float
from mtmc_lsp.core.sizes import product
from mtmc_lsp.ir.axes import Axis
from mtmc_lsp.ir.memory_order import column_axes, strided_columns, transposed_axis, windows_along_columns
from mtmc_lsp.ir.primitives import KernelIR, Prim, PrimOp, ProductDims
from mtmc_lsp.ir.recurrence import recurrence_in
from mtmc_lsp.ir.regions import Region, RegionKind, product_in
from mtmc_lsp.schedule.attention_configs import attention_config, attention_variants
from mtmc_lsp.schedule.column_tiles import column_block, next_power_of_two, single_columns
from mtmc_lsp.schedule.configs import (
    MOST_ELEMENTS,
    AttentionConfig,
    KernelConfig,
    MatmulConfig,
    RecurrentConfig,
    TileConfig,
)
from mtmc_lsp.schedule.matmul_configs import is_one_piece, product_config, product_variants
from mtmc_lsp.schedule.recurrent_configs import recurrent_config, recurrent_variants

Config = TypeVar("Config", bound=KernelConfig)

WHOLE_ROW_LIMIT = 16384
"""Columns up to which a row is held at once; twice as many where it is the only tensor that is walked along them."""


def default_config(ir: KernelIR, region: Region) -> KernelConfig:
    """A sound first configuration for the workload's sizes."""
    if region.kind is RegionKind.MATMUL:
        return product_config(ir, region)
    if region.kind is RegionKind.ATTENTION:
        return attention_config(ir, region)
    if region.kind is RegionKind.RECURRENT:
        return recurrent_config(ir, recurrence_in(ir, region))
    return tile_config(ir, region)


def tile_config(ir: KernelIR, region: Region) -> TileConfig:
    """A sound first configuration of an elementwise kernel, a reduction or a scan."""
    config = _first_config(ir, region)
    return _spread_out(ir, region, config) if region.kind in (RegionKind.MAP, RegionKind.REDUCE) else config


LONG = 100
"""Primitives of a kernel from which on it waits for itself: for each step of a loop that is written out."""
LEAST_ELEMENTS = 128
"""Of a tile: four of a thread in one warp."""


def _spread_out(ir: KernelIR, region: Region, config: TileConfig) -> TileConfig:
    """The configuration with smaller tiles where a long kernel has few programs: while one waits, others run."""
    if len(region.prims) < LONG or config.loop or config.is_split:
        return config
    sizes = ir.graph.sizes
    elements = product([axis.size for axis in (*region.parallel_axes, *region.reduced_axes)]).value(sizes)
    rows, block = config.rows, config.block
    while rows * block > LEAST_ELEMENTS and elements < MANY_PROGRAMS * rows * block:
        if rows > 1:
            rows //= 2
        elif region.kind is RegionKind.MAP:
            block //= 2
        else:
            break
    # Each thread of a warp has at least eight elements.
    return replace(config, rows=rows, block=block, warps=min(config.warps, max(1, rows * block // 256)))


def _first_config(ir: KernelIR, region: Region) -> TileConfig:
    sizes = ir.graph.sizes
    if region.kind is RegionKind.MAP:
        columns = region.parallel_axes[-1].size.value(sizes) if region.parallel_axes else 1
        turned = transposed_axis(ir, region)
        if turned is not None:
            return _turned_tiles(ir, region, turned)[0]
        if windows_along_columns(ir, region) is not None:
            return single_columns(columns, 8)
        block = column_block(columns) if len(region.parallel_axes) > 1 else 1024
        return TileConfig(max(1, 1024 // block), block)
    columns = region.columns.value(sizes)
    if strided_columns(ir, region):
        # Neighbouring rows lie densest: a tile of many rows reads them together.
        if region.kind is RegionKind.REDUCE and _reads_again(ir, region) and columns <= HELD_COLUMNS:
            return _held_tiles(next_power_of_two(columns))[0]
        block = 32 if region.kind is RegionKind.REDUCE and columns >= 128 else 16
        return _shared_out(ir, region, TileConfig(64, block, loop=True))
    whole = next_power_of_two(columns)
    if region.kind is RegionKind.SCAN:
        return TileConfig(1, min(whole, 1024), loop=True)
    if whole > WHOLE_ROW_LIMIT * (2 if _walked(region) == 1 else 1):
        block, warps = (8192, 16) if _walked(region) == 1 else (4096, 8)
        return _shared_out(ir, region, TileConfig(1, block, loop=True, warps=warps))
    rows = max(1, min(16 if whole >= SHORT else 128, 1024 // whole))
    return TileConfig(rows, whole, warps=_warps(rows * whole))


SHORT = 64
"""Columns below which a program takes more than 16 rows: of fewer elements its threads would have next to nothing to do."""
FEW_PROGRAMS = 256
"""With fewer programs of a reduction than this, each with a long sum, much of a large device would be idle."""
SHARED_BLOCK = 4096
"""Most columns of a tile where programs share a row: what is written then overlaps with what other programs read. On an H200
the second kernel of a layer norm over 16 rows of 2^22 took 153 us so, and 168 us in tiles of twice the width."""
MANY_PROGRAMS = 512
"""About as many programs as a large device runs at once."""
LEAST_SHARED = 1 << 18
"""Elements of a reduction from which on several programs per row pay for the second kernel."""


def _shared_out(ir: KernelIR, region: Region, config: TileConfig) -> TileConfig:
    """The configuration, in parts where few programs would have all the work."""
    return in_parts(ir, region, config) if region.kind is RegionKind.REDUCE else config


def in_parts(ir: KernelIR, region: Region, config: TileConfig) -> TileConfig:
    """The configuration of a reduction of few long rows, split; the same where it has rows enough, or is small."""
    sizes = ir.graph.sizes
    rows, columns = region.rows.value(sizes), region.columns.value(sizes)
    programs = -(-rows // config.rows)
    if programs >= FEW_PROGRAMS or rows * columns < LEAST_SHARED:
        return config
    split = config
    if not config.loop:
        split = replace(config, block=min(config.block, 2048), warps=8)
    elif config.block > SHARED_BLOCK:
        split = replace(config, block=SHARED_BLOCK, warps=8)
    # Each part walks a few blocks, so that a program's start is a small part of it.
    most = columns // (4 * split.block)
    parts = min(MANY_PROGRAMS // programs, most)
    return replace(split, split=1 << (parts.bit_length() - 1), persist=0) if parts >= 2 else config


def _warps(elements: int) -> int:
    """Warps so that each thread holds about 16 elements."""
    return max(1, min(32 if elements > WHOLE_ROW_LIMIT else 16, next_power_of_two(elements // 512)))


def _walked(region: Region) -> int:
    """Tensors that the region reads along its rows, what all rows share not counted."""
    reduced, kept = set(region.reduced_axes), set(region.parallel_axes)
    axes = [set(region.table.all_axes(name)) for name in region.inputs]
    return sum(1 for own in axes if own & reduced and own & kept)


HELD_COLUMNS = 256
"""Columns that step over memory, up to which a tile of many rows holds all of them at once."""


def _held_tiles(whole: int) -> list[TileConfig]:
    """Tiles that hold all columns, ``whole`` of them, where neighbouring rows lie densest; the usual one first."""
    tiles = (
        [(64, 4), (32, 4), (64, 8), (128, 8), (32, 8), (16, 4)] if whole <= 64 else [(32, 8), (16, 4), (32, 4), (64, 8)]
    )
    return [TileConfig(rows, whole, warps=warps) for rows, warps in tiles]


def _reads_again(ir: KernelIR, region: Region) -> bool:
    """Whether a tile that does not hold its columns may have to walk them more than once."""
    passes = sum(ir.prims[name].op is PrimOp.REDUCE for name in region.prims)
    reduced, table = set(region.reduced_axes), region.table
    return passes > 1 or any(reduced & set(table.all_axes(name)) for _, name in region.stored(ir))


PARTIAL = frozenset({PrimOp.WINDOW, PrimOp.SLICE, PrimOp.PAD, PrimOp.CAT, PrimOp.FLIP, PrimOp.GATHER, PrimOp.CROP})
"""What reads a tensor at other places than its own, so that neighbouring axes do not run together."""


def _turned_tiles(ir: KernelIR, region: Region, turned: Axis) -> list[TileConfig]:
    """Tiles of the axis that lies dense in what is read by the axis that lies dense in what is written; the usual one first."""
    sizes = ir.graph.sizes
    apart = any(ir.prims[name].op in PARTIAL for name in region.prims)
    inside = column_axes(ir, region) if apart else region.parallel_axes[region.parallel_axes.index(turned) + 1 :]
    most_rows = next_power_of_two(turned.size.value(sizes))
    most_columns = next_power_of_two(product([axis.size for axis in inside]).value(sizes))
    return _unique(
        TileConfig(min(rows, most_rows), min(block, most_columns), warps=warps) for rows, block, warps in TURNED_TILES
    )


TURNED_TILES = (
    (64, 64, 8), (64, 64, 4), (32, 64, 4), (64, 32, 4), (32, 32, 4), (32, 128, 8), (128, 32, 8), (16, 128, 4), (128, 16, 4),
    (16, 256, 8), (16, 64, 4),
)  # fmt: skip


def variants(ir: KernelIR, region: Region, config: KernelConfig) -> list[KernelConfig]:
    """Other configurations worth measuring, the present one left out."""
    found: Iterable[KernelConfig]
    if isinstance(config, MatmulConfig):
        own = product_in(ir, region)
        short = is_one_piece(ir, own, config.precision)
        found = product_variants(config, of_windows=bool(ProductDims.of(own).kernel_positions), short=short)
    elif isinstance(config, AttentionConfig):
        found = attention_variants(ir, region)
    elif isinstance(config, RecurrentConfig):
        found = recurrent_variants(recurrence_in(ir, region), config)
    else:
        found = tile_variants(ir, region, config)
    return [item for item in _unique(found) if item != config]


def tile_variants(ir: KernelIR, region: Region, config: TileConfig) -> Iterator[TileConfig]:
    """The configuration of a tile kernel with other tiles."""
    if (turned := transposed_axis(ir, region)) is not None:
        tiles = [(tile.rows, tile.block, tile.warps) for tile in _turned_tiles(ir, region, turned)]
    elif region.kind is RegionKind.MAP:
        tiles = _map_tiles(ir, region, config)
    else:
        yield from _reduction_variants(ir, region, config)
        return
    for rows, block, warps in tiles:
        if rows * block <= MOST_ELEMENTS:
            yield replace(config, rows=rows, block=block, warps=warps)


def _map_tiles(ir: KernelIR, region: Region, config: TileConfig) -> list[tuple[int, int, int]]:
    """Rows, columns and warps worth measuring for an elementwise kernel."""
    columns = region.parallel_axes[-1].size.value(ir.graph.sizes) if region.parallel_axes else 1
    several = len(region.parallel_axes) > 1
    tiles: list[tuple[int, int, int]] = []
    if windows_along_columns(ir, region) is not None:
        tiles += [(one.rows, one.block, one.warps) for one in (single_columns(columns, warps) for warps in (4, 8, 16))]
    for total, warps in [(512, 4), (1024, 4), (1024, 8), (2048, 4), (2048, 8), (4096, 8), (4096, 4), (8192, 8)]:
        block = min(total, config.block)
        tiles.append((total // block, block if several else total, warps))
    return tiles + ([(1, 1024, 4), (1, 2048, 4), (1, 2048, 8), (1, 4096, 8)] if several else [])


def _unique(items: Iterable[Config]) -> list[Config]:
    return list(dict.fromkeys(items))


MOST_FACTORS = 1024
"""Numbers of a size from 0.75 to 1.5 whose product float64 holds."""


def is_wide_product(prim: Prim) -> bool:
    """Whether it is a running product of floats, in the midst of which more may overflow than in its results."""
    return prim.op is PrimOp.SCAN and prim.fn == "prod" and is_float(prim.dtype)


def _reduction_variants(ir: KernelIR, region: Region, config: TileConfig) -> Iterator[TileConfig]:
    columns = region.columns.value(ir.graph.sizes)
    whole = next_power_of_two(columns)
    if strided_columns(ir, region):
        held = _held_tiles(whole) if region.kind is RegionKind.REDUCE and columns <= 2 * HELD_COLUMNS else []
        for tile in held:
            yield replace(config, rows=tile.rows, block=whole, loop=False, warps=tile.warps, stages=tile.stages)
        for rows, block, warps in STRIDED_TILES:
            yield replace(config, rows=rows, block=block, loop=True, warps=warps)
        return
    if region.kind is RegionKind.SCAN:
        products = any(is_wide_product(ir.prims[name]) for name in region.prims)
        for block, rows, warps in [(1024, 1, 4), (2048, 1, 8), (4096, 1, 8), (512, 4, 4), (256, 4, 4)]:
            if block <= MOST_FACTORS or not products:
                yield replace(config, rows=rows, block=block, warps=warps)
        return
    if whole <= 65536:
        for rows in (1, 2, 4, 8, 16, *((32, 64, 128) if whole < SHORT else ())):
            if rows * whole > 32768 and rows > 1:
                continue
            for warps in (1, 2, 4, 8, 16, 32):
                if 8 <= rows * whole / (warps * 32) <= 64:
                    yield replace(config, rows=rows, block=whole, loop=False, warps=warps)
    if columns > 1024:
        for block, warps in LOOPED_TILES:
            if block < whole:
                yield replace(config, rows=1, block=block, loop=True, warps=warps)


STRIDED_TILES = (
    (32, 32, 4), (64, 32, 4), (64, 32, 8), (256, 16, 8), (256, 8, 4), (128, 16, 4), (128, 16, 8), (32, 16, 2), (64, 64, 8),
    (128, 32, 8),
)  # fmt: skip
"""Rows, columns and warps where neighbouring rows lie densest in memory."""
LOOPED_TILES = (
    (1024, 4), (2048, 4), (2048, 8), (4096, 8), (4096, 16), (8192, 16), (8192, 8), (16384, 16), (16384, 32),
)  # fmt: skip
"""Columns and warps of a program that loops over its row."""
