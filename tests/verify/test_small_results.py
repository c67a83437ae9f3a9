"""Small elements of a result must be right where the reference computes them as precisely as large ones."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from pairs import POINTWISE, changed

from mtmc_lsp.core.results import Verdict, VerdictStatus

Judge = Callable[..., Verdict]
HEAD = "import torch\nimport torch.nn.functional as F\n\n\n"
SOFTMAX = f"{HEAD}# mtmc: x=f32[N,D] N=12 D=40\ndef reference(x):\n    return torch.softmax(x, -1)\n"
ROWS = """import torch
import triton
import triton.language as tl


@triton.jit
def kernel(x_ptr, out_ptr, columns, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * columns + cols, mask=cols < columns, other=-float("inf"))
    numerator = tl.exp(x - tl.max(x, axis=0))
    part = numerator / tl.sum(numerator, axis=0)
    tl.store(out_ptr + row * columns + cols, RESULT, mask=cols < columns)


def fast(x):
    x = x.contiguous()
    out = torch.empty_like(x)
    if out.numel():
        kernel[(x.shape[0],)](x, out, x.shape[1], BLOCK=triton.next_power_of_2(x.shape[1]))
    return out
"""


def pointwise(judge: Judge, result: str, formula: str) -> Verdict:
    """The verdict on a formula in Triton against one in torch."""
    reference = f"{HEAD}# mtmc: x=f32[N,D] N=12 D=40\ndef reference(x):\n    return {result}\n"
    return judge(reference, "reference", changed(POINTWISE, ("FORMULA", formula)), "fast")


@pytest.mark.parametrize("limit", ["1e-12", "1.0 / 1000000 / 1000", "BLOCK * 1e-11"])
def test_small_probabilities_that_are_flushed_are_refused(judge: Judge, limit: str) -> None:
    flushed = changed(ROWS, ("RESULT", f"tl.where(part < {limit}, 0.0, part)"))
    verdict = judge(SOFTMAX, "reference", flushed, "fast")
    assert verdict.status is VerdictStatus.INCORRECT
    assert "small elements" in verdict.reason


@pytest.mark.parametrize(
    "result", ["part", "tl.exp2(1.4426950408889634 * (x - tl.max(x, axis=0))) / tl.sum(numerator, axis=0)"]
)
def test_honest_probabilities_are_certified(judge: Judge, result: str) -> None:
    verdict = judge(SOFTMAX, "reference", changed(ROWS, ("RESULT", result)), "fast")
    assert verdict.is_correct, verdict.reason


@pytest.mark.parametrize(
    ("result", "formula"),
    [
        ("torch.exp(x)", "tl.where(x < -32.0 * 0.7, 0.0, tl.exp(x))"),
        ("x * x * 3", "tl.where(tl.abs(x) < 3.0 / 40000, 0.0, x * x * 3)"),
    ],
)
def test_small_elements_of_other_results_are_compared(judge: Judge, result: str, formula: str) -> None:
    verdict = pointwise(judge, result, formula)
    assert verdict.status is VerdictStatus.INCORRECT, verdict.reason


@pytest.mark.parametrize(
    ("result", "formula"),
    [
        ("torch.sigmoid(x) - 0.5", "1 / (1 + tl.exp(-x)) - 0.5"),
        ("torch.exp(x - 3) / 7", "tl.exp2((x - 3) * 1.4426950408889634) / 7"),
        ("x.pow(4) / 7", "x * x * x * x * (1.0 / 7)"),
    ],
)
def test_rounding_of_small_elements_is_no_mistake(judge: Judge, result: str, formula: str) -> None:
    verdict = pointwise(judge, result, formula)
    assert verdict.is_correct, verdict.reason
