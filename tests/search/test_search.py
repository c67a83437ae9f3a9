"""The search keeps what is verified and faster, falls back otherwise, and goes on after a crash."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from mtmc_lsp.core.action import ActionKind, Expected, MacroAction
from mtmc_lsp.core.errors import WorkerFailed
from mtmc_lsp.core.graph import Graph
from mtmc_lsp.core.protocols import CannotCode
from mtmc_lsp.core.results import BaselineTime, CompileReport, Ratio, Speed, Timing, Verdict, VerdictStatus
from mtmc_lsp.core.run import Candidate, RunStatus, StepStatus
from mtmc_lsp.core.workload import Capture, Environment, Target, TargetKind, Workload, WorkloadSource
from mtmc_lsp.measure.devices import data_sheet
from mtmc_lsp.search.greedy import Events, GreedySearch, Limits
from mtmc_lsp.search.store import Store

TARGET = Target("/x/m.py", "f", TargetKind.FUNCTION, 1, 2)
CAPTURE = Capture(
    Workload(TARGET, WorkloadSource.DIRECTIVE), Graph((), (), (), "tensor", {}), (), Environment("", "", ""), 0, 0, "m"
)


class Planner:
    """Proposes the numbered actions in order."""

    def __init__(self, count: int) -> None:
        self.count = count

    def propose(self, state):
        n = len(state.history)
        expected = Expected(10.0)
        return (
            MacroAction(ActionKind.FUSE, (f"n{n}",), (1, 1), expected=expected, text=f"step {n}")
            if n < self.count
            else None
        )


class Coder:
    """Appends the action's region to the text; refuses ``n1`` when asked to."""

    def __init__(self, refuses: str = "") -> None:
        self.refuses = refuses

    def start(self, capture, source):
        return Candidate("root", None, None, source, None, None)

    def write(self, capture, candidate, action):
        if action.region[0] == self.refuses:
            raise CannotCode("no such form")
        text = candidate.source + action.region[0] + "\n"
        return Candidate(text, candidate.id, action, text, None, None)


class Measurer:
    """Times by a table of region to microseconds; ``None`` is incorrect, an exception is raised."""

    def __init__(self, times: dict[str, float | None | Exception]) -> None:
        self.times = times

    def device(self):
        return data_sheet(("sm_90",))

    def verify(self, candidate):
        time = self.times[candidate.source.split()[-1]]
        if isinstance(time, Exception):
            raise time
        status = VerdictStatus.CORRECT if time is not None else VerdictStatus.INCORRECT
        return Verdict(status, (), "gpu", reason="" if time else "wrong")

    def compile(self, candidate):
        return CompileReport()

    def time(self, candidate, previous):
        own = self.times[candidate.source.split()[-1]]
        before = self.times.get(previous.source.split()[-1], 100.0) if previous.source.split() else 100.0
        ratio, against = 100.0 / own, before / own
        speed = Speed.FASTER if ratio > 1 else Speed.SLOWER
        baselines = (BaselineTime("eager", 100.0, Ratio(ratio, ratio * 0.99, ratio * 1.01)),)
        if previous.source.split():
            baselines += (BaselineTime("previous", before, Ratio(against, against * 0.99, against * 1.01)),)
        return Timing(own, baselines, "eager", speed, Ratio(1, 0.99, 1.01), 25, "fake", 0.5)

    def close(self):
        pass


def search(planner, coder, measurer, *, measured: bool = True, on_step: Callable = lambda step: None) -> GreedySearch:
    events = Events(lambda index, action: None, lambda text: None, on_step)
    return GreedySearch(CAPTURE, "", planner, coder, measurer, measured=measured, limits=Limits(), events=events)


def test_slower_wrong_and_crashed_steps_leave_the_last_good_version() -> None:
    times = {"n0": 50.0, "n1": 80.0, "n2": None, "n3": WorkerFailed("it died", kind="crashed"), "n4": 25.0}
    result = search(Planner(5), Coder(), Measurer(times)).run("r", "h")
    assert [step.status for step in result.steps] == [
        StepStatus.ACCEPTED,
        StepStatus.REJECTED,
        StepStatus.FAILED,
        StepStatus.FAILED,
        StepStatus.ACCEPTED,
    ]
    assert result.final.source == "n0\nn4\n"
    assert result.status is RunStatus.IMPROVED
    assert "it died" in result.steps[3].reason
    assert "not faster" in result.steps[1].reason


def test_what_the_coder_cannot_write_is_a_failed_step_with_its_reason() -> None:
    result = search(Planner(2), Coder("n0"), Measurer({"n1": 50.0})).run("r", "h")
    assert result.steps[0].status is StepStatus.FAILED
    assert "no such form" in result.steps[0].reason
    assert result.final.source == "n1\n"


def test_no_gain_leaves_the_users_own_file() -> None:
    result = search(Planner(1), Coder(), Measurer({"n0": 105.0})).run("r", "h")
    assert result.status is RunStatus.NO_GAIN
    assert result.final.source == ""


def test_nothing_verified_is_incorrect() -> None:
    assert search(Planner(2), Coder(), Measurer({"n0": None, "n1": None})).run("r", "h").status is RunStatus.INCORRECT


def test_without_a_gpu_no_time_is_claimed() -> None:
    result = search(Planner(1), Coder(), Measurer({"n0": 1.0}), measured=False).run("r", "h")
    assert result.status is RunStatus.UNMEASURED
    assert result.final.speedup is None
    assert result.steps[0].timing is None


def test_a_run_goes_on_from_the_steps_in_the_store(tmp_path: Path) -> None:
    store = Store(tmp_path / ".mtmc")
    run = store.begin("/x/m.py", "f", "hash")
    times = {"n0": 50.0, "n1": 25.0, "n2": 12.0}
    first = search(Planner(2), Coder(), Measurer(times), on_step=lambda step: store.add_step(run, step))
    first.run(run, "hash")
    store.close()

    again = Store(tmp_path / ".mtmc")
    record = again.unfinished("/x/m.py", "f")
    assert record is not None
    assert record.steps == 2
    result = search(Planner(3), Coder(), Measurer(times)).run(run, "hash", again.steps(run))
    assert result.final.source == "n0\nn1\nn2\n"
    again.finish(result)
    assert again.result(run) == result
    assert (tmp_path / ".mtmc" / ".gitignore").read_text() == "*\n"
