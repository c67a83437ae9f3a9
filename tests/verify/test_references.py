"""References are computed ahead: in order, none twice, and not while a candidate waits for the reference process."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from handwritten import RMS

from mtmc_lsp.core.errors import FailureKind, OutOfMemory, WorkerFailed
from mtmc_lsp.core.workload import Capture
from mtmc_lsp.verify.adapters import VersionInFile
from mtmc_lsp.verify.cases import Case
from mtmc_lsp.verify.engine import VerificationEngine
from mtmc_lsp.verify.messages import JudgeAnswer, JudgeRequest, ReferenceAnswer, ReferenceRequest
from mtmc_lsp.verify.reference import Reference
from mtmc_lsp.verify.trials import Trial

CASES = [Case({"N": n, "D": 8}, "normal", n) for n in range(1, 6)]


class FakeWorker:
    """Answers in place of the reference process."""

    def __init__(self) -> None:
        self.seeds: list[int] = []
        self.proceed = threading.Event()
        self.proceed.set()
        self.failures: dict[int, Exception] = {}

    def call(self, request: Any, seconds: float, *_: object) -> Any:
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
    worker: FakeWorker, reference: Reference, tmp_path: Any
) -> None:
    trial = Trial(reference.capture)
    first = reference.prepare(trial, CASES[:1], first=CASES[0])[0]
    first.done.result(10)
    worker.proceed.clear()
    judging = threading.Thread(
        target=reference.judge,
        args=(first, tmp_path / "r"),
        kwargs={"is_exact": False, "differing": (), "finds_trivial": True},
    )
    judging.start()
    while not reference._judging:
        pass
    later = reference.prepare(trial, CASES[1:], first=CASES[0])
    threading.Event().wait(0.2)
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
