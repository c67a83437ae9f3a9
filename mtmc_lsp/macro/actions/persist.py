"""Persist: as many programs as the device holds, each doing one tile (or group of rows) after another.

*Legal* where pieces of work are independent, which is what a region's kept axes are, and the kernel is not split: every piece
is still done once, by the same statements. Statements that no row takes part in move in front of the loop; a kernel never
writes a buffer that it reads, so they give the same values there.
"""

from __future__ import annotations

from collections.abc import Iterable

from mtmc_lsp.core.action import ActionKind, MacroAction
from mtmc_lsp.core.graph import Graph
from mtmc_lsp.macro.actions.base import (
    Config,
    IllegalAction,
    Situation,
    config_of,
    current_config,
    kind_word,
    lone_kernel_of,
    program_for,
    region_of,
    where,
    whole_numbers,
)
from mtmc_lsp.macro.actions.tuning import measured_choice
from mtmc_lsp.macro.cost import programs_of
from mtmc_lsp.macro.prims import Program
from mtmc_lsp.macro.regions import Region, RegionKind
from mtmc_lsp.macro.schedule import KernelPlan, Schedule

SHARE = 0.03
"""Part of a kernel's time that launching and draining many short programs costs."""
LEAST_WAVES = 4
"""Programs per multiprocessor from which on it is worth trying."""


class Persist:
    """A fixed number of programs."""

    kind = ActionKind.PERSIST

    def apply(self, graph: Graph, schedule: Schedule, action: MacroAction) -> Schedule:
        """The kernel with ``persist`` programs."""
        plan = lone_kernel_of(schedule, action)
        program = program_for(graph, schedule)
        region = region_of(program, plan)
        changes = config_of(action)
        if set(changes) != {"persist"}:
            raise IllegalAction("persist: only the number of programs is to be chosen")
        whole_numbers(action, changes, powers=False)
        config = {**current_config(program, region, plan), **changes}
        _check(region, config)
        return schedule.with_kernel(KernelPlan(plan.nodes, config, plan.recomputed))

    def propose(self, situation: Situation) -> Iterable[MacroAction]:
        """Where there are many programs; what it brings, only measuring tells."""
        program, device = situation.program, situation.device
        for plan, region in situation.lone_kernels() if situation.measured else ():
            config = current_config(program, region, plan)
            if config.get("persist"):
                continue
            if programs_of(program, region, config) < LEAST_WAVES * device.sm_count:
                continue
            try:
                _check(region, config)
            except IllegalAction:
                continue
            per = (1, 2) if region.kind is RegionKind.MATMUL else (2, 4, 8)
            variants: list[Config] = [{"persist": device.sm_count * number} for number in per]
            yield from self._choice(situation, program, plan, region, variants)

    def _choice(
        self,
        situation: Situation,
        program: Program,
        plan: KernelPlan,
        region: Region,
        variants: list[Config],
    ) -> Iterable[MacroAction]:
        _, place = where(program, region.nodes)
        yield from measured_choice(
            situation,
            plan,
            region,
            self.kind,
            variants,
            SHARE,
            f"make the {kind_word(region.kind)} kernel of {place} persistent",
            "A few programs per multiprocessor do one piece of work after another, so what all pieces share is read once "
            f"per program and no wave of programs is left half empty; {len(variants)} numbers of programs are measured.",
        )


def _check(region: Region, config: Config) -> None:
    if region.kind is RegionKind.ATTENTION:
        raise IllegalAction("persist: attention's programs differ in length; the device shares them out better")
    if int(config.get("split", 1)) > 1 or int(config.get("split_k", 1)) > 1:
        raise IllegalAction("persist: a split kernel has few pieces for many programs already")
    if config.get("stream_k"):
        raise IllegalAction("persist: programs that share the last tiles do one piece of work after another already")
    if not region.kept:
        raise IllegalAction("persist: there are no rows to do one after another")
    if config.get("order") == "columns":
        raise IllegalAction("persist: the programs run along the columns first")
