"""The cost of loops with products of their state: iterations run one after another, and each multiplies with all matrices."""

from __future__ import annotations

from mtmc_lsp.core.device_model import DeviceModel
from mtmc_lsp.core.dtypes import is_low_precision, itemsize
from mtmc_lsp.ir.loops.cells import CellForm
from mtmc_lsp.schedule.cell_configs import LEAST_ROWS_OF_DOT, keeps_matrices
from mtmc_lsp.schedule.configs import LoopConfig

EXCHANGE_US = 0.15
"""Microseconds in which the threads of a program exchange the parts of a product's sums through shared memory. An estimate."""
FMA_SHARE = 0.3
"""Share of the peak of a multiprocessor that products of few rows reach. An estimate."""


def products_us(form: CellForm, config: LoopConfig, device: DeviceModel) -> float:
    """The time of all products of one iteration, if each multiprocessor runs one program."""
    elements = form.matrix_elements()
    kind = form.products[0].dtype
    rate = device.fp64_flops if kind == "float64" else device.flops["fp32"]
    if is_low_precision(kind) and config.rows >= LEAST_ROWS_OF_DOT:
        rate = device.flops["fp16"]
    arithmetic = 2.0 * config.rows * elements / (FMA_SHARE * rate / device.sm_count) * 1e6
    loads = 0.0
    if not keeps_matrices(form):
        loads = elements * itemsize(kind) / (device.l2_bandwidth / device.sm_count) * 1e6
    return EXCHANGE_US * len(form.products) + max(arithmetic, loads)
