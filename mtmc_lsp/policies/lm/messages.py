"""The request that scores actions."""

from __future__ import annotations

from dataclasses import dataclass

from mtmc_lsp.process.protocol import Request


@dataclass(frozen=True)
class Scores:
    """The probabilities of actions, and what they cost."""

    probabilities: tuple[float, ...]
    """Of the actions in the order of the request; they sum to one."""
    seconds: float
    """Time of the scoring, without loading the model."""
    load_seconds: float
    """Time to load the model; 0 if it was loaded before."""
    state_tokens: int
    reused_tokens: int
    """Tokens of the state that were computed for the request before."""
    action_tokens: int
    """Of all actions together."""


@dataclass(frozen=True)
class ScoreRequest(Request[Scores], command="policies.lm.score"):
    """Score action texts in a state."""

    folder: str
    """Of the policy. The worker keeps the last one loaded."""
    device: str
    """``cpu`` or ``cuda``."""
    state: str
    actions: tuple[str, ...]
