"""Candidates, steps and runs: what a search makes and a store keeps."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from mtmc_lsp.core.action import MacroAction
from mtmc_lsp.core.chat import ModelUse
from mtmc_lsp.core.dependencies import Dependency
from mtmc_lsp.core.device_model import DeviceModel
from mtmc_lsp.core.results import BaselineTime, CompileReport, Ratio, Timing, Verdict, Work
from mtmc_lsp.core.workload import Environment, Target, Workload

SCHEMA = 1
"""Version of every JSON document we print."""


@dataclass(frozen=True)
class GeneratedCode:
    """The three things that a candidate puts into the user's file."""

    imports: tuple[str, ...]
    """Import statements the block needs, one each."""
    block: str
    """Kernels, guard and launcher: module-level source, placed above the target; ends with a newline."""
    dispatch: str
    """The dispatch statement, unindented, placed first in the target's body (after its docstring); ends with a newline."""


@dataclass(frozen=True)
class KernelLaunch:
    """What cross-compilation needs to know of one kernel in a candidate."""

    kernel: str
    """Name of the ``@triton.jit`` function."""
    signature: dict[str, str]
    """Parameter to Triton type: ``*fp32``, ``i32``, ``fp32``; constexpr parameters left out."""
    constexprs: dict[str, object]
    num_warps: int
    num_stages: int
    divisible_by_16: tuple[str, ...] = ()
    """Parameters (pointers, sizes) that are multiples of 16 in the workload."""


class Author(Enum):
    """Who wrote a version."""

    BUILTIN = "builtin"
    MODEL = "model"
    """A language model."""


@dataclass(frozen=True)
class Candidate:
    """One complete version of the user's file."""

    id: str
    """Content hash: the same state and action give the same id."""
    parent: str | None
    action: MacroAction | None
    """What made it from the parent; ``None`` for the user's own file."""
    source: str
    """The whole file's text."""
    code: GeneratedCode | None
    schedule: object
    """The coder's own state as JSON, from which it goes on."""
    launches: tuple[KernelLaunch, ...] = ()
    """Empty where the coder does not know them: the compiler then finds them by calling the launcher without data."""
    author: Author = Author.BUILTIN
    """Who wrote its last step."""
    dependencies: tuple[Dependency, ...] = ()
    """What it depends on beside the target's own text."""


class StepStatus(Enum):
    """What became of a step."""

    ACCEPTED = "accepted"
    REJECTED = "rejected"
    """Correct, but not faster (or against the user's settings)."""
    FAILED = "failed"
    """It could not be coded, did not compile, or is not correct."""


@dataclass(frozen=True)
class Step:
    """One macro action and everything that came of it."""

    index: int
    """1-based, in the order tried."""
    action: MacroAction
    status: StepStatus
    reason: str
    """One sentence: why it has this status."""
    diff: str = ""
    """Unified diff against the last good version."""
    candidate: Candidate | None = None
    """``None`` where the coder could not write it."""
    verdict: Verdict | None = None
    timing: Timing | None = None
    report: CompileReport | None = None
    work: Work | None = None
    """Of the candidate; ``None`` where the cost model does not know its kernels."""

    @property
    def is_base(self) -> bool:
        """Whether its version was timed and is no faster than the user's own code: it was kept for later steps to build on."""
        eager = self.timing.against("eager") if self.timing is not None else None
        return eager is not None and eager.ratio <= 1.0


class RunStatus(Enum):
    """What a whole run came to."""

    IMPROVED = "improved"
    NO_GAIN = "no_gain"
    INCORRECT = "incorrect"
    """Steps were proposed, but none verified."""
    UNMEASURED = "unmeasured"
    """No GPU: verified by the interpreter and compiled, never timed."""
    RUNNING = "running"
    """Not finished: going on, or killed and to be resumed."""


KEPT = (RunStatus.IMPROVED, RunStatus.UNMEASURED)
"""How a run ends whose last version is worth having."""


@dataclass(frozen=True)
class Speedup:
    """The headline of a measured run."""

    vs_eager: Ratio | None
    vs_compile: Ratio | None
    vs_best: Ratio | None


@dataclass(frozen=True)
class Final:
    """The last good version."""

    source: str
    diff: str
    speedup: Speedup | None
    """``None`` where nothing was timed."""
    roofline: float | None


@dataclass(frozen=True)
class RunResult:
    """The document of ``mtmc optimize --json``."""

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
    """Wall time of the run."""
    source_hash: str
    """SHA-256 of the file's bytes as read."""
    model_use: ModelUse | None = None
    """What the language model was asked, where one took part."""
    device: DeviceModel | None = None
    """The ceilings that the run was planned with."""
    work: Work | None = None
    """Of the user's own code."""
