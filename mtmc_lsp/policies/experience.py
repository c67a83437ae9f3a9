"""How often each kind of action gained in similar states of the training data, for the reasons that users read.

States are similar if the same resource limits the call and a step was or was not accepted before.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from mtmc_lsp.core.action import ActionKind

LAUNCH_SHARE = 0.5
"""Share of launches in the predicted time from which a call is limited by them."""
Experience = Mapping[str, tuple[int, int]]
"""Gains and tries of each kind of action in each class of states, by :func:`experience_key`."""


def limit_of(features: Mapping[str, float]) -> str:
    """What limits the present version by the cost model: ``launches``, ``memory`` or ``arithmetic``."""
    if features["schedule.launch_share"] >= LAUNCH_SHARE:
        return "launches"
    is_memory = features["schedule.memory_share"] >= features["schedule.arithmetic_share"]
    return "memory" if is_memory else "arithmetic"


def experience_key(kind: ActionKind, features: Mapping[str, float]) -> str:
    """The class of a state for one kind of action: ``fuse, memory, first``."""
    stage = "later" if features["history.faster"] > 0 else "first"
    return f"{kind.value}, {limit_of(features)}, {stage}"


class ExperienceCounter:
    """Counts gains and tries."""

    def __init__(self) -> None:
        self._tries: Counter[str] = Counter()
        self._gains: Counter[str] = Counter()

    def add(self, key: str, *, gained: bool) -> None:
        """Count one action that was tried."""
        self._tries[key] += 1
        self._gains[key] += gained

    def counts(self) -> dict[str, tuple[int, int]]:
        """Gains and tries by class."""
        return {key: (self._gains[key], tries) for key, tries in sorted(self._tries.items())}
