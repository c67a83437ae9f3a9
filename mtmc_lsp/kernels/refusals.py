"""Why an edit was not kept: the stage at which it ended, and the numbers."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from mtmc_lsp.core.errors import FailureKind
from mtmc_lsp.core.results import Timing, VerdictStatus
from mtmc_lsp.core.run import Step, StepStatus

HOST_SHARE = 0.8
"""Share of the time from which on the launch on the host explains it."""
DEVICE_SHARE = 0.9
"""Share of the time from which on the GPU alone explains it."""
DISTURBED = "another program computed"
"""Part of the message of timings that another program disturbed."""
DOES_NOT_COMPILE = "does not compile"
"""Part of the reason of versions that the compiler rejects."""
MOST_TEXT = 300


class Stage(str, Enum):
    """The stage at which an edit ended."""

    COMPILE = "compile error"
    """The edited file does not compile, or cannot be loaded."""
    STATISTICS = "compiler statistics"
    """It compiles to more spills."""
    WRONG = "wrong"
    """It shows another fault or other results than the file as it stands."""
    NOT_COMPARED = "not comparable"
    """The results of the file as it stands vary, so nothing can be compared."""
    NOT_FASTER = "not faster"
    LAUNCH_BOUND = "launch-bound"
    """It is not faster, and the launch on the host takes most of the time."""
    DISTURBED = "timing disturbed"
    """Another program used the GPU."""
    TIME_ENDED = "no time"
    """The time of the run ended."""
    ERROR = "error"
    """It raises an exception on the GPU, or its process ends."""


@dataclass(frozen=True)
class Refusal:
    """One edit that was not kept."""

    change: str
    """Kind of the edit."""
    kernel: str
    stage: Stage
    detail: str
    """One clause for people."""
    ratio: float | None = None
    """Speed over the version before, where both were timed."""
    median_us: float | None = None


def refusal_of(step: Step) -> Refusal | None:
    """Why a step was not kept; None if it was."""
    if step.status is StepStatus.ACCEPTED:
        return None
    timing = step.timing
    ratio = (timing.against("previous") or timing.against("eager")) if timing is not None else None
    params = step.action.params
    return Refusal(
        str(params.get("change", "")),
        str(params.get("kernel", "")),
        _stage(step),
        step.reason[:MOST_TEXT],
        ratio.ratio if ratio is not None else None,
        timing.median_us if timing is not None else None,
    )


def _stage(step: Step) -> Stage:
    if step.timing is not None:
        return Stage.LAUNCH_BOUND if takes_the_launch(step.timing) else Stage.NOT_FASTER
    if step.status is StepStatus.REJECTED:
        return Stage.COMPILE if DOES_NOT_COMPILE in step.reason else Stage.STATISTICS
    if step.failure in (FailureKind.CANCELLED, FailureKind.DEADLINE):
        return Stage.TIME_ENDED
    if DISTURBED in step.reason:
        return Stage.DISTURBED
    if step.failure is FailureKind.COMPILE_ERROR:
        return Stage.COMPILE
    verdict = step.verdict
    if verdict is None or verdict.is_correct:
        return Stage.ERROR
    if verdict.status is VerdictStatus.COMPILE_ERROR:
        return Stage.COMPILE
    return Stage.NOT_COMPARED if verdict.status is VerdictStatus.UNCERTIFIABLE else Stage.WRONG


def takes_the_launch(timing: Timing) -> bool:
    """Whether the host takes most of the time of a call.

    After a wait, a launch takes up to four times as long as in a row of calls. So the host's time explains nothing where a CUDA
    graph of the call takes about as long.
    """
    device = timing.graph_us
    is_hidden = device is not None and device >= DEVICE_SHARE * timing.median_us
    return timing.host_us > HOST_SHARE * timing.median_us and not is_hidden
