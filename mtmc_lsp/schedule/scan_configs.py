"""Configurations of loops over time steps that run as associative scans."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from mtmc_lsp.core.device_model import DeviceModel
from mtmc_lsp.core.sizes import product
from mtmc_lsp.ir.loops.form import LoopForm
from mtmc_lsp.ir.memory_order import column_axes
from mtmc_lsp.ir.primitives import ONE
from mtmc_lsp.ir.regions import RegionKind
from mtmc_lsp.schedule.column_tiles import next_power_of_two
from mtmc_lsp.schedule.configs import LEAST_STEPS, LoopConfig
from mtmc_lsp.schedule.device_limits import max_stages

SCANNED_ELEMENTS = 1024
"""Elements of a scan's first tile: 8 for each thread of four warps, so that updates in float64 fit into registers."""
MOST_SCAN_STEPS = 1024
"""Most time steps of a first tile."""
SCAN_COLUMNS = 32
"""Columns of a first tile: neighbouring threads of a warp read neighbouring elements."""
SERIES_COLUMNS = 4
"""The same where neighbouring steps are neighbours in memory: the threads of a warp read one series."""
PROGRAMS_PER_SM = 2
"""Programs per multiprocessor that the segments of a scan are to reach."""
LEAST_CHUNKS = 4
"""Chunks of a segment that amortise the start of its program."""
MOST_SEGMENTS = 128
"""Most segments of a first configuration: each program combines those in front of it one after another."""
STAGES = 2
"""Chunks whose loads are in flight at once."""


def scan_config(form: LoopForm, device: DeviceModel) -> LoopConfig:
    """A first configuration of a loop as a scan: the chunk's length follows from the columns, the segments from the device."""
    block = scan_block(form, SERIES_COLUMNS if has_dense_steps(form) else SCAN_COLUMNS)
    return _tile(form, block, SCANNED_ELEMENTS // block, device)


def has_dense_steps(form: LoopForm) -> bool:
    """Whether iterations write neighbouring elements of a result."""
    outputs = zip(form.loop.outputs, form.node.outputs, strict=True)
    return any(item.position is not None and kind.stride[item.position.dim] == ONE for item, kind in outputs)


def scan_block(form: LoopForm, most: int) -> int:
    """Columns of a scan's tile; all of them where the body has reductions."""
    sizes = form.ir.graph.sizes
    if form.region.kind is not RegionKind.MAP:
        return next_power_of_two(form.region.columns.value(sizes))
    return min(most, next_power_of_two(columns_of_scan(form)))


def columns_of_scan(form: LoopForm) -> int:
    """The length of the axes that the columns of a scan's tile walk."""
    region, sizes = form.region, form.ir.graph.sizes
    if region.kind is not RegionKind.MAP:
        return region.columns.value(sizes)
    columns = column_axes(form.ir, region)
    return product([axis.size for axis in region.parallel_axes if axis in columns]).value(sizes)


def tiles_of_scan(form: LoopForm, config: LoopConfig) -> int:
    """Tiles of independent states: the programs of a scan, without its segments."""
    region, sizes = form.region, form.ir.graph.sizes
    columns = columns_of_scan(form)
    rows = product([axis.size for axis in region.parallel_axes]).value(sizes)
    if region.kind is not RegionKind.MAP:
        return rows
    return rows // max(1, columns) * -(-columns // config.block)


def scan_variants(form: LoopForm, config: LoopConfig, device: DeviceModel) -> Iterator[LoopConfig]:
    """``config`` with other tiles and numbers of segments, stages and warps."""
    for columns in (SERIES_COLUMNS, SCAN_COLUMNS // 2, SCAN_COLUMNS, 2 * SCAN_COLUMNS):
        block = scan_block(form, columns)
        for elements in (SCANNED_ELEMENTS // 2, SCANNED_ELEMENTS, 2 * SCANNED_ELEMENTS):
            yield _tile(form, block, elements // block, device)
    for segments in (config.segments // 2, config.segments * 2):
        if 1 <= segments <= MOST_SEGMENTS:
            yield replace(config, segments=segments)
    for stages in (1, 2, 3):
        yield replace(config, stages=min(stages, max_stages(device)))


def _tile(form: LoopForm, block: int, steps: int, device: DeviceModel) -> LoopConfig:
    """A tile of about this many steps, with as many segments as fill the device."""
    length = form.loop.count.value(form.ir.graph.sizes)
    longest = max(LEAST_STEPS, next_power_of_two(length))
    steps = min(max(steps, LEAST_STEPS), longest, MOST_SCAN_STEPS)
    warps = max(1, min(8, steps * block // (8 * device.warp_size)))
    config = LoopConfig(1, block, warps, min(STAGES, max_stages(device)), steps)
    wanted = PROGRAMS_PER_SM * device.sm_count // max(1, tiles_of_scan(form, config))
    segments = min(wanted, length // (LEAST_CHUNKS * steps), MOST_SEGMENTS)
    return replace(config, segments=1 << (segments.bit_length() - 1)) if segments > 1 else config
