"""The float64 oracle of a case is left out until results differ from the reference's: equal ones need no permitted error."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from concurrent.futures import CancelledError
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from handwritten import RMS

from mtmc_lsp.core.errors import FailureKind, WorkerFailed
from mtmc_lsp.core.results import CheckStatus
from mtmc_lsp.core.workload import Capture
from mtmc_lsp.process.worker import tensor_ipc
from mtmc_lsp.process.worker_pool import WorkerPool
from mtmc_lsp.verify import reference as module
from mtmc_lsp.verify.cases import AUTOGRAD, Case
from mtmc_lsp.verify.error_limits import Draws
from mtmc_lsp.verify.messages import (
    CaseRequest,
    JudgeAnswer,
    JudgeRequest,
    OracleAnswer,
    OracleRequest,
    ReferenceAnswer,
    ReferenceRequest,
    ShareInputsRequest,
)
from mtmc_lsp.verify.reference import Reference
from mtmc_lsp.verify.trials import Trial
from mtmc_lsp.verify.worker import expectations, reference_cache
from mtmc_lsp.verify.worker.judge_command import judge
from mtmc_lsp.verify.worker.reference_commands import compute_oracle, compute_reference

SOURCE = "import torch\n# mtmc: x=f32[N,D] N=64 D=32\ndef f(x):\n    return torch.softmax(x, -1), x.argmax(-1)\n"


@pytest.fixture(autouse=True)
def empty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reference_cache, "_cache", {})


@pytest.fixture
def oracles(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Notes each computation of an oracle."""
    made: list[str] = []
    oracle_of = expectations.oracle_of

    def noting(*args: Any, **kwargs: Any) -> dict[str, Any]:
        made.append("oracle")
        return oracle_of(*args, **kwargs)

    monkeypatch.setattr(expectations, "oracle_of", noting)
    return made


class Judged:
    """A case whose oracle was left out, and the judgement of results on it."""

    def __init__(self, capture: Capture, folder: Path) -> None:
        case = Case({"N": 64, "D": 32}, "normal", 1)
        self.data = CaseRequest(capture, user_source=None, case=case, inputs=str(folder / "inputs"))
        self.expected, self._results = str(folder / "expected"), str(folder / "results")
        assert compute_reference(ReferenceRequest(self.data, self.expected, defers_oracle=True)).has_oracle
        self.x = tensor_ipc.import_(self.data.inputs, "cpu")["x"]

    def failed(self, results: list[Any], **more: Any) -> tuple[list[str], JudgeAnswer]:
        facts = [
            {"type": "Tensor", "device": "cpu", "requires_grad": False, "shares memory with": "no input"} for _ in "01"
        ]
        observed = {"results": results, "after": {}, "facts": facts, "changed_state": []}
        tensor_ipc.export_(observed, self._results, in_memory=False)
        answer = judge(JudgeRequest(self.data, self.expected, self._results, "budget", **more))
        return [check.name for check in answer.checks if check.status is CheckStatus.FAILED], answer


@pytest.fixture
def judged(captured: Callable[[str, str], Capture], tmp_path: Path) -> Judged:
    return Judged(captured(SOURCE, "f"), tmp_path)


def right(x: torch.Tensor) -> list[torch.Tensor]:
    return [torch.softmax(x, -1), x.argmax(-1)]


def test_the_reference_s_results_pass_without_an_oracle(judged: Judged, oracles: list[str]) -> None:
    failed, answer = judged.failed(right(judged.x), finds_trivial=False)
    assert not failed and not oracles and answer.is_identical and answer.compared == ("result 0",)


def test_other_results_are_judged_by_the_oracle(judged: Judged, oracles: list[str]) -> None:
    values, index = right(judged.x)
    exponentials = (judged.x.double() - 0.1).exp()
    other = (exponentials / exponentials.sum(-1, keepdim=True)).float()
    assert not torch.equal(other, values)
    failed, answer = judged.failed([other, index], finds_trivial=False)
    assert not failed and oracles and not answer.is_identical and answer.reference_error > 0
    for results in ([values * 1.001, index], [values, index.roll(1)], [values[:, :16], index], [values]):
        assert judged.failed(results, finds_trivial=False)[0]
    assert len(oracles) <= 3, "more draws follow from the first oracle's runs, which are kept"


def test_one_wrong_element_is_no_identical_result(judged: Judged) -> None:
    values, index = right(judged.x)
    for i, wrong in ((0, values.clone()), (1, index.clone())):
        wrong.view(-1)[7] += 1
        assert judged.failed([wrong, index] if i == 0 else [values, wrong], finds_trivial=False)[0]


def test_trivial_answers_are_sought_with_an_oracle(judged: Judged, oracles: list[str]) -> None:
    failed, answer = judged.failed(right(judged.x), finds_trivial=True)
    assert not failed and oracles and not answer.trivial


