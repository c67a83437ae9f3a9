"""The narrow joints between the parts; each can be tested with a fake on the other side."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from mtmc_lsp.core.action import MacroAction
from mtmc_lsp.core.device_model import DeviceModel
from mtmc_lsp.core.profile import KernelTime
from mtmc_lsp.core.results import Check, CompileReport, Timing, Verdict
from mtmc_lsp.core.run import Candidate, Step
from mtmc_lsp.core.workload import Capture


@dataclass(frozen=True)
class State:
    """All that a planner looks at."""

    capture: Capture
    candidate: Candidate
    """The last good version."""
    history: tuple[Step, ...]
    device: DeviceModel
    has_gpu: bool
    """Whether steps are timed; without a GPU only predictions guide."""
    kernel_times: Callable[[], tuple[KernelTime, ...]] = tuple
    """Has the GPU watched for the kernels of ``candidate``, the slowest first; called only by those who read them, as it takes
    seconds. Gives none where that is not possible."""
    deadline: float | None = None
    """Of the monotonic clock, when a planner ends with what it has found so far; None where it may take its time."""


class CannotCode(Exception):
    """The coder cannot express this action; the message says why, for people."""


class Planner(Protocol):
    """Decides what to optimise next."""

    def propose(self, state: State) -> MacroAction | None:
        """The next action, or ``None`` when nothing is worth trying; never one whose key is in the history."""


class Coder(Protocol):
    """Writes one action."""

    def start(self, capture: Capture, source: str) -> Candidate:
        """The root of a run: the user's own file, nothing generated."""

    def write(self, capture: Capture, candidate: Candidate, action: MacroAction) -> Candidate:
        """``candidate`` with ``action`` applied; the same arguments give the same candidate byte for byte.

        Raises:
            CannotCode: this coder cannot.
        """


@runtime_checkable
class Sampler(Protocol):
    """A coder that may write one step in several ways, of which the best is kept."""

    def write_several(self, capture: Capture, candidate: Candidate, action: MacroAction) -> list[Candidate]:
        """Different versions of ``candidate`` with ``action`` applied, one at least.

        Raises:
            CannotCode: there is none.
        """


@runtime_checkable
class Repairer(Protocol):
    """A coder that can mend what it wrote once it is told what is wrong."""

    def repair(self, capture: Capture, candidate: Candidate, failed: Candidate, failure: str) -> Candidate:
        """Another try at the action of ``failed``, from the last good version ``candidate``.

        Raises:
            CannotCode: it has no further try.
        """


@runtime_checkable
class Watcher(Protocol):
    """A measurer that also sees which kernels a version runs."""

    def kernel_times(self, candidate: Candidate) -> tuple[KernelTime, ...]:
        """The kernels of one call, the slowest first; none without a GPU."""


@runtime_checkable
class FarVerifier(Protocol):
    """A measurer that can also try a version on tensors of more elements than 32 bits count."""

    def verify_far(self, candidate: Candidate) -> Check:
        """Whether a version that was verified holds there too; skipped, with the reason, where that cannot be seen."""


class Measurer(Protocol):
    """Checks and times candidates of one capture."""

    def device(self) -> DeviceModel:
        """The ceilings of the device that is measured on (or compiled for)."""

    def verify(self, candidate: Candidate) -> Verdict:
        """Whether the candidate computes what the user's own code computes."""

    def compile(self, candidate: Candidate) -> CompileReport:
        """What the compiler makes of each kernel, for each architecture asked for."""

    def time(self, candidate: Candidate, previous: Candidate | None) -> Timing | None:
        """Paired timing against eager, ``torch.compile`` and the previous good version; ``None`` without a GPU."""

    def close(self) -> None:
        """End the worker processes."""
