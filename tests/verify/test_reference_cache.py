"""The cache of the reference process, and its answer if float64 does not fit into memory."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from mtmc_lsp.core.results import CheckStatus
from mtmc_lsp.core.workload import Capture
from mtmc_lsp.process.worker import tensor_ipc
from mtmc_lsp.verify.cases import Case
from mtmc_lsp.verify.messages import CaseRequest, JudgeRequest, ReferenceRequest
from mtmc_lsp.verify.worker import expectations, reference_cache
from mtmc_lsp.verify.worker.judge_command import judge
from mtmc_lsp.verify.worker.reference_commands import compute_reference


@pytest.fixture(autouse=True)
def empty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reference_cache, "_cache", {})


def test_what_has_room_is_kept_in_memory_and_the_rest_in_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reference_cache, "HOST_BYTES", 1000)
    small, large = ({"results": [torch.arange(count)]} for count in (10, 1000))
    for name, value in (("small", small), ("large", large)):
        reference_cache.store(str(tmp_path / name), value, or_file=True)
        assert reference_cache.is_cached(str(tmp_path / name))
        assert torch.equal(reference_cache.load(str(tmp_path / name), "cpu")["results"][0], value["results"][0])
    assert [path.name for path in tmp_path.iterdir()] == ["large"]
    assert not reference_cache.is_cached(str(tmp_path / "other"))
    monkeypatch.setattr(reference_cache, "FILE_BYTES", 7000)
    reference_cache.store(str(tmp_path / "too large"), large, or_file=True)
    assert not reference_cache.is_cached(str(tmp_path / "too large"))


def test_what_is_kept_anew_takes_the_old_ones_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reference_cache, "HOST_BYTES", 1000)
    for _ in range(3):
        reference_cache.store(str(tmp_path / "case"), [torch.zeros(200)], or_file=True)
    assert not list(tmp_path.iterdir())


SOURCE = "# mtmc: x=f32[N,D] N=64 D=32\ndef f(x):\n    return x.exp().sum(-1)\n"


def case_request(capture: Capture, folder: Path, sizes: dict[str, int]) -> CaseRequest:
    return CaseRequest(capture, user_source=None, case=Case(sizes, "normal", 1), inputs=str(folder / "inputs"))


def test_where_float64_does_not_fit_the_users_results_are_compared_with(
    captured, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_room(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(expectations, "oracle_of", no_room)
    data = case_request(captured(SOURCE, "f"), tmp_path, {"N": 64, "D": 32})
    expected, results = str(tmp_path / "expected"), str(tmp_path / "results")
    assert not compute_reference(ReferenceRequest(data, expected)).has_oracle
    x = tensor_ipc.import_(data.inputs, "cpu")["x"]
    for factor, passes in ((1 + 5e-5, True), (1 + 5e-4, False)):
        result = (x.exp().sum(-1).double() * factor).float()
        facts = [{"type": "Tensor", "device": "cpu", "requires_grad": False, "shares memory with": "no input"}]
        tensor_ipc.export_(
            {"results": [result], "after": {}, "facts": facts, "changed_state": []}, results, in_memory=False
        )
        checks = judge(JudgeRequest(data, expected, results, "budget")).checks
        failed = [check.name for check in checks if check.status is CheckStatus.FAILED]
        assert failed == ["result 0 values"] * (not passes)


def test_a_process_that_was_started_again_computes_again_what_it_had_kept(captured, tmp_path: Path) -> None:
    data = case_request(captured(SOURCE, "f"), tmp_path, {"N": 8, "D": 4})
    expected, results = str(tmp_path / "expected"), str(tmp_path / "results")
    assert compute_reference(ReferenceRequest(data, expected)).has_oracle
    first = reference_cache.load(expected, "cpu")
    reference_cache._cache.clear()
    tensor_ipc.export_(first, results, in_memory=False)
    checks = judge(JudgeRequest(data, expected, results, "budget")).checks
    assert all(check.status is CheckStatus.PASSED for check in checks)
