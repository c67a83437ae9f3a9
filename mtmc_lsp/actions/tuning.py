"""Tile, vectorize, pipeline, reorder and autotune: other values of a kernel's configuration.

*Legal* wherever the kernel has the choice and the value is in its range. Tiles partition the independent axes and masks cover
partial tiles, so each element is computed once. Warps and stages change how a tile is computed, not its result. Programs are
independent, so their order is free. The order of additions inside a sum may change with the tile.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from mtmc_lsp.actions.base import Situation, changed_plan, ir_for, kernel_of, region_of, where
from mtmc_lsp.core.action import ActionKind, Expected, MacroAction
from mtmc_lsp.core.device_model import DeviceModel
from mtmc_lsp.core.graph import Graph
from mtmc_lsp.core.json_codec import to_json
from mtmc_lsp.fusion.repeated_blocks import alike, form
from mtmc_lsp.ir.primitives import KernelIR
from mtmc_lsp.ir.regions import Region, RegionKind
from mtmc_lsp.schedule.configs import KernelConfig, LoopOrder, MatmulConfig, TileConfig, field_names
from mtmc_lsp.schedule.legality import has_order, kind_word
from mtmc_lsp.schedule.matmul_configs import stage_bytes
from mtmc_lsp.schedule.schedule import KernelPlan, Schedule
from mtmc_lsp.schedule.tile_configs import variants
from mtmc_lsp.tuning.cost import kernel_cost

Changes = Mapping[str, object]
"""Choices of a configuration to their new values, as JSON data."""
TILES = ("rows", "block", "loop", "block_m", "block_n", "block_k")
MOST_TILES = 6
MIN_GAIN_LAUNCHES = 1 / 40
"""Predicted gain, in launches, below which measuring is not worth its seconds (H200: 0.1 us)."""


class _Tuning:
    """A change of some of the configuration's values."""

    kind: ActionKind
    keys: tuple[str, ...]
    share: float
    """Share of the kernel's time that a better choice may save: an estimate that only orders the steps."""

    def apply(self, graph: Graph, schedule: Schedule, action: MacroAction) -> Schedule:
        """Every kernel of the action's region with the new values."""
        kernel_of(schedule, action)
        ir = ir_for(graph, schedule)
        for plan in schedule.kernels:
            if set(action.region) & set(plan.nodes):
                allowed = [name for name in self.keys if self.has(region_of(ir, plan), plan.config, name)]
                schedule = schedule.with_kernel(changed_plan(ir, plan, action, allowed))
        return schedule

    def has(self, region: Region, config: KernelConfig, name: str) -> bool:
        """Whether the choice affects the kernel."""
        return name in field_names(config)

    def propose(self, situation: Situation) -> Iterable[MacroAction]:
        """A few other values per kernel, to measure."""
        ir = situation.ir
        kernels = list(situation.kernels()) if situation.has_gpu else []
        for group in alike(kernels, lambda kernel: _same_work(ir, *kernel)):
            plan, region = group[0]
            others = [region for _, region in group[1:]]
            choices = [_changes(plan.config, item, self.keys) for item in self.choices(situation, region, plan.config)]
            choices = [item for i, item in enumerate(choices) if item and item not in choices[:i]]
            _, place = where(ir, [name for _, each in group for name in each.nodes])
            which = (
                f"the {len(group)} {kind_word(region.kind)} kernels"
                if others
                else f"the {kind_word(region.kind)} kernel"
            )
            text, why = self.describe(f"{which} of {place}", choices, plan.config, situation.device)
            yield from measured_choice(situation, plan, region, self.kind, choices, self.share, text, why, others)

    def choices(self, situation: Situation, region: Region, config: KernelConfig) -> Sequence[KernelConfig]:
        """Configurations worth measuring; only their changes among :attr:`keys` count."""
        raise NotImplementedError

    def describe(
        self, name: str, choices: Sequence[Changes], config: KernelConfig, device: DeviceModel
    ) -> tuple[str, str]:
        """The action's title and rationale."""
        raise NotImplementedError


