"""The roofline planner as a policy: probabilities from predicted savings, in the planner's order."""

from __future__ import annotations

from collections.abc import Sequence

from mtmc_lsp.core.action import MacroAction
from mtmc_lsp.core.learning.policy import Choice
from mtmc_lsp.core.protocols import State
from mtmc_lsp.planners.roofline import NOTHING_LEFT
from mtmc_lsp.policies.phrases import saving_phrase
from mtmc_lsp.policies.ranker import softmax

TEMPERATURE = 0.5
"""Temperature of the softmax over savings, each divided by the largest saving: an action without saving gets exp(-2) times the
weight of the best one."""


class RooflinePolicy:
    """Weighs actions by predicted savings.

    The planner's order also counts launch overhead, so an action may come before one with a larger saving on the device. Its
    weight is then that of the larger saving: probabilities never contradict the order.
    """

    name = "roofline"

    def choices(self, state: State, actions: Sequence[MacroAction]) -> list[Choice]:
        """The probability of each action and of STOP, in the planner's order; STOP is the last."""
        savings: list[float] = []
        for action in reversed(actions):
            savings.append(max([action.expected.saved_us, *savings[-1:]]))
        savings.reverse()
        scale = max((abs(saving) for saving in savings), default=0.0) or 1.0
        # An action that is proposed although no saving is predicted is still before STOP.
        stop = min([0.0, *savings])
        weights = softmax([saving / scale / TEMPERATURE for saving in (*savings, stop)])
        listed = [
            Choice(action, weight, saving_phrase(action)) for action, weight in zip(actions, weights, strict=False)
        ]
        return [*listed, Choice(None, weights[-1], NOTHING_LEFT.reason)]
