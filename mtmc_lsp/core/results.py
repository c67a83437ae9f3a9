"""Verdicts, timings and compile reports."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from mtmc_lsp.core.errors import FailureKind


class CheckStatus(Enum):
    """Outcome of one check."""

    PASSED = "passed"
    FAILED = "failed"
    SKIPPED = "skipped"


@dataclass(frozen=True)
class Check:
    """One verification check."""

    name: str
    """``values``, ``dtype``, ``inputs-unchanged``, ..."""
    status: CheckStatus
    case: str = ""
    """The test case: ``s0=37, normal, seed 2``."""
    detail: str = ""
    """What the check observed; for a failure, enough to reproduce it."""


MIXED_SHARE, LIBRARY_SHARE = 0.1, 0.9
"""The parts of the arithmetic in the library from which a candidate is called ``mixed`` and ``library``."""


def label_of(library_share: float | None) -> str:
    """``kernel``, ``library`` or ``mixed``, by the part of the arithmetic in the library; empty if that is unknown."""
    if library_share is None:
        return ""
    if library_share < MIXED_SHARE:
        return "kernel"
    return "library" if library_share >= LIBRARY_SHARE else "mixed"


OBSERVED = "observed"
"""Mode of a verdict on edited kernels without a reference: their results were compared, and no error was measured."""


class VerdictStatus(Enum):
    """Outcome of a verification."""

    CORRECT = "correct"
    CORRECT_AT_REDUCED_SIZES = "correct_at_reduced_sizes"
    """Correct in all cases, but the workload's sizes are too large for Triton's interpreter and did not run."""
    INCORRECT = "incorrect"
    """A check failed."""
    COMPILE_ERROR = "compile_error"
    """The candidate does not import or compile."""
    RUNTIME_ERROR = "runtime_error"
    """The candidate raised, or its kernel was not launched."""
    TIMEOUT = "timeout"
    CRASHED = "crashed"
    UNCERTIFIABLE = "uncertifiable"
    """No error was detected, but the workload cannot distinguish correct from incorrect, or nothing could run. See the reason."""


@dataclass(frozen=True)
class Verdict:
    """Result of verifying a candidate against the user's code."""

    status: VerdictStatus
    checks: tuple[Check, ...]
    mode: str
    """``gpu``, ``interpreter`` (no GPU: Triton's interpreter on the CPU, reduced shapes) or ``observed``."""
    error: float = 0.0
    """Largest relative L2 error of the candidate against the float64 oracle, over all cases."""
    reference_error: float = 0.0
    """Relative L2 error of the user's code on the same case."""
    reason: str = ""
    """One sentence; empty if the status is ``correct``."""
    notes: tuple[str, ...] = ()
    """What was reduced or left out: ``shapes reduced to s0=8 for the interpreter``."""
    failure: FailureKind | None = None
    """The kind of failure if the candidate raised an exception or its process failed."""
    library_share: float | None = None
    """The part of the reference's arithmetic that torch's own operations do in the candidate; ``None`` if it was not counted."""

    @property
    def computed_by(self) -> str:
        """What does the arithmetic: ``kernel``, ``library`` (torch's own operations) or ``mixed``; empty if that is unknown."""
        return label_of(self.library_share)

    @property
    def is_out_of_memory(self) -> bool:
        """Whether the candidate ran out of memory."""
        return self.failure is not None and self.failure.is_out_of_memory

    @property
    def is_correct(self) -> bool:
        """Whether the candidate passed verification, at whatever sizes ran."""
        return self.status in (VerdictStatus.CORRECT, VerdictStatus.CORRECT_AT_REDUCED_SIZES)


class Speed(Enum):
    """Result of comparing a candidate's time with that of a baseline."""

    FASTER = "FASTER"
    SAME = "SAME"
    SLOWER = "SLOWER"
    AMBIGUOUS = "AMBIGUOUS"


@dataclass(frozen=True)
class Ratio:
    """A speedup with its 95 % bootstrap interval; above 1 is faster."""

    ratio: float
    low: float
    high: float


@dataclass(frozen=True)
class BaselineTime:
    """Time of a baseline and the candidate's speedup over it."""

    name: str
    """``eager``, ``compile``, ``max-autotune`` (``torch.compile`` in that mode, if enabled), ``previous``, or ``reduce-overhead``
    (``torch.compile`` in that mode, compared with a version that uses a CUDA graph)."""
    median_us: float
    speedup: Ratio | None
    """``None`` if the baseline could not run."""
    speed: Speed | None = None
    """The candidate compared with this baseline, beyond the noise of the A/A control."""
    note: str = ""
    graph_us: float | None = None
    """Median time in a CUDA graph; only for short calls that can be captured."""
    compile_seconds: float | None = None
    """Compile time, not part of any time above; ``None`` if nothing is compiled."""
    peak_bytes: int | None = None
    """As in :class:`Timing`."""


