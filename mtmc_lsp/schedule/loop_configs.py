"""First configurations of loops over time steps, and other tiles worth measuring."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from mtmc_lsp.core.device_model import DeviceModel
from mtmc_lsp.core.sizes import product
from mtmc_lsp.ir.loops.blocks import BlockForm
from mtmc_lsp.ir.loops.cells import CellForm
from mtmc_lsp.ir.loops.chunks import ChunkForm, chunk_form
from mtmc_lsp.ir.loops.form import LoopForm, independent_elements
from mtmc_lsp.ir.regions import RegionKind
from mtmc_lsp.schedule.block_configs import block_config, block_variants
from mtmc_lsp.schedule.cell_configs import cell_config, cell_variants
from mtmc_lsp.schedule.column_tiles import next_power_of_two
from mtmc_lsp.schedule.configs import LEAST_STEPS, LoopConfig, PrecisionMode, TileConfig
from mtmc_lsp.schedule.device_limits import max_stages
from mtmc_lsp.schedule.scan_configs import scan_variants

LEAST_ELEMENTS = 32
"""Elements of the smallest tile: one per thread of a warp."""
MOST_LOOP_ELEMENTS = 1024
"""Elements of the largest first tile. More programs hide more latency than larger loads save."""
STAGES = 4
"""Iterations whose loads are in flight at once, if shared memory holds them."""

CHUNK, SHORT_CHUNK = 64, 32
"""Iterations of chunks that are tried, besides half of the shorter and twice the longer one."""
CHUNK_WARPS, CHUNK_STAGES = 4, 2
MOST_PRODUCT = 64**3
"""Multiplications of the largest product of a chunk without tensor cores: Triton unrolls them, and larger ones compiled for more
than a minute."""
MOST_CHUNK_ELEMENTS = 8192
"""Elements of the largest state, and of the largest tile of keys, in a program of chunks."""


def loop_config(form: LoopForm, device: DeviceModel, precision: PrecisionMode = PrecisionMode.IEEE) -> LoopConfig:
    """A first configuration: tiles so small that every multiprocessor has several programs, which hide each other's latency.

    Args:
        precision: of float32 products where each iteration is a launch.
    """
    if isinstance(form, CellForm):
        return cell_config(form, device, precision)
    if isinstance(form, BlockForm):
        return block_config(form, device)
    elements = independent_elements(form)
    block = 4 * device.warp_size
    while block < MOST_LOOP_ELEMENTS and elements >= 16 * device.sm_count * block:
        block *= 2
    while block > LEAST_ELEMENTS and elements < 2 * device.sm_count * block:
        block //= 2
    return _tile(form, block, min(STAGES, max_stages(device)), device)


def loop_variants(form: LoopForm, config: LoopConfig, device: DeviceModel) -> Iterator[LoopConfig]:
    """``config`` with other tiles and numbers of stages."""
    if isinstance(form, CellForm):
        yield from cell_variants(form, config, device)
        return
    if isinstance(form, BlockForm):
        yield from block_variants(config, device)
        return
    if config.is_scan:
        yield from scan_variants(form, config, device)
        return
    if config.is_chunked:
        yield from _chunk_variants(form, config, device)
        return
    present = config.rows * config.block
    for elements in (present // 4, present // 2, 2 * present, 4 * present):
        if LEAST_ELEMENTS <= elements <= 4 * MOST_LOOP_ELEMENTS:
            yield _tile(form, elements, config.stages, device)
    for stages in (1, 2, 4, 8):
        yield replace(config, stages=min(stages, max_stages(device)))


def _tile(form: LoopForm, elements: int, stages: int, device: DeviceModel) -> LoopConfig:
    """A tile of about this many elements; a reduction's tile has whole rows."""
    sizes = form.ir.graph.sizes
    warps = max(1, elements // (4 * device.warp_size))
    if form.region.kind is RegionKind.MAP:
        axes = form.region.parallel_axes
        columns = next_power_of_two(axes[-1].size.value(sizes)) if axes else 1
        if len(axes) < 2:
            return LoopConfig(1, elements, warps, stages)
        block = min(elements, max(columns, 1))
        return LoopConfig(max(1, elements // block), block, warps, stages)
    columns = next_power_of_two(form.region.columns.value(sizes))
    rows = max(1, elements // columns)
    return LoopConfig(rows, columns, max(1, min(32, rows * columns // (4 * device.warp_size))), stages)


def chunk_config(device: DeviceModel) -> LoopConfig:
    """A configuration of a loop in chunks, before :func:`chunk_tiles` are compared."""
    return LoopConfig(1, LEAST_STEPS, CHUNK_WARPS, min(CHUNK_STAGES, max_stages(device)), chunk=CHUNK)


def key_block(form: LoopForm) -> int:
    """The channels of a key that a program of chunks holds: all of them, as a power of two that products can take."""
    return max(LEAST_STEPS, next_power_of_two(form.region.columns.value(form.ir.graph.sizes)))


def programs_of_chunks(form: LoopForm, chunk: ChunkForm, block: int) -> int:
    """The programs of a loop in chunks with ``block`` columns of values."""
    sizes = form.ir.graph.sizes
    outer = product([axis.size for axis in form.region.parallel_axes if axis != chunk.values]).value(sizes)
    return outer * -(-chunk.values.size.value(sizes) // block)


def sequential_config(form: LoopForm) -> LoopConfig:
    """The tile of a kernel that computes single rows of a loop whose body has reductions."""
    return LoopConfig(1, next_power_of_two(form.region.columns.value(form.ir.graph.sizes)), 1, STAGES)


def chunk_tiles(form: LoopForm, config: LoopConfig) -> Iterator[LoopConfig]:
    """``config`` with other chunks and columns of values.

    Chunks are short where gates decay per channel of the key, because rows whose quotients could overflow are computed twice.
    """
    chunk, keys, sizes = chunk_form(form), key_block(form), form.ir.graph.sizes
    longest = max(LEAST_STEPS, next_power_of_two(form.loop.count.value(sizes)))
    longest = min(longest, SHORT_CHUNK) if chunk.has_key_gates else longest
    columns = max(LEAST_STEPS, next_power_of_two(chunk.values.size.value(sizes)))
    for length in (LEAST_STEPS, SHORT_CHUNK, CHUNK, 2 * CHUNK):
        for block in (LEAST_STEPS, 2 * LEAST_STEPS, 4 * LEAST_STEPS, 8 * LEAST_STEPS):
            widest = max(length, block)
            is_small = form.ir.graph.fp32_matmul == "tf32" or length * widest * keys <= MOST_PRODUCT
            if length <= longest and block <= columns and widest * keys <= MOST_CHUNK_ELEMENTS and is_small:
                yield replace(config, chunk=length, block=block)


def _chunk_variants(form: LoopForm, config: LoopConfig, device: DeviceModel) -> Iterator[LoopConfig]:
    """``config`` with other chunks, columns, warps and stages."""
    yield from (item for item in chunk_tiles(form, config) if item.chunk == config.chunk or item.block == config.block)
    for warps in (2, 4, 8):
        yield replace(config, warps=warps)
    for stages in (1, 2, 3):
        yield replace(config, stages=min(stages, max_stages(device)))


def tile_of(config: LoopConfig) -> TileConfig:
    """The tile of the states as that of an elementwise kernel or a reduction; the rows of a scan's tile are time steps."""
    rows = config.steps if config.is_scan else config.rows
    return TileConfig(rows, config.block, warps=config.warps, stages=config.stages)
