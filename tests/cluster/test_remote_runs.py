"""Runs whose trials are spread over workers: the same steps as on one machine, and times of one GPU."""

from __future__ import annotations

import itertools
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

import pytest
from services import FakeJobs

from mtmc_lsp.app.bench.jobs import WorkerLost
from mtmc_lsp.app.remote import messages
from mtmc_lsp.app.remote.measurer import RemoteMeasurer
from mtmc_lsp.app.remote.target import RemoteTarget
from mtmc_lsp.core.action import MacroAction
from mtmc_lsp.core.errors import FailureKind, MtmcError, WorkerFailed
from mtmc_lsp.core.json_codec import from_json
from mtmc_lsp.core.learning.transitions import Outcome
from mtmc_lsp.core.results import Check, CheckStatus, CompileReport
from mtmc_lsp.core.run import Candidate, RunResult
from mtmc_lsp.core.settings import Settings
from mtmc_lsp.evolve.local_runner import Here
from mtmc_lsp.evolve.remote_runner import RemoteRunner
from mtmc_lsp.evolve.trials import TrialRequest, TrialResult
from mtmc_lsp.evolve.workloads import Workloads
from mtmc_lsp.search.components import Events, Limits, SearchComponents
from mtmc_lsp.search.greedy import GreedySearch
from mtmc_lsp.search.loop import Search
from mtmc_lsp.search.tree.search import BeamSearch
from tests.search.fakes import ENVIRONMENT, SOURCE, FakeCoder, FakeMeasurer, FakePlanner, action, capture

OPENING = messages.Opening("/project/model.py", "f", sys.executable, Settings())
ACTIONS = [
    action(number, outcome)
    for number, outcome in enumerate(
        ("better", "slower", "wrong", "same", "better", "uncompiled", "uncoded", "better", "crash", "hang", "better")
    )
]
KINDS = (
    messages.CompileRequest,
    messages.VerifyRequest,
    messages.TimeRequest,
    messages.TimeAllRequest,
    messages.TryRequest,
    messages.RankRequest,
    messages.DeviceRequest,
    messages.UntimedRequest,
    messages.OffsetsRequest,
    messages.KernelTimesRequest,
)


class Workers:
    """Answers the requests of a measurer with a fake that has a GPU, or none."""

    def __init__(self, *, has_gpu: bool = True, slowdown: Sequence[float] = ()) -> None:
        """Prepare.

        Args:
            slowdown: by how much the GPU of each worker is slower than that of the first.
        """
        self._fake, self._slowdown = FakeMeasurer(has_gpu=has_gpu), slowdown
        self.requests: list[tuple[int, Any]] = []
        self.meeting: threading.Barrier | None = None
        """Where the first two trials meet."""
        self._tries = itertools.count()

    def __call__(self, number: int, command: str, data: Any) -> Any:
        request = from_json(next(kind for kind in KINDS if kind.command == command), data)
        self.requests.append((number, request))
        return self._answer(number, request)

    def _answer(self, number: int, request: Any) -> Any:
        fake = self._fake
        if isinstance(request, messages.DeviceRequest):
            return fake.device()
        if isinstance(request, messages.CompileRequest):
            return fake.compile(request.candidate)
        if isinstance(request, messages.VerifyRequest):
            return fake.verify(request.candidate)
        if isinstance(request, messages.TimeRequest | messages.TimeAllRequest):
            return messages.Timed(fake.time(request.candidate, request.previous))
        if isinstance(request, messages.RankRequest):
            factor = self._slowdown[number]
            medians = [us * factor if us is not None else None for us in fake.quick(request.candidates)]
            return messages.Ranked(tuple(CompileReport() for _ in medians), tuple(medians))
        if isinstance(request, messages.TryRequest):
            return self._try(request)
        if isinstance(request, messages.UntimedRequest):
            return messages.Baselines(())
        if isinstance(request, messages.OffsetsRequest):
            return Check("offsets", CheckStatus.SKIPPED)
        raise AssertionError(request)

    def _try(self, request: messages.TryRequest) -> messages.Tried:
        fake, candidate, tried = self._fake, request.candidate, messages.Tried()
        if next(self._tries) < 2 and self.meeting is not None:
            self.meeting.wait()
        try:
            tried = messages.Tried(fake.compile(candidate))
            if tried.report is not None and tried.report.ok and request.verifies:
                tried = replace(tried, verdict=fake.verify(candidate))
            if request.times and (tried.report is None or tried.report.ok):
                tried = replace(tried, timing=fake.time(candidate, request.previous))
        except MtmcError as error:
            return replace(tried, error=error.to_json())
        return tried


