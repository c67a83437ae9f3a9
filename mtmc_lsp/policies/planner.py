"""A planner that proposes the most probable choice of a policy."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

from mtmc_lsp.core.action import MacroAction, Stop
from mtmc_lsp.core.learning.policy import Choice, Policy
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

    def choices(self, state: State) -> list[Choice]:
        """The probability of each untried legal action and of STOP, the most probable first.

        Before the first step, STOP has the probability 0, so that each run tries at least one action.
        """
        actions = self._ranking.ranked(state)
        if not actions:
            return [Choice(None, 1.0, NOTHING_LEFT.reason)]
        choices = self._policy.choices(state, actions)
        return choices if state.history else _without_stop(choices)

    def propose(self, state: State) -> MacroAction | Stop:
        """The most probable action with the policy's reason, or the policy's decision to stop."""
        best = self.choices(state)[0]
        if best.action is None:
            return Stop(best.reason)
        reason = f"The {self._policy.name} policy ({100 * best.probability:.0f} %): {best.reason}."
        return replace(best.action, rationale=f"{best.action.rationale} {reason}".strip())


def _without_stop(choices: Sequence[Choice]) -> list[Choice]:
    """The choices with the probability of STOP shared among the actions; STOP is the last."""
    actions = [choice for choice in choices if choice.action is not None]
    total = math.fsum(choice.probability for choice in actions)
    shared = [
        replace(choice, probability=choice.probability / total if total > 0 else 1 / len(actions)) for choice in actions
    ]
    return [*shared, *(replace(choice, probability=0.0) for choice in choices if choice.action is None)]
