"""Tile, vectorize, pipeline, reorder and autotune: other values of a kernel's configuration.

*Legal* always where the kernel has the choice and the value is in its range: tiles partition the independent axes and masks
cover what sticks out, so each element is still computed once; warps and stages change how a tile is computed, not what;
programs are independent, so their order is free. The order of additions inside a sum may change with the tile.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from mtmc_lsp.actions.base import (
    Config,
    IllegalAction,
    Situation,
    config_of,
    current_config,
    ir_for,
    kernel_of,
    kind_word,
    region_of,
    where,
    whole_numbers,
)
from mtmc_lsp.core.action import ActionKind, Expected, MacroAction
from mtmc_lsp.core.graph import Graph
from mtmc_lsp.fusion.repeated_blocks import alike, form
from mtmc_lsp.ir.primitives import KernelIR
from mtmc_lsp.ir.regions import Region, RegionKind
from mtmc_lsp.schedule.matmul_configs import stage_bytes
from mtmc_lsp.schedule.schedule import KernelPlan, Schedule
from mtmc_lsp.schedule.tile_configs import MOST_ELEMENTS, variants
from mtmc_lsp.tuning.cost import kernel_cost

TILES = ("rows", "block", "loop", "block_m", "block_n", "block_k")
MOST_TILES, LEAST_DOT, LARGEST_DOT = 6, 16, 256
LEAST_US = 0.1
"""A predicted gain below this is not worth the seconds of measuring it."""


class _Tuning:
    """A change of some of the configuration's values."""

    kind: ActionKind
    keys: tuple[str, ...]
    share: float
    """Part of the kernel's time that a better choice is expected to save: a guess that only orders the steps."""

    def apply(self, graph: Graph, schedule: Schedule, action: MacroAction) -> Schedule:
        """Every kernel of the action's region with the values that it sets."""
        kernel_of(schedule, action)
        ir = ir_for(graph, schedule)
        for plan in schedule.kernels:
            if set(action.region) & set(plan.nodes):
                schedule = self._set(ir, schedule, plan, action)
        return schedule

    def _set(self, ir: KernelIR, schedule: Schedule, plan: KernelPlan, action: MacroAction) -> Schedule:
        region = region_of(ir, plan)
        changes = config_of(action)
        config = current_config(ir, region, plan)
        wrong = [name for name in changes if name not in self.keys or not self.has(region, config, name)]
        if wrong:
            word = kind_word(region.kind)
            raise IllegalAction(f"{self.kind.value}: a {word} kernel has no {wrong[0]} to choose")
        self.check(action, changes, {**config, **changes})
        return schedule.with_kernel(replace(plan, config={**config, **changes}))

    def has(self, region: Region, config: Mapping[str, object], name: str) -> bool:
        """Whether the kernel has the choice."""
        return name in config

    def check(self, action: MacroAction, changes: Mapping[str, object], config: Mapping[str, object]) -> None:
        """Raise :class:`IllegalAction` where a value is out of its range."""
        numbers = {name: value for name, value in changes.items() if name not in ("loop", "order", "precision")}
        whole_numbers(action, {name: value for name, value in numbers.items() if name != "stages"})
        whole_numbers(action, {"stages": config.get("stages", 1)}, powers=False)
        if int(str(config.get("rows", 1))) * int(str(config.get("block", 1))) > MOST_ELEMENTS:
            raise IllegalAction(f"{self.kind.value}: a tile of more than {MOST_ELEMENTS} elements")
        dots = [int(str(config[name])) for name in ("block_m", "block_n", "block_k") if name in config]
        if any(not LEAST_DOT <= size <= LARGEST_DOT for size in dots):
            raise IllegalAction(f"{self.kind.value}: tiles of a product have sides of {LEAST_DOT} to {LARGEST_DOT}")
        if int(str(config.get("warps", 4))) > 32:
            raise IllegalAction(f"{self.kind.value}: a program has at most 32 warps")

    def propose(self, situation: Situation) -> Iterable[MacroAction]:
        """A few other values per kernel, to be measured."""
        ir = situation.ir
        kernels = list(situation.kernels()) if situation.has_gpu else []
        for group in alike(kernels, lambda kernel: _same_work(ir, *kernel)):
            plan, region = group[0]
            others = [region for _, region in group[1:]]
            config = current_config(ir, region, plan)
            choices = [item for item in self.choices(situation, region, config) if item]
            _, place = where(ir, [name for _, each in group for name in each.nodes])
            which = (
                f"the {len(group)} {kind_word(region.kind)} kernels"
                if others
                else f"the {kind_word(region.kind)} kernel"
            )
            text, why = self.words(f"{which} of {place}", choices, config)
            yield from measured_choice(situation, plan, region, self.kind, choices, self.share, text, why, others)

    def choices(self, situation: Situation, region: Region, config: Config) -> list[Config]:
        """Changes worth measuring."""
        raise NotImplementedError

    def words(self, name: str, choices: list[Config], config: Config) -> tuple[str, str]:
        """The action's one-line form and its reason."""
        raise NotImplementedError


