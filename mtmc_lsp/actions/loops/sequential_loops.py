"""What actions on loops share: they change the kernel of a loop whose iterations run one after another."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable

from mtmc_lsp.actions.base import Situation, changed_plan, ir_for, lone_kernel_of
from mtmc_lsp.core.action import ActionKind, MacroAction
from mtmc_lsp.core.graph import Graph
from mtmc_lsp.ir.regions import Region
from mtmc_lsp.schedule.configs import LoopConfig
from mtmc_lsp.schedule.schedule import KernelPlan, Schedule

LEAST_GAIN = 0.2
"""Share of the kernel's time that such an action must be predicted to save: its latencies are estimates."""


class SequentialLoopAction(ABC):
    """Computes several iterations at once in the kernel of a loop."""

    kind: ActionKind
    choices: tuple[str, ...]
    """Choices of the configuration that the action sets."""

    def apply(self, graph: Graph, schedule: Schedule, action: MacroAction) -> Schedule:
        """The loop's kernel with the configuration of the action."""
        plan = lone_kernel_of(schedule, action)
        return schedule.with_kernel(changed_plan(ir_for(graph, schedule), plan, action, self.choices))

    def propose(self, situation: Situation) -> Iterable[MacroAction]:
        """Loops that are predicted to take less time than with their iterations one after another."""
        for plan, region in situation.lone_kernels():
            config = plan.config
            if isinstance(config, LoopConfig) and not config.is_scan and not config.is_chunked:
                yield from self.proposals(situation, plan, region, config)

    @abstractmethod
    def proposals(
        self, situation: Situation, plan: KernelPlan, region: Region, present: LoopConfig
    ) -> Iterable[MacroAction]:
        """The actions on a loop's kernel, whose present configuration runs one iteration after another."""
