"""A policy that knows nothing: the baseline for learned policies."""

from __future__ import annotations

import random
from collections.abc import Sequence

from mtmc_lsp.core.action import MacroAction
from mtmc_lsp.core.learning.policy import Choice
from mtmc_lsp.core.protocols import State


class RandomPolicy:
    """Weighs actions at random and never stops while actions are left.

    The weights depend on the seed, the version, the number of steps and the action alone: a run can be repeated, and the order
    of the actions does not matter.
    """

    name = "random"

    def __init__(self, seed: int = 0) -> None:
        self._seed = seed

    def choices(self, state: State, actions: Sequence[MacroAction]) -> list[Choice]:
        """The probability of each action, the most probable first, and of STOP, which is 0."""
        prefix = f"{self._seed}/{state.candidate.id}/{len(state.history)}"
        drawn = [(random.Random(f"{prefix}/{action.key}").random() + 1e-9, action) for action in actions]
        drawn.sort(key=lambda item: (-item[0], item[1].key))
        total = sum(weight for weight, _ in drawn)
        return [
            *(Choice(action, weight / total, "chosen at random") for weight, action in drawn),
            Choice(None, 0.0, "no action is left"),
        ]
