"""First configurations of recurrent layers, and other tiles worth measuring."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from mtmc_lsp.core.device_model import DeviceModel
from mtmc_lsp.core.dtypes import ITEMSIZE
from mtmc_lsp.ir.primitives import KernelIR, Prim
from mtmc_lsp.ir.recurrence import Recurrence, recurrence_of, steps_and_batch
from mtmc_lsp.schedule.column_tiles import next_power_of_two
from mtmc_lsp.schedule.configs import PrecisionMode, RecurrentConfig
from mtmc_lsp.schedule.device_limits import max_stages, min_recurrent_programs

MODES = (PrecisionMode.TF32X3, PrecisionMode.IEEE)
"""Precision modes for fp32, fastest first: tensor cores on operands split into two parts (not supported by Triton's AMD
backend), and fp32 units. Measured on an H200, six LSTM layers: 8.2 and 11.4 us per launch, errors of 1.2e-7 and 1.0e-7 after 512
steps. cuDNN's error was 6.4e-5, and 1.4e-7 without TF32. bf16x6 took 12.9 us."""
TILES = ((32, 64, 2, 3), (64, 64, 4, 3), (32, 128, 4, 2), (64, 32, 4, 4), (32, 64, 4, 3))
"""Columns, depth, warps and stages of kernels on tensor cores; measured on an H200."""
FMA_TILES = ((16, 32, 4, 1), (16, 64, 8, 1), (16, 64, 4, 1))
"""Columns, depth, warps and stages of kernels on fp32 units; measured on an H200."""


def modes_of(prim: Prim, device: DeviceModel, *, strict: bool) -> tuple[PrecisionMode, ...]:
    """The precision modes of a recurrence's products; ``strict`` allows only those that round as fp32 units do."""
    if prim.dtype == "float32" and not strict and device.vendor != "amd":
        return MODES
    return (PrecisionMode.IEEE,)


def recurrent_config(
    ir: KernelIR, prim: Prim, device: DeviceModel, precision: PrecisionMode | None = None
) -> RecurrentConfig:
    """A first configuration: programs of few units, so that many multiprocessors read a launch's weights.

    Args:
        precision: of the products; None for the fastest one.
    """
    recurrence = recurrence_of(prim)
    batch = steps_and_batch(ir, prim)[1].value(ir.graph.sizes)
    precision = precision or modes_of(prim, device, strict=False)[0]
    if uses_fma(prim.dtype, precision):
        return RecurrentConfig(16, 16, 32, 4, 1, precision)
    has_many_units = recurrence.parallel_layers * recurrence.hidden >= 16 * min_recurrent_programs(device)
    columns = 16 if recurrence.gates == 1 else (64 if has_many_units else 32)
    depth, stages = (64, 3) if has_many_units or ITEMSIZE[prim.dtype] < 4 else (128, 2)
    stages = min(stages, max_stages(device))
    config = RecurrentConfig(_power(batch, 64), columns, _power(recurrence.hidden, depth), 4, stages, precision)
    while not _fits(config, prim, device) and config.stages > 1:
        config = replace(config, stages=config.stages - 1)
    return config


def recurrent_variants(prim: Prim, config: RecurrentConfig, device: DeviceModel) -> Iterator[RecurrentConfig]:
    """``config`` with other tiles worth measuring, as far as shared memory holds them."""
    hidden = recurrence_of(prim).hidden
    tiles = FMA_TILES if uses_fma(prim.dtype, config.precision) else TILES
    for columns, depth, warps, stages in tiles:
        if depth < 2 * hidden and columns < 8 * hidden:
            stages = min(stages, max_stages(device))
            variant = replace(config, block_n=columns, block_k=depth, warps=warps, stages=stages)
            if _fits(variant, prim, device):
                yield variant


def _fits(config: RecurrentConfig, prim: Prim, device: DeviceModel) -> bool:
    """Whether the tiles of all stages fit into shared memory."""
    stage = config.block_k * (config.block_m + config.block_n) * ITEMSIZE[prim.dtype]
    return stage * config.stages <= device.shared_bytes


def uses_fma(dtype: str, precision: PrecisionMode) -> bool:
    """Whether products are computed by fp32 or fp64 units in registers: a batch has too few rows for tensor-core tiles."""
    return precision is PrecisionMode.IEEE and dtype in ("float32", "float64")


def units_of(recurrence: Recurrence, config: RecurrentConfig) -> int:
    """Units of a program; a tile has four columns for each unit where a cell has gates."""
    return config.block_n // (1 if recurrence.gates == 1 else 4)


def _power(number: int, most: int) -> int:
    """The least power of two that is at least ``number``, from 16 to ``most``."""
    return min(most, max(16, next_power_of_two(number)))
