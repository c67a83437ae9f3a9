"""Messages to a service on a worker: the target that it opens, its requests and their answers."""

from __future__ import annotations

from dataclasses import dataclass

from mtmc_lsp.core.device_model import DeviceModel
from mtmc_lsp.core.profile import KernelTime
from mtmc_lsp.core.results import BaselineTime, Check, CompileReport, Timing, Verdict
from mtmc_lsp.core.run import Candidate
from mtmc_lsp.core.settings import Settings
from mtmc_lsp.core.workload import Capture
from mtmc_lsp.process.protocol import Request
from mtmc_lsp.process.sandbox import Isolation


@dataclass(frozen=True)
class Opening:
    """A target, as a service opens it."""

    path: str
    target: str
    python: str
    settings: Settings
    needs_sandbox: bool = False
    fresh: bool = False
    captures: tuple[Capture, ...] = ()
    """The graphs that another service captured; empty before."""
    cores: tuple[int, ...] = ()
    """The CPU cores that it may use; empty for all."""


@dataclass(frozen=True)
class Captured:
    """The graphs of the target, or of its regions."""

    captures: tuple[Capture, ...]


@dataclass(frozen=True)
class CaptureRequest(Request[Captured], command="remote.capture"):
    """Capture the target."""


@dataclass(frozen=True)
class IsolationRequest(Request[Isolation], command="remote.isolation"):
    """The level of the sandbox."""

    index: int
    """Index of the region, here and in all further requests."""


@dataclass(frozen=True)
class DeviceRequest(Request[DeviceModel], command="remote.device"):
    """The device of the worker."""

    index: int


@dataclass(frozen=True)
class CompileRequest(Request[CompileReport], command="remote.compile"):
    """Compile a version."""

    index: int
    candidate: Candidate


@dataclass(frozen=True)
class VerifyRequest(Request[Verdict], command="remote.verify"):
    """Verify a version."""

    index: int
    candidate: Candidate


@dataclass(frozen=True)
class Timed:
    """A timing; None without a GPU."""

    timing: Timing | None


@dataclass(frozen=True)
class TimeRequest(Request[Timed], command="remote.time"):
    """Time a version for a short time, against the version before."""

    index: int
    candidate: Candidate
    previous: Candidate | None


@dataclass(frozen=True)
class TimeAllRequest(Request[Timed], command="remote.time-all"):
    """Time a version against all baselines."""

    index: int
    candidate: Candidate
    previous: Candidate | None
    wait: float | None


@dataclass(frozen=True)
class Tried:
    """The stages of a trial, up to the first that failed."""

    report: CompileReport | None = None
    verdict: Verdict | None = None
    timing: Timing | None = None
    error: dict[str, object] | None = None
    """The error of the stage after these, as JSON data."""


@dataclass(frozen=True)
class TryRequest(Request[Tried], command="remote.try"):
    """Compile a version, verify it or time it."""

    index: int
    candidate: Candidate
    previous: Candidate | None
    verifies: bool
    """Whether it is verified."""
    times: bool
    """Whether it is timed."""


@dataclass(frozen=True)
class Ranked:
    """Configurations that were compiled and timed in turn on one GPU."""

    reports: tuple[CompileReport, ...]
    medians: tuple[float | None, ...]


@dataclass(frozen=True)
class RankRequest(Request[Ranked], command="remote.rank"):
    """Compile configurations, and time those that compile."""

    index: int
    candidates: tuple[Candidate, ...]


@dataclass(frozen=True)
class KernelTimes:
    """The kernels of one call."""

    times: tuple[KernelTime, ...]


@dataclass(frozen=True)
class KernelTimesRequest(Request[KernelTimes], command="remote.kernel-times"):
    """Profile the kernels of a version."""

    index: int
    candidate: Candidate


@dataclass(frozen=True)
class OffsetsRequest(Request[Check], command="remote.int32-offsets"):
    """Verify a version on very large tensors."""

    index: int
    candidate: Candidate


@dataclass(frozen=True)
class Baselines:
    """Baselines with the reasons why they have no time."""

    baselines: tuple[BaselineTime, ...]


@dataclass(frozen=True)
class UntimedRequest(Request[Baselines], command="remote.untimed-baselines"):
    """The baselines that could not be timed."""

    index: int


@dataclass(frozen=True)
class Recompilations:
    """How often ``torch.compile`` compiles again, and how long that takes."""

    count: int
    seconds: float


@dataclass(frozen=True)
class RecompilationsRequest(Request[Recompilations], command="remote.recompilations"):
    """Count the compilations for the other sizes that are verified."""

    index: int
