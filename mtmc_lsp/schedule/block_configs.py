"""First configurations of loops whose program instances hold whole blocks, and others worth measuring."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from mtmc_lsp.core.device_model import DeviceModel
from mtmc_lsp.ir.loops.blocks import BlockForm
from mtmc_lsp.schedule.configs import LoopConfig
from mtmc_lsp.schedule.device_limits import max_stages

ELEMENTS_PER_THREAD = 16
"""Elements of the largest block per thread. More threads exchange elements more slowly. An estimate, not measured."""
MOST_WARPS = 16
STAGES = 3
"""Iterations whose loads are in flight at once."""


def block_config(form: BlockForm, device: DeviceModel) -> LoopConfig:
    """A first configuration: as few warps as hold the largest block."""
    warps = 1
    while warps < MOST_WARPS and form.largest > warps * device.warp_size * ELEMENTS_PER_THREAD:
        warps *= 2
    return LoopConfig(1, 1, warps, min(STAGES, max_stages(device)))


def block_variants(config: LoopConfig, device: DeviceModel) -> Iterator[LoopConfig]:
    """``config`` with other numbers of warps and stages."""
    for warps in (config.warps // 2, config.warps * 2, config.warps * 4):
        if 1 <= warps <= MOST_WARPS:
            yield replace(config, warps=warps)
    for stages in (1, 2):
        yield replace(config, stages=min(stages, max_stages(device)))