def test_the_workload_s_oracle_on_request_is_the_one_that_its_judge_would_compute(
    judged: Judged, oracles: list[str]
) -> None:
    """Trivial answers are sought in that case: its limits have the draws that refuse them."""
    judged.data = replace(judged.data, is_first=True)
    compute_oracle(OracleRequest(judged.data, judged.expected))
    made = len(oracles)
    assert made and reference_cache.load(judged.expected, "cpu")["draws"] == Draws.ALL
    failed, answer = judged.failed(right(judged.x), finds_trivial=True)
    assert not failed and not answer.trivial and len(oracles) == made


def test_an_oracle_is_computed_once_on_request(judged: Judged, oracles: list[str]) -> None:
    request = OracleRequest(judged.data, judged.expected)
    assert compute_oracle(request).has_oracle and len(oracles) == 1
    kept = reference_cache.load(judged.expected, "cpu")
    assert not kept["is_deferred"] and kept["oracle"][0].dtype == torch.float64
    compute_oracle(request)
    assert len(oracles) == 1
    reference_cache._cache.clear()
    compute_oracle(request)
    assert len(oracles) == 1


def test_the_oracle_of_a_kept_run_is_that_of_a_new_one(judged: Judged, tmp_path: Path) -> None:
    compute_oracle(OracleRequest(judged.data, judged.expected))
    later = reference_cache.load(judged.expected, "cpu")
    compute_reference(ReferenceRequest(judged.data, str(tmp_path / "direct")))
    direct = reference_cache.load(str(tmp_path / "direct"), "cpu")
    assert all(map(torch.equal, later["oracle"], direct["oracle"])) and later["sensitivity"] == direct["sensitivity"]
    assert later.keys() == direct.keys()


class FakeWorker:
    """Answers in place of the reference process."""

    def __init__(self) -> None:
        self.deferred: dict[int, bool] = {}
        self.oracles: list[int] = []
        self.is_identical = True
        self.last = threading.Event()

    def call(self, request: Any, seconds: float, *_: object) -> Any:
        if isinstance(request, JudgeRequest):
            return JudgeAnswer((), is_identical=self.is_identical)
        seed = request.data.case.seed
        if isinstance(request, OracleRequest):
            self.oracles.append(seed)
            return OracleAnswer(True)
        self.deferred[seed] = request.defers_oracle
        return ReferenceAnswer(has_oracle=True, is_large=False)

    def kill(self) -> None:
        """Nothing runs."""

    def close(self) -> None:
        """Nothing runs."""


