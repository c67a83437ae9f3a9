"""A process that dies on a case: the case is repeated in a fresh process, once for each candidate."""

from __future__ import annotations

from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mtmc_lsp.core.errors import FailureKind, MtmcError, RequestError, WorkerFailed
from mtmc_lsp.core.graph import Graph
from mtmc_lsp.core.results import VerdictStatus
from mtmc_lsp.verify.case_runner import CaseRunner
from mtmc_lsp.verify.cases import Case
from mtmc_lsp.verify.messages import CallPlan, CandidateAnswer, CandidateRequest, JudgeAnswer, ReferenceAnswer
from mtmc_lsp.verify.outcomes import CaseOutcome
from mtmc_lsp.verify.reference import Reference

RAN = CandidateAnswer("ran", launches=1, all_launches=1)
ASSERTED = CandidateAnswer("runtime_error", "device-side assert triggered", FailureKind.DEVICE_ASSERT)


class Processes:
    """A candidate's process and a reference, whose answers are scripted: the last one repeats."""

    def __init__(self, answers: list[CandidateAnswer | MtmcError], judgements: list[JudgeAnswer | MtmcError]) -> None:
        self._answers, self._judgements = answers, judgements
        self.started, self.compared, self.looked_for_trivial = 1, 0, list[bool]()
        self.pool = self
        self.run_seconds = 1.0

    def call(self, process: object, request: CandidateRequest, seconds: float) -> CandidateAnswer:
        return self._next(self._answers)

    def next(self) -> None:
        self.started += 1

    def judge(self, *args: Any, finds_trivial: bool, **more: Any) -> JudgeAnswer:
        self.compared += 1
        self.looked_for_trivial.append(finds_trivial)
        return self._next(self._judgements)

    def take_results(self, to: Path) -> None:
        pass

    def wait_for(self, prepared: object) -> None:
        pass

    def share_inputs(self, prepared: object) -> None:
        pass

    def path_for_results(self) -> Path:
        return Path("results.pt")

    @staticmethod
    def _next(script: list[Any]) -> Any:
        item = script.pop(0) if len(script) > 1 else script[0]
        if isinstance(item, Exception):
            raise item
        return item


def outcomes(processes: Processes, count: int = 1) -> list[CaseOutcome | None]:
    graph = Graph(inputs=(), nodes=(), outputs=(), returns="", sizes={})
    trial: Any = SimpleNamespace(capture=SimpleNamespace(graph=graph, uses_random=False), few=False, is_full=True)
    candidate: Any = SimpleNamespace(source=lambda trial: None, needs_kernel=True, replays_launches=False)
    runner = CaseRunner(processes, processes, candidate, trial)  # type: ignore[arg-type]
    done: Future[ReferenceAnswer] = Future()
    done.set_result(ReferenceAnswer(True, False))
    data = SimpleNamespace(is_first=False)
    prepared: Any = SimpleNamespace(case=Case({"B": 4}, "normal", 1), data=data, done=done, expected="expected.pt")
    return [runner.outcome(prepared, CallPlan()) for _ in range(count)]


def crash() -> WorkerFailed:
    return WorkerFailed("the process ended by signal 11", kind=FailureKind.CRASHED)


@pytest.mark.parametrize("death", [crash(), ASSERTED], ids=["crash", "device-side assert"])
def test_a_candidate_whose_process_dies_once_is_run_again_in_a_fresh_one(death: CandidateAnswer | MtmcError) -> None:
    processes = Processes([death, RAN], [JudgeAnswer(())])
    (outcome,) = outcomes(processes)
    assert outcome is not None and outcome.is_correct
    assert processes.started > 1


def test_a_candidate_whose_process_dies_again_has_failed() -> None:
    processes = Processes([crash()], [JudgeAnswer(())])
    first, second = outcomes(processes, 2)
    assert first is not None and first.status is VerdictStatus.CRASHED
    assert second is not None and second.status is VerdictStatus.CRASHED
    assert processes.started == 2, "one retry for the candidate, not one for each case"


@pytest.mark.parametrize("error", [crash(), RequestError("device-side assert", kind=FailureKind.DEVICE_ASSERT)])
def test_a_comparison_that_dies_costs_a_retry_and_is_no_internal_error(error: MtmcError) -> None:
    processes = Processes([RAN], [error, JudgeAnswer(())])
    (outcome,) = outcomes(processes)
    assert outcome is not None and outcome.is_correct
    assert (processes.compared, processes.started) == (2, 2)
    processes = Processes([RAN], [error])
    (outcome,) = outcomes(processes)
    assert outcome is not None and outcome.status is VerdictStatus.CRASHED
    assert "compares its results died" in outcome.reason


def test_a_wrong_answer_or_a_timeout_is_not_tried_again() -> None:
    hang = WorkerFailed("no answer within 1 s", kind=FailureKind.TIMEOUT)
    for failure in (CandidateAnswer("runtime_error", "IndexError: 3"), hang):
        processes = Processes([failure, RAN], [JudgeAnswer(())])
        (outcome,) = outcomes(processes)
        assert outcome is not None and not outcome.is_correct


def test_a_comparison_that_loses_the_gpu_leaves_a_fresh_process_to_the_next(tmp_path: Path) -> None:
    class Lost:
        closed = 0

        def call(self, request: object, seconds: float, *_: object) -> object:
            raise RequestError("device-side assert triggered", kind=FailureKind.DEVICE_ASSERT)

        def close(self) -> None:
            self.closed += 1

        kill = close

    target = SimpleNamespace(path=str(tmp_path / "model.py"))
    environment = SimpleNamespace(gpu="")
    capture: Any = SimpleNamespace(environment=environment, workload=SimpleNamespace(target=target, device="cpu"))
    worker: Any = Lost()
    with Reference(capture, "", "python", worker=worker) as reference:
        prepared: Any = SimpleNamespace(data=None, expected="expected.pt")
        with pytest.raises(RequestError):
            reference.judge(prepared, tmp_path / "results.pt", is_exact=False, differing=(), finds_trivial=True)
    assert worker.closed == 1


def test_trivial_answers_are_compared_until_a_case_refutes_them_all() -> None:
    judgements = [("zeros", "a copy of x"), ("zeros", "the mean"), ("a copy of x",), ("zeros",)]
    processes = Processes([RAN], [JudgeAnswer((), trivial=names) for names in judgements])
    found = [outcome.trivial for outcome in outcomes(processes, 4) if outcome is not None]
    assert processes.looked_for_trivial == [True, True, True, False]
    assert found == [*map(frozenset, judgements[:3]), None]


@pytest.mark.parametrize("helps", ["room", "the GPU alone", ""])
def test_a_candidate_without_memory_is_run_again_with_room_and_then_alone(helps: str) -> None:
    no_memory = CandidateAnswer("runtime_error", "CUDA out of memory", FailureKind.GPU_OUT_OF_MEMORY)
    processes = Processes([no_memory], [JudgeAnswer(())])
    repeated = list[str]()

    def repeat(how: str) -> Any:
        def call(process: object, request: CandidateRequest, seconds: float) -> CandidateAnswer:
            repeated.append(how)
            return RAN if how == helps else no_memory

        return call

    processes.call_with_room, processes.call_alone = repeat("room"), repeat("the GPU alone")  # type: ignore[attr-defined]
    first, second = outcomes(processes, 2)
    assert first is not None and second is not None
    assert first.is_correct is second.is_correct is bool(helps)
    each = ["room"] if helps == "room" else ["room", "the GPU alone"]
    assert repeated == (each * 2 if helps else each), "a candidate that needs more than the GPU has is repeated once"