@dataclass(frozen=True)
class Conditions:
    """State of the GPU during a measurement, by NVML. Zero means unknown; then ``notes`` say why."""

    sm_mhz: int = 0
    """Median SM clock."""
    least_sm_mhz: int = 0
    memory_mhz: int = 0
    temperature_c: int = 0
    power_w: float = 0.0
    throttled: tuple[str, ...] = ()
    """Reasons for which the clocks were reduced at some time: ``power cap``, ``thermal slowdown by hardware``, ..."""
    others: tuple[str, ...] = ()
    """Other programs with memory on the GPU."""
    busy: tuple[str, ...] = ()
    """Those of ``others`` that computed on the GPU during the measurement."""
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Timing:
    """Paired, interleaved measurement of a candidate against its baselines on one GPU."""

    median_us: float
    """Median time of the candidate in microseconds."""
    baselines: tuple[BaselineTime, ...]
    best: str
    """Name of the fastest baseline."""
    noise: Ratio
    """A/A control: the candidate compared with itself."""
    samples: int
    method: str
    """Description of the measurement method."""
    roofline: float
    """Achieved fraction of the roofline, 0 to 1."""
    warm_us: float = 0.0
    """Median time with a warm L2 cache."""
    host_us: float = 0.0
    """Median host time per call: the latency that the caller sees for small kernels."""
    graph_us: float | None = None
    """Median time of the candidate in a CUDA graph: excludes launch overhead, which dominates short calls."""
    peak_bytes: int | None = None
    """The most device memory that one call allocates, results included; ``None`` if it was not measured."""
    conditions: Conditions | None = None
    """State of the GPU during the measurement."""
    measured_at: float = 0.0
    """Time of the measurement, in seconds since the epoch."""
    cached: bool = False
    """Whether the result comes from the timing cache (same sources, inputs, GPU, driver and versions)."""
    rows: Timing | None = None
    """The same comparison by rows of calls without a wait between them, where the host bounds these: the time per call. Before a
    single call the GPU is busy, which hides the host's time. ``None`` if it was not measured, or the GPU bounds rows, too."""

    @property
    def spread(self) -> float:
        """The largest relative difference of the candidate from itself, by the A/A control."""
        return max(self.noise.high - 1.0, 1.0 - self.noise.low)

    def baseline(self, name: str) -> BaselineTime | None:
        """The baseline called ``name``, or for ``best`` the fastest one; ``None`` if it was not timed."""
        name = self.best if name == "best" else name
        return next((b for b in self.baselines if b.name == name), None)

    def against(self, name: str) -> Ratio | None:
        """Speedup over the baseline called ``name``; ``None`` if it did not run."""
        baseline = self.baseline(name)
        return baseline.speedup if baseline is not None else None

    def more_bytes(self, name: str) -> int | None:
        """How much more device memory a call allocates at most than the baseline called ``name``; ``None`` if that is unknown."""
        baseline = self.baseline(name)
        other = baseline.peak_bytes if baseline is not None else None
        return self.peak_bytes - other if self.peak_bytes is not None and other is not None else None

    def speed_over(self, name: str) -> Speed | None:
        """The candidate compared with the baseline called ``name``; ``None`` if it did not run."""
        baseline = self.baseline(name)
        return baseline.speed if baseline is not None else None


@dataclass(frozen=True)
class KernelReport:
    """Compiler statistics of one kernel for one architecture. Contains no time."""

    kernel: str
    arch: str
    """``sm_90``, ``gfx942``."""
    registers: int | None = None
    spills: int | None = None
    """Bytes of local memory per thread."""
    shared_bytes: int = 0
    occupancy: float | None = None
    """Resident warps divided by the maximum per SM, 0 to 1."""
    error: str = ""
    """The compiler's message on failure; empty if the kernel compiled."""
    exceeds_shared: bool = False
    """Whether the kernel failed because it needs more shared memory than a block may have."""
    ran_out_of_time: bool = False
    """Whether the kernel failed because it was not compiled within the time limit."""

    @property
    def summary(self) -> str:
        """Description of the known statistics."""
        parts = []
        if self.registers is not None:
            parts += [f"{self.registers} registers", f"{self.spills or 0} bytes spilled"]
        parts.append(f"{self.shared_bytes} bytes shared")
        if self.occupancy is not None:
            parts.append(f"occupancy {self.occupancy:.0%}")
        return ", ".join(parts)


@dataclass(frozen=True)
class CompileReport:
    """Compile results of all kernels of a candidate for all architectures; needs no GPU."""

    kernels: tuple[KernelReport, ...] = ()
    seconds: float = 0.0

    @property
    def ok(self) -> bool:
        """Whether every kernel compiled for every architecture."""
        return all(not kernel.error for kernel in self.kernels)

    @property
    def ran_out_of_time(self) -> bool:
        """Whether a kernel was not compiled within the time limit."""
        return any(kernel.ran_out_of_time for kernel in self.kernels)

    @property
    def exceeds_shared(self) -> bool:
        """Whether kernels failed, and only because they need too much shared memory."""
        failed = [kernel for kernel in self.kernels if kernel.error]
        return bool(failed) and all(kernel.exceeds_shared for kernel in failed)


@dataclass(frozen=True)
class Work:
    """Work of one call as estimated by the cost model, not measured."""

    bytes: float
    """Read from and written to device memory."""
    flops: float
    """FLOPs of matmuls; 0 if there are none."""
