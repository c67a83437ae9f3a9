"""What the trial of a version gave, and the interface of what tries it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from mtmc_lsp.core.device_model import DeviceModel
from mtmc_lsp.core.learning.transitions import Outcome
from mtmc_lsp.core.results import CompileReport, Timing, Verdict
from mtmc_lsp.core.run import Candidate

MIN_GAIN = 0.01
"""Relative gain below which a version is not called faster: equal versions differ by about this much."""
ERRORS = 2.0
"""Standard errors by which a ratio must exceed that."""
GOOD = (Outcome.CORRECT, Outcome.SLOWER, Outcome.FASTER)
"""Outcomes of versions that further actions may change."""


@dataclass(frozen=True)
class Judgement:
    """The outcome of one version, compared with the version before."""

    outcome: Outcome
    detail: str = ""
    before_us: float | None = None
    after_us: float | None = None
    ratio: float | None = None
    ratio_error: float | None = None
    timing: Timing | None = None
    """For the planner: with the time in a CUDA graph if the call is short."""
    verdict: Verdict | None = None


def timed_outcome(ratio: float, error: float) -> Outcome:
    """Whether a version is faster than the version before beyond noise."""
    return Outcome.FASTER if ratio - ERRORS * error > 1.0 + MIN_GAIN else Outcome.SLOWER


class SiblingMeasurer(Protocol):
    """Compiles, verifies and times versions that change the same version."""

    has_gpu: bool
    """Whether versions are timed."""
    most_at_once: int
    """How many actions to measure together: all of a version where that saves time, few where none waits for another."""

    def device(self) -> DeviceModel:
        """The device that is planned and compiled for."""

    def compile(self, candidates: Sequence[Candidate]) -> list[CompileReport]:
        """Compile all kernels of several versions at once."""

    def judge(self, before: Candidate, groups: Sequence[Sequence[Candidate]]) -> list[list[Judgement]]:
        """The outcomes of versions that compile.

        Args:
            before: the version that all of them change.
            groups: versions of one action each; one version, or the configurations of an action that measures several.

        Raises:
            MtmcError: nothing can be measured any more.
        """
