"""Candidates, steps and runs: created by a search and stored."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

from mtmc_lsp.core.action import MacroAction
from mtmc_lsp.core.chat import ModelUse
from mtmc_lsp.core.dependencies import Dependency
from mtmc_lsp.core.device_model import DeviceModel
from mtmc_lsp.core.errors import FailureKind
from mtmc_lsp.core.results import BaselineTime, CompileReport, Ratio, Timing, Verdict, Work
from mtmc_lsp.core.workload import CodeRegion, Environment, Target, Workload

DTYPE = "triton.dtype:"
"""Begins a constant of a launch that is a dtype of Triton: ``triton.dtype:fp32``."""
ORIGINAL = "original"
"""Key of the state of a candidate that edits the user's own kernels: the file as it stood before the run."""
SCHEMA = 1
"""Schema version of every JSON document that we print."""


class Placement(Enum):
    """Where the generated block goes in the user's file."""

    END = "end"
    """Below the user's code, with its imports, but above the first statement that may call the target on import."""
    ABOVE = "above"
    """Above the target, with the imports at the top of the file."""
    SIBLING = "sibling"
    """In ``NAME_kernels.py`` beside the user's ``NAME.py``, which imports what the dispatch needs.

    A candidate is one text all the same, with the block at the end of the file; it is split when it is written.
    """


@dataclass(frozen=True)
class GeneratedCode:
    """The parts of a candidate that are inserted into the user's file."""

    imports: tuple[str, ...]
    """Import statements that the block needs, one per entry."""
    block: str
    """Module-level source with kernels, guard and launcher; ends with a newline."""
    dispatch: str
    """Dispatch statement without indentation, placed first in the target's body after its docstring, or first in its region;
    ends with a newline."""
    place: Placement = Placement.END
    regions: tuple[tuple[CodeRegion, str], ...] = ()
    """The regions and their dispatch statements if the code is for several regions; then ``dispatch`` is empty."""


@dataclass(frozen=True)
class KernelLaunch:
    """Information about one kernel of a candidate that cross-compilation needs."""

    kernel: str
    """Name of the ``@triton.jit`` function."""
    signature: dict[str, str]
    """Parameter to Triton type (``*fp32``, ``i32``, ``fp32``), without constexpr parameters."""
    constexprs: dict[str, object]
    num_warps: int
    num_stages: int
    divisible_by_16: tuple[str, ...] = ()
    """Parameters (pointers or sizes) that are multiples of 16 in the workload."""


class Author(Enum):
    """Author of a version."""

    BUILTIN = "builtin"
    MODEL = "model"
    """A language model."""


@dataclass(frozen=True)
class Candidate:
    """One complete version of the user's file."""

    id: str
    """Content hash: the same state and action have the same id."""
    parent: str | None
    action: MacroAction | None
    """The action that created it from the parent; ``None`` for the user's file."""
    source: str
    """Text of the whole file."""
    code: GeneratedCode | None
    schedule: object
    """The coder's state as JSON, from which it continues."""
    launches: tuple[KernelLaunch, ...] = ()
    """Empty if the coder does not know them. The compiler then finds them by calling the launcher without data."""
    author: Author = Author.BUILTIN
    """Author of the last step."""
    dependencies: tuple[Dependency, ...] = ()
    """Dependencies of the target other than its source."""


class StepStatus(Enum):
    """Outcome of a step."""

    ACCEPTED = "accepted"
    REJECTED = "rejected"
    """Correct, but not faster, or in conflict with the user's settings."""
    FAILED = "failed"
    """Not written, not compiled or not correct."""


