"""The cost of loops on blocks: iterations run one after another, and each exchanges elements inside of a program instance."""

from __future__ import annotations

from mtmc_lsp.core.device_model import DeviceModel
from mtmc_lsp.ir.loops.blocks import BlockForm
from mtmc_lsp.ir.primitives import VIEW_OPS, PrimOp
from mtmc_lsp.schedule.configs import LoopConfig

EXCHANGE_US = 0.1
"""Microseconds of a reduction, shift or product among the threads of a program. An estimate."""
CYCLES_PER_OPERATION = 1.0
"""Issue slots of one operation of 32 threads. An estimate."""
SCHEDULERS = 4
"""Warps of a multiprocessor that issue an instruction in each cycle."""


def block_us(form: BlockForm, config: LoopConfig, device: DeviceModel) -> float:
    """The time of one iteration of one program instance: exchanges, and the elements of all blocks."""
    moving = {prim.name for prim in form.exchanges()}
    elements = 0.0
    for name in form.region.prims:
        prim = form.ir.prims[name]
        if prim.op is not PrimOp.CONSTANT and (prim.op not in VIEW_OPS or name in moving):
            elements += form.terms(prim)
    per_cycle = min(config.warps, SCHEDULERS) * device.warp_size / CYCLES_PER_OPERATION
    return EXCHANGE_US * len(moving) + elements / per_cycle / (device.clock_hz / 1e6)
