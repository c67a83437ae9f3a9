"""Persist: as many programs as the device holds, each doing one tile (or group of rows) after another.

*Legal* where pieces of work are independent, which is what a region's kept axes are, and the kernel is not split: every piece
is still done once, by the same statements. Statements that no row takes part in move in front of the loop; a kernel never
writes a buffer that it reads, so they give the same values there.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from mtmc_lsp.actions.base import Situation, changed_plan, ir_for, lone_kernel_of, where
from mtmc_lsp.actions.tuning import measured_choice
from mtmc_lsp.core.action import ActionKind, MacroAction
from mtmc_lsp.core.graph import Graph
from mtmc_lsp.ir.primitives import KernelIR
from mtmc_lsp.ir.regions import Region, RegionKind
from mtmc_lsp.schedule.configs import IllegalConfig, MatmulConfig, TileConfig
from mtmc_lsp.schedule.legality import kind_word, reconfigured
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
        return schedule.with_kernel(changed_plan(ir_for(graph, schedule), plan, action, ["persist"]))

    def propose(self, situation: Situation) -> Iterable[MacroAction]:
        """Where there are many programs; what it brings, only measuring tells."""
        ir, device = situation.ir, situation.device
        for plan, region in situation.lone_kernels() if situation.has_gpu else ():
            if programs_of(ir, region, plan.config) < LEAST_WAVES * device.sm_count or _is_persistent(plan):
                continue
            per = (1, 2) if region.kind is RegionKind.MATMUL else (2, 4, 8)
            variants = [{"persist": device.sm_count * number} for number in per]
            try:
                reconfigured(ir, region, plan, variants[0])
            except IllegalConfig:
                continue
            yield from self._choice(situation, ir, plan, region, variants)

    def _choice(
        self,
        situation: Situation,
        ir: KernelIR,
        plan: KernelPlan,
        region: Region,
        variants: Sequence[Mapping[str, object]],
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


def _is_persistent(plan: KernelPlan) -> bool:
    return isinstance(plan.config, (TileConfig, MatmulConfig)) and plan.config.persist > 0
