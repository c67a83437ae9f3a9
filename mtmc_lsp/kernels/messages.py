"""The request that observes the kernels of a launcher under Triton's interpreter."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

from mtmc_lsp.compile.messages import CompileRequest
from mtmc_lsp.core.results import CompileReport
from mtmc_lsp.core.run import KernelLaunch
from mtmc_lsp.core.workload import Workload
from mtmc_lsp.process.protocol import Request
from mtmc_lsp.timing.messages import SAMPLING_SECONDS, TimeAnswer

MOST_STEPS = 2000
"""Memory operations of one call, after which it ends: the interpreter takes about half a millisecond for each."""


NOT_RUN = "the case does not run on the GPU"
"""Why a case was left out where the GPU observes a version."""
VARIES = "the results of the file as it stands vary from run to run on the GPU, so nothing can be compared"
NOT_COMPARED = (NOT_RUN, VARIES)


class FaultKind(Enum):
    """What a kernel or its launcher does wrong."""

    READ_OUTSIDE = "read-outside"
    """An element outside the tensor is read."""
    WRITE_OUTSIDE = "write-outside"
    """An element outside the tensor is written."""
    UNDEFINED_LANES = "undefined-lanes"
    """The result depends on lanes that a mask leaves undefined, because the load has no ``other``."""
    UNINITIALISED = "uninitialised"
    """Memory is read that nothing wrote."""
    NOT_WRITTEN = "not-written"
    """Elements of the result are never written."""
    RACE = "race"
    """Several program instances access one element, and the result depends on their order."""
    WRONG_VALUES = "wrong-values"
    """The result differs from the reference's."""
    RAISES = "raises"
    """The call raises an exception."""


@dataclass(frozen=True)
class Fault:
    """One fault that a call showed."""

    kind: FaultKind
    line: int
    """1-based line in the file; 0 if no line causes it alone."""
    kernel: str = ""
    detail: str = ""
    """One clause for people."""

    @property
    def place_and_detail(self) -> str:
        """The clause with the line and the kernel, as far as they are known: ``line 12, add_kernel: it reads ...``."""
        place = ", ".join([*([f"line {self.line}"] if self.line else []), *([self.kernel] if self.kernel else [])])
        return f"{place}: {self.detail}" if place else self.detail


@dataclass(frozen=True)
class TraceCase:
    """One set of inputs."""

    sizes: Mapping[str, int]
    distribution: str = "normal"
    seed: int = 0
    has_distinct_integers: bool = False
    """Whether the elements of each integer tensor differ, as far as its range allows: equal indices make programs store to one
    element, which callers of many kernels rule out."""

    @property
    def text(self) -> str:
        """A description with the names of the sizes."""
        parts = [f"{name}={value}" for name, value in self.sizes.items()]
        parts += [] if self.distribution == "normal" else [self.distribution]
        return ", ".join([*parts, *(["distinct integers"] if self.has_distinct_integers else [])])


@dataclass(frozen=True)
class Access:
    """The accesses by one load, store or atomic operation of a kernel in one call of the launcher."""

    kernel: str
    line: int
    operation: str
    """``load``, ``store`` or ``atomic``."""
    tensor: str
    """The kernel's parameter."""
    pattern: str
    """``contiguous``, ``strided`` (a fixed distance of several elements), ``gathered`` (no fixed distance), ``gathered rows``
    (contiguous along one axis), ``broadcast`` (all lanes access one element) or ``scalar``."""
    is_masked: bool
    elements: int
    """Active lanes of all program instances."""
    bytes: int
    tensor_bytes: int = 0
    """Size of the tensor's storage; 0 if no tensor was recognised."""


@dataclass(frozen=True)
class LaunchWork:
    """The work of all launches of one kernel in one call of the launcher."""

    launch: KernelLaunch
    grid: tuple[int, ...]
    programs: int
    """Program instances of the whole grid."""
    ran: int
    """Program instances that ran."""
    operations: float
    """Floating-point operations of all program instances, estimated from those that ran."""
    numbers: Mapping[str, int] = field(default_factory=dict)
    """Integer arguments of the last launch by parameter."""


@dataclass(frozen=True)
class CaseTrace:
    """What one call showed."""

    case: TraceCase
    faults: tuple[Fault, ...] = ()
    refusal: str = ""
    """Why nothing was observed: the launcher itself raises an exception for these inputs, or the call takes too long."""
    accesses: tuple[Access, ...] = ()
    launches: tuple[LaunchWork, ...] = ()
    steps: int = 0
    """Loads, stores and atomic operations of all program instances."""

    @property
    def is_sound(self) -> bool:
        """Whether the call showed no fault."""
        return not self.faults


@dataclass(frozen=True)
class TraceAnswer:
    """What the calls showed."""

    cases: tuple[CaseTrace, ...]
    problem: str = ""
    """Why the file could not be loaded; empty if it could."""
    compile_seconds: float = 0.0
    """Time to compile its kernels one after the other, as far as that was measured."""


