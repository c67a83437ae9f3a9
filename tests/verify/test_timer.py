"""Which process times a candidate: none waits for a baseline that is still compiled."""

from __future__ import annotations

import contextlib
import math
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mtmc_lsp.core.errors import FailureKind, MtmcError, WorkerFailed
from mtmc_lsp.core.graph import Graph
from mtmc_lsp.core.results import BaselineTime, Ratio, Speed, Timing, Verdict, VerdictStatus
from mtmc_lsp.core.run import Candidate
from mtmc_lsp.core.workload import Capture, Environment, Target, TargetKind, Workload, WorkloadSource
from mtmc_lsp.device.choice import model_of_arch
from mtmc_lsp.measure import timer as timer_module
from mtmc_lsp.measure.local_measurer import LocalMeasurer, MeasureOptions
from mtmc_lsp.measure.timer import Timer
from mtmc_lsp.process.protocol import NoAnswer
from mtmc_lsp.process.worker_pool import WorkerPool
from mtmc_lsp.timing.messages import BaselinesRequest, PrepareRequest, RankAnswer, RankRequest, TimeAnswer, TimeRequest
from mtmc_lsp.verify.messages import CandidateSource, LoadRequest

ONE = Ratio(1.0, 0.99, 1.01)
CAPTURE = Capture(
    Workload(Target("m.py", "f", TargetKind.FUNCTION, 1, 2), WorkloadSource.DIRECTIVE),
    Graph(inputs=(), nodes=(), outputs=(), returns="", sizes={"n": 1}),
    arguments=(),
    environment=Environment("3.12", "2.11", "3.6"),
    flops=1.0,
    bytes=1.0,
    module_name="m",
)
CANDIDATE = CandidateSource("candidate")


class FakeProcess:
    """Times with the baselines that are requested; compiles when it may."""

    def __init__(self, error: MtmcError | None = None) -> None:
        self.requests: list[Any] = []
        self.may_compile = threading.Event()
        self.error, self.restarts = error, 0
        self.speedup = Ratio(2.0, 1.9, 2.1)

    def call(self, request: Any, seconds: float, *_: object) -> Any:
        self.requests.append(request)
        if isinstance(request, BaselinesRequest):
            assert self.may_compile.wait(60)
            if self.error is not None:
                raise self.error
            return None
        if isinstance(request, RankRequest):
            return RankAnswer((1.0,))
        if isinstance(request, (LoadRequest, PrepareRequest)):
            return NoAnswer()
        assert isinstance(request, TimeRequest)
        names = ("eager", *request.baselines)
        baselines = tuple(BaselineTime(name, 100.0, self.speedup, Speed.FASTER) for name in names)
        return TimeAnswer(Timing(50.0, baselines, "eager", ONE, 60, "fake", 0.5), (0.0, 1.0))

    def next(self) -> None:
        self.restarts += 1

    @property
    def timed(self) -> list[tuple[str, ...]]:
        return [request.baselines for request in self.requests if isinstance(request, TimeRequest)]


class Prepared:
    """A timer whose baselines are being compiled."""

    def __init__(self, process: FakeProcess, *, is_shared: bool = False, seconds: float = math.inf) -> None:
        self.process, self.trials = process, process if is_shared else FakeProcess()
        self.timer = Timer(CAPTURE, "user", WorkerPool(has_gpu=False), process, self.trials, fresh=True)  # type: ignore[arg-type]
        self.timer._device = model_of_arch("sm_90")
        self.background = ThreadPoolExecutor(1)
        self.reference: Any = SimpleNamespace(sharing_workload=_no_inputs)
        self.timer.prepare_baselines(self.background, self.reference, None, seconds)  # type: ignore[arg-type]

    def compile(self) -> None:
        self.process.may_compile.set()
        self.timer.wait_for_baselines()


def _no_inputs(_: object) -> Any:
    return contextlib.nullcontext("")


@pytest.fixture(autouse=True)
def own_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr(timer_module, "cache_folder", lambda: tmp_path)
    yield
    monkeypatch.setattr("tempfile.tempdir", None)


