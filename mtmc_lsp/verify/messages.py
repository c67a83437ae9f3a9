"""Requests of the verification: to the reference process, which also judges, and to the candidate process."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from mtmc_lsp.core.errors import FailureKind
from mtmc_lsp.core.json_codec import Repeated
from mtmc_lsp.core.results import Check
from mtmc_lsp.core.workload import Capture, Target, Workload
from mtmc_lsp.process.protocol import NoAnswer, Request
from mtmc_lsp.verify.cases import Case
from mtmc_lsp.verify.error_limits import ElementCount, Measurement
from mtmc_lsp.verify.use.uses import Use

STORED, STORED_AFTER = "stored", "stored in inputs"
"""Keys of masks, by result and by changed input: what a sample of programs stored."""
NO_ARGUMENTS = "[[], {}]"
"""Constructor arguments: none."""


@dataclass(frozen=True)
class SeparateCandidate:
    """A candidate in its own file instead of the user's."""

    target: Target
    init: str
    """The reference's constructor arguments, as text of Python literals: positional ones, and ones by name."""


@dataclass(frozen=True)
class CandidateSource:
    """How to load a candidate."""

    text: str
    """The file with the candidate."""
    separate: SeparateCandidate | None = None
    """Set if the file is not a version of the user's file."""


@dataclass(frozen=True)
class CaseRequest:
    """What all requests about one case share."""

    capture: Repeated[Capture]
    user_source: str | None
    """The user's file at the start of the run; ``None`` reads the file."""
    case: Case
    inputs: str
    """The file with the inputs, and the key under which they are shared."""
    is_first: bool = False
    """Whether the case is the workload itself."""
    init: str = ""
    """Constructor arguments that replace those of ``get_init_inputs``."""
    shares_memory: bool = False
    """Whether large tensors go from process to process in GPU memory instead of files."""

    @property
    def call(self) -> Capture:
        """The capture with the case's values of run-time numbers."""
        return self.capture.with_numbers(self.case.numbers) if self.case.numbers else self.capture


@dataclass(frozen=True)
class ConstructorAnswer:
    """The reference's constructor arguments."""

    init: str
    """Text of Python literals: a list of positional ones, and a dictionary of those by name."""


@dataclass(frozen=True)
class ConstructorRequest(Request[ConstructorAnswer], command="verify.constructor"):
    """Call ``get_init_inputs`` of the user's file."""

    capture: Repeated[Capture]
    user_source: str | None


@dataclass(frozen=True)
class ReferenceAnswer:
    """The state of a case after its reference was computed."""

    has_oracle: bool
    """Whether the float64 oracle fitted into memory; otherwise results are compared with the reference's only."""
    is_large: bool
    """Whether the inputs stay in GPU memory until :class:`ShareInputsRequest`."""
    operations: float = 0.0
    """The arithmetic operations of the user's code, if they were counted."""


@dataclass(frozen=True)
class ReferenceRequest(Request[ReferenceAnswer], command="verify.reference"):
    """Create the inputs of a case, and run the user's code and its float64 oracle on them."""

    data: CaseRequest
    expected: str
    """The file for the results, which the candidate process cannot read."""
    counts_operations: bool = False
    """Whether a further call counts the arithmetic operations."""
    defers_oracle: bool = False
    """Whether to leave out the oracle, until results differ from the reference's or :class:`OracleRequest`."""
    shares_inputs: bool = False
    """Whether large inputs are shared at once, as by :class:`ShareInputsRequest`."""


@dataclass(frozen=True)
class OracleAnswer:
    """The state of a case after its oracle was computed."""

    has_oracle: bool
    """As in :class:`ReferenceAnswer`."""


@dataclass(frozen=True)
class OracleRequest(Request[OracleAnswer], command="verify.oracle"):
    """Compute the float64 oracle of a case that was left out, unless it is not in memory."""

    data: CaseRequest
    expected: str


