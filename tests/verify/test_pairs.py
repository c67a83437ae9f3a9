"""``mtmc verify`` as a user runs it, and what a verdict says where right and wrong cannot be told apart."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from pairs import HONEST, MODEL, MODEL_NEW, POINTWISE, REFERENCE, changed

from mtmc_lsp.core.results import Verdict, VerdictStatus
from tests.cli.runner import mtmc


@pytest.fixture
def verdict_of(judge: Callable[..., Verdict]) -> Callable[[str, str], tuple[VerdictStatus, str]]:
    """Judges a formula in Triton against one in torch."""

    def formulas(own: str, formula: str) -> tuple[VerdictStatus, str]:
        text = f"import torch\n\n\n# mtmc: x=f32[N,D] N=9 D=20\ndef own(x):\n    return {own}\n"
        verdict = judge(text, "own", POINTWISE.replace("FORMULA", formula), "fast")
        return verdict.status, verdict.reason

    return formulas


def test_an_honest_pair_in_two_files_passes_check_by_check(tmp_path: Path) -> None:
    (tmp_path / "reference.py").write_text(REFERENCE)
    (tmp_path / "candidate.py").write_text(HONEST)
    answer = mtmc(tmp_path, "verify", "reference.py::rms", "candidate.py::fast", CUDA_VISIBLE_DEVICES="")
    assert answer.code == 0, answer.out + answer.err
    for check in ("result 0 values", "input x unchanged", "determinism", "kernel's result used", "text: imports"):
        assert check in answer.out
    assert not list(tmp_path.rglob("failures"))


def test_other_cases_do_not_see_what_one_did_to_the_candidates_module(judge: Callable[..., Verdict]) -> None:
    used = "        self.shapes = {*getattr(self, 'shapes', ()), x.shape}\n        assert len(self.shapes) == 1\n"
    text = changed(MODEL_NEW, ("    def forward(self, x):\n", f"    def forward(self, x):\n{used}"))
    verdict = judge(MODEL, "Model", text, "ModelNew")
    assert verdict.is_correct, verdict.reason


def test_a_module_that_can_be_constructed_only_once_is_refused(judge: Callable[..., Verdict]) -> None:
    once = "        super().__init__()\n        MADE.append(self)\n        assert len(MADE) == 1\n"
    text = changed(
        MODEL_NEW,
        ("class ModelNew", "MADE = []\n\n\nclass ModelNew"),
        ("        super().__init__()\n", once),
    )
    verdict = judge(MODEL, "Model", text, "ModelNew")
    assert verdict.status is VerdictStatus.INCORRECT
    assert "a second instance" in verdict.reason


def test_a_kernelbench_pair_gets_the_references_inputs_and_parameters(tmp_path: Path) -> None:
    """The candidate's file needs neither ``get_inputs`` nor our names; its parameters have other values than at its start."""
    (tmp_path / "model.py").write_text(MODEL)
    (tmp_path / "new.py").write_text(MODEL_NEW)
    (tmp_path / "bad.py").write_text(changed(MODEL_NEW, ("* tl.load(gain_ptr + at % width, mask=mask)", "")))
    good = mtmc(tmp_path, "verify", "model.py", "new.py", "--json", CUDA_VISIBLE_DEVICES="")
    assert good.code == 0, good.document["verdict"]["reason"]
    assert good.document["verdict"]["status"] == "correct"
    bad = mtmc(tmp_path, "verify", "model.py", "bad.py", "--json", "--out", "why.py", CUDA_VISIBLE_DEVICES="")
    assert bad.code == 1
    assert bad.document["verdict"]["status"] == "incorrect"
    rerun = subprocess.run([sys.executable, "why.py"], cwd=tmp_path, capture_output=True, text=True, timeout=800)
    assert rerun.returncode == 1
    assert "result 0 is wrong" in rerun.stdout


