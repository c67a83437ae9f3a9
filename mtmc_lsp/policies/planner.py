"""A planner that proposes the most probable choice of a policy."""

from __future__ import annotations

from dataclasses import replace
from typing import Protocol

from mtmc_lsp.core.action import MacroAction, Stop
from mtmc_lsp.core.learning.policy import Policy
from mtmc_lsp.core.protocols import State
from mtmc_lsp.planners.roofline import NOTHING_LEFT


class Ranking(Protocol):
    """Lists legal actions; the roofline planner does."""

    def ranked(self, state: State) -> list[MacroAction]:
        """All untried legal actions worth trying, best first."""


class PolicyPlanner:
    """Proposes what a policy finds most probable among the legal actions."""

    def __init__(self, ranking: Ranking, policy: Policy) -> None:
        """Choose among the actions of ``ranking`` by ``policy``."""
        self._ranking = ranking
        self._policy = policy

    def propose(self, state: State) -> MacroAction | Stop:
        """The most probable action with the policy's reason, or the policy's decision to stop.

        A policy cannot stop before the first step, so that each run tries at least one action.
        """
        actions = self._ranking.ranked(state)
        if not actions:
            return NOTHING_LEFT
        choices = self._policy.choices(state, actions)
        if not state.history:
            choices = [choice for choice in choices if choice.action is not None]
        best = choices[0]
        if best.action is None:
            return Stop(best.reason)
        reason = f"The {self._policy.name} policy ({100 * best.probability:.0f} %): {best.reason}."
        return replace(best.action, rationale=f"{best.action.rationale} {reason}".strip())
