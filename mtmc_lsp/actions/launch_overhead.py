"""What fewer launches bring, where the host's time to launch is what a call takes."""

from __future__ import annotations

from functools import cached_property

from mtmc_lsp.actions.base import ActionHandler, IllegalAction, Situation
from mtmc_lsp.core.action import ActionKind, MacroAction
from mtmc_lsp.core.protocols import CannotCode
from mtmc_lsp.core.run import StepStatus
from mtmc_lsp.ir.regions import VIEWS
from mtmc_lsp.rewrites import ir_of
from mtmc_lsp.rewrites.graph_editing import CannotRewrite
from mtmc_lsp.schedule.launch_units import launches
from mtmc_lsp.schedule.schedule import Schedule

MOST_LAUNCHES = 8
"""A call of more is replayed as one CUDA graph first: one step brings what many would."""
FEWER = (ActionKind.FUSE, ActionKind.SIDE_BY_SIDE)
"""Actions that make one launch of several."""


class Launching:
    """The time that the device waits for the host, by launch, in a version that was timed."""

    def __init__(self, situation: Situation, rules: dict[ActionKind, ActionHandler]) -> None:
        """Take the version at hand; ``rules`` carry out actions."""
        self._situation = situation
        self._rules = rules

    @cached_property
    def _count(self) -> int:
        return self._count_of(self._situation.schedule)

    @cached_property
    def each_us(self) -> float:
        """Microseconds of a launch that nothing else hides: a call's time beyond that of its kernels by themselves."""
        timing = self._situation.timing
        if timing is None or timing.graph_us is None or self._situation.schedule.cuda_graph:
            return 0.0
        for step in reversed(self._situation.history):
            if step.status is StepStatus.ACCEPTED:
                break
            if step.action.kind in FEWER:
                # The host's times vary too much for such a step to show: from a graph, the device's tell.
                return 0.0
        return max(0.0, timing.median_us - timing.graph_us) / self._count if self._count <= MOST_LAUNCHES else 0.0

    def saved_us(self, action: MacroAction) -> float:
        """What the launches bring that ``action`` saves, beside what it saves on the device."""
        if action.kind not in FEWER or not self.each_us:
            return 0.0
        try:
            after = self._rules[action.kind].apply(self._situation.graph, self._situation.schedule, action)
            return self.each_us * max(0, self._count - self._count_of(after))
        except (IllegalAction, CannotCode, CannotRewrite):
            return 0.0

    def _count_of(self, schedule: Schedule) -> int:
        """Launches of kernels and torch calls; views are none."""
        ir = ir_of(self._situation.graph, schedule)
        named = ir.graph.named
        return sum(
            launch[0].plan is not None or named[launch[0].nodes[0]].op.split(".")[1] not in VIEWS
            for launch in launches(ir, schedule)
        )
