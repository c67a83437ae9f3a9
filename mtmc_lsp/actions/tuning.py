"""Autotune: measure other values of a kernel's configuration, and use the fastest.

A kernel is tuned at most twice: first its tile with suitable warps and stages, then small changes of the best configuration:
warps, pipeline stages, program order, and persistent programs. The second round follows for products, and where the first round
gained. Otherwise it hardly ever pays: of 16 kernels on H100s, one gained 2 %, and three were cut by the budget.

*Legal* wherever the kernel has the choice and the value is in its range. Tiles partition the independent axes and masks cover
partial tiles, so each element is computed once. Warps and stages change how a tile is computed, not its result. Programs are
independent, so their order is free, and one program may compute several tiles: statements that do not depend on the row move
in front of that loop, where they give the same values, since a kernel never writes a buffer that it reads. The order of
additions inside a sum may change with the tile.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from mtmc_lsp.actions.base import IllegalAction, Situation, changed_plan, ir_for, kernel_of, lines_of
from mtmc_lsp.actions.titles import kernel_title
from mtmc_lsp.core.action import ActionKind, Expected, MacroAction
from mtmc_lsp.core.graph import Graph
from mtmc_lsp.core.json_codec import to_json
from mtmc_lsp.core.run import StepStatus
from mtmc_lsp.fusion.repeated_blocks import form, groups_of_equal
from mtmc_lsp.ir.primitives import KernelIR, ProductDims
from mtmc_lsp.ir.regions import Region, RegionKind, product_in, products_in
from mtmc_lsp.schedule.configs import (
    IllegalConfig,
    KernelConfig,
    LoopOrder,
    MatmulConfig,
    PrecisionMode,
    TileConfig,
    field_names,
)
from mtmc_lsp.schedule.device_limits import max_warps
from mtmc_lsp.schedule.legality import has_order, reconfigured
from mtmc_lsp.schedule.matmul_configs import product_config, product_variants, stage_bytes, with_tma
from mtmc_lsp.schedule.precision_modes import TF32_MODES
from mtmc_lsp.schedule.schedule import KernelPlan, Schedule
from mtmc_lsp.schedule.tile_configs import variants
from mtmc_lsp.tuning.kernel_cost import kernel_cost, programs_of

Changes = Mapping[str, object]
"""Choices of a configuration to their new values, as JSON data."""
TILE_FIELDS = ("rows", "block", "loop", "block_m", "block_n", "block_k", "steps", "segments", "chunk", "split")
FIELDS = (*TILE_FIELDS, "warps", "stages", "depth", "group_m", "order", "persist", "flatten", "precision", "tma")
"""Choices that autotuning changes; the precision only where both round operands to as many bits."""
OTHER_TILES = 4
"""Tiles that are measured in the other mode of a product that may run in TF32, besides its first one."""
ROUNDS = 2
"""Times that a kernel is tuned: its tile, then small changes."""
TILE_SHARE, REFINEMENT_SHARE = 0.10, 0.03
"""Shares of the kernel's time that a better choice may save: estimates that only order the steps."""
MOST_STAGES = 6
"""Most pipeline stages that fine-tuning tries, where shared memory holds them."""
PERSISTENT_WAVES = 4
"""Programs per multiprocessor from which on persistence is tried."""
MIN_HEADROOM = 0.05
"""Share of the call's time above the roofline's bound from which on a kernel is tuned. A measurement of variants takes 2 to 10 s,
and on an H200 tuned kernels reach 95 to 97 % of the bound."""
MIN_GAIN_LAUNCHES = 1 / 40
"""Predicted gain, in launches, below which measuring is not worth its seconds (H200: 0.1 us)."""
MIN_GAIN_SHARE = 1 / 200
"""The same as a share of the call's time: the times of equal versions differ by about as much."""


