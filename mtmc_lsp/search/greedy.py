"""The greedy search: every action changes the last accepted version. The fastest path for a good planner, and the default."""

from __future__ import annotations

from collections.abc import Sequence

from mtmc_lsp.core.action import Stop
from mtmc_lsp.core.run import Candidate, Step, StepStatus
from mtmc_lsp.search.loop import Chosen, Search


class GreedySearch(Search):
    """One run for one capture."""

    def _choose(self, steps: Sequence[Step], seconds: float) -> Chosen | Stop:
        if self._has_failed_too_often(steps):
            return Stop("the last steps in a row were not accepted")
        best = self._last_version(steps)
        action = self._components.planner.propose(self._state(best, steps, seconds))
        return action if isinstance(action, Stop) else Chosen(best, action)

    def _last_version(self, steps: Sequence[Step]) -> Candidate:
        versions = (step.candidate for step in reversed(steps) if step.status is StepStatus.ACCEPTED)
        return next((version for version in versions if version is not None), self._root)
