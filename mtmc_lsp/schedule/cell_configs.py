"""First configurations of loops with products of their state, and others worth measuring."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from mtmc_lsp.core.device_model import DeviceModel
from mtmc_lsp.core.dtypes import is_low_precision, itemsize
from mtmc_lsp.core.loop import MATRIX_TILE, MOST_MATRIX_TILES
from mtmc_lsp.core.sizes import Size
from mtmc_lsp.ir.loops.cells import CellForm
from mtmc_lsp.ir.loops.form import LoopForm
from mtmc_lsp.schedule.column_tiles import next_power_of_two
from mtmc_lsp.schedule.configs import LEAST_DEPTH, LoopConfig, PrecisionMode
from mtmc_lsp.schedule.device_limits import max_stages
from mtmc_lsp.schedule.recurrent_configs import modes_of

LEAST_ROWS_OF_DOT = 16
"""Rows from which on a product is a ``tl.dot``. Fewer rows are multiplied with the matrix and summed."""
DOT_DTYPES = ("float32", "float16", "bfloat16")
"""Dtypes of products by ``tl.dot``."""
MOST_KEPT = 2**14
"""Elements of matrices that a program instance keeps in registers: a quarter of those of a multiprocessor."""
REGISTERS, MOST_REGISTERS = 2**16, 255
"""Registers of a multiprocessor, and of a thread."""
OTHER_REGISTERS = 110
"""Registers of a thread for all but the matrices that stay there. With 110, kernels of GRU and LSTM cells of 128 units for sm_90
spill at most 16 bytes of each thread."""
MOST_COLUMN = 128
"""Most rows and columns of a block of a matrix whose columns threads hold: 64 registers of each thread."""
MOST_COLUMN_REGISTERS = 256
"""Most registers of a thread for columns. At 256, an LSTM of 128 units spills 112 bytes of each thread for sm_90. In a prototype
on an H200, loading a quarter of its matrices in each iteration was slower: 1,038 us instead of 967 us for 512 steps."""
COLUMN_OTHERS = 64
"""Registers of a thread for all but its columns: 30 to 64 in GRU and LSTM cells of 16 to 64 units, for sm_90."""
COLUMNS_PER_WARP = 16
"""Columns of a matrix per warp, so that two threads share a column. With one thread for each column, Triton moves whole matrices
through shared memory in each iteration. With four, fewer registers are left: on an H200, a prototype of a GRU with 128 units took
479 us instead of 380 us for 512 steps."""
MOST_TERMS = 2**16
"""Elements of the largest tile of products that are summed."""
TERMS_PER_THREAD = 64
"""Elements of a matrix per thread of a program instance."""
TILES_IN_FLIGHT = 4
"""Tiles of matrices that the compiler loads at once where they are not kept in registers."""
STAGES = 3
"""Iterations whose loads are in flight at once."""


MOST_SUMS = 2**15
"""Elements of the sums of all products that a program computes in a launch for each iteration: 64 registers of 512 threads."""


SUMS_PER_WARP = 2**10
"""Elements of the sums of a warp with few rows: 32 registers of each thread."""
STEP_WARPS = 4
"""Warps of a program that computes one iteration. An estimate, not measured."""
EXACT_ROWS, EXACT_DEPTH = 32, 32
"""Most rows and columns, and the depth, of first tiles in IEEE arithmetic: each thread holds its operands of a ``tl.dot``."""
SPLIT_ROWS, SPLIT_COLUMNS, SPLIT_DEPTH = 16, 32, 64
"""The first tile of float32 products as three TF32 products. On an H200, it was the fastest of 17 in prototypes of GRU and LSTM
cells with 128 to 1024 units and 64 rows. An iteration of a GRU with 512 units took 10.5 us, with tiles of 32 rows 28 us, and in
IEEE arithmetic 56 us."""
MOST_STEP_ROWS, MOST_DEPTH = 64, 128
"""Most rows and columns of first tiles on tensor cores, and the largest depth."""
MOST_ROWS_IN_TURN = 4
"""Most programs of one row that a multiprocessor runs one after another. An estimate: in prototypes with 128 units on an H200, an
iteration of one row took 0.8 to 1.9 us, and a launch for many rows 4.4 us."""
LAUNCHES_PER_READ = 1.2
"""Launches in which a program reads all matrices, from which on each iteration is a launch. On an H100, an iteration of a GRU
with 192 units and 32 rows takes 6.7 us where programs read the matrices (predicted: 7.1 us, 1.4 launches), and
5.5 us in a launch."""
LEAST_ROWS_OF_TENSOR_CORES = 8
"""Rows, rounded up to a power of two, from which on a launch for each iteration uses tensor cores, with tiles of 16 rows. With
8 rows on an H100, an iteration of an LSTM with 512 units takes 10.6 us, as sums 27.9 us (GRU: 10.9 and 12.9 us). Fewer rows were
not measured."""


def cell_block(size: int, config: LoopConfig) -> int:
    """The columns of a block of an axis with ``size`` elements."""
    least = 16 if config.rows >= LEAST_ROWS_OF_DOT else 1
    return max(least, min(config.block, next_power_of_two(size)))


def sums_of(form: CellForm, config: LoopConfig) -> int:
    """The elements of the sums of all products that a program holds in a launch for each iteration."""
    sizes = form.ir.graph.sizes
    width = form.width.value(sizes)
    products = sum(-(-columns.value(sizes) // width) for _, columns in form.widths())
    terms = 1 if config.rows >= LEAST_ROWS_OF_DOT else config.depth
    return products * config.rows * config.block * terms


def keeps_matrices(form: CellForm) -> bool:
    """Whether the matrices stay in registers for all iterations."""
    return form.matrix_elements() <= MOST_KEPT


def keeps_columns(form: CellForm, config: LoopConfig) -> bool:
    """Whether two threads hold each column of the matrices, so that they sum a product in registers. A program has one row."""
    block = min(config.block, _units(form))
    if config.rows > 1 or config.is_stepwise or config.warps * COLUMNS_PER_WARP < block:
        return False
    return _column_registers(form, config) <= MOST_COLUMN_REGISTERS


def _column_registers(form: CellForm, config: LoopConfig) -> int:
    """The registers of a thread that holds columns of the matrices."""
    words = sum(_in_blocks(form, rows, config) * _in_blocks(form, columns, config) for rows, columns in form.widths())
    words *= max(1, itemsize(form.products[0].dtype) // 4)
    return -(-words // (32 * config.warps))


def _units(form: CellForm) -> int:
    """The least power of two with the columns of all states and results."""
    sizes = form.ir.graph.sizes
    return next_power_of_two(max((size.value(sizes) for size in form.columns_written), default=1))


def _in_blocks(form: CellForm, size: Size, config: LoopConfig) -> int:
    """The elements of an axis, with the padding of its blocks."""
    elements = size.value(form.ir.graph.sizes)
    block = cell_block(elements, config)
    return -(-elements // block) * block


def column_config(form: CellForm) -> LoopConfig | None:
    """A first configuration whose threads hold columns of the matrices; None if these are too large."""
    units = _units(form)
    block = min(MOST_COLUMN, max(units, _widest(form)))
    warps = max(1, min(units, block) // COLUMNS_PER_WARP)
    # Loads of an iteration are in flight during its sums. Two stages took 574 us instead of 380 us in a prototype with 128 units.
    config = LoopConfig(1, block, warps, 1)
    return config if keeps_columns(form, config) else None


def has_few_rows(form: CellForm, config: LoopConfig, device: DeviceModel) -> bool:
    """Whether the programs of one row that hold columns can run at once, or a few of them one after another."""
    registers = min(MOST_REGISTERS, _column_registers(form, config) + COLUMN_OTHERS)
    at_once = max(1, REGISTERS // (32 * config.warps * registers))
    return _rows(form) <= MOST_ROWS_IN_TURN * device.sm_count * at_once


def prefers_launches(form: CellForm, device: DeviceModel) -> bool:
    """Whether an iteration should be a launch: programs would read the matrices for longer, or run in too many turns."""
    if form.against_launches:
        return False
    in_columns = column_config(form)
    if in_columns is not None:
        if has_few_rows(form, in_columns, device):
            return False
        if not keeps_matrices(form) and not is_low_precision(form.products[0].dtype):
            return True
    read = form.matrix_elements() * itemsize(form.products[0].dtype) / (device.l2_bandwidth / device.sm_count) * 1e6
    return not form.fits or read > LAUNCHES_PER_READ * device.launch_us


def loop_modes(form: LoopForm, device: DeviceModel, *, strict: bool) -> tuple[PrecisionMode, ...]:
    """The precision modes of the products of a loop with a launch for each iteration, fastest first.

    Three TF32 products also come first where the user allows TF32: the error of one adds up over the iterations.

    Args:
        strict: whether results must round as float32 units do.
    """
    if not isinstance(form, CellForm) or form.products[0].dtype != "float32":
        return (PrecisionMode.IEEE,)
    has_dot = not form.has_matrix_per_row and next_power_of_two(_rows(form)) >= LEAST_ROWS_OF_TENSOR_CORES
    if not has_dot or not prefers_launches(form, device):
        return (PrecisionMode.IEEE,)
    return modes_of(form.products[0], device, strict=strict)


def _is_exact(form: CellForm) -> bool:
    """Whether products are float32 in the user's settings."""
    return form.products[0].dtype == "float32" and form.ir.graph.fp32_matmul != "tf32"


