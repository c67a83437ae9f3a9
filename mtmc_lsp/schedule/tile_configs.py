"""How a kernel runs when it is first written, and which other ways are worth trying.

A configuration is a flat mapping. For tile kernels: ``rows`` (per program), ``block`` (columns per tile), ``loop`` (over blocks
of columns), ``warps``, ``stages``. Also ``split`` (parts of a reduction's columns), ``persist`` (programs that do one piece of
work after another) and ``order`` (``columns``: an elementwise kernel's programs run along columns first). Those of products are
in :mod:`mtmc_lsp.schedule.matmul_configs`.
"""

from __future__ import annotations

from collections.abc import Mapping

from mtmc_lsp.core.dtypes import is_float
from mtmc_lsp.core.sizes import product
from mtmc_lsp.ir.axes import Axis
from mtmc_lsp.ir.memory_order import across, column_axes, strided_columns, windows_along_columns
from mtmc_lsp.ir.primitives import KernelIR, Prim, PrimOp, ProductDims
from mtmc_lsp.ir.recurrence import first_config, other_configs, recurrence_in
from mtmc_lsp.ir.regions import Region, RegionKind, product_in
from mtmc_lsp.schedule.attention_configs import attention_config, attention_variants
from mtmc_lsp.schedule.column_tiles import column_block, next_power_of_two, single_columns
from mtmc_lsp.schedule.matmul_configs import Config, is_one_piece, product_config, product_variants

WHOLE_ROW_LIMIT = 16384
"""Columns up to which a row is held at once; twice as many where it is the only tensor that is walked along them."""


MOST_ELEMENTS = 65536
"""Elements of the largest tile of a tile kernel."""


def default_config(ir: KernelIR, region: Region) -> Config:
    """A sound first configuration for the workload's sizes."""
    config = _first_config(ir, region)
    return _spread_out(ir, region, config) if region.kind in (RegionKind.MAP, RegionKind.REDUCE) else config


LONG = 100
"""Primitives of a kernel from which on it waits for itself: for each step of a loop that is written out."""
LEAST_ELEMENTS = 128
"""Of a tile: four of a thread in one warp."""


