"""Persist: launch as many programs as the device holds; each loops over tiles (or groups of rows).

*Legal* where tiles are independent, as a region's kept axes are, and the kernel is not split: the same statements compute every
tile once. Statements that do not depend on the row move in front of the loop. A kernel never writes a buffer that it reads, so
they give the same values there.
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
"""Share of a kernel's time that starting and draining many short programs costs. Measured on an H200."""
LEAST_WAVES = 4
"""Programs per multiprocessor from which on persistence is tried."""


class Persist:
    """A fixed number of programs."""

    kind = ActionKind.PERSIST

    def apply(self, graph: Graph, schedule: Schedule, action: MacroAction) -> Schedule:
        """The kernel with ``persist`` programs."""
        plan = lone_kernel_of(schedule, action)
        return schedule.with_kernel(changed_plan(ir_for(graph, schedule), plan, action, ["persist"]))

    def propose(self, situation: Situation) -> Iterable[MacroAction]:
        """Kernels with many programs; the gain is measured, not predicted."""
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
            "A few programs per multiprocessor each loop over several tiles. They load shared operands once per "
            f"program and avoid an underfilled last wave. {len(variants)} numbers of programs are measured.",
        )


def _is_persistent(plan: KernelPlan) -> bool:
    return isinstance(plan.config, (TileConfig, MatmulConfig)) and plan.config.persist > 0
