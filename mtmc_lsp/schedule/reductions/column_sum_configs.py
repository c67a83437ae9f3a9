"""Configurations of kernels that walk rows and sum over all of them: how many programs share the rows, and their tiles.

Each program holds whole rows, and one accumulator for each column and sum. Its number of programs is a compromise: all should
run at once and fill the device, but each of them writes a row of sums, which a second launch reads.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from mtmc_lsp.core.device_model import DeviceModel
from mtmc_lsp.core.dtypes import ITEMSIZE, compute_dtype
from mtmc_lsp.ir.primitives import KernelIR
from mtmc_lsp.ir.reductions.column_sums import MOST_ACCUMULATORS
from mtmc_lsp.ir.regions import Region
from mtmc_lsp.schedule.column_tiles import next_power_of_two
from mtmc_lsp.schedule.configs import TileConfig
from mtmc_lsp.schedule.device_limits import max_row_elements, max_warps

THREAD_REGISTERS = 24
"""Registers of a thread for addresses and masks. An estimate, not measured."""
LEAST_ROWS = 8
"""Rows of a program from which on its row of sums is little traffic beside them."""
MOST_PER_SM = 8
"""Most programs per multiprocessor."""
TILE = 2048
"""Elements of a tile of short rows."""
MOST_ROWS = 64
"""Most short rows of a tile."""
MOST_HELD = 8192
"""Most elements of a tile with which values that all rows share, such as weights, stay in registers beside the sums."""
OTHER_SHARED = 2048
"""Bytes of shared memory for reductions. An estimate, not measured."""
ELEMENTS_PER_THREAD = 16
"""Elements of a tile that a thread holds of each tensor."""


def column_sum_config(ir: KernelIR, region: Region, device: DeviceModel) -> TileConfig:
    """A first configuration for the workload's sizes."""
    padded = next_power_of_two(region.columns.value(ir.graph.sizes))
    rows = max(1, min(MOST_ROWS, TILE // padded))
    return _config(ir, region, device, rows, padded, _warps(rows * padded, device))


def column_sum_variants(ir: KernelIR, region: Region, device: DeviceModel) -> Iterator[TileConfig]:
    """Configurations worth measuring."""
    padded = next_power_of_two(region.columns.value(ir.graph.sizes))
    for rows in (1, 2, 4, 8, 16, 32, 64):
        if rows > 1 and rows * padded > max_row_elements(device) // 2:
            continue
        for warps in (1, 2, 4, 8, 16, 32):
            if 4 <= rows * padded / (warps * device.warp_size) <= 64:
                config = _config(ir, region, device, rows, padded, warps)
                yield from (config, *(replace(config, persist=device.sm_count * number) for number in (1, 2)))


def _config(ir: KernelIR, region: Region, device: DeviceModel, rows: int, padded: int, warps: int) -> TileConfig:
    tiles = -(-region.rows.value(ir.graph.sizes) // rows)
    held = rows * padded * (len(region.sums) + len(streamed(region)) + 1) + THREAD_REGISTERS * warps * device.warp_size
    resident = device.sm_count * max(1, min(MOST_PER_SM, device.registers_per_sm // held))
    # Where rows are few, one program per multiprocessor comes before programs with many rows.
    programs = max(min(resident, tiles * rows // LEAST_ROWS), min(device.sm_count, tiles))
    stages = 2 if rows * padded <= MOST_HELD and _can_load_ahead(ir, region, device) else 1
    return TileConfig(rows, padded, warps=warps, stages=stages, persist=max(1, programs))


def _can_load_ahead(ir: KernelIR, region: Region, device: DeviceModel) -> bool:
    """Whether shared memory holds a tile of each streamed tensor, also for the longest rows that the guard admits."""
    each = sum(ITEMSIZE[ir.prims[name].dtype] for name in streamed(region))
    return MOST_ACCUMULATORS // len(region.sums) * each + OTHER_SHARED <= device.shared_bytes


def _warps(elements: int, device: DeviceModel) -> int:
    return max(1, min(max_warps(device), next_power_of_two(elements // (ELEMENTS_PER_THREAD * device.warp_size))))


def streamed(region: Region) -> list[str]:
    """Tensors that the kernel reads along its rows and columns."""
    every = {*region.parallel_axes, *region.reduced_axes}
    return [name for name in region.inputs if every <= set(region.table.all_axes(name))]


def partial_bytes(ir: KernelIR, region: Region, config: TileConfig) -> float:
    """Bytes of the sums that the programs write, and that the second launch reads."""
    columns = region.columns.value(ir.graph.sizes)
    return 2.0 * config.persist * columns * sum(ITEMSIZE[compute_dtype(ir.prims[name].dtype)] for name in region.sums)
