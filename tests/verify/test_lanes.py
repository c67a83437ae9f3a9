"""Cases of one candidate that two processes run side by side."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
from handwritten import RMS

from mtmc_lsp.core.errors import FailureKind, WorkerFailed
from mtmc_lsp.core.results import VerdictStatus
from mtmc_lsp.core.workload import Capture
from mtmc_lsp.measure import local_measurer
from mtmc_lsp.measure.local_measurer import LocalMeasurer, MeasureOptions
from mtmc_lsp.process.fork_server import ForkServer
from mtmc_lsp.verify.adapters import VersionInFile
from mtmc_lsp.verify.candidate_process import CandidateProcess
from mtmc_lsp.verify.cases import AUTOGRAD, Case
from mtmc_lsp.verify.engine import VerificationEngine
from mtmc_lsp.verify.messages import CandidateRequest, GuardRequest
from mtmc_lsp.verify.outcomes import CaseOutcome, Verification, checked
from mtmc_lsp.verify.reference import Reference
from mtmc_lsp.verify.running import lanes as module
from mtmc_lsp.verify.running.lanes import lanes, run_side_by_side

SIZES = (8, 11, 1, 11, 0, 8)
CASES = [Case({"B": size}, "normal", number) for number, size in enumerate(SIZES)]
CASES.insert(5, Case({"B": 1}, "normal", 9, AUTOGRAD))


def test_cases_of_the_same_sizes_and_kind_are_in_one_process() -> None:
    divided = lanes(CASES)
    assert divided is not None
    assert sorted(number for lane in divided for number in lane) == list(range(len(CASES)))
    process_of = {number: i for i, lane in enumerate(divided) for number in lane}
    assert process_of[1] == process_of[3], "both have B=11"
    assert process_of[0] == process_of[6] == 0, "the workload's sizes are in the first process"
    assert all(lane == sorted(lane) for lane in divided)
    assert all(len({(CASES[i].kind, CASES[i].sizes["B"]) for i in lane}) > 1 for lane in divided)


@pytest.mark.parametrize("cases", [CASES[:1], CASES[:3], [CASES[0], CASES[6], CASES[0]]])
def test_one_process_runs_all_cases_of_few_sizes(cases: list[Case]) -> None:
    assert lanes(cases) is None


def failed(case: Case) -> CaseOutcome:
    return CaseOutcome(case, VerdictStatus.INCORRECT, reason=f"wrong at {case.seed}")


def test_the_first_failure_in_the_order_of_cases_is_reported_whichever_process_is_faster() -> None:
    """The second process fails at once, the first one at an earlier case."""
    late = threading.Event()
    ran: list[int] = []

    def first(case: Case) -> CaseOutcome:
        assert late.wait(60)
        ran.append(case.seed)
        return failed(case) if case.seed == 2 else checked(case, [])

    def second(case: Case) -> CaseOutcome:
        ran.append(case.seed)
        late.set()
        return failed(case)

    cases = [Case({}, "normal", number) for number in range(6)]
    outcomes = run_side_by_side(cases, ([0, 2, 4], [3, 5]), (first, second))
    assert [outcome.case.seed for outcome in outcomes] == [0, 2]
    assert outcomes[-1].reason == "wrong at 2"
    assert sorted(ran) == [0, 2, 3], "cases after a failure do not begin"


def test_an_error_in_one_process_stops_the_other_and_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    running: list[Future[Any]] = []
    ran: list[int] = []

    class Threads(ThreadPoolExecutor):
        def submit(self, *arguments: Any) -> Any:
            running.append(super().submit(*arguments))
            return running[-1]

    def first(case: Case) -> CaseOutcome:
        ran.append(case.seed)
        while len(running) < 2:
            pass
        assert running[1].exception(60)
        return checked(case, [])

    def second(case: Case) -> CaseOutcome:
        raise WorkerFailed("the verification was abandoned", kind=FailureKind.CANCELLED)

    monkeypatch.setattr(module, "ThreadPoolExecutor", Threads)
    cases = [Case({}, "normal", number) for number in range(4)]
    with pytest.raises(WorkerFailed, match="abandoned"):
        run_side_by_side(cases, ([0, 1, 2], [3]), (first, second))
    assert ran == [0]


@pytest.fixture(scope="module")
def verified(
    capture_of: Callable[..., Capture], fork_server: ForkServer, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[..., tuple[Verification, dict[CandidateProcess, list[str]]]]]:
    """Verifies a version of RMS in one or two processes; returns also the cases of each process."""
    capture = capture_of(RMS)
    with contextlib.ExitStack() as ends:
        reference = ends.enter_context(Reference(capture, RMS.text, sys.executable, seed=5, fork_server=fork_server))

        def process() -> CandidateProcess:
            folder = str(tmp_path_factory.mktemp("lanes"))
            one = CandidateProcess(
                sys.executable,
                folder,
                capture.environment,
                has_gpu=False,
                hidden=reference.hidden,
                fork_server=fork_server,
            )
            ends.callback(one.close)
            return one

        def verify(source: str, count: int) -> tuple[Verification, dict[CandidateProcess, list[str]]]:
            processes = [process() for _ in range(count)]
            cases: dict[CandidateProcess, list[str]] = {one: [] for one in processes}
            for one in processes:
                note_cases(one, cases[one])
            engine = VerificationEngine(reference, *processes)
            return engine.verify(VersionInFile(capture, RMS.text, source)), cases

        yield verify


def note_cases(process: CandidateProcess, cases: list[str]) -> None:
    call = process.call

    def noted(request: Any, *more: Any) -> Any:
        if isinstance(request, GuardRequest):
            cases.append("delivery")
        if isinstance(request, CandidateRequest):
            cases.append(request.data.case.label)
        return call(request, *more)

    process.call = noted  # type: ignore[method-assign]


def test_two_processes_reach_the_verdict_of_one(verified: Callable[..., Any]) -> None:
    alone, cases_of_one = verified(RMS.candidate().source, 1)
    beside, cases_of_two = verified(RMS.candidate().source, 2)
    assert alone.verdict.is_correct
    assert beside.verdict == alone.verdict
    first, second = cases_of_two.values()
    assert first[0] == second[0] == "delivery", "both have constructed the module when the cases begin"
    assert len(second) > 2
    assert sorted(first + second[1:]) == sorted(*cases_of_one.values())


def test_the_second_process_of_a_candidate_ends_with_its_verification(verified: Callable[..., Any]) -> None:
    """Also where the version does not get as far as the cases: a late call would begin in the process of the next version."""
    refused = RMS.candidate(("    if rms_fits(x, w):\n", "    if False:\n"))
    verification, cases = verified(refused.source, 2)
    assert not verification.verdict.is_correct
    assert all(process._worker._process is None for process in cases)


def test_two_processes_report_the_failure_of_one(verified: Callable[..., Any]) -> None:
    wrong = RMS.candidate((" and t.dtype == torch.float32", ""))
    verdicts = [verified(wrong.source, count)[0].verdict for count in (1, 2)]
    assert verdicts[0].status is VerdictStatus.INCORRECT
    assert verdicts[1] == verdicts[0]


@pytest.mark.parametrize("is_slow", [False, True])
def test_the_measurer_has_a_second_process_where_the_host_bounds_the_launches(
    is_slow: bool, capture_of: Callable[..., Capture], monkeypatch: pytest.MonkeyPatch
) -> None:
    capture = capture_of(RMS)
    on_gpu = replace(
        capture,
        environment=replace(capture.environment, gpu="a GPU", capability="sm_90"),
        workload=replace(capture.workload, device="cuda"),
    )
    monkeypatch.setattr(local_measurer, "is_host_bound", lambda _: is_slow)
    monkeypatch.setattr(CandidateProcess, "warm_up", lambda _: None)
    monkeypatch.setattr(Reference, "start", lambda _: None)
    with contextlib.closing(LocalMeasurer(on_gpu, sys.executable, MeasureOptions(archs=("sm_90",)))) as measurer:
        second = measurer._engine._second
        assert (second is not None) is is_slow
        assert second is None or second._process is not measurer._process