def measured_choice(
    situation: Situation,
    plan: KernelPlan,
    region: Region,
    kind: ActionKind,
    variants: Sequence[Config],
    share: float,
    text: str,
    why: str,
    others: Sequence[Region] = (),
) -> Iterator[MacroAction]:
    """One action that measures several configurations of a kernel; nothing where it was tried, or can bring nothing.

    ``others`` are regions that do the same work, and get what the kernel gets.
    """
    ir = situation.ir
    cost = kernel_cost(ir, region, current_config(ir, region, plan), situation.device)
    saved = share * (cost.us - situation.device.launch_us) * (1 + len(others))
    nodes = tuple(name for each in (region, *others) for name in each.nodes)
    tried = any(step.action.kind is kind and step.action.region == nodes for step in situation.history)
    if tried or not variants or saved < LEAST_US:
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
    """What decides which configuration is best: what is done, over how many rows and columns, and how it is done now."""
    sizes = [axis.size.value(ir.graph.sizes) for axis in (*region.kept, *region.reduced)]
    return form(ir.graph, region.nodes), region.kind, tuple(sizes), tuple(sorted(plan.config.items()))


def _only(names: Sequence[str], items: Iterable[Config], config: Config) -> list[Config]:
    """What each configuration changes among ``names``; without repeats."""
    found: list[Config] = []
    for item in items:
        changes = {name: value for name, value in item.items() if name in names and config.get(name) != value}
        if changes and changes not in found:
            found.append(changes)
    return found


