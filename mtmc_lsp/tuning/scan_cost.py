"""Cost of loops over time steps that run as associative scans."""

from __future__ import annotations

from mtmc_lsp.core.device_model import DeviceModel
from mtmc_lsp.ir.loops.form import LoopForm, independent_elements
from mtmc_lsp.ir.loops.scan import scan_form
from mtmc_lsp.schedule.configs import LoopConfig
from mtmc_lsp.schedule.scan_configs import tiles_of_scan
from mtmc_lsp.tuning.cost import TRITON_EFFICIENCY, Cost, roofline_us

LOAD_US, ISSUE_US = 0.6, 0.001
"""Microseconds until a load from memory arrives, and for an operation that waits for no other one. Estimates, not measured."""

SCAN_LEVEL_US, EARLIER_US, SCAN_WARPS_PER_SM = 0.05, 0.02, 16
"""Microseconds for a doubling of a scan's range, and to apply the update of one earlier segment; warps per multiprocessor whose
chunks overlap. Estimates, not measured."""

COMPOSITION, WIDE_COMPOSITION = 24, 120
"""Operations for each element and component of an update that a scan takes, in float32 and in float64. The first is an estimate.
The second is fitted on an H200 with nine loops, whose targets took 0.8 to 1.5 times the predicted time of the loop."""


def scan_cost(form: LoopForm, moved: float, config: LoopConfig, device: DeviceModel) -> Cost:
    """The cost of a loop as scans: its traffic once per kernel, or the latency of the chunks of a segment."""
    scan = scan_form(form)
    passes = 1 + (scan.levels if config.segments > 1 else 0)
    chunks = -(-form.loop.count.value(form.ir.graph.sizes) // (config.steps * config.segments))
    elements = config.steps * config.block / (config.warps * device.warp_size)
    levels = len(scan.recurrences) * (config.steps.bit_length() - 1)
    per_chunk = LOAD_US / config.stages + SCAN_LEVEL_US * levels + ISSUE_US * elements * len(form.region.prims)
    programs = tiles_of_scan(form, config) * config.segments
    waves = max(1.0, programs * config.warps / (SCAN_WARPS_PER_SM * device.sm_count))
    # The multiprocessor with most programs decides.
    busy = programs / (-(-programs // device.sm_count) * device.sm_count)
    # Kernels after the first one read from the cache what fits there.
    memory = passes * roofline_us(moved, 0.0, device, 1.0, TRITON_EFFICIENCY * busy)
    latency = passes * (chunks * per_chunk * waves + EARLIER_US * config.segments)
    total = independent_elements(form) * form.loop.count.value(form.ir.graph.sizes)
    fp32, fp64 = device.flops["fp32"], device.fp64_flops
    seconds = len(form.region.prims) / fp32
    for item in scan.recurrences:
        each = WIDE_COMPOSITION / fp64 if item.is_wide else COMPOSITION / fp32
        seconds += each * len(item.coefficients)
    # The rates count multiply-adds as two operations.
    arithmetic = 2e6 * total * passes * seconds / busy
    # The last launch checks for states that are not finite.
    return Cost(moved * passes, 0.0, max(memory, latency, arithmetic) + device.launch_us * (passes + 1))
