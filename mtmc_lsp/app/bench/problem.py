"""One problem of ``mtmc bench`` in a separate process: if it crashes the process, the other problems go on.

The process reads a :class:`ProblemRequest` as JSON from standard input and writes its answer to the file that is its argument.
"""

from __future__ import annotations

import json
import sys
import time
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mtmc_lsp.app.backends import Backends
from mtmc_lsp.app.pipeline import CAPTURING, Pipeline, RunOptions
from mtmc_lsp.app.target_file import Request, open_target
from mtmc_lsp.core.errors import EnvironmentNotAble, FailureKind, MtmcError, RequestError, WorkerFailed
from mtmc_lsp.core.json_codec import from_json, to_json
from mtmc_lsp.core.run import KEPT, RunResult, Step, StepStatus, parents
from mtmc_lsp.core.settings import Settings
from mtmc_lsp.core.workload import Capture
from mtmc_lsp.ir.regions import VIEWS
from mtmc_lsp.process.gpu_lock import lock_seconds
from mtmc_lsp.process.parent_watch import end_with_parent
from mtmc_lsp.process.priority import limit_to_cores
from mtmc_lsp.process.worker_process import command_seconds
from mtmc_lsp.rewrites import ir_of
from mtmc_lsp.schedule.schedule import Schedule
from mtmc_lsp.search.components import Events

FIRST_STAGE, PLANNING = "capturing", "planning"
"""Names of the time until the capture is there, and of the time in which the next action is chosen."""


@dataclass(frozen=True)
class ProblemRequest:
    """A problem and how it is solved."""

    path: str
    target: str
    python: str
    settings: Settings
    seconds: float
    """Seconds from the start after which even a running step is ended."""
    store: str
    """The folder of the store for the run, so that the run can be exported."""
    cores: tuple[int, ...] = ()
    """The CPU cores that it may use; empty for all."""
    fresh: bool = False
    """Whether timings of earlier runs are measured again."""


def solve(request: ProblemRequest) -> dict[str, Any]:
    """Optimize the problem.

    Returns:
        The document of the run, without the code of its steps.

    Raises:
        MtmcError: the problem is refused, or cannot run here.
    """
    stages = Stages(FIRST_STAGE)
    deadline = time.monotonic() + request.seconds
    target = open_target(Request(Path(request.path), request.target, request.settings, request.python))
    progress: list[tuple[float, int, str]] = []

    def note(step: Step) -> None:
        progress.append((round(stages.elapsed, 3), step.index, step.status.value))

    def on_step(step: Step) -> None:
        stages.enter(PLANNING)
        note(step)

    events = Events(
        on_captured=lambda _: stages.enter(PLANNING),
        on_stage=lambda name: stages.enter(FIRST_STAGE if name == CAPTURING else name),
        on_step=on_step,
        on_switched=note,
        on_withdrawn=note,
    )
    # Nobody can agree to a language model here.
    backends = Backends.from_settings(request.settings).without_model
    options = RunOptions(backends, deadline=deadline, store=Path(request.store), fresh=request.fresh)
    with Pipeline(target, options, events) as pipeline:
        result, captures = pipeline.optimize(), pipeline.captures()
    document = _document(result)
    if time.monotonic() >= deadline and result.status not in KEPT:
        # The run was cut off, so it does not show that there is nothing to gain.
        document["status"] = "timeout"
    stages.enter("")
    facts = {
        "stages": stages.seconds,
        "progress": progress,
        "commands": {name: round(seconds, 3) for name, seconds in sorted({**command_seconds, **lock_seconds}.items())},
        "operations": sum(len(capture.graph.nodes) for capture in captures),
        "torch_calls": [op for capture in captures for op in _torch_calls(capture, result)],
    }
    return {**document, **facts}


class Stages:
    """Measures how long each stage of a run takes."""

    def __init__(self, first: str) -> None:
        self.seconds: dict[str, float] = {}
        """Seconds of each stage, summed over the run."""
        self._stage, self._since = first, time.monotonic()
        self._began = self._since

    @property
    def elapsed(self) -> float:
        """Seconds since the beginning of the first stage."""
        return time.monotonic() - self._began

    def enter(self, stage: str) -> None:
        """End the current stage and start another; stages whose names differ in numbers only are summed."""
        now, name = time.monotonic(), " ".join(word for word in self._stage.split() if not word.isdigit())
        self.seconds[name] = round(self.seconds.get(name, 0.0) + now - self._since, 3)
        self._stage, self._since = stage, now


def _document(result: RunResult) -> dict[str, Any]:
    """The result without code, which the store contains: a suite has thousands of steps, and its code may be of others."""
    document: dict[str, Any] = to_json(result)
    known = parents(result.steps)
    for step in document["steps"]:
        del step["candidate"], step["diff"], step["base"]
        step["parent"] = known[step["index"]]
        if step["verdict"] is not None:
            step["verdict"]["checks"] = len(step["verdict"]["checks"])
    del document["final"]["diff"], document["final"]["source"]
    if document["offer"] is not None:
        del document["offer"]["source"], document["offer"]["diff"]
    return document


def _torch_calls(capture: Capture, result: RunResult) -> list[str]:
    """The operations of the target, or of one region, that the last accepted version still runs as torch calls."""
    region = capture.workload.target.region
    numbers = (0, region.number if region is not None else 0)
    own = [step for step in result.steps if step.status is StepStatus.ACCEPTED and step.region in numbers]
    accepted = [step.candidate for step in own if step.candidate]
    schedule = from_json(Schedule, accepted[-1].schedule) if accepted else Schedule()
    nodes = ir_of(capture.graph, schedule).graph.nodes
    ops = [node.op for node in nodes if schedule.kernel_of(node.name) is None]
    return [op for op in ops if op.split(".")[1] not in VIEWS]


def failed(status: str, message: str) -> dict[str, Any]:
    """The answer for a problem whose process gave none."""
    return {"status": status, "error": MtmcError(message).to_json()}


def _status(error: MtmcError) -> str:
    """The status of a problem without a run: ``refused``, ``timeout``, ``crashed`` or ``not_able``."""
    if isinstance(error, RequestError):
        return "refused"
    if isinstance(error, WorkerFailed) and error.kind is not FailureKind.OUT_OF_MEMORY:
        return "crashed" if error.kind in (FailureKind.CRASHED, FailureKind.BAD_ANSWER) else "timeout"
    return "not_able" if isinstance(error, EnvironmentNotAble | WorkerFailed) else "crashed"


def main() -> None:
    """Solve the problem and write the answer."""
    end_with_parent()
    request = from_json(ProblemRequest, json.load(sys.stdin))
    limit_to_cores(request.cores)
    try:
        answer = solve(request)
    except MtmcError as error:
        answer = {"status": _status(error), "error": error.to_json()}
    except Exception as error:  # a bug of ours ends one problem; the answer says where it is
        frame = traceback.extract_tb(error.__traceback__)[-1]
        answer = failed("crashed", f"{type(error).__name__}: {error} ({Path(frame.filename).name}:{frame.lineno})")
    Path(sys.argv[1]).write_text(json.dumps(answer), encoding="utf-8")


if __name__ == "__main__":
    main()
