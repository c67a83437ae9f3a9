"""Probabilities of actions from a planner: its policy's if it has one, else from the savings that it predicts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from mtmc_lsp.core.action import MacroAction, Stop
from mtmc_lsp.core.learning.policy import Choice
from mtmc_lsp.core.protocols import Planner, State

SHARPNESS = 3.0
"""The best action is e^3, some 20 times, as probable as one that is predicted to save nothing.

The cost model ranks actions well and is often wrong by a factor, so actions of half the saving must stay possible.
"""
PROPOSED = 0.5
"""The probability of the one action that a planner proposes without weighing others. The rest is for its next proposals."""


@runtime_checkable
class WeighingPlanner(Protocol):
    """A planner with a policy."""

    def choices(self, state: State) -> list[Choice]:
        """The probability of each untried legal action and of STOP, the most probable first."""


@runtime_checkable
class RankingPlanner(Protocol):
    """A planner that orders all legal actions."""

    def propose(self, state: State) -> MacroAction | Stop:
        """The best untried action."""

    def ranked(self, state: State) -> list[MacroAction]:
        """All untried legal actions worth trying, best first."""


def choices_of(planner: Planner, state: State) -> list[Choice]:
    """The probabilities of actions and STOP in a state, the most probable first. A planner without any proposes one action."""
    if isinstance(planner, WeighingPlanner):
        return planner.choices(state)
    actions = planner.ranked(state) if isinstance(planner, RankingPlanner) else []
    if actions:
        return by_saving(actions)
    proposed = planner.propose(state)
    if isinstance(proposed, Stop):
        return [Choice(None, 1.0, proposed.reason)]
    return [Choice(proposed, PROPOSED, proposed.rationale)]


def by_saving(actions: Sequence[MacroAction]) -> list[Choice]:
    """A softmax of the predicted savings that keeps the planner's order. STOP is left to the planner: it has no weight."""
    largest = max(action.expected.saved_us for action in actions)
    shares = [max(0.0, action.expected.saved_us) / largest if largest > 0 else 0.0 for action in actions]
    # A planner also puts an action first for other reasons than its saving, such as that others depend on it.
    weights = [math.exp(SHARPNESS * max(shares[number:])) for number in range(len(shares))]
    total = sum(weights)
    return [
        Choice(action, weight / total, f"predicted to save {action.expected.saved_us:.1f} us")
        for action, weight in zip(actions, weights, strict=True)
    ]
