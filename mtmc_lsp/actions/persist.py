"""Persist: as many programs as the device holds, each doing one tile (or group of rows) after another.

*Legal* where pieces of work are independent, which is what a region's kept axes are, and the kernel is not split: every piece
is still done once, by the same statements. Statements that no row takes part in move in front of the loop; a kernel never
writes a buffer that it reads, so they give the same values there.
"""

from __future__ import annotations

from collections.abc import Iterable

from mtmc_lsp.actions.base import (
    Config,
    IllegalAction,
    Situation,
    config_of,
    current_config,
    ir_for,
    kind_word,
    lone_kernel_of,
    region_of,
    where,
    whole_numbers,
)
from mtmc_lsp.actions.tuning import measured_choice
from mtmc_lsp.core.action import ActionKind, MacroAction
from mtmc_lsp.core.graph import Graph
from mtmc_lsp.ir.primitives import KernelIR
from mtmc_lsp.ir.regions import Region, RegionKind
from mtmc_lsp.schedule.schedule import KernelPlan, Schedule
from mtmc_lsp.tuning.cost import programs_of

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
        ir = ir_for(graph, schedule)
        region = region_of(ir, plan)
        changes = config_of(action)
        if set(changes) != {"persist"}:
            raise IllegalAction("persist: only the number of programs is to be chosen")
        whole_numbers(action, changes, powers=False)
        config = {**current_config(ir, region, plan), **changes}
        _check(region, config)
        return schedule.with_kernel(KernelPlan(plan.nodes, config, plan.recomputed))

    def propose(self, situation: Situation) -> Iterable[MacroAction]:
        """Where there are many programs; what it brings, only measuring tells."""
        ir, device = situation.ir, situation.device
        for plan, region in situation.lone_kernels() if situation.has_gpu else ():
            config = current_config(ir, region, plan)
            if config.get("persist"):
                continue
            if programs_of(ir, region, config) < LEAST_WAVES * device.sm_count:
                continue
            try:
                _check(region, config)
            except IllegalAction:
                continue
            per = (1, 2) if region.kind is RegionKind.MATMUL else (2, 4, 8)
            variants: list[Config] = [{"persist": device.sm_count * number} for number in per]
            yield from self._choice(situation, ir, plan, region, variants)

    def _choice(
        self,
        situation: Situation,
        ir: KernelIR,
        plan: KernelPlan,
        region: Region,
        variants: list[Config],
    ) -> Iterable[MacroAction]:
        _, place = where(ir, region.nodes)
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
