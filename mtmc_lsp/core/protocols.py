"""Interfaces between the main components. Each can be tested with a fake on the other side."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from mtmc_lsp.core.action import MacroAction, Stop
from mtmc_lsp.core.device_model import DeviceModel
from mtmc_lsp.core.profile import KernelTime
from mtmc_lsp.core.results import BaselineTime, Check, CompileReport, Timing, Verdict
from mtmc_lsp.core.run import Candidate, Step
from mtmc_lsp.core.workload import Capture


@dataclass(frozen=True)
class State:
    """Input of a planner."""

    capture: Capture
    candidate: Candidate
    """The last accepted version."""
    history: tuple[Step, ...]
    device: DeviceModel
    has_gpu: bool
    """Whether steps are timed. Without a GPU, planners rely on predictions."""
    kernel_times: Callable[[], tuple[KernelTime, ...]] = tuple
    """Profiles the kernels of ``candidate`` on the GPU, slowest first. Takes seconds, so only planners that need it call it.
    Empty if profiling is not possible."""
    deadline: float | None = None
    """Monotonic time at which the planner must return its best result so far; None for no limit."""


class CannotCode(Exception):
    """The coder cannot express this action. The message tells the user why."""


class Planner(Protocol):
    """Chooses the next optimisation."""

    def propose(self, state: State) -> MacroAction | Stop:
        """The next action, or ``Stop`` if nothing is worth trying. Never an action whose key is in the history."""


class Coder(Protocol):
    """Writes the code for one action."""

    def start(self, capture: Capture, source: str) -> Candidate:
        """Initial candidate of a run: the user's file without generated code."""

    def write(self, capture: Capture, candidate: Candidate, action: MacroAction) -> Candidate:
        """Apply ``action`` to ``candidate``. Deterministic: the same arguments give the same candidate byte for byte.

        Raises:
            CannotCode: this coder cannot express the action.
        """


@runtime_checkable
class Sampler(Protocol):
    """A coder that can write one step in several ways. The best one is used."""

    def write_several(self, capture: Capture, candidate: Candidate, action: MacroAction) -> list[Candidate]:
        """One or more different versions of ``candidate`` with ``action`` applied.

        Raises:
            CannotCode: there is no version.
        """


@runtime_checkable
class Repairer(Protocol):
    """A coder that can correct its code after a failure."""

    def repair(self, capture: Capture, candidate: Candidate, failed: Candidate, failure: str) -> Candidate:
        """Try the action of ``failed`` again, starting from the last accepted version ``candidate``.

        Raises:
            CannotCode: there are no attempts left.
        """


@runtime_checkable
class KernelProfiler(Protocol):
    """A measurer that can also profile the kernels of a version."""

    def kernel_times(self, candidate: Candidate) -> tuple[KernelTime, ...]:
        """The kernels of one call, the slowest first; none without a GPU."""


@runtime_checkable
class SharedReference(Protocol):
    """A measurer that computes the expected results of the user's code once, for all versions that it verifies."""

    @property
    def waited_seconds(self) -> float:
        """How long the verifications until now have waited for these results."""


@runtime_checkable
class LargeTensorVerifier(Protocol):
    """A measurer that can also verify a version on tensors with more elements than 32-bit offsets can address."""

    def verify_int32_offsets(self, candidate: Candidate) -> Check:
        """Verify an accepted version on such tensors. The check is skipped, with a reason, if that is not possible."""


@runtime_checkable
class BaselineTimer(Protocol):
    """A measurer that compiles baselines in the background, and can wait for them."""

    def time_with_baselines(self, candidate: Candidate, previous: Candidate | None, wait: float) -> Timing | None:
        """Like :meth:`Measurer.time`, with every baseline that is compiled within ``wait`` seconds."""

    def untimed_baselines(self) -> tuple[BaselineTime, ...]:
        """The baselines that the run could have timed, each with a note that says why it has no time."""

    def recompilations(self) -> tuple[int, float]:
        """How often ``torch.compile`` compiles again for the other sizes that are verified, and the seconds that takes."""


@runtime_checkable
class ParallelMeasurer(Protocol):
    """A measurer that can try several versions at the same time."""

    @property
    def spare(self) -> int:
        """How many further trials can begin now."""

    def try_ahead(self, candidate: Candidate, previous: Candidate, *, verifies: bool) -> None:
        """Begin to compile, verify and time a version. :meth:`Measurer.compile` and the other methods wait for its results.

        Args:
            previous: the version that it changes.
            verifies: whether it is verified, too.
        """


class Measurer(Protocol):
    """Verifies, compiles and times candidates of one capture."""

    @property
    def verifies_beside(self) -> bool:
        """Whether :meth:`verify` may run in another thread, beside the other methods."""

    def device(self) -> DeviceModel:
        """Performance limits of the device that is measured on or compiled for."""

    def verify(self, candidate: Candidate, is_wanted: Callable[[], bool] = lambda: True) -> Verdict:
        """Verify that the candidate computes the same results as the user's code.

        Args:
            is_wanted: called between the cases; the verification ends when it returns false.

        Raises:
            WorkerFailed: of kind ``CANCELLED`` if the verification is no longer wanted.
        """

    def compile(self, candidate: Candidate) -> CompileReport:
        """Compile each kernel for each configured architecture."""

    def time(self, candidate: Candidate, previous: Candidate | None) -> Timing | None:
        """Paired timing against eager, the previous good version, and each baseline that is ready; ``None`` without a GPU.

        Raises:
            ResultsDiffer: the results differ from those of the user's code on the inputs that are timed.
        """

    def close(self) -> None:
        """Stop the worker processes."""