def measured_choice(
    situation: Situation,
    plan: KernelPlan,
    region: Region,
    kind: ActionKind,
    variants: Sequence[Changes],
    share: float,
    text: str,
    why: str,
    others: Sequence[Region] = (),
) -> Iterator[MacroAction]:
    """One action that measures several configurations of a kernel; nothing where it was tried, or cannot gain enough.

    ``others`` are regions that do the same work and get the same configuration.
    """
    ir = situation.ir
    cost = kernel_cost(ir, region, plan.config, situation.device)
    saved = share * (cost.us - situation.device.launch_us) * (1 + len(others))
    nodes = tuple(name for each in (region, *others) for name in each.nodes)
    tried = any(step.action.kind is kind and step.action.region == nodes for step in situation.history)
    if tried or not variants or saved < MIN_GAIN_LAUNCHES * situation.device.launch_us:
        return
    lines, _ = where(ir, nodes)
    yield MacroAction(
        kind=kind,
        region=nodes,
        lines=lines,
        params={"variants": [{"config": dict(choice)} for choice in variants]},
        rationale=why,
        expected=Expected(saved, cost.bytes, cost.bytes, cost.flops, cost.flops),
        text=text,
    )


def _same_work(ir: KernelIR, plan: KernelPlan, region: Region) -> Hashable:
    """What determines the best configuration: the operations, the sizes of the axes, and the present configuration."""
    sizes = [axis.size.value(ir.graph.sizes) for axis in (*region.parallel_axes, *region.reduced_axes)]
    return form(ir.graph, region.nodes), region.kind, tuple(sizes), plan.config


def _changes(before: KernelConfig, after: KernelConfig, names: Sequence[str]) -> Changes:
    """The choices among ``names`` that differ, as JSON data."""
    old = to_json(before)
    return {name: value for name, value in to_json(after).items() if name in names and old[name] != value}


def _listed(values: Iterable[object]) -> str:
    """``1, 3 and 4``."""
    items = list(map(str, values))
    return " and ".join([", ".join(items[:-1]), items[-1]] if len(items) > 1 else items)


def _tile(config: KernelConfig) -> tuple[object, ...]:
    """The choices that determine the tile."""
    return tuple(value for name, value in to_json(config).items() if name in TILES)