class Autotune:
    """The configuration of each kernel, by measurement."""

    kind = ActionKind.AUTOTUNE

    def apply(self, graph: Graph, schedule: Schedule, action: MacroAction) -> Schedule:
        """Every kernel of the action's region with the new values."""
        kernel_of(schedule, action)
        ir = ir_for(graph, schedule)
        for plan in schedule.kernels:
            if set(action.region) & set(plan.nodes):
                allowed = [name for name in FIELDS if name in field_names(plan.config)]
                changed = changed_plan(ir, plan, action, allowed)
                if schedule.shares_launch(plan) and _is_persistent(changed.config):
                    raise IllegalAction("autotune: the launch runs other kernels too, so this one cannot be persistent")
                schedule = schedule.with_kernel(changed)
        return schedule

    def propose(self, situation: Situation) -> Iterable[MacroAction]:
        """Other configurations of each kernel, to measure; none where the roofline leaves nothing to gain."""
        if situation.timing is not None and situation.timing.roofline > 1.0 - MIN_HEADROOM:
            return
        ir = situation.ir
        kernels = list(situation.kernels()) if situation.has_gpu else []
        for group in groups_of_equal(kernels, lambda kernel: _same_work(ir, *kernel)):
            plan, region = group[0]
            others = [region for _, region in group[1:]]
            nodes = tuple(name for _, each in group for name in each.nodes)
            rounds = times_tried(situation, self.kind, nodes)
            if rounds >= ROUNDS or (rounds and not _is_worth_refining(situation, plan, nodes)):
                continue
            configs = variants(ir, region, plan.config, situation.device) if rounds == 0 else []
            configs += in_other_tf32_mode(situation, plan, region) if rounds == 0 else []
            tiles = _distinct_changes(plan.config, configs)
            choices = tiles or _distinct_changes(plan.config, refinements(situation, plan, region))
            name = kernel_title(ir, plan.nodes)
            if others:
                name += f" and {len(others)} equal {'kernel' if len(others) == 1 else 'kernels'}"
            if tiles:
                share, text = TILE_SHARE, f"Tune {name}"
                why = f"{len(choices)} combinations of tile, warps and stages are measured on this GPU; the fastest is used."
            else:
                share, text = REFINEMENT_SHARE, f"Fine-tune {name}"
                why = (
                    f"{len(choices)} small changes of warps, pipeline stages, program order or number of programs are "
                    "measured on this GPU; the fastest is used."
                )
            yield from measured_choice(situation, plan, region, self.kind, choices, share, text, why, others)


def in_other_tf32_mode(situation: Situation, plan: KernelPlan, region: Region) -> list[KernelConfig]:
    """Scaled float16 operands for a kernel with a TF32 product, and the reverse: they round to as many bits."""
    config, ir, device = plan.config, situation.ir, situation.device
    if not isinstance(config, MatmulConfig) or config.precision not in TF32_MODES:
        return []
    prim = product_in(ir, region)
    others = [
        mode for mode in situation.precisions.modes[prim.origin] if mode not in (config.precision, PrecisionMode.IEEE)
    ]
    configs: list[KernelConfig] = []
    for mode in others:
        first = with_tma(ir, region, product_config(ir, region, device, mode), device)
        first = replace(
            first, split_k=config.split_k, stream_k=config.stream_k, persist=config.persist, flatten=config.flatten
        )
        has_windows = bool(ProductDims.of(prim).kernel_positions)
        configs += [first, *product_variants(first, device, of_windows=has_windows, short=False)[:OTHER_TILES]]
    return configs


