"""The cost of loops with products of their state: iterations run one after another, and each multiplies with all matrices."""

from __future__ import annotations

from mtmc_lsp.core.device_model import DeviceModel
from mtmc_lsp.core.dtypes import is_low_precision, itemsize
from mtmc_lsp.ir.loops.cells import CellForm
from mtmc_lsp.schedule.cell_configs import LEAST_ROWS_OF_DOT, keeps_matrices, kept_tiles, programs_of_step
from mtmc_lsp.schedule.configs import LoopConfig, PrecisionMode
from mtmc_lsp.tuning.cost import peak
from mtmc_lsp.tuning.scan_cost import LOAD_US

EXCHANGE_US = 0.15
"""Microseconds in which the threads of a program exchange the parts of a product's sums through shared memory. An estimate."""
CACHED_SHARE = 0.5
"""Share of the last-level cache up to which matrices stay there from one iteration to the next. An estimate."""
GAP = 0.25
"""Time between two launches that wait in a queue, in launches. An estimate."""
FMA_SHARE = 0.3
"""Share of the peak of a multiprocessor that products of few rows reach. An estimate."""
SPLIT_SHARE = 0.2
"""Share of the TF32 peak that three TF32 products reach in place of a float32 product. In prototypes with 512 and 1024 units and
tiles of 16 x 32 on an H200, it was 0.19 to 0.24."""


def step_us(form: CellForm, config: LoopConfig, device: DeviceModel) -> float:
    """The time of one iteration that is a launch: the host launches the next ones while the device computes."""
    sizes, kind = form.ir.graph.sizes, form.products[0].dtype
    programs = programs_of_step(form, config.rows, config.block)
    rows = -(-form.region.rows.value(sizes) // config.rows)
    share = min(1.0, programs / device.sm_count)
    # The last programs run alone.
    waves = max(1.0, -(-programs // device.sm_count) * device.sm_count / programs) if share == 1.0 else 1.0
    rate = _rate(form, config, device) * FMA_SHARE
    if config.precision is PrecisionMode.TF32X3:
        rate = peak(device, kind, PrecisionMode.TF32) * SPLIT_SHARE / 3
    elements, size = form.matrix_elements(), itemsize(kind)
    arithmetic = 2.0 * rows * config.rows * elements / (rate * share) * 1e6 * waves
    bandwidth = device.l2_bandwidth if elements * size <= CACHED_SHARE * device.l2_bytes else device.bandwidth
    columns = programs // rows
    inner = sum(height.value(sizes) for height, _ in form.widths())
    loaded = size * (rows * elements + columns * rows * config.rows * inner)
    busy = max(arithmetic, loaded / (bandwidth * share) * 1e6) + LOAD_US
    return max(busy + GAP * device.launch_us, device.launch_us)


def _rate(form: CellForm, config: LoopConfig, device: DeviceModel) -> float:
    """The peak of the products."""
    kind = form.products[0].dtype
    if config.rows >= LEAST_ROWS_OF_DOT and is_low_precision(kind):
        return device.flops["fp16"]
    if config.rows >= LEAST_ROWS_OF_DOT and kind == "float32" and form.ir.graph.fp32_matmul == "tf32":
        return device.flops["tf32"]
    return device.fp64_flops if kind == "float64" else device.flops["fp32"]


def products_us(form: CellForm, config: LoopConfig, device: DeviceModel) -> float:
    """The time of all products of one iteration, if each multiprocessor runs one program."""
    elements = form.matrix_elements()
    kind = form.products[0].dtype
    rate = _rate(form, config, device)
    arithmetic = 2.0 * config.rows * elements / (FMA_SHARE * rate / device.sm_count) * 1e6
    loaded = 0
    if not keeps_matrices(form):
        loaded = max(0, elements - kept_tiles(form, config) * config.block**2)
    # On an H200, LSTM and GRU cells of 128 and 256 units read 56 to 71 bytes per ns and program, the L2's share of one: the L1
    # did not make the smaller ones faster.
    loads = loaded * itemsize(kind) / (device.l2_bandwidth / device.sm_count) * 1e6
    return EXCHANGE_US * len(form.products) + max(arithmetic, loads)
