"""First configurations of loops over time steps, and other tiles worth measuring."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from mtmc_lsp.core.device_model import DeviceModel
from mtmc_lsp.ir.loops.blocks import BlockForm
from mtmc_lsp.ir.loops.cells import CellForm
from mtmc_lsp.ir.loops.form import LoopForm, independent_elements
from mtmc_lsp.ir.regions import RegionKind
from mtmc_lsp.schedule.block_configs import block_config, block_variants
from mtmc_lsp.schedule.cell_configs import cell_config, cell_variants
from mtmc_lsp.schedule.column_tiles import next_power_of_two
from mtmc_lsp.schedule.configs import LoopConfig, TileConfig
from mtmc_lsp.schedule.device_limits import max_stages
from mtmc_lsp.schedule.scan_configs import scan_variants

LEAST_ELEMENTS = 32
"""Elements of the smallest tile: one per thread of a warp."""
MOST_LOOP_ELEMENTS = 1024
"""Elements of the largest first tile. More programs hide more latency than larger loads save."""
STAGES = 4
"""Iterations whose loads are in flight at once, if shared memory holds them."""


def loop_config(form: LoopForm, device: DeviceModel) -> LoopConfig:
    """A first configuration: tiles so small that every multiprocessor has several programs, which hide each other's latency."""
    if isinstance(form, CellForm):
        return cell_config(form, device)
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


def tile_of(config: LoopConfig) -> TileConfig:
    """The tile of the states as that of an elementwise kernel or a reduction; the rows of a scan's tile are time steps."""
    rows = config.steps if config.is_scan else config.rows
    return TileConfig(rows, config.block, warps=config.warps, stages=config.stages)
