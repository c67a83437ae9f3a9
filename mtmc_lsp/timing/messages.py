"""Requests that time, rank and profile code."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from mtmc_lsp.core.errors import FailureKind
from mtmc_lsp.core.json_codec import Repeated
from mtmc_lsp.core.results import Timing
from mtmc_lsp.core.workload import Capture, Environment
from mtmc_lsp.device.calibration import Calibration
from mtmc_lsp.process.protocol import NoAnswer, Request
from mtmc_lsp.verify.messages import SeparateCandidate

SAMPLING_SECONDS = 2.0
"""How long one timing takes samples."""


@dataclass(frozen=True)
class TimeAnswer:
    """A timing and when it was taken."""

    timing: Timing
    window: tuple[float, float]
    """Start and end of the samples by the monotonic clock, in seconds: the GPU was used by nothing else."""
    waited_seconds: float = 0.0
    """How long the worker waited to use the GPU alone."""


@dataclass(frozen=True)
class TimeRequest(Request[TimeAnswer], command="timing.time"):
    """Time a candidate against eager mode, ``torch.compile`` and the previous version."""

    capture: Repeated[Capture]
    user_source: str | None
    """The user's file at the start of the run; ``None`` reads the file."""
    source: str
    """The file with the candidate."""
    baselines: tuple[str, ...]
    """Modes of ``torch.compile`` to time: ``compile``, ``max-autotune``, ``reduce-overhead``."""
    bound_us: float
    """The roofline's lower bound of one call."""
    least_us: float
    """A time that no correct call can beat on this GPU."""
    previous: str | None = None
    """The file with the version before the candidate."""
    separate: SeparateCandidate | None = None
    """Set if ``source`` is a separate candidate file."""
    seconds: float = SAMPLING_SECONDS
    """Time to spend on samples."""
    ends_when_clear: bool = False
    """Whether to end when it is clear if the candidate is faster than the previous version, or else than eager mode."""


@dataclass(frozen=True)
class PrepareRequest(Request[NoAnswer], command="timing.prepare"):
    """Load versions and call each once, so that their timing, for which the GPU is locked, only takes samples.

    The next request that times or ranks these versions uses them. A version that fails is loaded again there.
    """

    capture: Repeated[Capture]
    user_source: str | None
    """As in :class:`TimeRequest`."""
    sources: tuple[str, ...]
    """The file with each version."""


@dataclass(frozen=True)
class BaselinesRequest(Request[NoAnswer], command="timing.baselines"):
    """Compile the user's code with ``torch.compile`` in advance, so that the first timing does not wait for it."""

    capture: Repeated[Capture]
    user_source: str | None
    """As in :class:`TimeRequest`."""
    baselines: tuple[str, ...]
    """As in :class:`TimeRequest`."""
    inputs: str = ""
    """Path under which another process shares the inputs; empty to create them."""
    gpu: str = ""
    """UUID of the GPU to lock while computing; empty for no lock."""
    lock_folder: str = ""
    """Where the lock files are."""


@dataclass(frozen=True)
class RankAnswer:
    """Median times of the variants."""

    medians_us: tuple[float | None, ...]
    """``None`` for variants that fail or were not timed before the limit."""
    waited_seconds: float = 0.0
    """How long the worker waited to use the GPU alone."""
    alone_seconds: float = 0.0
    """How long it used the GPU alone."""


@dataclass(frozen=True)
class RankRequest(Request[RankAnswer], command="timing.rank"):
    """Rank variants of one version by a few samples each."""

    capture: Repeated[Capture]
    user_source: str | None
    """As in :class:`TimeRequest`."""
    sources: tuple[str, ...]
    """The file with each variant."""
    seconds: float | None = None
    """Time limit; ``None`` for none."""


@dataclass(frozen=True)
class SiblingTime:
    """How one version compares with the version before, on the timed inputs."""

    error: str = ""
    """Why it has no time: it raises, or its results differ; empty if it was timed."""
    kind: FailureKind | None = None
    """The kind of that failure."""
    before_us: float = 0.0
    """Median of the version before, in the same rounds."""
    after_us: float = 0.0
    ratio: float = 0.0
    """Speedup over the version before."""
    ratio_error: float = 0.0
    """Standard error of ``ratio``."""
    timing: Timing | None = None
    """For planners: the time of the version alone, in a CUDA graph too if it is short."""


@dataclass(frozen=True)
class SiblingsAnswer:
    """The times of all versions, in the order of the request."""

    times: tuple[SiblingTime, ...]
    waited_seconds: float = 0.0
    """How long the worker waited to use the GPU alone."""
    alone_seconds: float = 0.0
    """How long it used the GPU alone."""


@dataclass(frozen=True)
class SiblingsRequest(Request[SiblingsAnswer], command="timing.siblings"):
    """Compare several versions of one target with the version that they change, in one lock period."""

    capture: Repeated[Capture]
    user_source: str | None
    """As in :class:`TimeRequest`."""
    previous: str | None
    """The file with the version before; ``None`` for the user's code."""
    sources: tuple[str, ...]
    """The file with each version."""
    groups: tuple[int, ...]
    """For each version the number of its group: of a group of several, only the fastest are sampled often."""
    bound_us: float
    """As in :class:`TimeRequest`."""
    least_us: float
    """As in :class:`TimeRequest`."""


@dataclass(frozen=True)
class RecompilationsAnswer:
    """What other sizes cost under ``torch.compile``."""

    count: int
    seconds: float


@dataclass(frozen=True)
class RecompilationsRequest(Request[RecompilationsAnswer], command="timing.recompilations"):
    """Call the compiled baseline at other sizes, and count how often it compiles again."""

    capture: Repeated[Capture]
    user_source: str | None
    """As in :class:`TimeRequest`."""
    sizes: tuple[Mapping[str, int], ...]
    """Values of the graph's size symbols."""


@dataclass(frozen=True)
class CalibrationRequest(Request[Calibration], command="timing.calibration"):
    """Measure the ceilings of the GPU."""


@dataclass(frozen=True)
class EnvironmentRequest(Request[Environment], command="timing.environment"):
    """Read the versions of the interpreter and its libraries, and the GPU."""


@dataclass(frozen=True)
class OperatorRow:
    """One operator in a profile, per call of the target."""

    name: str
    calls: float
    cpu_us: float
    """Includes the operators that it calls."""
    gpu_us: float
    """Time of the kernels that it launches."""


@dataclass(frozen=True)
class KernelRow:
    """One kernel in a profile, per call of the target."""

    name: str
    calls: float
    us: float


@dataclass(frozen=True)
class ProfileAnswer:
    """A profile by torch's profiler; times are microseconds per call of the target."""

    device: str
    """``cuda`` or ``cpu``."""
    calls: int
    """Number of profiled calls."""
    wall_us: float
    """Median on the host's clock, without the profiler, until the device is done."""
    operators: tuple[OperatorRow, ...]
    kernels: tuple[KernelRow, ...]
    gpu_us: float
    """Time in which at least one kernel runs."""
    gap_us: float
    """Time between the first and the last kernel of a call in which no kernel runs."""


@dataclass(frozen=True)
class ProfileRequest(Request[ProfileAnswer], command="timing.profile"):
    """Profile calls of the target."""

    capture: Repeated[Capture]
    user_source: str | None
    """As in :class:`TimeRequest`."""
    sizes: Mapping[str, int]
    """Values of the graph's size symbols."""
    seconds: float
    """Approximate duration."""
    source: str | None = None
    """The file with a candidate; ``None`` profiles the user's file."""