class RaisingJobs(FakeJobs):
    """As on a worker, errors are answers."""

    def _answered(self, number: int, command: str, data: Any) -> Any:
        try:
            return super()._answered(number, command, data)
        except MtmcError as error:
            return {"error": error.to_json()}


@pytest.fixture
def remote() -> Iterator[Callable[..., tuple[RemoteMeasurer, Workers]]]:
    """Makes measurers over fake workers."""
    opened: list[FakeJobs] = []

    def make(count: int, *, has_gpu: bool = True, slowdown: Sequence[float] = ()) -> tuple[RemoteMeasurer, Workers]:
        workers = Workers(has_gpu=has_gpu, slowdown=slowdown or [1.0] * count)
        jobs = RaisingJobs(count, workers)
        opened.append(jobs)
        environment = ENVIRONMENT if has_gpu else replace(ENVIRONMENT, gpu="", capability="")
        graph = capture(environment=environment)
        graph = replace(graph, workload=replace(graph.workload, device="cuda" if has_gpu else "cpu"))
        return RemoteMeasurer(RemoteTarget(jobs, OPENING), (graph,), 0), workers

    yield make
    for jobs in opened:
        jobs.close()


def run(kind: type[Search], actions: Sequence[MacroAction], measurer: Any, *, plans_ahead: bool = True) -> RunResult:
    environment = ENVIRONMENT if measurer.has_gpu else replace(ENVIRONMENT, gpu="", capability="")
    limits = Limits(seconds=60.0, steps=len(actions))
    parts = SearchComponents(
        FakePlanner(actions), FakeCoder(), measurer, measurer.has_gpu, limits, plans_ahead=plans_ahead
    )
    return kind(capture(environment=environment), SOURCE, parts, Events()).run("run", "hash")


def described(result: RunResult) -> list[tuple[object, ...]]:
    return [(step.index, step.action.text, step.status, step.reason, step.base) for step in result.steps]


@pytest.mark.parametrize("kind", [GreedySearch, BeamSearch])
@pytest.mark.parametrize("has_gpu", [True, False])
@pytest.mark.parametrize("count", [1, 2, 4])
def test_a_run_has_the_same_steps_with_any_number_of_workers(
    kind: type[Search], has_gpu: bool, count: int, remote: Callable[..., tuple[RemoteMeasurer, Workers]]
) -> None:
    measurer, workers = remote(count, has_gpu=has_gpu)
    there = run(kind, ACTIONS, measurer)
    assert described(there) == described(run(kind, ACTIONS, FakeMeasurer(has_gpu=has_gpu)))
    trials = [(number, item) for number, item in workers.requests if isinstance(item, messages.TryRequest)]
    assert trials
    tried = [(item.candidate.source, item.previous.source) for _, item in trials if item.previous is not None]
    assert len(tried) == len(set(tried)), "no trial runs twice"
    if count == 4:
        assert len({number for number, _ in trials}) > 1


@pytest.mark.parametrize("outcome", ["better", "slower"])
@pytest.mark.parametrize("has_gpu", [True, False])
def test_trials_begin_before_it_is_known_that_they_follow(
    has_gpu: bool, outcome: str, remote: Callable[..., tuple[RemoteMeasurer, Workers]]
) -> None:
    """The first two trials reach the workers before the first one is answered."""
    measurer, workers = remote(4, has_gpu=has_gpu)
    workers.meeting = threading.Barrier(2, timeout=60)
    actions = [action(number, outcome) for number in range(3)]
    result = run(GreedySearch, actions, measurer)
    assert described(result) == described(run(GreedySearch, actions, FakeMeasurer(has_gpu=has_gpu)))


def test_nothing_begins_ahead_if_a_model_plans_or_writes(
    remote: Callable[..., tuple[RemoteMeasurer, Workers]],
) -> None:
    measurer, workers = remote(4, has_gpu=False)
    run(GreedySearch, [action(number, "better") for number in range(3)], measurer, plans_ahead=False)
    assert workers.requests
    assert not [item for _, item in workers.requests if isinstance(item, messages.TryRequest)]