@dataclass(frozen=True)
class ShareInputsRequest(Request[NoAnswer], command="verify.share_inputs"):
    """Share the large inputs of a case with another process, until the case is judged or :class:`UnshareInputsRequest`."""

    data: CaseRequest
    path: str
    """The file through which the other process opens the inputs."""


@dataclass(frozen=True)
class UnshareInputsRequest(Request[NoAnswer], command="verify.unshare_inputs"):
    """Free what :class:`ShareInputsRequest` shared."""

    path: str


class Surroundings(Enum):
    """Where a candidate runs. Its results must be the same everywhere."""

    VERIFICATION = "verification"
    """A worker process whose new memory holds NaN."""
    EARLY = "early"
    """With clocks that jump between calls, and random numbers that are often extreme; the first one is small."""
    LATE = "late"
    """The same, but the first random number is large."""
    PROGRAM = "program"
    """As in a user's program: its stack, modules, arguments, environment, memory and threads."""
    PROGRAM_ON_GPU = "program on a GPU"
    """The same, and the interpreter runs the candidate's text unchanged, with names of a GPU."""


class GridOrder(Enum):
    """The order in which the interpreter runs the programs of a launch. A GPU has none, so results must not depend on it."""

    USUAL = "usual"
    """By their index."""
    REVERSED = "reversed"
    SHUFFLED = "shuffled"
    INTERLEAVED = "interleaved"
    """Each program pauses before each of its stores, while the others continue; only in small grids."""


@dataclass(frozen=True)
class CallPlan:
    """The calls of a candidate on one case. All of them use the same module instance, as a user's program does."""

    changes_contents: bool = False
    """Whether a first call sees the same tensors with other contents: results that are kept by address then show."""
    repeats: int = 0
    """Calls on equal inputs after the judged call."""
    repeat_seconds: float = 3600.0
    """Time after which no further repeat starts, once :data:`LEAST_REPEATS` are done."""
    disables_kernels: bool = False
    """Whether a last call runs with kernel launches that do nothing: its results must differ."""
    counts_library: bool = False
    """Whether a further call counts the arithmetic of torch's own operations, and reads of tensors' contents in Python."""
    moves_counts: bool = False
    """Whether a further call finds the counts that the candidate keeps as after many calls: its results must be the same."""
    keeps_results: bool = False
    """Whether the results of all calls stay in memory, are compared again at the end, and are then written to."""
    adds_instance: bool = False
    """Whether a second instance with other parameters is called in between, or before all other calls in other surroundings.
    Then the first one, and a further one with the same parameters, must give the same results."""
    surroundings: Surroundings = Surroundings.VERIFICATION
    """Where the process runs the calls; it must be a new one unless this is the default."""
    is_sanitized: bool = False
    """Whether the process runs under ``compute-sanitizer``."""
    order: GridOrder = GridOrder.USUAL
    """In which order the interpreter runs the programs of all launches."""
    sample_seconds: float = 0.0
    """If not 0, the interpreter runs a sample of the programs of each launch that takes long, for this processor time."""
    whole_seconds: float = 0.0
    """Processor time that all programs of a launch may take instead."""
    must_compare: bool = False
    """Whether all programs run if the results of a sample cannot be compared."""


