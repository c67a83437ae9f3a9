"""The interface of a policy: how likely it is that each legal action is the best next one (Macro Thinking).

A policy orders and weighs actions; it never makes an action legal and never keeps a version. Search methods use the probabilities
as priors.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from mtmc_lsp.core.action import MacroAction
from mtmc_lsp.core.protocols import State


@dataclass(frozen=True)
class Choice:
    """One possible decision in a state."""

    action: MacroAction | None
    """``None`` for STOP: no further action is worth its time."""
    probability: float
    """The choices of a state sum to one."""
    reason: str
    """What decided, for the user: the features of a ranker, the state of a language model, the estimate of the cost model."""

    @property
    def key(self) -> str:
        """The action's key; ``stop`` for STOP."""
        return self.action.key if self.action is not None else "stop"


class Policy(Protocol):
    """Weighs the legal actions of a state."""

    name: str
    """As in the setting ``planner``: ``roofline``, ``ranker``, ``lm``."""

    def choices(self, state: State, actions: Sequence[MacroAction]) -> list[Choice]:
        """The probability of each action and of STOP, the most probable first.

        Args:
            actions: the legal, untried actions of the state, as the roofline planner orders them; at least one.
        """