def test_configurations_of_several_gpus_are_compared_by_their_ratio_to_the_same_version(
    remote: Callable[..., tuple[RemoteMeasurer, Workers]],
) -> None:
    """The second GPU is four times slower, and has the best configuration."""
    measurer, workers = remote(2, slowdown=[1.0, 4.0])
    coder = FakeCoder()
    base = coder.start(capture(), SOURCE)
    choices = [
        base,
        *(coder.write(capture(), base, action(n, outcome)) for n, outcome in enumerate(["same", "better"])),
    ]
    assert [report.ok for report in measurer.compile_variants(choices)] == [True] * 3
    assert measurer.quick(choices) == [100.0, 100.0, 80.0]
    ranks = [(number, item.candidates) for number, item in workers.requests]
    assert sorted(number for number, _ in ranks) == [0, 1]
    assert all(candidates[0].source == base.source for _, candidates in ranks), "each GPU times the version before"


def test_a_configuration_step_of_a_run_takes_the_fastest_configuration(
    remote: Callable[..., tuple[RemoteMeasurer, Workers]],
) -> None:
    measurer, _ = remote(2, slowdown=[1.0, 4.0])
    tune = action(0, "same", variants=[{"outcome": "slower"}, {"outcome": "same"}, {"outcome": "better"}])
    (step,) = run(GreedySearch, [tune], measurer).steps
    assert step.candidate is not None
    assert step.candidate.schedule == {"us": 80.0, "outcome": "better"}


class StuckJobs:
    """Jobs that never end, or whose workers are lost."""

    is_remote, shares_gpus, count = True, False, 2

    def __init__(self, *, is_lost: bool = False) -> None:
        self._is_lost = is_lost

    def submit(self, job: Callable[..., Any], *arguments: Any, **options: Any) -> Future[Any]:
        future: Future[Any] = Future()
        if self._is_lost:
            future.set_exception(RuntimeError("lost"))
        return future

    def result(self, future: Future[Any]) -> Any:
        raise WorkerLost("the workers that ran it were lost 4 times, so the cluster gave it up")


def test_nothing_waits_longer_than_the_run() -> None:
    target = RemoteTarget(StuckJobs(), OPENING)
    with pytest.raises(WorkerFailed, match=r"the time was over before remote\.device ended") as caught:
        target.call(messages.DeviceRequest(0), time.monotonic() + 0.1)
    assert caught.value.kind is FailureKind.DEADLINE


def test_a_version_that_loses_all_its_workers_fails_alone() -> None:
    target = RemoteTarget(StuckJobs(is_lost=True), OPENING)
    here = Here(capture(), SOURCE, sys.executable, ("sm_90",), Workloads((("N=64", {"N": 64}),)), float("inf"))
    runner = RemoteRunner(target, here, RemoteMeasurer(target, (capture(),), 0))
    version = Candidate("v", None, None, SOURCE, None, {"us": 1.0})
    (result,) = runner.run([TrialRequest(version, version)])
    assert result.outcome is Outcome.OUT_OF_TIME
    assert "were lost 4 times" in result.detail


def test_the_versions_of_a_generation_are_tried_at_the_same_time_and_answered_in_order() -> None:
    together = threading.Barrier(3, timeout=60)

    def answer(number: int, command: str, data: Any) -> TrialResult:
        together.wait()
        return TrialResult(Outcome.CORRECT, detail=data["trial"]["candidate"]["id"])

    jobs = FakeJobs(3, answer)
    target = RemoteTarget(jobs, OPENING)
    here = Here(capture(), SOURCE, sys.executable, ("sm_90",), Workloads((("N=64", {"N": 64}),)), float("inf"))
    runner = RemoteRunner(target, here, RemoteMeasurer(target, (capture(),), 0))
    versions = [Candidate(f"v{number}", None, None, SOURCE, None, {"us": 1.0}) for number in range(3)]
    results = runner.run([TrialRequest(versions[0], version) for version in versions])
    assert [result.detail for result in results] == ["v0", "v1", "v2"]
    jobs.close()
