"""The history of a run in the terms of training data: the outcome and the speedup of each step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mtmc_lsp.core.action import ActionKind
from mtmc_lsp.core.errors import FailureKind
from mtmc_lsp.core.learning.transitions import Outcome
from mtmc_lsp.core.results import Ratio, Speed, Timing
from mtmc_lsp.core.run import Step, StepStatus

FAILURES = (Outcome.NOT_LEGAL, Outcome.COMPILE_ERROR, Outcome.WRONG, Outcome.OUT_OF_TIME)
"""Outcomes without a correct version."""
LIMITS = (FailureKind.TIMEOUT, FailureKind.DEADLINE)


@dataclass(frozen=True)
class TriedAction:
    """One step of a history, as far as features use it."""

    kind: ActionKind
    region: frozenset[str]
    outcome: Outcome
    ratio: float | None
    """Speedup over the version that the action changed; None if it was not timed."""
    is_accepted: bool

    @property
    def has_failed(self) -> bool:
        """Whether there is no correct version."""
        return self.outcome in FAILURES


def tried_actions(history: Sequence[Step]) -> list[TriedAction]:
    """The history, oldest first."""
    return [
        TriedAction(
            step.action.kind,
            frozenset(step.action.region),
            outcome_of(step),
            _ratio_of(step),
            step.status is StepStatus.ACCEPTED,
        )
        for step in history
    ]


def outcome_of(step: Step) -> Outcome:
    """The furthest stage that a step reached."""
    if step.failure in LIMITS or (step.failure is not None and step.failure.is_out_of_memory):
        return Outcome.OUT_OF_TIME
    if step.report is not None and not step.report.ok:
        return Outcome.COMPILE_ERROR
    if step.verdict is not None and not step.verdict.is_correct:
        return Outcome.WRONG
    if step.timing is not None:
        return _speed_of(step.timing)
    if step.candidate is None:
        return Outcome.NOT_LEGAL
    if step.status is StepStatus.FAILED:
        return Outcome.COMPILE_ERROR if step.failure is FailureKind.COMPILE_ERROR else Outcome.WRONG
    return Outcome.CORRECT


def present_us(history: Sequence[Step]) -> float | None:
    """Median microseconds of the present version; None if it was not timed."""
    times = (s.timing.median_us for s in reversed(history) if s.status is StepStatus.ACCEPTED and s.timing is not None)
    return next(times, None)


def _speed_of(timing: Timing) -> Outcome:
    """Faster or slower than the version before, beyond noise."""
    baseline = timing.baseline(_before(timing))
    if baseline is None or baseline.speedup is None:
        return Outcome.CORRECT
    if baseline.speed is not None:
        return Outcome.FASTER if baseline.speed is Speed.FASTER else Outcome.SLOWER
    return Outcome.FASTER if baseline.speedup.low > max(1.0, timing.noise.high) else Outcome.SLOWER


def _ratio_of(step: Step) -> float | None:
    ratio: Ratio | None = step.timing.against(_before(step.timing)) if step.timing is not None else None
    return ratio.ratio if ratio is not None else None


def _before(timing: Timing) -> str:
    """Name of the version that the step changed: the user's code if no version was accepted before."""
    return "previous" if timing.against("previous") is not None else "eager"
