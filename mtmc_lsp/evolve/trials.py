"""The interface between an evolution and what tries its versions: here, or elsewhere.

Requests and results are immutable and can be written as JSON, so that a runner may send them to other processes or hosts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from mtmc_lsp.core.device_model import DeviceModel
from mtmc_lsp.core.learning.transitions import Outcome
from mtmc_lsp.core.profile import KernelTime
from mtmc_lsp.core.run import Candidate


class Stage(Enum):
    """How far a version is tried."""

    COMPILE = "compile"
    VERIFY = "verify"
    """Compiled, and verified on few cases."""
    SCORE = "score"
    """Compiled, verified on few cases, and timed on every workload."""


@dataclass(frozen=True)
class TrialRequest:
    """A version to try."""

    parent: Candidate
    """The version to compare it with."""
    candidate: Candidate
    stage: Stage = Stage.SCORE


@dataclass(frozen=True)
class Measured:
    """A version on one workload, compared with its parent."""

    us: float
    """Microseconds a call; measured, or the cost model's estimate."""
    ratio: float
    """Speedup over the parent."""
    error: float = 0.0
    """Standard error of ``ratio``."""


@dataclass(frozen=True)
class TrialResult:
    """What came of a version."""

    outcome: Outcome
    """``SLOWER`` if it is slower than its parent on every workload: then it was not verified."""
    detail: str = ""
    """Why it failed; empty otherwise."""
    workloads: tuple[Measured, ...] = ()
    """One for each workload, if the version is correct and was scored."""
    memory: float = 0.0
    """Estimated bytes that a call allocates; 0 if unknown."""
    launches: int = 0
    compiled: str = ""
    """Registers, spills and shared memory of its kernels, a line each."""
    seconds: float = 0.0


class TrialRunner(Protocol):
    """Tries versions of one target."""

    has_gpu: bool
    """Whether versions are timed. Otherwise times are estimates."""

    def device(self) -> DeviceModel:
        """The device that is planned and compiled for."""

    def baseline(self, root: Candidate) -> tuple[float, ...]:
        """Microseconds a call of the user's code on every workload."""

    def resources(self, candidate: Candidate) -> tuple[float, int]:
        """Estimated bytes that a call allocates, and its number of launches; 0 if unknown."""

    def run(self, requests: Sequence[TrialRequest]) -> list[TrialResult]:
        """Try versions, in the order of the requests.

        Raises:
            MtmcError: nothing can be tried any more.
        """

    def kernel_times(self, candidate: Candidate) -> tuple[KernelTime, ...]:
        """The kernels of one call with their times, the slowest first; none without a GPU."""

    def close(self) -> None:
        """End what runs."""