@dataclass(frozen=True)
class CandidateAnswer:
    """What the candidate process observed. The results are in its scratch folder."""

    status: str
    """``ran``, ``incorrect``, ``compile_error`` or ``runtime_error``."""
    reason: str = ""
    failure: FailureKind = FailureKind.EXCEPTION
    is_refusal: bool = False
    """Whether the candidate raises the exception itself, by a statement in its file."""
    fault: str = ""
    """Where a kernel accesses memory wrongly, which its results need not show; empty if it does not."""
    launches: int = 0
    """Kernel launches of the judged call."""
    all_launches: int = 0
    """Kernel launches of all calls."""
    differing: tuple[int, ...] | None = None
    """Numbers of the results that differ from call to call; ``None`` without repeats."""
    uses_kernels: bool = True
    """Whether the results change if kernel launches do nothing."""
    unused_kernels: tuple[str, ...] = ()
    """Names of kernels without which the results are the same, if the candidate launches several."""
    threads: int = 0
    """Threads that the candidate started and that ran on after a call."""
    other_threads: int = 0
    """Threads other than the caller's that launched kernels."""
    refusal: str = ""
    """Why the guard refuses the judged call, as a clause; empty if a kernel ran or there is no guard."""
    counts: tuple[str, ...] = ()
    """Names of counts that change the results when they are as after many calls."""
    library_operations: float | None = None
    """The arithmetic operations of torch in a call; ``None`` if they were not counted."""
    host_reads: int = 0
    """How often a call read contents of tensors in Python, if operations were counted."""
    reads: tuple[str, ...] = ()
    """Files about its process that the candidate opened."""
    programs: tuple[tuple[str, int, int], ...] = ()
    """Of a call with samples, for each launch: the kernel's name, how many programs ran, and how many there are."""
    uncompared: str = ""
    """Why what a sample of programs stored cannot be compared; empty if it can."""
    program_seconds: float = 0.0
    """Processor time of the programs of a call with samples."""
    needs_all_programs: bool = False
    """Whether all programs ran because the results of a sample cannot be compared."""
    unread: str = ""
    """Which elements of an argument no program loads, if nothing can be compared; empty if the programs may load all."""
    waiting: tuple[str, ...] = ()
    """Names of kernels whose programs may wait for each other."""
    streams: str | None = None
    """Which launches no synchronisation of streams orders, as a clause; empty if there are none, ``None`` if not observed."""
    interference: str | None = None
    """How calls disturb each other's results, as a clause; empty if they do not, ``None`` if no results were kept."""


@dataclass(frozen=True)
class CandidateRequest(Request[CandidateAnswer], command="verify.candidate"):
    """Run a candidate on the inputs of a case."""

    data: CaseRequest
    candidate: CandidateSource
    calls: CallPlan = CallPlan()


@dataclass(frozen=True)
class UseScript:
    """The steps that work for the reference. Its results stay in its process."""

    uses: tuple[Use, ...]
    skipped: str = ""
    """Why there are no steps."""


@dataclass(frozen=True)
class UseReferenceRequest(Request[UseScript], command="verify.use_reference"):
    """Use the reference as a user's program does, and write the tensors that a candidate needs for the same steps."""

    data: CaseRequest
    expected: str
    """The file for the results, which the candidate process cannot read."""


@dataclass(frozen=True)
class UseRequest(Request[CandidateAnswer], command="verify.use_candidate"):
    """Use a candidate in the same steps."""

    data: CaseRequest
    candidate: CandidateSource
    uses: tuple[Use, ...]


@dataclass(frozen=True)
class UseChecks:
    """One check for each step."""

    checks: tuple[Check, ...]


@dataclass(frozen=True)
class JudgeUseRequest(Request[UseChecks], command="verify.judge_use"):
    """Compare a candidate's results of all steps with the reference's, in the reference process."""

    uses: tuple[Use, ...]
    expected: str
    results: str
    """The file with the candidate's results."""
    precision: str
    """``budget`` or ``strict``, as in the settings."""


@dataclass(frozen=True)
class GuardAnswer:
    """Whether the kernels of a file run for a call."""

    has_guard: bool = True
    """Whether the target calls a guard at all."""
    reason: str = ""
    """Why a guard refuses the call, as a clause; empty if the kernels run."""
    condition: str = ""
    """The condition that does not hold, as Python."""
    guard: str = ""
    """The guard that refuses."""
    stands_in: bool = False
    """Whether CPU tensors stood in for those of a GPU."""


@dataclass(frozen=True)
class ConstructRequest(Request[NoAnswer], command="verify.construct"):
    """Load the user's file and construct the target's module, so that later requests find both. Errors are left to these."""

    workload: Workload
    user_source: str
    module_name: str
    """As :attr:`~mtmc_lsp.core.workload.Capture.module_name`."""


