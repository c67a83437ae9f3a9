"""References are computed ahead: in order, none twice, and not while a candidate waits for the reference process."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from handwritten import RMS

from mtmc_lsp.core.errors import FailureKind, OutOfMemory, WorkerFailed
from mtmc_lsp.core.workload import Capture
from mtmc_lsp.process.worker_pool import WorkerPool
from mtmc_lsp.verify import reference as module
from mtmc_lsp.verify.adapters import VersionInFile
from mtmc_lsp.verify.cases import AUTOGRAD, ON_CPU, Case
from mtmc_lsp.verify.engine import VerificationEngine
from mtmc_lsp.verify.messages import JudgeAnswer, JudgeRequest, ReferenceAnswer, ReferenceRequest
from mtmc_lsp.verify.reference import Reference
from mtmc_lsp.verify.trials import Trial

CASES = [Case({"N": n, "D": 8}, "normal", n) for n in range(1, 6)]


class FakeWorker:
    """Answers in place of the reference process."""

    def __init__(self) -> None:
        self.seeds: list[int] = []
        self.proceed, self.entered = threading.Event(), threading.Event()
        self.proceed.set()
        self.failures: dict[int, Exception] = {}

    def call(self, request: Any, seconds: float, *_: object) -> Any:
        self.entered.set()
        assert self.proceed.wait(60)
        if isinstance(request, JudgeRequest):
            return JudgeAnswer(())
        assert isinstance(request, ReferenceRequest)
        seed = request.data.case.seed
        self.seeds.append(seed)
        if seed in self.failures:
            raise self.failures[seed]
        return ReferenceAnswer(has_oracle=True, is_large=False)

    def kill(self) -> None:
        """Nothing runs."""

    def close(self) -> None:
        """Nothing runs."""


@pytest.fixture
def worker() -> FakeWorker:
    return FakeWorker()


@pytest.fixture
def reference(worker: Any, capture_of: Callable[..., Capture]) -> Iterator[Reference]:
    with Reference(capture_of(RMS), RMS.text, sys.executable, seed=3, worker=worker) as one:
        yield one


def test_each_case_is_computed_once_and_in_order(worker: FakeWorker, reference: Reference) -> None:
    trial = Trial(reference.capture)
    for _ in range(2):
        for prepared in reference.prepare(trial, CASES, first=CASES[0]):
            assert prepared.done.result(10).has_oracle
    assert worker.seeds == [case.seed for case in CASES]


def test_a_case_can_be_used_before_the_next_one_is_computed(worker: FakeWorker, reference: Reference) -> None:
    prepared = reference.prepare(Trial(reference.capture), CASES[:1], first=CASES[0])
    prepared[0].done.result(10)
    worker.proceed.clear()
    more = reference.prepare(Trial(reference.capture), CASES, first=CASES[0])
    assert more[0].done.done() and not more[1].done.done()
    worker.proceed.set()
    more[-1].done.result(10)


def test_an_error_belongs_to_its_case_alone(worker: FakeWorker, reference: Reference) -> None:
    worker.failures[2] = OutOfMemory("it does not fit")
    prepared = reference.prepare(Trial(reference.capture), CASES, first=CASES[0])
    prepared[-1].done.result(10)
    assert [isinstance(case.done.exception(), OutOfMemory) for case in prepared] == [False, True, False, False, False]


def test_no_further_case_is_computed_while_results_wait_to_be_judged(
    worker: FakeWorker, reference: Reference, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    trial, waits = Trial(reference.capture), threading.Event()
    wait_for = reference._idle.wait_for

    def noted(may_compute: Callable[[], bool]) -> bool:
        if not may_compute():
            waits.set()
        return wait_for(may_compute)

    monkeypatch.setattr(reference._idle, "wait_for", noted)
    first = reference.prepare(trial, CASES[:1], first=CASES[0])[0]
    first.done.result(10)
    worker.proceed.clear()
    judging = threading.Thread(
        target=reference.judge,
        args=(first, tmp_path / "r"),
        kwargs={"is_exact": False, "differing": (), "finds_trivial": True},
    )
    judging.start()
    while not reference._waiting.total():
        pass
    later = reference.prepare(trial, CASES[1:], first=CASES[0])
    assert waits.wait(60), "the next case waits"
    assert worker.seeds == [1]
    worker.proceed.set()
    judging.join(60)
    later[-1].done.result(10)
    assert worker.seeds == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("is_tight", [False, True])
def test_with_little_memory_only_the_workload_is_computed_ahead(
    is_tight: bool, reference: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(VerificationEngine, "is_tight", lambda *_: is_tight)
    process: Any = None
    engine = VerificationEngine(reference, process)
    ahead = engine.compute_ahead(VersionInFile(reference.capture, RMS.text, RMS.text))
    assert ahead[0].data.is_first
    assert (len(ahead) == 1) is is_tight


def test_a_deadline_while_a_reference_is_computed_ends_the_verification(
    worker: FakeWorker, reference: Reference
) -> None:
    prepared = reference.prepare(Trial(reference.capture), CASES, first=CASES[0])
    prepared[-1].done.result(10)
    worker.failures[9] = WorkerFailed("the time limit was reached", kind=FailureKind.DEADLINE)
    case = Case({"N": 4, "D": 8}, "normal", 9)
    late = reference.prepare(Trial(reference.capture), [case], first=CASES[0])[0]
    assert late.done.exception(10) is worker.failures[9]


LOOP = """
import torch