class Tile(_Tuning):
    """Other tile sizes, with the warps and stages that suit them."""

    kind = ActionKind.TILE
    keys = (*TILES, "warps", "stages")
    share = 0.03

    def choices(self, situation: Situation, region: Region, config: Config) -> list[Config]:
        """The first few of the variants that have other tiles, one for each tile; none where all were tried at once."""
        if any(
            s.action.kind is ActionKind.AUTOTUNE and set(region.nodes) <= set(s.action.region)
            for s in situation.history
        ):
            return []
        found: dict[tuple[object, ...], Config] = {}
        for item in variants(situation.ir, region, config):
            tile = tuple(item.get(name) for name in TILES)
            if tile != tuple(config.get(name) for name in TILES):
                found.setdefault(tile, item)
        spread = list(found.values())
        step = max(1, -(-len(spread) // MOST_TILES))
        return _only(self.keys, spread[::step], config)

    def words(self, name: str, choices: list[Config], config: Config) -> tuple[str, str]:
        sizes = " x ".join(str(config[key]) for key in TILES if key in config and key != "loop")
        why = f"A program's tile is {sizes} now; {len(choices)} other tiles are measured, and the fastest is kept."
        return f"retile {name}", why


class Vectorize(_Tuning):
    """Other numbers of warps for the same tile: elements per thread."""

    kind = ActionKind.VECTORIZE
    keys = ("warps",)
    share = 0.02

    def choices(self, situation: Situation, region: Region, config: Config) -> list[Config]:
        """Half and twice as many threads."""
        warps = int(config["warps"])
        return [{"warps": number} for number in (warps // 2, warps * 2) if 1 <= number <= 16]

    def words(self, name: str, choices: list[Config], config: Config) -> tuple[str, str]:
        sizes = [int(config[key]) for key in ("rows", "block", "block_m", "block_n") if key in config]
        elements = 1
        for size in sizes:
            elements *= size
        each = elements / (32 * int(config["warps"]))
        why = (
            f"A thread holds {each:g} elements now; wider vectors need fewer instructions, more threads hide more latency: "
            f"{' and '.join(str(choice['warps']) for choice in choices)} warps are measured."
        )
        return f"change the elements per thread of {name}", why


class Pipeline(_Tuning):
    """Other numbers of stages: how many blocks ahead a loop loads."""

    kind = ActionKind.PIPELINE
    keys = ("stages",)
    share = 0.025

    def has(self, region: Region, config: Mapping[str, object], name: str) -> bool:
        """Stages only matter to a loop over memory."""
        looped = region.kind in (RegionKind.MATMUL, RegionKind.ATTENTION, RegionKind.SCAN)
        return looped or bool(config.get("loop") or config.get("persist") or config.get("split"))

    def choices(self, situation: Situation, region: Region, config: Config) -> list[Config]:
        """One stage fewer, and up to two more where shared memory holds them."""
        if not self.has(region, config, "stages"):
            return []
        stages = int(config["stages"])
        numbers = [number for number in (stages - 1, stages + 1, stages + 2) if 1 <= number <= 6]
        return [
            {"stages": n} for n in numbers if n < stages or stage_bytes(config) * n <= situation.device.shared_bytes
        ]

    def words(self, name: str, choices: list[Config], config: Config) -> tuple[str, str]:
        numbers = " and ".join(str(choice["stages"]) for choice in choices)
        why = f"Loads run {config['stages']} blocks ahead of the arithmetic now; {numbers} are measured."
        return f"pipeline {name}", why


class Reorder(_Tuning):
    """Another order of programs: which tiles run at the same time, and so share the L2 cache."""

    kind = ActionKind.REORDER
    keys = ("group_m", "order")
    share = 0.03

    def has(self, region: Region, config: Mapping[str, object], name: str) -> bool:
        """Products walk tiles in groups of rows; elementwise kernels along rows or columns first."""
        if name == "group_m":
            return region.kind is RegionKind.MATMUL
        return region.kind is RegionKind.MAP and len(region.kept) > 1 and not config.get("persist")

    def check(self, action: MacroAction, changes: Mapping[str, object], config: Mapping[str, object]) -> None:
        """As for all, and the order is one of two."""
        super().check(action, changes, config)
        if config.get("order", "rows") not in ("rows", "columns"):
            raise IllegalAction(f"reorder: programs run along rows or columns first, not {config['order']!r}")

    def choices(self, situation: Situation, region: Region, config: Config) -> list[Config]:
        """Other group sizes, or the other order."""
        if region.kind is RegionKind.MATMUL:
            return [{"group_m": number} for number in (1, 4, 16) if number != config["group_m"]]
        columns = region.kept[-1].size.value(situation.ir.graph.sizes) if region.kept else 1
        if not self.has(region, config, "order") or columns <= int(config["block"]):
            return []
        return [{"order": "rows" if config.get("order") == "columns" else "columns"}]

    def words(self, name: str, choices: list[Config], config: Config) -> tuple[str, str]:
        why = "Programs that run together should read the same operands, so that the L2 cache serves them"
        return f"reorder the programs of {name}", f"{why}; {len(choices)} other orders are measured."


class Autotune(_Tuning):
    """Any of the configuration's values together, measured."""

    kind = ActionKind.AUTOTUNE
    keys = (*TILES, "warps", "stages", "group_m")
    share = 0.10

    def choices(self, situation: Situation, region: Region, config: Config) -> list[Config]:
        """All variants."""
        return _only(self.keys, variants(situation.ir, region, config), config)

    def words(self, name: str, choices: list[Config], config: Config) -> tuple[str, str]:
        why = f"{len(choices)} tile shapes, warp counts and stages are measured on this GPU; the fastest is kept."
        return f"tune {name}", why
