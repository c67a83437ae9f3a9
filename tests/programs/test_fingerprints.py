"""Fingerprints tell graphs apart by operators, dtypes and ranks, and forbidden programs are recognised."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from mtmc_lsp.app.bench.suite import find_problems
from mtmc_lsp.core.workload import Capture
from mtmc_lsp.programs.fingerprints import (
    DIGITS,
    FORBIDDEN_FILE,
    fingerprint,
    forbidden_fingerprints,
    is_common,
    is_forbidden,
    leaks,
)

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = {
    "examples": "examples",
    "everyday": "benchmarks/everyday",
    "unseen": "benchmarks/unseen",
    "loops": "benchmarks/loops",
    "loops_cudnn": "benchmarks/loops_cudnn",
    "loops_training": "benchmarks/loops_training",
}
SCORE = """\
import torch


# mtmc: x=f32[N,D] w=f32[D] N=6 D=8
def score(x, w, eps=1e-6):
    left = torch.exp(x) * w
    right = torch.sigmoid(x)
    total = left.sum(-1, keepdim=True)
    return left / (total + eps) - right
"""
SAME = {
    "names": SCORE.replace("left", "a").replace("total", "b"),
    "sizes": SCORE.replace("N=6 D=8", "N=12 D=40"),
    "constants": SCORE.replace("1e-6", "1e-3"),
    "order": SCORE.replace(
        "    left = torch.exp(x) * w\n    right = torch.sigmoid(x)\n",
        "    right = torch.sigmoid(x)\n    left = torch.exp(x) * w\n",
    ),
}
OTHER = {
    "operator": SCORE.replace("torch.sigmoid", "torch.tanh"),
    "dtype": SCORE.replace("f32", "f64"),
    "rank": SCORE.replace("f32[N,D]", "f32[N,3,D]"),
    "input": SCORE.replace("torch.sigmoid(x)", "torch.sigmoid(w)"),
    "connection": SCORE.replace("- right", "- left"),
    "operands": SCORE.replace("left / (total + eps) - right", "right - left / (total + eps)"),
}  # fmt: skip


@pytest.mark.parametrize("text", SAME.values(), ids=SAME)
def test_names_sizes_constants_and_order_do_not_count(text: str, captured: Callable[[str, str], Capture]) -> None:
    assert text != SCORE
    assert fingerprint(captured(text, "score").graph) == fingerprint(captured(SCORE, "score").graph)


@pytest.mark.parametrize("text", OTHER.values(), ids=OTHER)
def test_operators_dtypes_ranks_and_connections_count(text: str, captured: Callable[[str, str], Capture]) -> None:
    assert text != SCORE
    assert fingerprint(captured(text, "score").graph) != fingerprint(captured(SCORE, "score").graph)


def test_what_is_written_into_an_argument_counts(captured: Callable[[str, str], Capture]) -> None:
    text = "# mtmc: x=f32[8] y=f32[8]\ndef f(x, y):\n    {}\n    return x * 2.0 + y.exp() - 1.0\n"
    into_x, into_y = (captured(text.format(f"{name}.add_(1.0)"), "f").graph for name in "xy")
    assert fingerprint(into_x) != fingerprint(into_y)


def test_a_leak_names_both_programs(captured: Callable[[str, str], Capture]) -> None:
    benchmark = captured(SCORE, "score")
    copied = captured(SAME["sizes"].replace("def score", "def learned"), "learned")
    fresh = captured(OTHER["operator"].replace("def score", "def fresh"), "fresh")
    assert [(leak.training, leak.forbidden) for leak in leaks([fresh, copied], [benchmark])] == [("learned", "score")]


def test_graphs_of_three_operations_belong_to_everybody(captured: Callable[[str, str], Capture]) -> None:
    text = "import torch\n\n\n# mtmc: x=f32[6,8]\ndef f(x):\n    return torch.softmax(x * 2.0, dim=-1) + 1.0\n"
    small = captured(text, "f")
    assert is_common(small.graph)
    assert not is_forbidden(small)
    assert leaks([small], [small]) == []


@pytest.mark.parametrize(
    ("file", "name"),
    [
        ("examples/rmsnorm_residual.py", "rmsnorm_residual"),
        ("benchmarks/everyday/training.py", "ppo_loss"),
        ("benchmarks/everyday/vision.py", "box_iou"),
        ("benchmarks/unseen/language.py", "gemma_rms_norm"),
    ],
)
def test_a_benchmark_is_forbidden_also_with_other_sizes(
    file: str, name: str, captured: Callable[[str, str], Capture]
) -> None:
    text = re.sub(r"\b([A-Z])=\d{3,}", r"\1=24", (ROOT / file).read_text())
    assert is_forbidden(captured(text, name))


def test_a_program_that_no_benchmark_has_is_allowed(captured: Callable[[str, str], Capture]) -> None:
    assert not is_forbidden(captured(SCORE, "score"))


def test_the_file_contains_hashes_of_each_suite_and_nothing_else() -> None:
    lines = FORBIDDEN_FILE.read_text().splitlines()
    suites = {
        match[1]: match
        for line in lines
        if (match := re.match(r"# suite (\w+): (\d+) programs, (\d+) captured, (\d+) graphs", line))
    }
    assert set(suites) == {*FOLDERS, "kernelbench", "reporting"}
    captured = {suite: int(match[3]) for suite, match in suites.items()}
    assert {suite: captured[suite] for suite in FOLDERS} == {
        suite: len(find_problems(ROOT / folder)) for suite, folder in FOLDERS.items()
    }
    assert captured["kernelbench"] >= 215
    assert captured["reporting"] >= 120
    hashes = [line for line in lines if not line.startswith("#")]
    assert all(re.fullmatch(rf"[0-9a-f]{{{DIGITS}}}", line) for line in hashes)
    assert len(hashes) == sum(int(match[4]) for match in suites.values())
    assert set(hashes) == forbidden_fingerprints()
