"""One problem of ``mtmc bench``, in a process of its own: whatever it does to that process, the other problems go on.

Its argument is the file for the answer; a :class:`ProblemRequest` comes as JSON on standard input.
"""

from __future__ import annotations

import json
import sys
import time
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mtmc_lsp.app import pipeline as session
from mtmc_lsp.core.errors import EnvironmentNotAble, FailureKind, MtmcError, RequestError, WorkerFailed
from mtmc_lsp.core.json_codec import from_json, to_json
from mtmc_lsp.core.run import KEPT, RunResult, StepStatus
from mtmc_lsp.core.settings import Settings
from mtmc_lsp.core.workload import Capture
from mtmc_lsp.ir.regions import VIEWS
from mtmc_lsp.process.priority import limit_to_cores
from mtmc_lsp.process.worker_process import command_seconds
from mtmc_lsp.rewrites import ir_of
from mtmc_lsp.schedule.schedule import Schedule
from mtmc_lsp.search.greedy import Events
from mtmc_lsp.search.store import Store

PLANNING = "planning"
"""The stage before an action is chosen; what a run does else it tells."""


@dataclass(frozen=True)
class ProblemRequest:
    """A problem, and how it is to be worked on."""

    path: str
    target: str
    python: str
    settings: Settings
    seconds: float
    """When the last step that is under way is ended, counted from the start."""
    store: str
    """The folder that keeps the run, so that it can be exported."""
    cores: tuple[int, ...] = ()
    """Where it runs; empty for wherever it may."""


def solve(request: ProblemRequest) -> dict[str, Any]:
    """Optimise the problem; its run's document without the sources of the steps.

    Raises:
        MtmcError: it is refused, or cannot be run here.
    """
    stages = Stages("capturing")
    deadline = time.monotonic() + request.seconds
    opened = session.open_target(session.Request(Path(request.path), request.target, request.settings, request.python))
    quiet = Events(
        on_action=lambda index, action: None, on_stage=stages.enter, on_step=lambda step: stages.enter(PLANNING)
    )
    with session.warmed(opened) as fork_server, Store(Path(request.store)) as store:
        capture = session.capture_target(opened, fork_server, seconds=request.seconds)
        stages.enter(PLANNING)
        result = session.optimize(opened, capture, store, quiet, deadline=deadline, fork_server=fork_server)
    document = _document(result)
    if time.monotonic() >= deadline and result.status not in KEPT:
        # What was not tried to its end says nothing about whether there is something to gain.
        document["status"] = "timeout"
    stages.enter("")
    facts = {
        "stages": stages.seconds,
        "commands": {name: round(seconds, 3) for name, seconds in sorted(command_seconds.items())},
        "operations": len(capture.graph.nodes),
        "torch_calls": _torch_calls(capture, result),
    }
    return {**document, **facts}


class Stages:
    """A clock for what a run does one after the other."""

    def __init__(self, first: str) -> None:
        self.seconds: dict[str, float] = {}
        """Of each stage, all its turns together."""
        self._stage, self._since = first, time.monotonic()

    def enter(self, stage: str) -> None:
        """The stage before has ended; numbers in its name do not tell it from others."""
        now, name = time.monotonic(), " ".join(word for word in self._stage.split() if not word.isdigit())
        self.seconds[name] = round(self.seconds.get(name, 0.0) + now - self._since, 3)
        self._stage, self._since = stage, now


def _document(result: RunResult) -> dict[str, Any]:
    """The result without the sources of the steps, which the store has: a suite has thousands of them."""
    document: dict[str, Any] = to_json(result)
    for step in document["steps"]:
        del step["candidate"], step["diff"]
        if step["verdict"] is not None:
            step["verdict"]["checks"] = len(step["verdict"]["checks"])
    del document["final"]["diff"]
    return document


def _torch_calls(capture: Capture, result: RunResult) -> list[str]:
    """The operations that the last accepted version leaves to torch."""
    kept = [step.candidate for step in result.steps if step.status is StepStatus.ACCEPTED and step.candidate]
    schedule = from_json(Schedule, kept[-1].schedule) if kept else Schedule()
    nodes = ir_of(capture.graph, schedule).graph.nodes
    ops = [node.op for node in nodes if schedule.kernel_of(node.name) is None]
    return [op for op in ops if op.split(".")[1] not in VIEWS]


def failed(status: str, message: str) -> dict[str, Any]:
    """What is noted of a problem whose process did not answer as it should."""
    return {"status": status, "error": MtmcError(message).to_json()}


def _status(error: MtmcError) -> str:
    """``refused``, ``timeout``, ``crashed`` or ``not_able``: of a problem that gave no run."""
    if isinstance(error, RequestError):
        return "refused"
    if isinstance(error, WorkerFailed) and error.kind is not FailureKind.OUT_OF_MEMORY:
        return "crashed" if error.kind in (FailureKind.CRASHED, FailureKind.BAD_ANSWER) else "timeout"
    return "not_able" if isinstance(error, EnvironmentNotAble | WorkerFailed) else "crashed"


def main() -> None:
    """Solve the problem and write the answer."""
    request = from_json(ProblemRequest, json.load(sys.stdin))
    limit_to_cores(request.cores)
    try:
        answer = solve(request)
    except MtmcError as error:
        answer = {"status": _status(error), "error": error.to_json()}
    except Exception as error:  # a bug of ours ends one problem, and is told with where it is
        place = traceback.extract_tb(error.__traceback__)[-1]
        answer = failed("crashed", f"{type(error).__name__}: {error} ({Path(place.filename).name}:{place.lineno})")
    Path(sys.argv[1]).write_text(json.dumps(answer), encoding="utf-8")


if __name__ == "__main__":
    main()