def test_a_trial_is_timed_at_once_while_the_baselines_are_compiled() -> None:
    prepared = Prepared(FakeProcess())
    timing = prepared.timer.time_trial(CANDIDATE)
    assert [b.name for b in timing.baselines] == ["eager"]
    assert (prepared.process.timed, prepared.trials.timed) == ([], [()])
    assert prepared.timer.rank(["a"], None) == [1.0]
    prepared.compile()


def test_a_trial_is_timed_against_the_baselines_once_they_are_compiled() -> None:
    prepared = Prepared(FakeProcess())
    prepared.compile()
    timing = prepared.timer.time_trial(CANDIDATE)
    assert [b.name for b in timing.baselines] == ["eager", "compile"]
    assert (prepared.process.timed, prepared.trials.timed) == ([("compile",)], [])


@pytest.mark.parametrize(("seconds", "is_started"), [(39.0, False), (41.0, True), (math.inf, True)])
def test_a_loop_that_cannot_be_unrolled_within_the_budget_is_not_compiled(
    seconds: float, is_started: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(timer_module, "loop_operations", lambda graph, sizes: 4000)
    prepared = Prepared(FakeProcess(), seconds=seconds)
    prepared.process.may_compile.set()
    timing = prepared.timer.time(CANDIDATE)
    assert [b.name for b in timing.baselines] == ["eager", "compile"]
    assert any(isinstance(request, BaselinesRequest) for request in prepared.process.requests) == is_started
    assert (timing.against("compile") is not None) == is_started
    if not is_started:
        note = (
            "torch.compile was not started: it unrolls a loop of 4,000 operations, which takes longer than the budget"
        )
        assert timing.baselines[1].note == prepared.timer.untimed_baselines()[0].note == note


@pytest.mark.parametrize("decides", [False, True])
def test_the_budget_limits_a_compilation_that_does_not_decide(
    decides: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits: list[float] = []
    target = replace(CAPTURE.workload.target, path=str(tmp_path / "m.py"))
    capture = replace(CAPTURE, workload=replace(CAPTURE.workload, target=target))
    options = MeasureOptions(compile_decides=decides, deadline=time.monotonic() + 1000.0)
    with contextlib.closing(LocalMeasurer(capture, sys.executable, options, source="")) as measurer:
        measurer.has_gpu = True
        monkeypatch.setattr(measurer._engine, "compute_ahead", lambda version: ["a case"])
        monkeypatch.setattr(measurer._timer, "prepare_baselines", lambda *arguments: limits.append(arguments[-1]))
        measurer._prepare()
    (limit,) = limits
    assert limit == math.inf if decides else 0.0 < limit <= 1000.0


@pytest.mark.parametrize("is_tight", [False, True])
def test_where_memory_is_tight_the_baselines_wait_for_the_first_verdict(
    is_tight: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A trial and a verification have the memory first, and no trial waits for ``torch.compile``."""
    events: list[str] = []
    target = replace(CAPTURE.workload.target, path=str(tmp_path / "m.py"))
    capture = replace(CAPTURE, workload=replace(CAPTURE.workload, target=target))
    with contextlib.closing(LocalMeasurer(capture, sys.executable, source="")) as measurer:
        measurer.has_gpu = True

        def verify(*_: object, **more: object) -> Any:
            events.append("verdict")
            return SimpleNamespace(verdict=Verdict(VerdictStatus.CORRECT, (), "gpu"))

        monkeypatch.setattr(measurer._engine, "is_tight", lambda capture: is_tight)
        monkeypatch.setattr(measurer._engine, "compute_ahead", lambda version: ["a case"])
        monkeypatch.setattr(measurer._engine, "verify", verify)
        monkeypatch.setattr(measurer, "_compile_other_sizes", lambda candidate: None)
        monkeypatch.setattr(measurer._process, "warm_up", lambda: None)
        monkeypatch.setattr(measurer._timer, "prepare_baselines", lambda *arguments: events.append("baselines"))
        monkeypatch.setattr(measurer._timer, "time_trial", lambda *arguments, **more: events.append("trial"))
        candidate = Candidate("one", None, None, "", None, {})
        measurer._prepare()
        measurer.time(candidate, None)
        assert measurer.verify(candidate).is_correct
    assert events[: 3 - is_tight] == (["trial", "verdict"] if is_tight else ["baselines", "trial", "verdict"])
    assert "baselines" in events


def test_a_baseline_that_is_still_compiled_is_part_of_the_timing_with_a_note() -> None:
    prepared = Prepared(FakeProcess())
    began = time.monotonic()
    timing = prepared.timer.time(CANDIDATE, wait=0.05)
    assert time.monotonic() - began < 5
    assert [b.name for b in timing.baselines] == ["eager", "compile"]
    assert timing.against("compile") is None
    assert timing.baselines[1].note == "torch.compile was still compiling after 0 s"
    prepared.compile()
    assert prepared.timer.time(CANDIDATE, wait=0.05).against("compile") is not None


@pytest.mark.parametrize(("low", "times"), [(19.0, 2), (21.0, 1)])
def test_a_trial_that_was_far_faster_is_not_timed_again_without_the_baselines(low: float, times: int) -> None:
    prepared = Prepared(FakeProcess())
    prepared.trials.speedup = prepared.process.speedup = Ratio(25.0, low, 30.0)
    trial = prepared.timer.time_trial(CANDIDATE)
    last = prepared.timer.time(CANDIDATE, wait=0.0)
    assert len(prepared.trials.timed) == times
    assert last.against("eager") == trial.against("eager") and [b.name for b in last.baselines] == ["eager", "compile"]
    prepared.compile()
    assert prepared.timer.time(CANDIDATE, wait=0.0).against("compile") is not None
    assert prepared.process.timed == [("compile",)]


def test_a_compiler_that_ends_its_process_leaves_a_note_and_the_times_of_eager_mode() -> None:
    prepared = Prepared(FakeProcess(WorkerFailed("the process ran out of memory", kind=FailureKind.OUT_OF_MEMORY)))
    prepared.compile()
    timing = prepared.timer.time(CANDIDATE)
    assert timing.against("eager") is not None
    assert timing.baselines[1].note == "torch.compile gave no result: the process ran out of memory"
    assert prepared.process.timed == []


def test_a_compiler_that_the_budget_stops_was_still_compiling() -> None:
    error = WorkerFailed("the time limit of the whole run was reached", kind=FailureKind.DEADLINE)
    prepared = Prepared(FakeProcess(error))
    prepared.compile()
    assert [b.note for b in prepared.timer.untimed_baselines()] == ["torch.compile was still compiling after 0 s"]


def test_baselines_that_were_compiled_too_late_were_not_timed_within_the_budget() -> None:
    prepared = Prepared(FakeProcess())
    prepared.compile()
    (baseline,) = prepared.timer.untimed_baselines()
    assert (baseline.name, baseline.speedup) == ("compile", None)
    assert baseline.note == "torch.compile was not timed within the budget"


def test_one_process_for_both_times_after_its_baselines_are_compiled() -> None:
    """Where memory is tight, there is no second process."""
    prepared = Prepared(FakeProcess(), is_shared=True)
    threading.Timer(0.2, prepared.process.may_compile.set).start()
    assert prepared.timer.time(CANDIDATE).against("compile") is not None
    assert prepared.process.timed == [("compile",)]


def test_a_further_baseline_is_compiled_once() -> None:
    prepared = Prepared(FakeProcess())
    prepared.compile()
    for _ in range(2):
        timing = prepared.timer.time(CANDIDATE, more_baselines=("reduce-overhead",))
        assert [b.name for b in timing.baselines] == ["eager", "compile", "reduce-overhead"]
    compiled = [request.baselines for request in prepared.process.requests if isinstance(request, BaselinesRequest)]
    assert compiled == [("compile",), ("reduce-overhead",)]


def test_a_gpu_that_another_run_calibrated_meanwhile_is_not_calibrated_again(monkeypatch: pytest.MonkeyPatch) -> None:
    process = FakeProcess()
    timer = Timer(CAPTURE, "user", WorkerPool(has_gpu=False), process, fresh=True)  # type: ignore[arg-type]
    device = model_of_arch("sm_90")
    known = iter([None, device])
    monkeypatch.setattr(timer_module, "cached_device", lambda _: next(known))
    assert timer.device() == timer.device() == device
    assert process.requests == []