@dataclass(frozen=True)
class Step:
    """One macro action and all its results."""

    index: int
    """1-based, in the order of execution."""
    action: MacroAction
    status: StepStatus
    reason: str
    """Reason for the status, one sentence."""
    diff: str = ""
    """Unified diff against the version that the action was tried on."""
    candidate: Candidate | None = None
    """``None`` if the coder could not write it."""
    verdict: Verdict | None = None
    timing: Timing | None = None
    report: CompileReport | None = None
    work: Work | None = None
    """Of the candidate; ``None`` where the cost model does not know its kernels."""
    failure: FailureKind | None = None
    """The kind of failure if coding, compiling, verifying or timing raised an error."""
    region: int = 0
    """Number of the region that it optimises, in a run of several regions; otherwise 0."""
    base: str = ""
    """Id of the version that the action was tried on; empty in runs of earlier releases."""
    prior: float | None = None
    """Probability of the action by the policy when a beam or tree search chose it; None in a greedy search."""
    is_alternative: bool = False
    """Whether its version is faster than its base, but the search delivers another branch."""

    @property
    def is_base(self) -> bool:
        """Whether the timed version is not faster than eager. It was accepted only as a base for later steps."""
        eager = self.timing.against("eager") if self.timing is not None else None
        return eager is not None and eager.ratio <= 1.0


def original_text(step: Step) -> str | None:
    """The file as it stood before a run of edits; None for a step with generated code."""
    schedule = step.candidate.schedule if step.candidate is not None else None
    if step.candidate is None or step.candidate.code is not None or not isinstance(schedule, Mapping):
        return None
    text = schedule.get(ORIGINAL)
    return text if isinstance(text, str) else None


def parents(steps: Sequence[Step]) -> dict[int, int]:
    """For each step, the number of the step whose version its action was tried on; 0 for the user's code."""
    found: dict[int, int] = {}
    numbers: dict[str, int] = {}
    last = 0
    for step in steps:
        found[step.index] = numbers.get(step.base, 0) if step.base else last
        if step.candidate is not None:
            numbers.setdefault(step.candidate.id, step.index)
        if step.status is StepStatus.ACCEPTED:
            last = step.index
    return found


class RunStatus(Enum):
    """Outcome of a run."""

    IMPROVED = "improved"
    """Faster than the baseline that decides, which is what the user runs today unless the settings say otherwise."""
    NO_GAIN = "no_gain"
    INCORRECT = "incorrect"
    """Steps were proposed, but none passed verification."""
    UNMEASURED = "unmeasured"
    """No GPU: verified with the interpreter and compiled, but not timed."""
    RUNNING = "running"
    """Not finished: still active, or killed and can be resumed."""


KEPT = (RunStatus.IMPROVED, RunStatus.UNMEASURED)
"""Statuses of a run whose last version is useful."""


@dataclass(frozen=True)
class Speedup:
    """Speedups of a timed run."""

    vs_eager: Ratio | None
    vs_compile: Ratio | None
    vs_best: Ratio | None


@dataclass(frozen=True)
class CompilerOffer:
    """``torch.compile`` instead of the kernels, where it is faster. It is offered to the user and never applied by itself."""

    source: str
    """The user's file with the decorator."""
    diff: str
    compile_seconds: float
    recompilations: int | None = None
    """How often ``torch.compile`` compiled again for the other verified sizes; ``None`` if that was not measured."""
    recompile_seconds: float = 0.0
    """The time of these compilations."""


@dataclass(frozen=True)
class Final:
    """The last accepted version of a run."""

    source: str
    diff: str
    speedup: Speedup | None
    """``None`` if nothing was timed."""
    roofline: float | None


@dataclass(frozen=True)
class RunResult:
    """The document that ``mtmc optimize --json`` prints."""

    schema: int
    id: str
    target: Target
    workload: Workload
    environment: Environment
    baselines: tuple[BaselineTime, ...]
    steps: tuple[Step, ...]
    final: Final
    status: RunStatus
    seconds: float
    """Wall time of the run in seconds."""
    source_hash: str
    """SHA-256 of the file content that was read."""
    baseline: str = "eager"
    """The baseline that the last version must beat to be delivered: ``eager``, ``compile`` or ``best``."""
    offer: CompilerOffer | None = None
    """Set where ``torch.compile`` alone is faster than the last version."""
    model_use: ModelUse | None = None
    """Use of the language model, if any."""
    device: DeviceModel | None = None
    """Performance limits used for planning."""
    work: Work | None = None
    """Work of the user's code."""
    end_reason: str = ""
    """Why no further step was tried: a limit, or the planner's reason to stop."""
    notes: tuple[str, ...] = ()
    """What else the user should know about the run, as sentences: why a trained policy was not used."""