def _spread_out(ir: KernelIR, region: Region, config: Config) -> Config:
    """The configuration with smaller tiles where a long kernel has few programs: while one waits, others run."""
    if len(region.prims) < LONG or config.get("loop") or "split" in config:
        return config
    sizes = ir.graph.sizes
    elements = product([axis.size for axis in (*region.kept, *region.reduced)]).value(sizes)
    rows, block = int(config["rows"]), int(config["block"])
    while rows * block > LEAST_ELEMENTS and elements < MANY_PROGRAMS * rows * block:
        if rows > 1:
            rows //= 2
        elif region.kind is RegionKind.MAP:
            block //= 2
        else:
            break
    return {**config, "rows": rows, "block": block, "warps": min(int(config["warps"]), max(1, rows * block // 256))}


def _first_config(ir: KernelIR, region: Region) -> Config:
    if region.kind is RegionKind.MATMUL:
        return product_config(ir, region)
    if region.kind is RegionKind.ATTENTION:
        return attention_config(ir, region)
    if region.kind is RegionKind.RECURRENT:
        return first_config(ir, recurrence_in(ir, region))
    sizes = ir.graph.sizes
    if region.kind is RegionKind.MAP:
        columns = region.kept[-1].size.value(sizes) if region.kept else 1
        turned = across(ir, region)
        if turned is not None:
            return _turned_tiles(ir, region, turned)[0]
        if windows_along_columns(ir, region) is not None:
            return single_columns(columns, 8)
        block = column_block(columns) if len(region.kept) > 1 else 1024
        return {"rows": max(1, 1024 // block), "block": block, "warps": 4, "stages": 2}
    columns = region.columns.value(sizes)
    if strided_columns(ir, region):
        # Neighbouring rows lie densest: a tile of many rows reads them together.
        if region.kind is RegionKind.REDUCE and _reads_again(ir, region) and columns <= HELD_COLUMNS:
            return _held_tiles(next_power_of_two(columns))[0]
        block = 32 if region.kind is RegionKind.REDUCE and columns >= 128 else 16
        return _shared_out(ir, region, {"rows": 64, "block": block, "loop": True, "warps": 4, "stages": 2})
    whole = next_power_of_two(columns)
    if region.kind is RegionKind.SCAN:
        return {"rows": 1, "block": min(whole, 1024), "loop": True, "warps": 4, "stages": 2}
    if whole > WHOLE_ROW_LIMIT * (2 if _walked(region) == 1 else 1):
        block, warps = (8192, 16) if _walked(region) == 1 else (4096, 8)
        return _shared_out(ir, region, {"rows": 1, "block": block, "loop": True, "warps": warps, "stages": 2})
    rows = max(1, min(16 if whole >= SHORT else 128, 1024 // whole))
    return {"rows": rows, "block": whole, "loop": False, "warps": _warps(rows * whole), "stages": 2}


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


def _shared_out(ir: KernelIR, region: Region, config: Config) -> Config:
    """The configuration, in parts where few programs would have all the work."""
    return {**config, **split_parts(ir, region, config)} if region.kind is RegionKind.REDUCE else config


def split_parts(ir: KernelIR, region: Region, config: Mapping[str, int | str | bool]) -> Config:
    """How to split a reduction of few long rows; nothing where it has rows enough, or is small."""
    sizes = ir.graph.sizes
    rows, columns = region.rows.value(sizes), region.columns.value(sizes)
    programs = -(-rows // int(config["rows"]))
    if programs >= FEW_PROGRAMS or rows * columns < LEAST_SHARED:
        return {}
    changes: Config = {}
    block = int(config["block"])
    if not config.get("loop"):
        block = min(block, 2048)
        changes = {"block": block, "warps": 8}
    elif block > SHARED_BLOCK:
        block = SHARED_BLOCK
        changes = {"block": block, "warps": 8}
    # Each part walks a few blocks, so that a program's start is a small part of it.
    most = columns // (4 * block)
    parts = min(MANY_PROGRAMS // programs, most)
    return {**changes, "split": 1 << (parts.bit_length() - 1)} if parts >= 2 else {}


def _warps(elements: int) -> int:
    """Warps so that each thread holds about 16 elements."""
    return max(1, min(32 if elements > WHOLE_ROW_LIMIT else 16, next_power_of_two(elements // 512)))


def _walked(region: Region) -> int:
    """Tensors that the region reads along its rows, what all rows share not counted."""
    reduced, kept = set(region.reduced), set(region.kept)
    axes = [set(region.table.all_axes(name)) for name in region.inputs]
    return sum(1 for own in axes if own & reduced and own & kept)


HELD_COLUMNS = 256
"""Columns that step over memory, up to which a tile of many rows holds all of them at once."""


def _held_tiles(whole: int) -> list[Config]:
    """Tiles that hold all columns, ``whole`` of them, where neighbouring rows lie densest; the usual one first."""
    tiles = (
        [(64, 4), (32, 4), (64, 8), (128, 8), (32, 8), (16, 4)] if whole <= 64 else [(32, 8), (16, 4), (32, 4), (64, 8)]
    )
    return [{"rows": rows, "block": whole, "loop": False, "warps": warps, "stages": 2} for rows, warps in tiles]


def _reads_again(ir: KernelIR, region: Region) -> bool:
    """Whether a tile that does not hold its columns may have to walk them more than once."""
    passes = sum(ir.prims[name].op is PrimOp.REDUCE for name in region.prims)
    reduced, table = set(region.reduced), region.table
    return passes > 1 or any(reduced & set(table.all_axes(name)) for _, name in region.stored(ir))


PARTIAL = frozenset({PrimOp.WINDOW, PrimOp.SLICE, PrimOp.PAD, PrimOp.CAT, PrimOp.FLIP, PrimOp.GATHER, PrimOp.CROP})
"""What reads a tensor at other places than its own, so that neighbouring axes do not run together."""


def _turned_tiles(ir: KernelIR, region: Region, turned: Axis) -> list[Config]:
    """Tiles of the axis that lies dense in what is read by the axis that lies dense in what is written; the usual one first."""
    sizes = ir.graph.sizes
    apart = any(ir.prims[name].op in PARTIAL for name in region.prims)
    inside = column_axes(ir, region) if apart else region.kept[region.kept.index(turned) + 1 :]
    most_rows = next_power_of_two(turned.size.value(sizes))
    most_columns = next_power_of_two(product([axis.size for axis in inside]).value(sizes))
    found: list[Config] = []
    for rows, block, warps in TURNED_TILES:
        tile: Config = {"rows": min(rows, most_rows), "block": min(block, most_columns), "warps": warps, "stages": 2}
        if tile not in found:
            found.append(tile)
    return found


TURNED_TILES = (
    (64, 64, 8), (64, 64, 4), (32, 64, 4), (64, 32, 4), (32, 32, 4), (32, 128, 8), (128, 32, 8), (16, 128, 4), (128, 16, 4),
    (16, 256, 8), (16, 64, 4),
)  # fmt: skip


def variants(ir: KernelIR, region: Region, config: Mapping[str, int | str | bool]) -> list[Config]:
    """Other configurations worth measuring, the present one left out."""
    if region.kind is RegionKind.MATMUL:
        own = product_in(ir, region)
        short = is_one_piece(ir, own, str(config["precision"]))
        found = product_variants(config, of_windows=bool(ProductDims.of(own).taps), short=short)
    elif region.kind is RegionKind.ATTENTION:
        found = attention_variants(ir, region)
    elif region.kind is RegionKind.RECURRENT:
        found = [*other_configs(ir, recurrence_in(ir, region), config)]
    elif (turned := across(ir, region)) is not None:
        found = _turned_tiles(ir, region, turned)
    elif region.kind is RegionKind.MAP:
        columns = region.kept[-1].size.value(ir.graph.sizes) if region.kept else 1
        single = windows_along_columns(ir, region) is not None
        found = [single_columns(columns, warps) for warps in (4, 8, 16)] if single else []
        found += [
            {
                "rows": max(1, total // min(total, int(config["block"]))),
                "block": min(total, int(config["block"]) if len(region.kept) > 1 else total),
                "warps": w,
            }
            for total, w in [(512, 4), (1024, 4), (1024, 8), (2048, 4), (2048, 8), (4096, 8), (4096, 4), (8192, 8)]
        ]
        if len(region.kept) > 1:
            found += [{"rows": 1, "block": b, "warps": w} for b, w in [(1024, 4), (2048, 4), (2048, 8), (4096, 8)]]
    else:
        found = _reduction_variants(ir, region, config)
    merged = [{**config, **changes} for changes in found]
    unique: list[Config] = []
    for item in merged:
        if item != dict(config) and item not in unique:
            unique.append(item)
    return unique


MOST_FACTORS = 1024
"""Numbers of a size from 0.75 to 1.5 whose product float64 holds."""


def is_wide_product(prim: Prim) -> bool:
    """Whether it is a running product of floats, in the midst of which more may overflow than in its results."""
    return prim.op is PrimOp.SCAN and prim.fn == "prod" and is_float(prim.dtype)


def _reduction_variants(ir: KernelIR, region: Region, config: Mapping[str, int | str | bool]) -> list[Config]:
    columns = region.columns.value(ir.graph.sizes)
    whole = next_power_of_two(columns)
    found: list[Config] = []
    if strided_columns(ir, region):
        held = _held_tiles(whole) if region.kind is RegionKind.REDUCE and columns <= 2 * HELD_COLUMNS else []
        return held + [
            {"rows": r, "block": b, "warps": w, "loop": True}
            for r, b, w in [
                (32, 32, 4),
                (64, 32, 4),
                (64, 32, 8),
                (256, 16, 8),
                (256, 8, 4),
                (128, 16, 4),
                (128, 16, 8),
                (32, 16, 2),
                (64, 64, 8),
                (128, 32, 8),
            ]
        ]
    if region.kind is RegionKind.SCAN:
        products = any(is_wide_product(ir.prims[name]) for name in region.prims)
        return [
            {"block": b, "rows": r, "warps": w}
            for b, r, w in [(1024, 1, 4), (2048, 1, 8), (4096, 1, 8), (512, 4, 4), (256, 4, 4)]
            if b <= MOST_FACTORS or not products
        ]
    if whole <= 65536:
        for rows in (1, 2, 4, 8, 16, *((32, 64, 128) if whole < SHORT else ())):
            if rows * whole > 32768 and rows > 1:
                continue
            found += [
                {"rows": rows, "block": whole, "loop": False, "warps": warps}
                for warps in (1, 2, 4, 8, 16, 32)
                if 8 <= rows * whole / (warps * 32) <= 64
            ]
    if columns > 1024:
        found += [
            {"rows": 1, "block": block, "loop": True, "warps": warps}
            for block, warps in [
                (1024, 4),
                (2048, 4),
                (2048, 8),
                (4096, 8),
                (4096, 16),
                (8192, 16),
                (8192, 8),
                (16384, 16),
                (16384, 32),
            ]
            if block < whole
        ]
    return found
