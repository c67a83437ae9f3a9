"""The requests of a training. The worker keeps the model and the optimisers between them."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from mtmc_lsp.process.protocol import Request
from mtmc_lsp.training.lm.parameters import LmParameters


class Phase(Enum):
    """The part of the training that an update belongs to."""

    SUPERVISED = "supervised"
    WARM_UP = "value warm-up"
    PPO = "ppo"


@dataclass(frozen=True)
class CurvePoint:
    """The numbers of one update. None where the phase has no such number, or nothing was validated."""

    update: int
    """From 1."""
    phase: Phase
    seconds: float
    learning_rate: float
    loss: float | None = None
    """Cross-entropy of the supervised start, or PPO's clipped objective."""
    accuracy: float | None = None
    """Share of the supervised batch whose best action was the most probable one."""
    reward: float | None = None
    """Mean of the walks' total rewards."""
    steps: float | None = None
    """Mean length of a walk, STOP included."""
    entropy: float | None = None
    kl: float | None = None
    clipped: float | None = None
    """Share of the steps whose probability ratio was clipped."""
    value_loss: float | None = None
    validation_top1: float | None = None
    """Share of the held-out versions whose best action is the most probable one."""
    validation_reward: float | None = None
    """Mean total reward of walks through held-out trees that take the most probable action."""


@dataclass(frozen=True)
class TrainingStatus:
    """How far a training is."""

    update: int
    """Updates done."""
    updates: int
    """Updates in all."""
    trees: int
    """Trees to train on."""
    held_out: int
    """Trees of held-out families."""
    examples: int
    """Of the supervised start."""
    parameters: int
    """Trained weights of the adapter."""
    device: str
    """``cpu`` or ``cuda``."""
    points: tuple[CurvePoint, ...] = ()
    """The updates of this request."""


@dataclass(frozen=True)
class StartTrainingRequest(Request[TrainingStatus], command="training.lm.start"):
    """Load the model and the trees, and continue from the last checkpoint."""

    folder: str
    device: str
    """``cpu`` or ``cuda``; empty for a GPU if there is one."""
    parameters: LmParameters


@dataclass(frozen=True)
class AdvanceTrainingRequest(Request[TrainingStatus], command="training.lm.advance"):
    """Train for some time, at least one update; then write a checkpoint and the policy."""

    seconds: float
    is_last: bool = False
    """Whether the training ends after it, so that the policy learns how sure it must be to stop."""