class Tile(_Tuning):
    """Other tile sizes, with suitable warps and stages."""

    kind = ActionKind.TILE
    keys = (*TILES, "warps", "stages")
    share = 0.03

    def choices(self, situation: Situation, region: Region, config: KernelConfig) -> Sequence[KernelConfig]:
        """The first few variants with other tiles, one per tile; none where autotuning tried all of them."""
        if any(
            s.action.kind is ActionKind.AUTOTUNE and set(region.nodes) <= set(s.action.region)
            for s in situation.history
        ):
            return []
        by_tile: dict[tuple[object, ...], KernelConfig] = {}
        for item in variants(situation.ir, region, config, situation.device):
            if (tile := _tile(item)) != _tile(config):
                by_tile.setdefault(tile, item)
        spread = list(by_tile.values())
        step = max(1, -(-len(spread) // MOST_TILES))
        return spread[::step]

    def describe(
        self, name: str, choices: Sequence[Changes], config: KernelConfig, device: DeviceModel
    ) -> tuple[str, str]:
        sizes = " x ".join(str(value) for value in _tile(config) if not isinstance(value, bool))
        why = f"A program computes a tile of {sizes} now. {len(choices)} other tiles are measured; the fastest is used."
        return f"try other tile sizes for {name}", why


class Vectorize(_Tuning):
    """Other numbers of warps for the same tile, which changes the elements per thread."""

    kind = ActionKind.VECTORIZE
    keys = ("warps",)
    share = 0.02

    def choices(self, situation: Situation, region: Region, config: KernelConfig) -> Sequence[KernelConfig]:
        """Half and twice as many threads."""
        return [replace(config, warps=n) for n in (config.warps // 2, config.warps * 2) if 1 <= n <= 16]

    def describe(
        self, name: str, choices: Sequence[Changes], config: KernelConfig, device: DeviceModel
    ) -> tuple[str, str]:
        each = config.elements / (device.warp_size * config.warps)
        why = (
            f"Each thread processes {each:g} elements now. More per thread needs fewer instructions; more threads "
            f"hide more latency. {_listed(choice['warps'] for choice in choices)} warps are measured."
        )
        return f"try other numbers of warps for {name}", why


class Pipeline(_Tuning):
    """Other numbers of pipeline stages: how many blocks ahead a loop prefetches."""

    kind = ActionKind.PIPELINE
    keys = ("stages",)
    share = 0.025

    def has(self, region: Region, config: KernelConfig, name: str) -> bool:
        """Stages only affect loops that load from memory."""
        if isinstance(config, TileConfig):
            return region.kind is RegionKind.SCAN or config.loop or config.persist > 0 or config.is_split
        return region.kind is not RegionKind.RECURRENT

    def choices(self, situation: Situation, region: Region, config: KernelConfig) -> Sequence[KernelConfig]:
        """One stage fewer, and up to two more if they fit into shared memory."""
        if not self.has(region, config, "stages"):
            return []
        now, most = config.stages, situation.device.shared_bytes
        numbers = [number for number in (now - 1, now + 1, now + 2) if 1 <= number <= 6]
        return [replace(config, stages=n) for n in numbers if n < now or stage_bytes(config) * n <= most]

    def describe(
        self, name: str, choices: Sequence[Changes], config: KernelConfig, device: DeviceModel
    ) -> tuple[str, str]:
        numbers = _listed(choice["stages"] for choice in choices)
        why = f"The loop has {config.stages} pipeline stages now, which prefetch its loads; {numbers} stages are measured."
        return f"try other numbers of pipeline stages for {name}", why


class Reorder(_Tuning):
    """Another order of programs: tiles that run at the same time share the L2 cache."""

    kind = ActionKind.REORDER
    keys = ("group_m", "order")
    share = 0.03

    def has(self, region: Region, config: KernelConfig, name: str) -> bool:
        """Products order tiles in groups of rows; elementwise kernels along rows or columns first."""
        if name == "group_m":
            return region.kind is RegionKind.MATMUL
        return isinstance(config, TileConfig) and has_order(region) and not config.persist

    def choices(self, situation: Situation, region: Region, config: KernelConfig) -> Sequence[KernelConfig]:
        """Other group sizes, or the other order."""
        if isinstance(config, MatmulConfig):
            return [replace(config, group_m=number) for number in (1, 4, 16)]
        if not isinstance(config, TileConfig) or not self.has(region, config, "order"):
            return []
        if region.parallel_axes[-1].size.value(situation.ir.graph.sizes) <= config.block:
            return []
        other = LoopOrder.ROWS if config.order is LoopOrder.COLUMNS else LoopOrder.COLUMNS
        return [replace(config, order=other)]

    def describe(
        self, name: str, choices: Sequence[Changes], config: KernelConfig, device: DeviceModel
    ) -> tuple[str, str]:
        why = "Programs that run at the same time should read the same operands, so that these are in the L2 cache."
        return f"reorder the programs of {name}", f"{why} {len(choices)} other orders are measured."


class Autotune(_Tuning):
    """All values of the configuration together."""

    kind = ActionKind.AUTOTUNE
    keys = (*TILES, "warps", "stages", "group_m")
    share = 0.10

    def choices(self, situation: Situation, region: Region, config: KernelConfig) -> Sequence[KernelConfig]:
        """All variants."""
        return variants(situation.ir, region, config, situation.device)

    def describe(
        self, name: str, choices: Sequence[Changes], config: KernelConfig, device: DeviceModel
    ) -> tuple[str, str]:
        why = f"{len(choices)} combinations of tile, warps and stages are measured on this GPU; the fastest is used."
        return f"tune {name}", why