def step_config(form: CellForm, device: DeviceModel, precision: PrecisionMode = PrecisionMode.IEEE) -> LoopConfig:
    """A first configuration with a launch for each iteration: the largest tiles that give each multiprocessor a program."""
    sizes, dtype = form.ir.graph.sizes, form.products[0].dtype
    count = 1 if form.has_matrix_per_row else next_power_of_two(_rows(form))
    columns, inner = next_power_of_two(form.width.value(sizes)), max(LEAST_DEPTH, _widest(form))
    on_tensor_cores = precision is PrecisionMode.TF32X3 or not _is_exact(form)
    if dtype not in DOT_DTYPES or count < (LEAST_ROWS_OF_TENSOR_CORES if on_tensor_cores else LEAST_ROWS_OF_DOT):
        config = LoopConfig(min(count, 8), min(columns, 8), STEP_WARPS, 1, depth=LEAST_DEPTH)
        while config.depth < min(inner, MOST_DEPTH) and sums_of(form, config) < SUMS_PER_WARP * config.warps:
            config = replace(config, depth=2 * config.depth)
        return config
    if precision is PrecisionMode.TF32X3:
        stages, depth = min(STAGES, max_stages(device)), min(inner, SPLIT_DEPTH)
        block = max(LEAST_ROWS_OF_DOT, min(columns, SPLIT_COLUMNS))
        return LoopConfig(SPLIT_ROWS, block, STEP_WARPS, stages, depth=depth, precision=precision)
    rows, block = LEAST_ROWS_OF_DOT, LEAST_ROWS_OF_DOT
    is_exact = _is_exact(form)
    most = EXACT_ROWS if is_exact else MOST_STEP_ROWS
    while 2 * rows <= min(count, most) and programs_of_step(form, 2 * rows, block) >= device.sm_count:
        rows *= 2
    while 2 * block <= min(columns, most) and programs_of_step(form, rows, 2 * block) >= device.sm_count:
        block *= 2
    depth = min(inner, EXACT_DEPTH if is_exact else MOST_DEPTH // 2)
    return LoopConfig(rows, block, STEP_WARPS, min(STAGES, max_stages(device)), depth=depth)


def programs_of_step(form: CellForm, rows: int, block: int) -> int:
    """The programs of a launch for one iteration."""
    return -(-_rows(form) // rows) * -(-form.width.value(form.ir.graph.sizes) // block)


def kept_tiles(form: CellForm, config: LoopConfig) -> int:
    """The tiles of matrices that stay in registers for all iterations; each iteration loads the others."""
    count = form.pieces(config.block)
    if keeps_matrices(form) or keeps_columns(form, config):
        return count
    if config.rows > 1:
        # Several rows need the registers for their terms.
        return 0
    threads = 32 * config.warps
    per_thread = min(MOST_REGISTERS, REGISTERS // threads) - OTHER_REGISTERS
    words = max(1, itemsize(form.products[0].dtype) // 4)
    return max(0, min(count, per_thread * threads // words // config.block**2))


def cell_config(form: CellForm, device: DeviceModel, precision: PrecisionMode = PrecisionMode.IEEE) -> LoopConfig:
    """A first configuration: single rows while there are few, so that as many multiprocessors as possible work."""
    return step_config(form, device, precision) if prefers_launches(form, device) else whole_config(form, device)


def whole_config(form: CellForm, device: DeviceModel) -> LoopConfig:
    """A first configuration with all iterations in one launch."""
    in_columns = column_config(form)
    if in_columns is not None and has_few_rows(form, in_columns, device):
        return in_columns
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
    if config.is_stepwise:
        yield from _step_variants(form, config, device)
        return
    if prefers_launches(form, device):
        yield step_config(form, device)
    in_columns = column_config(form)
    if in_columns is not None:
        yield in_columns
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


def _step_variants(form: CellForm, config: LoopConfig, device: DeviceModel) -> Iterator[LoopConfig]:
    """``config`` with other tiles, and all iterations in one launch if a program holds the matrices."""
    if form.fits:
        yield whole_config(form, device)
    is_dot = config.rows >= LEAST_ROWS_OF_DOT
    least = LEAST_ROWS_OF_DOT if is_dot else 1
    rows = () if form.has_matrix_per_row else (config.rows // 2, config.rows * 2)
    variants = [replace(config, rows=each) for each in rows]
    variants += [replace(config, block=each) for each in (config.block // 2, config.block * 2)]
    variants += [replace(config, depth=each) for each in (config.depth // 2, config.depth * 2)]
    variants += [replace(config, warps=each) for each in (config.warps // 2, config.warps * 2)]
    variants += [replace(config, stages=each) for each in (1, min(STAGES, max_stages(device)))] if is_dot else []
    for each in variants:
        is_tile = least <= each.rows <= next_power_of_two(_rows(form)) and (not is_dot or each.block >= least)
        if is_tile and LEAST_DEPTH <= each.depth <= MOST_DEPTH and each.block >= 4 and sums_of(form, each) <= MOST_SUMS:
            yield each


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