# mtmc: x=f32[B,T] B=4 T=16384
def series(x):
    h = torch.zeros_like(x[:, 0])
    out = torch.empty_like(x)
    for t in range(x.shape[1]):
        h = 0.5 * h + x[:, t]
        out[:, t] = h
    return out
"""


def test_the_user_s_code_runs_once_on_the_cpu_of_a_machine_with_a_gpu(capture_of: Callable[..., Capture]) -> None:
    """A call may take a second there. On the GPU, further calls see other contents and equal ones."""
    capture, process = capture_of(RMS), SimpleNamespace()
    with Reference(capture, RMS.text, sys.executable, seed=3, worker=FakeWorker()) as reference:  # type: ignore[arg-type]
        engine = VerificationEngine(reference, process)  # type: ignore[arg-type]
        engine.has_gpu = True
        candidate = VersionInFile(capture, RMS.text, RMS.text)
        plans = [engine._plan(candidate, replace(CASES[0], kind=kind)) for kind in (ON_CPU, AUTOGRAD)]
    assert [(plan.changes_contents, plan.repeats) for plan in plans] == [(False, 0), (True, 1)]


def test_two_processes_compute_the_references_of_a_long_loop(
    captured: Callable[[str, str], Capture], monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    """And each judges the results of its cases, also while the other one computes."""
    capture = captured(LOOP, "series")
    assert module.is_host_bound(capture)
    capture = replace(capture, environment=replace(capture.environment, gpu="a GPU"))
    workers: list[FakeWorker] = []

    def new_worker(*_: object, **__: object) -> FakeWorker:
        workers.append(FakeWorker())
        return workers[-1]

    monkeypatch.setattr(module, "Worker", new_worker)
    cases = [Case({"B": 4, "T": n}, "normal", n) for n in range(1, 6)]
    with Reference(capture, LOOP, sys.executable, seed=3, pool=WorkerPool(has_gpu=False)) as reference:
        first, second = workers
        first.proceed.clear()
        second.proceed.clear()
        prepared = reference.prepare(Trial(capture), cases, first=cases[0])
        assert first.entered.wait(60) and second.entered.wait(60)
        first.proceed.set()
        prepared[-1].done.result(10)
        (slow,) = (case for case in prepared if not case.done.done())
        judged = reference.judge(prepared[-1], tmp_path / "r", is_exact=False, differing=(), finds_trivial=False)
        assert judged == JudgeAnswer(()) and not slow.done.done()
        second.proceed.set()
        slow.done.result(10)
        assert second.seeds == [slow.case.seed] and sorted(first.seeds + second.seeds) == [1, 2, 3, 4, 5]


def test_one_process_is_enough_for_other_code(captured: Callable[[str, str], Capture]) -> None:
    assert not module.is_host_bound(captured(LOOP.replace("T=16384", "T=512"), "series"))
    capture = captured(LOOP, "series")
    large = replace(capture, bytes=2e9)
    assert not module.is_host_bound(large)