def test_a_failure_becomes_a_small_file_that_shows_it_and_passes_once_mended(tmp_path: Path) -> None:
    (tmp_path / "reference.py").write_text(REFERENCE)
    tail = ("mask = cols < columns", "mask = cols < columns // 16 * 16")
    (tmp_path / "candidate.py").write_text(changed(HONEST, tail))
    answer = mtmc(tmp_path, "verify", "reference.py::rms", "candidate.py::fast", "--json", CUDA_VISIBLE_DEVICES="")
    assert answer.code == 1
    file = answer.document["reproduction"]
    text = Path(file).read_text()
    assert len(text) < 24_000  # 14,000 of them are patches of the interpreter
    assert "autograd" not in text, "the target is not trained"
    run = [sys.executable, file]
    seen = subprocess.run(run, capture_output=True, text=True, timeout=800)
    assert (seen.returncode, "result 0 is wrong" in seen.stdout) == (1, True), seen.stdout + seen.stderr
    (tmp_path / "candidate.py").write_text(HONEST)
    mended = subprocess.run(run, capture_output=True, text=True, timeout=800)
    assert mended.returncode == 0, mended.stdout + mended.stderr


@pytest.mark.parametrize(
    ("own", "formula", "said"),
    [("x * 1.0", "x * 1.0", "a copy of x"), ("x * 0.0", "x * 0.0", "zeros"), ("x * 0.0 + 1", "x * 0.0 + 1", "mean")],
)  # fmt: skip
def test_a_workload_that_tells_nothing_is_not_certified(own: str, formula: str, said: str, verdict_of) -> None:
    status, reason = verdict_of(own, formula)
    assert said in reason
    assert status is VerdictStatus.UNCERTIFIABLE


@pytest.mark.parametrize(
    ("own", "formula", "what"),
    [
        ("x * 3 - 1", "(x * 3 - 1) * 1.0000002", "exact"),
        ("torch.relu(x)", "tl.where(x > 0, x, 0.0)", "NaN"),
        ("x + 1", "tl.where(x > 1e30, 1e30, x + 1)", "infinite"),
        ("torch.where(x == 0, x, x.sign())", "tl.where(x > 1e-37, 1.0, tl.where(x < -1e-37, -1.0, 0.0))", "denormal"),
    ],
)
def test_what_only_unusual_values_show_is_found(own: str, formula: str, what: str, verdict_of) -> None:
    status, reason = verdict_of(own, formula)
    assert status is VerdictStatus.INCORRECT, reason
    assert what in reason


def reproduced(folder: Path, reference: str, candidate: str) -> tuple[Path, str]:
    """The file that shows what is wrong with a candidate, and what it prints."""
    (folder / "reference.py").write_text(reference)
    (folder / "candidate.py").write_text(candidate)
    answer = mtmc(folder, "verify", "reference.py::rms", "candidate.py::fast", "--json", CUDA_VISIBLE_DEVICES="")
    assert answer.code == 1, answer.out
    file = Path(answer.document["reproduction"])
    seen = subprocess.run([sys.executable, file], capture_output=True, text=True, timeout=800)
    assert seen.returncode == 1, seen.stdout + seen.stderr
    return file, seen.stdout


def test_a_failure_after_many_calls_is_shown_by_as_many(tmp_path: Path) -> None:
    drifts = changed(
        HONEST,
        ("def fast(", "CALLS = []\n\n\ndef fast("),
        ("    return out\n", "    CALLS.append(0)\n    return out if len(CALLS) < 30 else out * 1.01\n"),
    )
    file, printed = reproduced(tmp_path, REFERENCE, drifts)
    assert "in call" in printed
    assert "patch_interpreter()" in file.read_text()


def test_wrong_gradients_are_shown(tmp_path: Path) -> None:
    asks = changed(REFERENCE, ("N=13 D=24", "N=13 D=24 grad=x"))
    stops = changed(
        HONEST,
        ("def fast(", "class Fast(torch.autograd.Function):\n    @staticmethod\n    def forward(ctx, inp, weight, eps):\n        return run(inp, weight, eps)\n\n    @staticmethod\n    def backward(ctx, grad):\n        return grad, None, None\n\n\ndef fast(inp, weight, eps=1e-5):\n    return Fast.apply(inp, weight, eps)\n\n\ndef run("),
    )  # fmt: skip
    _, printed = reproduced(tmp_path, asks, stops)
    assert "is wrong" in printed or "instead of" in printed
