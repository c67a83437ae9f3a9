"""The gain of fewer launches, where a call is bound by the host's launch overhead."""

from __future__ import annotations

from functools import cached_property

from mtmc_lsp.actions.base import ActionHandler, IllegalAction, Situation
from mtmc_lsp.core.action import ActionKind, MacroAction
from mtmc_lsp.core.protocols import CannotCode
from mtmc_lsp.core.run import StepStatus
from mtmc_lsp.rewrites import ir_of
from mtmc_lsp.rewrites.graph_editing import CannotRewrite
from mtmc_lsp.schedule.launch_units import launch_count
from mtmc_lsp.schedule.schedule import Schedule

MOST_LAUNCHES = 8
"""Calls with more launches are first replayed as one CUDA graph: one step gains as much as many fusions."""
FEWER = (ActionKind.FUSE, ActionKind.SIDE_BY_SIDE)
"""Actions that merge several launches."""


class LaunchOverhead:
    """Host time per launch that the device waits for, from the timing of the present version."""

    def __init__(self, situation: Situation, handlers: dict[ActionKind, ActionHandler]) -> None:
        """``handlers`` apply actions."""
        self._situation = situation
        self._handlers = handlers

    @cached_property
    def _count(self) -> int:
        return self._count_of(self._situation.schedule)

    @cached_property
    def each_us(self) -> float:
        """Microseconds of overhead per launch: a call's time minus that of its kernels in a CUDA graph."""
        timing = self._situation.timing
        if timing is None or timing.graph_us is None or self._situation.schedule.cuda_graph:
            return 0.0
        for step in reversed(self._situation.history):
            if step.status is StepStatus.ACCEPTED:
                break
            if step.action.kind in FEWER:
                # Host times vary too much to show such a step; the device times of a graph show it.
                return 0.0
        return max(0.0, timing.median_us - timing.graph_us) / self._count if self._count <= MOST_LAUNCHES else 0.0

    def saved_us(self, action: MacroAction) -> float:
        """Microseconds that ``action`` saves by fewer launches, in addition to its savings on the device."""
        if action.kind not in FEWER or not self.each_us:
            return 0.0
        try:
            after = self._handlers[action.kind].apply(self._situation.graph, self._situation.schedule, action)
            return self.each_us * max(0, self._count - self._count_of(after))
        except (IllegalAction, CannotCode, CannotRewrite):
            return 0.0

    def _count_of(self, schedule: Schedule) -> int:
        return launch_count(ir_of(self._situation.graph, schedule), schedule)
