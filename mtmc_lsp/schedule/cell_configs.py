"""First configurations of loops with products of their state, and others worth measuring."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from mtmc_lsp.core.device_model import DeviceModel
from mtmc_lsp.core.dtypes import is_low_precision
from mtmc_lsp.core.loop import MATRIX_TILE, MOST_MATRIX_TILES
from mtmc_lsp.ir.loops.cells import CellForm
from mtmc_lsp.schedule.column_tiles import next_power_of_two
from mtmc_lsp.schedule.configs import LoopConfig
from mtmc_lsp.schedule.device_limits import max_stages

LEAST_ROWS_OF_DOT = 16
"""Rows from which on a product is a ``tl.dot``. Fewer rows are multiplied with the matrix and summed."""
DOT_DTYPES = ("float32", "float16", "bfloat16")
"""Dtypes of products by ``tl.dot``."""
MOST_KEPT = 2**14
"""Elements of matrices that a program instance keeps in registers: a quarter of those of a multiprocessor."""
MOST_TERMS = 2**16
"""Elements of the largest tile of products that are summed."""
TERMS_PER_THREAD = 64
"""Elements of a matrix per thread of a program instance."""
TILES_IN_FLIGHT = 4
"""Tiles of matrices that the compiler loads at once where they are not kept in registers."""
STAGES = 3
"""Iterations whose loads are in flight at once."""


def cell_block(size: int, config: LoopConfig) -> int:
    """The columns of a block of an axis with ``size`` elements."""
    least = 16 if config.rows >= LEAST_ROWS_OF_DOT else 1
    return max(least, min(config.block, next_power_of_two(size)))


def keeps_matrices(form: CellForm) -> bool:
    """Whether the matrices stay in registers for all iterations."""
    return form.matrix_elements() <= MOST_KEPT


def cell_config(form: CellForm, device: DeviceModel) -> LoopConfig:
    """A first configuration: single rows while there are few, so that as many multiprocessors as possible work."""
    rows, block, is_kept = 1, min(MATRIX_TILE, _widest(form)), keeps_matrices(form)
    if not is_kept and form.pieces(block // 2) <= MOST_MATRIX_TILES:
        # The loads of several tiles are in flight at once, and larger tiles do not fit in registers.
        block //= 2
    is_shared = not form.has_matrix_per_row and is_low_precision(form.products[0].dtype)
    if is_shared and not is_kept and _rows(form) >= LEAST_ROWS_OF_DOT * device.sm_count // 2:
        # The tiles that each iteration loads are shared by as many rows as possible.
        return _config(form, LEAST_ROWS_OF_DOT, block, device)
    may_grow = is_kept and not form.has_matrix_per_row
    while may_grow and rows < 8 and _rows(form) > 2 * device.sm_count * rows and 2 * rows * block**2 <= MOST_TERMS:
        rows *= 2
    return _config(form, rows, block, device)


def cell_variants(form: CellForm, config: LoopConfig, device: DeviceModel) -> Iterator[LoopConfig]:
    """``config`` with other rows, blocks and warps."""
    dtype = form.products[0].dtype
    # A ``tl.dot`` in IEEE arithmetic needs more registers for large tiles than there are.
    has_dot = is_low_precision(dtype) or (dtype in DOT_DTYPES and keeps_matrices(form))
    for rows in (1,) if form.has_matrix_per_row else (1, 2, 4, 8, 16, 32):
        is_small = rows < LEAST_ROWS_OF_DOT and rows * config.block**2 <= MOST_TERMS
        if rows <= next_power_of_two(_rows(form)) and (is_small or (has_dot and rows >= LEAST_ROWS_OF_DOT)):
            yield _config(form, rows, config.block, device)
    if config.block > 32 and form.pieces(config.block // 2) <= MOST_MATRIX_TILES:
        yield _config(form, config.rows, config.block // 2, device)
    for warps in (config.warps // 2, config.warps * 2):
        if 1 <= warps <= 16:
            yield replace(config, warps=warps)


def _rows(form: CellForm) -> int:
    return form.region.rows.value(form.ir.graph.sizes)


def _widest(form: CellForm) -> int:
    """The least power of two with the columns of all operands of products."""
    return next_power_of_two(max(rows.value(form.ir.graph.sizes) for rows, _ in form.widths()))


def _config(form: CellForm, rows: int, block: int, device: DeviceModel) -> LoopConfig:
    is_kept = keeps_matrices(form)
    terms = form.matrix_elements() if is_kept else min(TILES_IN_FLIGHT, form.pieces(block)) * block**2
    if rows < LEAST_ROWS_OF_DOT:
        terms = max(terms, rows * block**2 // 2)
    warps = min(16, next_power_of_two(-(-terms // (TERMS_PER_THREAD * device.warp_size))))
    # The tiles of matrices that each iteration loads would need shared memory for each stage.
    return LoopConfig(rows, block, warps, min(STAGES, max_stages(device)) if is_kept else 1)