def refinements(situation: Situation, plan: KernelPlan, region: Region) -> list[KernelConfig]:
    """Configurations that differ from a kernel's in warps, stages, program order or the number of programs."""
    config, device = plan.config, situation.device
    changes: list[Changes] = [
        {"warps": number} for number in (config.warps // 2, config.warps * 2) if 1 <= number <= max_warps(device) // 2
    ]
    if _has_stages(region, config):
        numbers = [number for number in (config.stages - 1, config.stages + 1, config.stages + 2) if number >= 1]
        products = max(1, len(products_in(situation.ir, region)))
        room = device.shared_bytes // max(1, stage_bytes(config, products))
        changes += [
            {"stages": number} for number in numbers if number < config.stages or number <= min(room, MOST_STAGES)
        ]
    if isinstance(config, MatmulConfig):
        changes += [{"group_m": number} for number in (1, 4, 16)]
    if isinstance(config, TileConfig) and has_order(region) and not config.persist:
        columns = region.parallel_axes[-1].size.value(situation.ir.graph.sizes)
        other = LoopOrder.ROWS if config.order is LoopOrder.COLUMNS else LoopOrder.COLUMNS
        changes += [{"order": other.value}] if columns > config.block else []
    is_alone = not situation.schedule.shares_launch(plan)
    programs = programs_of(situation.ir, region, config)
    if is_alone and not _is_persistent(config) and programs >= PERSISTENT_WAVES * device.sm_count:
        is_product = isinstance(config, MatmulConfig)
        loops: list[Changes] = [{"flatten": False}, {"flatten": True}] if is_product else [{}]
        per_sm = (1, 2) if is_product else (2, 4, 8)
        changes += [{"persist": device.sm_count * number, **loop} for number in per_sm for loop in loops]
    configs = [_reconfigured(situation.ir, region, plan, change) for change in changes]
    return [item for item in configs if item is not None and item != config]


def _reconfigured(ir: KernelIR, region: Region, plan: KernelPlan, change: Changes) -> KernelConfig | None:
    try:
        return reconfigured(ir, region, plan, change).config
    except IllegalConfig:
        return None


def _has_stages(region: Region, config: KernelConfig) -> bool:
    """Whether the kernel has a loop that loads from memory."""
    if isinstance(config, TileConfig):
        return region.kind is RegionKind.SCAN or config.loop or config.persist > 0 or config.is_split
    return region.kind not in (RegionKind.RECURRENT, RegionKind.LOOP)


def _is_persistent(config: KernelConfig) -> bool:
    return isinstance(config, (TileConfig, MatmulConfig)) and config.persist > 0


def _is_worth_refining(situation: Situation, plan: KernelPlan, nodes: Sequence[str]) -> bool:
    """Whether small changes may gain: a product has persistent loops to try, and other kernels if their tile gained."""
    if isinstance(plan.config, MatmulConfig):
        return True
    tuned = [step for step in situation.history if step.action.kind is ActionKind.AUTOTUNE]
    return any(step.status is StepStatus.ACCEPTED and step.action.region == tuple(nodes) for step in tuned)


def times_tried(situation: Situation, kind: ActionKind, nodes: Sequence[str]) -> int:
    """Steps of the run that tried a kind of action on a region."""
    return sum(step.action.kind is kind and step.action.region == tuple(nodes) for step in situation.history)


def measured_choice(
    situation: Situation,
    plan: KernelPlan,
    region: Region,
    kind: ActionKind,
    choices: Sequence[Changes],
    share: float,
    text: str,
    why: str,
    others: Sequence[Region] = (),
) -> Iterator[MacroAction]:
    """One action that measures several configurations of a kernel; nothing if it cannot gain enough.

    ``others`` are regions that do the same work and get the same configuration.
    """
    ir = situation.ir
    cost = kernel_cost(ir, region, plan.config, situation.device)
    saved = share * (cost.us - situation.device.launch_us) * (1 + len(others))
    nodes = tuple(name for each in (region, *others) for name in each.nodes)
    call_us = situation.timing.median_us if situation.timing is not None else 0.0
    if not choices or saved < max(MIN_GAIN_LAUNCHES * situation.device.launch_us, MIN_GAIN_SHARE * call_us):
        return
    yield MacroAction(
        kind=kind,
        region=nodes,
        lines=lines_of(ir, nodes),
        params={"variants": [{"config": dict(choice)} for choice in choices]},
        rationale=why,
        expected=Expected(saved, cost.bytes, cost.bytes, cost.flops, cost.flops),
        text=text,
    )


def _same_work(ir: KernelIR, plan: KernelPlan, region: Region) -> Hashable:
    """What determines the best configuration: the operations, the sizes of the axes, and the present configuration."""
    sizes = [axis.size.value(ir.graph.sizes) for axis in (*region.parallel_axes, *region.reduced_axes)]
    return form(ir.graph, region.nodes), region.kind, tuple(sizes), plan.config


def _distinct_changes(before: KernelConfig, configs: Iterable[KernelConfig]) -> list[Changes]:
    """The choices of :data:`FIELDS` in which each configuration differs, as JSON data, without repetitions."""
    old = to_json(before)
    changes: list[Changes] = []
    for config in configs:
        change = {name: value for name, value in to_json(config).items() if name in FIELDS and old[name] != value}
        if change and change not in changes:
            changes.append(change)
    return changes
