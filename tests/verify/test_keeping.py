"""What the reference's process keeps of its cases, and what it says where float64 does not fit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from mtmc_lsp.core.json_codec import to_json
from mtmc_lsp.process.worker import tensor_ipc as handover
from mtmc_lsp.verify.worker import commands as in_worker
from mtmc_lsp.verify.worker import expectations as expecting
from mtmc_lsp.verify.worker import reference_cache as keeping


@pytest.fixture(autouse=True)
def empty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keeping, "_kept", {})


def test_what_has_room_is_kept_in_memory_and_the_rest_in_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keeping, "HOST_BYTES", 1000)
    small, large = ({"results": [torch.arange(count)]} for count in (10, 1000))
    for name, value in (("small", small), ("large", large)):
        keeping.keep(str(tmp_path / name), value, or_file=True)
        assert keeping.is_there(str(tmp_path / name))
        assert torch.equal(keeping.kept(str(tmp_path / name), "cpu")["results"][0], value["results"][0])
    assert [path.name for path in tmp_path.iterdir()] == ["large"]
    assert not keeping.is_there(str(tmp_path / "other"))
    monkeypatch.setattr(keeping, "FILE_BYTES", 7000)
    keeping.keep(str(tmp_path / "too large"), large, or_file=True)
    assert not keeping.is_there(str(tmp_path / "too large"))


def test_what_is_kept_anew_takes_the_old_ones_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keeping, "HOST_BYTES", 1000)
    for _ in range(3):
        keeping.keep(str(tmp_path / "case"), [torch.zeros(200)], or_file=True)
    assert not list(tmp_path.iterdir())


SOURCE = "# mtmc: x=f32[N,D] N=64 D=32\ndef f(x):\n    return x.exp().sum(-1)\n"


def test_where_float64_does_not_fit_the_users_own_results_are_compared_with(
    captured, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_room(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(expecting, "_oracle", no_room)
    capture = captured(SOURCE, "f")
    case = {
        "sizes": {"N": 64, "D": 32},
        "distribution": "normal",
        "seed": 1,
        "kind": "values",
        "layout": "",
        "label": "",
    }
    files = {name: str(tmp_path / name) for name in ("inputs", "expected", "results")}
    request = {
        "capture": to_json(capture),
        "own": None,
        "widened": False,
        "case": case,
        "precision": "budget",
        "differing": [],
        **files,
    }
    assert in_worker.reference(request)["coarse"]
    x = handover.take(files["inputs"], "cpu")["x"]
    for factor, passes in ((1 + 5e-5, True), (1 + 5e-4, False)):
        result = (x.exp().sum(-1).double() * factor).float()
        facts = [{"type": "Tensor", "device": "cpu", "requires_grad": False, "shares memory with": "no input"}]
        handover.give({"results": [result], "after": {}, "facts": facts}, files["results"], in_memory=False)
        found = in_worker.compare(request)
        assert [check["name"] for check in found["checks"] if check["status"] == "failed"] == ["result 0 values"] * (
            not passes
        )


def test_a_process_that_was_started_anew_computes_again_what_it_had_kept(captured, tmp_path: Path) -> None:
    capture = captured(SOURCE, "f")
    case = {"sizes": {"N": 8, "D": 4}, "distribution": "normal", "seed": 1, "kind": "values", "layout": "", "label": ""}
    files = {name: str(tmp_path / name) for name in ("inputs", "expected", "results")}
    request = {
        "capture": to_json(capture),
        "own": None,
        "widened": False,
        "case": case,
        "precision": "budget",
        "differing": [],
        **files,
    }
    assert not in_worker.reference(request)["coarse"]
    first = keeping.kept(files["expected"], "cpu")
    keeping._kept.clear()
    handover.give(first, files["results"], in_memory=False)
    assert all(check["status"] == "passed" for check in in_worker.compare(request)["checks"])
