"""First configurations of recurrent layers, and others worth measuring."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from mtmc_lsp.core.dtypes import ITEMSIZE
from mtmc_lsp.ir.primitives import KernelIR, Prim
from mtmc_lsp.ir.recurrence import Recurrence, recurrence_of, steps_and_batch
from mtmc_lsp.schedule.configs import PrecisionMode, RecurrentConfig

MODES = (PrecisionMode.TF32X3, PrecisionMode.IEEE)
"""Precision modes for fp32, in the order in which they are tried: tensor cores on operands in two parts (AMD's compiler has no
such mode), and fp32 units. On an H200 a launch of six LSTM layers took 8.2 and 11.4 us, with errors of 1.2e-7 and 1.0e-7 after
512 steps; cuDNN's own was 6.4e-5, and 1.4e-7 without TF32. In bf16x6 it took 12.9 us."""
MANY_PROGRAMS = 90
"""Programs that a launch should have at least: about as many as a large device has multiprocessors."""
TILES = ((32, 64, 2, 3), (64, 64, 4, 3), (32, 128, 4, 2), (64, 32, 4, 4), (32, 64, 4, 3))
ADDED_UP_TILES = ((16, 32, 4, 1), (16, 64, 8, 1), (16, 64, 4, 1))
"""Columns, depth, warps and stages."""


def modes_of(prim: Prim, *, strict: bool) -> tuple[PrecisionMode, ...]:
    """The precision modes of a layer's products; ``strict`` leaves out what rounds otherwise than fp32 units."""
    if prim.dtype == "float32":
        return MODES[-1:] if strict else MODES
    return (PrecisionMode.IEEE,)


def recurrent_config(ir: KernelIR, prim: Prim, precision: PrecisionMode | None = None) -> RecurrentConfig:
    """A sound first configuration: programs of few units, so that many multiprocessors read a launch's weights.

    Args:
        ir: the primitives.
        prim: the recurrent layers.
        precision: of the products; None for the fastest one.
    """
    form = recurrence_of(prim)
    batch = steps_and_batch(ir, prim)[1].value(ir.graph.sizes)
    precision = precision or modes_of(prim, strict=False)[0]
    if is_added_up(prim.dtype, precision):
        return RecurrentConfig(16, 16, 32, 4, 1, precision)
    many = form.parallel_layers * form.hidden >= 16 * MANY_PROGRAMS
    columns = 16 if form.gates == 1 else (64 if many else 32)
    deep, stages = (64, 3) if many or ITEMSIZE[prim.dtype] < 4 else (128, 2)
    return RecurrentConfig(_power(batch, 64), columns, _power(form.hidden, deep), 4, stages, precision)


def recurrent_variants(prim: Prim, config: RecurrentConfig) -> Iterator[RecurrentConfig]:
    """``config`` with other tiles that are worth measuring: a few that were among the fastest somewhere."""
    hidden = recurrence_of(prim).hidden
    tiles = ADDED_UP_TILES if is_added_up(prim.dtype, config.precision) else TILES
    for columns, deep, warps, stages in tiles:
        if deep < 2 * hidden and columns < 8 * hidden:
            yield replace(config, block_n=columns, block_k=deep, warps=warps, stages=stages)


def is_added_up(dtype: str, precision: PrecisionMode) -> bool:
    """Whether products are computed by plain arithmetic in registers: a batch has few rows for a product's tiles."""
    return precision is PrecisionMode.IEEE and dtype in ("float32", "float64")


def units_of(form: Recurrence, config: RecurrentConfig) -> int:
    """Units of a program; a tile has four columns for each unit where a cell has gates."""
    return config.block_n // (1 if form.gates == 1 else 4)


def _power(number: int, most: int) -> int:
    """The least power of two from 16 on that is at least ``number``, or ``most``."""
    return min(most, max(16, 1 << (number - 1).bit_length()))
