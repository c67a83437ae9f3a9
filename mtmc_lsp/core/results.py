"""Verdicts, timings and compile reports: what measurement may claim (DESIGN section 7)."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class CheckStatus(Enum):
    """Outcome of one check."""

    PASSED = "passed"
    FAILED = "failed"
    SKIPPED = "skipped"


@dataclass(frozen=True)
class Check:
    """One thing that was looked at."""

    name: str
    """``values``, ``dtype``, ``inputs-unchanged``, ..."""
    status: CheckStatus
    case: str = ""
    """The case in words: ``s0=37, normal, seed 2``."""
    detail: str = ""
    """What was seen; for a failure enough to reproduce it."""


class VerdictStatus(Enum):
    """Outcome of a verification."""

    CORRECT = "correct"
    INCORRECT = "incorrect"
    """A check failed."""
    COMPILE_ERROR = "compile_error"
    """The candidate does not import or compile."""
    RUNTIME_ERROR = "runtime_error"
    """The candidate raised, or did not launch its kernel."""
    TIMEOUT = "timeout"
    CRASHED = "crashed"
    UNCERTIFIABLE = "uncertifiable"
    """No fault was found, but the workload cannot tell right from wrong, or nothing could be run; the reason says which."""


@dataclass(frozen=True)
class Verdict:
    """Result of verifying a candidate against the user's own code."""

    status: VerdictStatus
    checks: tuple[Check, ...]
    mode: str
    """``gpu`` or ``interpreter`` (no GPU: Triton's interpreter on the CPU, reduced shapes)."""
    error: float = 0.0
    """Largest relative L2 error of the candidate against the float64 oracle, over the cases."""
    reference_error: float = 0.0
    """The user's own code's relative L2 error on that same case."""
    reason: str = ""
    """One sentence, where the status is not ``correct``."""
    notes: tuple[str, ...] = ()
    """What was reduced or left out: ``shapes reduced to s0=8 for the interpreter``."""

    @property
    def is_correct(self) -> bool:
        """Whether the candidate may be kept."""
        return self.status is VerdictStatus.CORRECT


class Speed(Enum):
    """Verdict of a timing."""

    FASTER = "FASTER"
    SAME = "SAME"
    SLOWER = "SLOWER"
    AMBIGUOUS = "AMBIGUOUS"


@dataclass(frozen=True)
class Ratio:
    """A speedup with its bootstrap 95 % interval; above 1 is faster."""

    ratio: float
    low: float
    high: float


@dataclass(frozen=True)
class BaselineTime:
    """A baseline and how the candidate compares with it."""

    name: str
    """``eager``, ``compile``, ``max-autotune`` (``torch.compile`` in that mode, where it was asked for), ``reduce-overhead`` (in
    that mode, beside a version that replays a CUDA graph) or ``previous``."""
    median_us: float
    speedup: Ratio | None
    """``None`` where the baseline could not be run."""
    note: str = ""
    graph_us: float | None = None
    """Median replayed from a CUDA graph; only for short calls that can be captured."""
    compile_seconds: float | None = None
    """How long it took to compile, which is in no time above; ``None`` where nothing is compiled."""


@dataclass(frozen=True)
class Conditions:
    """How the GPU was while something was timed, by NVML; zeros where it is not known, and ``notes`` say why."""

    sm_mhz: int = 0
    """Median clock of the multiprocessors."""
    least_sm_mhz: int = 0
    memory_mhz: int = 0
    temperature_c: int = 0
    power_w: float = 0.0
    throttled: tuple[str, ...] = ()
    """Why the clocks were held down, at some moment: ``power cap``, ``thermal slowdown by hardware``, ..."""
    others: tuple[str, ...] = ()
    """Other programs that held the GPU."""
    busy: tuple[str, ...] = ()
    """Those of them that computed on it meanwhile."""
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Timing:
    """Paired, interleaved measurement of a candidate against its baselines on one GPU."""

    median_us: float
    """The candidate's own median time, microseconds."""
    baselines: tuple[BaselineTime, ...]
    best: str
    """Name of the fastest baseline."""
    speed: Speed
    """Against the best baseline."""
    noise: Ratio
    """The A/A control: the candidate against itself."""
    samples: int
    method: str
    """How it was measured, in words."""
    roofline: float
    """Fraction of the roofline reached, 0 to 1."""
    warm_us: float = 0.0
    """Median with a warm L2."""
    host_us: float = 0.0
    """Median host wall time per call, for small kernels what the user feels."""
    graph_us: float | None = None
    """The candidate's median replayed from a CUDA graph: without the cost of launching, which dominates short calls."""
    conditions: Conditions | None = None
    """How the GPU was meanwhile."""
    measured_at: float = 0.0
    """When it was measured, in seconds since the epoch."""
    cached: bool = False
    """Whether it was measured before, on the same sources, inputs, GPU, driver and versions."""

    def against(self, name: str) -> Ratio | None:
        """The speedup over the baseline called ``name``, if it ran."""
        return next((b.speedup for b in self.baselines if b.name == name), None)


@dataclass(frozen=True)
class KernelReport:
    """What the compiler says of one kernel, for one architecture. No time."""

    kernel: str
    arch: str
    """``sm_90``, ``gfx942``."""
    registers: int | None = None
    spills: int | None = None
    """Bytes of local memory per thread."""
    shared_bytes: int = 0
    occupancy: float | None = None
    """Resident warps over the most an SM holds, 0 to 1."""
    error: str = ""
    """The compiler's message where it failed; empty when it compiled."""

    @property
    def facts(self) -> str:
        """In words, what is known for its architecture."""
        facts = []
        if self.registers is not None:
            facts += [f"{self.registers} registers", f"{self.spills or 0} bytes spilled"]
        facts.append(f"{self.shared_bytes} bytes shared")
        if self.occupancy is not None:
            facts.append(f"occupancy {self.occupancy:.0%}")
        return ", ".join(facts)


@dataclass(frozen=True)
class CompileReport:
    """Cross-compilation of every kernel of a candidate; needs no GPU."""

    kernels: tuple[KernelReport, ...] = ()
    seconds: float = 0.0

    @property
    def ok(self) -> bool:
        """Whether every kernel compiled for every architecture."""
        return all(not kernel.error for kernel in self.kernels)


@dataclass(frozen=True)
class Work:
    """What one call does, as the cost model estimates it: never counted on a device."""

    bytes: float
    """Read from and written to the device's memory."""
    flops: float
    """Operations of matrix products; 0 where there are none."""