@dataclass(frozen=True)
class TraceRequest(Request[TraceAnswer], command="kernels.trace"):
    """Call a launcher under the interpreter, and observe each memory access of its kernels."""

    workload: Workload
    """Of the launcher."""
    source: str
    """The file's text."""
    cases: tuple[TraceCase, ...]
    reference: Workload | None = None
    """Of the function with the expected results, in the text ``original``."""
    original: str = ""
    """The text whose results are expected where there is no reference; empty compares with nothing."""
    most_programs: int = 0
    """Limit for the programs of each grid that run; their work is extrapolated. 0 means no limit."""
    most_steps: int = MOST_STEPS
    """Limit for the memory operations of one call."""
    compares_faulty: bool = False
    """Whether results are also compared where a call shows faults: then those of the original that are defined must stay."""


class Configs(Enum):
    """Which configurations of a version's autotuners run."""

    FIRST = "first"
    """The first one, which the kernel had before, as a rule."""
    OTHERS = "others"
    """Those that the file as it stands does not have, without the first one."""


@dataclass(frozen=True)
class KernelCheckRequest(Request[TraceAnswer], command="kernels.check"):
    """Run a version on the GPU, and compare its results with those of the file as it stands."""

    workload: Workload
    """Of the launcher."""
    original: str
    """The file as it stands."""
    source: str
    """The file with the version; the same text notes the launches."""
    cases: tuple[TraceCase, ...]
    configs: Configs = Configs.FIRST
    has_zero_indices: bool = False
    """Whether new integer tensors are zero until they are written, for tests that use them as indices; otherwise they are the
    largest integer."""


@dataclass(frozen=True)
class ProgramAnswer:
    """What a program printed."""

    output: str
    problem: str = ""
    """The exception that ended it; empty if none did."""


@dataclass(frozen=True)
class ProgramRequest(Request[ProgramAnswer], command="kernels.program"):
    """Run a file as a program, in a process that runs nothing else."""

    path: str
    tunes: bool = True
    """Whether autotuners choose among their configurations; otherwise the first one runs."""


class CallInputs(Enum):
    """What describes the inputs of a recorded call."""

    NORMAL = "normal"
    """Shapes and dtypes; floats are normal."""
    RANGES = "ranges"
    """The ranges of the recorded values, too: others raise an exception, or give NaN."""
    VALUES = "values"
    """Only the recorded values: a positive definite matrix, for example, or a kind that no directive describes."""


@dataclass(frozen=True)
class SuiteCall:
    """A call of a function by the test of its file."""

    qualname: str
    inputs: CallInputs
    record: str
    """The call as ``mtmc record`` stores it, as JSON text."""
    values: tuple[str, ...]
    """Python expressions of its positional arguments; empty if they have none."""


@dataclass(frozen=True)
class SuiteRecordAnswer:
    """The calls of a test, in their order."""

    calls: tuple[SuiteCall, ...]
    problem: str = ""
    """The exception that ended the test; empty if none did."""


@dataclass(frozen=True)
class SuiteRecordRequest(Request[SuiteRecordAnswer], command="kernels.record_suite"):
    """Run the test of a file on the CPU, and describe the calls of the file's functions. Its process runs nothing else."""

    path: str
    """A file that does not call the test when it is imported."""
    test: str


@dataclass(frozen=True)
class SuiteTestAnswer:
    """How the results of a test with a delivered file compare."""

    runs: bool
    equal: bool | None
    """Whether they are those of the original; None if these vary with the seed, or the original fails."""
    detail: str = ""


@dataclass(frozen=True)
class SuiteTestRequest(Request[SuiteTestAnswer], command="kernels.test_suite"):
    """Run the test of a file with the original's functions and with the delivered ones. Its process runs nothing else."""

    original: str
    """Path of a file that does not call the test when it is imported."""
    delivered: str
    test: str


ROW_METHOD = "CUDA events around rows of calls, contenders interleaved in random order, medians per call"
"""How calls that the host bounds are timed besides single calls."""


@dataclass(frozen=True)
class KernelTimeRequest(Request[TimeAnswer], command="kernels.time"):
    """Time a version of a file's kernels against the file as it stands, and against the version before."""

    workload: Workload
    """Of the launcher."""
    original: str
    """The file as it stands."""
    source: str
    """The file with the version."""
    previous: str
    """The file with the version before; empty for none."""
    bound_us: float
    """The roofline's lower bound of one call."""
    least_us: float
    """A shorter time, in microseconds, is a measurement error."""
    seconds: float = SAMPLING_SECONDS
    """Time to spend on samples."""


@dataclass(frozen=True)
class KernelCompileRequest(Request[CompileReport], command="kernels.compile"):
    """Cross-compile kernels of a file, whose launchers may name a GPU that this machine lacks."""

    request: CompileRequest