def test_oracles_of_a_network_follow_once_results_differ(
    capture_of: Callable[..., Capture], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of cases that were judged, and of calls outside the guard, are not computed ahead."""
    monkeypatch.setattr(module, "is_network", lambda graph: True)
    worker: Any = FakeWorker()
    cases = [Case({"N": n, "D": 8}, "normal", n) for n in range(1, 5)]
    cases.append(replace(cases[0], seed=5, kind=AUTOGRAD))
    with Reference(capture_of(RMS), RMS.text, sys.executable, seed=3, worker=worker) as reference:
        trial = Trial(reference.capture)
        reference.has_gpu = True
        reference._shares_memory = False
        prepared = reference.prepare(trial, cases, first=cases[0])
        prepared[-1].done.result(10)
        assert worker.deferred == {1: True, 2: True, 3: True, 4: True, 5: True}

        def judge_case(i: int) -> None:
            reference.judge(prepared[i], tmp_path / "r", is_exact=False, differing=(), finds_trivial=False)

        for i in (0, 1):
            judge_case(i)
        assert worker.oracles == [1], "the workload's oracle is computed before it is judged, without being asked for"
        worker.is_identical = False
        judge_case(2)
        later = reference.prepare(trial, [replace(cases[1], seed=6)], first=cases[0])
        later[0].done.result(10)
        assert worker.oracles == [1, 4] and worker.deferred[6] is False


def test_the_inputs_of_a_network_s_workload_are_shared_before_its_oracle_is_computed(
    capture_of: Callable[..., Capture], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A version begins on them meanwhile; for another version they are shared again."""
    monkeypatch.setattr(module, "is_network", lambda graph: True)
    requests: list[Any] = []

    class Sharing(FakeWorker):
        def call(self, request: Any, seconds: float, *_: object) -> Any:
            requests.append(request)
            answer = super().call(request, seconds)
            return replace(answer, is_large=True) if isinstance(answer, ReferenceAnswer) else answer

    worker: Any = Sharing()
    cases = [Case({"N": n, "D": 8}, "normal", n) for n in (1, 2)]
    with Reference(capture_of(RMS), RMS.text, sys.executable, seed=3, worker=worker) as reference:
        reference.has_gpu = reference._shares_memory = True
        first, second = reference.prepare(Trial(reference.capture), cases, first=cases[0])
        second.done.result(10)
        kinds = [type(request) for request in requests]
        assert kinds == [ReferenceRequest, OracleRequest, ReferenceRequest]
        assert [r.shares_inputs for r in requests if isinstance(r, ReferenceRequest)] == [True, False]
        worker.call = lambda request, *_: requests.append(request)
        for prepared, count in ((first, 0), (first, 1), (second, 2)):
            reference.share_inputs(prepared)
            assert sum(isinstance(request, ShareInputsRequest) for request in requests) == count


def test_inputs_that_were_shared_at_once_are_shared_again_after_a_failure(
    capture_of: Callable[..., Capture], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "is_network", lambda graph: True)

    class Dying(FakeWorker):
        def call(self, request: Any, seconds: float, *_: object) -> Any:
            if isinstance(request, OracleRequest):
                raise WorkerFailed("it died", kind=FailureKind.CRASHED)
            if isinstance(request, ShareInputsRequest):
                shared.append(request)
                return None
            return replace(super().call(request, seconds), is_large=True)

    shared: list[Any] = []
    worker: Any = Dying()
    cases = [Case({"N": n, "D": 8}, "normal", n) for n in (1, 2)]
    with Reference(capture_of(RMS), RMS.text, sys.executable, seed=3, worker=worker) as reference:
        reference.has_gpu = reference._shares_memory = True
        first, second = reference.prepare(Trial(reference.capture), cases, first=cases[0])
        second.done.result(10)
        reference.share_inputs(first)
        assert len(shared) == 1


def test_small_graphs_and_foreign_candidates_get_oracles_at_once(capture_of: Callable[..., Capture]) -> None:
    worker: Any = FakeWorker()
    cases = [Case({"N": n, "D": 8}, "normal", n) for n in range(1, 3)]
    with Reference(capture_of(RMS), RMS.text, sys.executable, seed=3, worker=worker) as reference:
        reference.has_gpu = True
        reference._shares_memory = False
        trial = Trial(reference.capture)
        reference.prepare(trial, cases, first=cases[0])[-1].done.result(10)
        reference.counts_operations = True
        outside = replace(cases[0], seed=5, kind=AUTOGRAD)
        reference.prepare(trial, [outside], first=cases[0])[-1].done.result(10)
        assert worker.deferred == {1: False, 2: False, 5: False}


def test_a_second_process_computes_other_cases_while_the_oracle_of_a_network_s_workload_is_computed(
    capture_of: Callable[..., Capture], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "is_network", lambda graph: True)
    capture = capture_of(RMS)
    assert module.is_host_bound(capture) and not module.is_host_bound(replace(capture, bytes=2e9))
    capture = replace(capture, environment=replace(capture.environment, gpu="a GPU"))
    may_end = threading.Event()
    workers: list[Any] = []

    class Waiting(FakeWorker):
        def call(self, request: Any, seconds: float, *_: object) -> Any:
            if isinstance(request, OracleRequest):
                assert may_end.wait(60)
            return super().call(request, seconds)

    def new_worker(*_: object, **__: object) -> Waiting:
        workers.append(Waiting())
        return workers[-1]

    monkeypatch.setattr(module, "Worker", new_worker)
    cases = [Case({"N": n, "D": 8}, "normal", n) for n in range(1, 6)]
    with Reference(capture, RMS.text, sys.executable, seed=3, pool=WorkerPool(has_gpu=False)) as reference:
        prepared = reference.prepare(Trial(capture), cases, first=cases[0])
        for each in prepared:
            each.done.result(60)
        home, other = sorted(workers, key=lambda worker: 1 not in worker.deferred)
        assert list(home.deferred) == [1] and list(other.deferred) == [2, 3, 4, 5] and not home.oracles
        may_end.set()
        reference._ahead.shutdown(wait=True)
    assert home.oracles == [1] and not other.oracles


def test_cases_that_wait_when_a_run_ends_are_cancelled(
    capture_of: Callable[..., Capture], monkeypatch: pytest.MonkeyPatch
) -> None:
    entered, may_end = threading.Event(), threading.Event()

    class Waiting(FakeWorker):
        def call(self, request: Any, seconds: float, *_: object) -> Any:
            entered.set()
            assert may_end.wait(60)
            return super().call(request, seconds)

    worker: Any = Waiting()
    cases = [Case({"N": n, "D": 8}, "normal", n) for n in (1, 2)]
    reference = Reference(capture_of(RMS), RMS.text, sys.executable, seed=3, worker=worker)
    prepared = reference.prepare(Trial(reference.capture), cases, first=cases[0])
    assert entered.wait(60)
    reference.close()
    with pytest.raises(CancelledError):
        prepared[1].done.result(60)
    may_end.set()
    assert prepared[0].done.result(60).has_oracle
