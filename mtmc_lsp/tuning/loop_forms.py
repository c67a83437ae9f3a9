"""The ways to run a loop over time steps: one iteration after another, scans of chunks, or chunks as products of matrices."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from mtmc_lsp.core.action import ActionKind
from mtmc_lsp.core.device_model import DeviceModel
from mtmc_lsp.ir.loops.chunks import chunks_or_none
from mtmc_lsp.ir.loops.form import LoopForm, independent_elements
from mtmc_lsp.ir.loops.fusion import loop_in
from mtmc_lsp.ir.loops.scan import scan_or_none
from mtmc_lsp.ir.primitives import KernelIR
from mtmc_lsp.ir.regions import Region
from mtmc_lsp.schedule.configs import IllegalConfig, LoopConfig, PrecisionMode
from mtmc_lsp.schedule.loop_configs import chunk_config, chunk_tiles, loop_config
from mtmc_lsp.schedule.scan_configs import scan_config
from mtmc_lsp.tuning.kernel_cost import kernel_cost

LEAST_GAIN = 0.2
"""Share of the kernel's time that another form must be predicted to save: predictions are often off by as much."""

MOST_STATES_PER_SM = 64
"""Independent elements of the state for each multiprocessor up to which a scan is tried: two warps. With more, the sequential
kernel keeps the device busy: on an H200, 124 states per multiprocessor took 98 us one after another (1,024 steps)."""

FORMS = (ActionKind.PARALLEL_SCAN, ActionKind.CHUNK_PRODUCTS)
"""The actions that choose another form than one iteration after another."""


def first_form(
    ir: KernelIR,
    region: Region,
    device: DeviceModel,
    refused: Collection[ActionKind] = frozenset(),
    precision: PrecisionMode = PrecisionMode.IEEE,
) -> LoopConfig:
    """A first configuration in the form with the shortest predicted time.

    Args:
        refused: forms that failed for this loop.
        precision: of float32 products where each iteration is a launch.
    """
    form = loop_in(ir, region)
    best = loop_config(form, device, precision)
    least_us = kernel_cost(ir, region, best, device).us * (1 - LEAST_GAIN)
    for kind in FORMS:
        config = config_in(kind, ir, region, form, device) if kind not in refused else None
        if config is not None and (us := kernel_cost(ir, region, config, device).us) <= least_us:
            best, least_us = config, us
    return best


def config_in(kind: ActionKind, ir: KernelIR, region: Region, form: LoopForm, device: DeviceModel) -> LoopConfig | None:
    """A first configuration of a loop in the form of an action; None if it has no such form, or too many states for it."""
    if kind is ActionKind.CHUNK_PRODUCTS:
        if chunks_or_none(form) is None:
            return None
        # There is none if the key has too many channels for a program.
        configs = chunk_tiles(form, chunk_config(device))
        return min(configs, key=lambda config: kernel_cost(ir, region, config, device).us, default=None)
    if independent_elements(form) > MOST_STATES_PER_SM * device.sm_count or scan_or_none(form) is None:
        return None
    try:
        return scan_config(form, device)
    except IllegalConfig:
        # A reduction in the body has too many columns for a tile of several steps.
        return None


def form_of(config: object) -> ActionKind | None:
    """The action that chooses the form of a configuration, which may be JSON data; None for one iteration after another."""
    steps, chunk = (
        config.get(name, 1) if isinstance(config, Mapping) else getattr(config, name, 1) for name in ("steps", "chunk")
    )
    if isinstance(steps, int) and steps > 1:
        return ActionKind.PARALLEL_SCAN
    return ActionKind.CHUNK_PRODUCTS if isinstance(chunk, int) and chunk > 1 else None