@dataclass(frozen=True)
class LoadRequest(Request[NoAnswer], command="verify.load"):
    """Run the text of modules ahead, which takes seconds of imports, so that requests that lock the GPU find them loaded.

    A text that fails is loaded again, with its error, by the request that needs it.
    """

    capture: Repeated[Capture]
    user_source: str | None
    """The user's file at the start of the run; ``None`` reads the file."""
    texts: tuple[str | None, ...]
    """Versions of the file; ``None`` for the user's."""


@dataclass(frozen=True)
class KernelsFile:
    """The file beside the user's file from which it imports its kernels, as it is or will be."""

    path: str
    text: str
    """With the target's kernels."""
    others: str
    """Without them."""


@dataclass(frozen=True)
class GuardRequest(Request[GuardAnswer], command="verify.guard"):
    """Call a file's target as the user calls it, and report what its guards decide. The kernels do not run."""

    workload: Workload
    """The call."""
    module_name: str
    """The usual name of the file's module."""
    user_source: str
    """The file without generated code for the target."""
    source: str
    """The file with generated code."""
    records_gradients: bool = False
    """Whether the call records gradients."""
    kernels: KernelsFile | None = None
    """The file of kernels, if the generated code is there."""


@dataclass(frozen=True)
class JudgeAnswer:
    """The comparison of a candidate's results with the expected ones."""

    checks: tuple[Check, ...]
    error: float = 0.0
    """Largest relative L2 error against the oracle."""
    reference_error: float = 0.0
    """The reference's error on that result."""
    compared: tuple[str, ...] = ()
    """Results whose floating-point values were compared."""
    undecided: tuple[str, ...] = ()
    """Those of them for which zeros would pass as well, since the reference's rounding errors are as large as the result."""
    trivial: tuple[str, ...] = ()
    """Answers that need no computation and pass as well: ``zeros``, ``a copy of x``."""
    measurements: tuple[Measurement, ...] = ()
    """Of the results whose floating-point values were compared."""
    counts: tuple[ElementCount, ...] = ()
    """Of elements of results that differ by more than rounding explains."""
    unexplained: tuple[int, ...] = ()
    """Numbers of the results that differ between the candidate's calls, but not between the reference's."""
    is_identical: bool = False
    """Whether all results are the reference's, bit for bit."""
    has_oracle: bool = True
    """As in :class:`ReferenceAnswer`."""


@dataclass(frozen=True)
class JudgeRequest(Request[JudgeAnswer], command="verify.judge"):
    """Compare a candidate's results with the expected ones, in the reference process."""

    data: CaseRequest
    expected: str
    results: str
    """The file with the candidate's results."""
    precision: str
    """``budget`` or ``strict``, as in the settings."""
    is_exact: bool = False
    """Whether the reference maps whole numbers to whole numbers, so that no rounding excuses a difference."""
    differing: tuple[int, ...] = ()
    """Results that differ between the candidate's calls."""
    finds_trivial: bool = True
    """Whether to find the trivial answers that would pass, which costs several further comparisons."""


@dataclass(frozen=True)
class ReproduceAnswer:
    """The file that reproduces a failure."""

    path: str


@dataclass(frozen=True)
class ReproduceRequest(Request[ReproduceAnswer], command="verify.reproduce"):
    """Write a failing case as a file that runs with torch and Triton alone."""

    data: CaseRequest
    candidate: CandidateSource
    path: str
    reason: str
    calls: int
    """The number of calls that the candidate process made."""
    precision: str


@dataclass(frozen=True)
class WholeTargetAnswer:
    """Whether a version of a file with regions computes what the user's file computes."""

    difference: str = ""
    """What differs, as a clause; empty if nothing does."""
    skipped: str = ""
    """Why nothing was compared, as a clause."""
    calls: int = 0
    """Calls that were compared."""


@dataclass(frozen=True)
class WholeTargetRequest(Request[WholeTargetAnswer], command="verify.whole_target"):
    """Call the whole target of a region in the user's file and in a version of it, and compare the results."""

    capture: Capture
    """Of the region."""
    workload: Workload
    """Of the whole target."""
    user_source: str
    text: str
    """The version."""
