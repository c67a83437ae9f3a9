"""Activations with cheaper, algebraically equal formulas: accurate for large inputs and without cancellation."""

from __future__ import annotations

import pytest

from tests.codegen.families import source
from tests.codegen.harness import verified
from tests.planning.situations import fully_fused, start

GELU = "0.5 * x * (1.0 + torch.tanh(0.7978845608028654 * (x + 0.044715 * torch.pow(x, 3.0))))"


def kernel(captured, text: str):
    capture = captured(text, "f")
    candidate = fully_fused(capture, start(capture, text))
    verdict = verified(capture, candidate)
    assert verdict.is_correct, verdict.reason
    return candidate.source


@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16"])
@pytest.mark.parametrize("text", [f"x: {GELU}", "x, y: (torch.tanh(x * 3) + 1) * y", "x: 1 + (x - 2).tanh()"])
def test_one_plus_tanh_is_a_sigmoid(text: str, dtype: str, captured) -> None:
    kernel_source = kernel(captured, source(text, dtype))
    assert "tl.sigmoid(2.0 * " in kernel_source
    assert "_tanh(" not in kernel_source


@pytest.mark.parametrize(
    "text",
    [
        "x: torch.tanh(x) + 2",
        "x: (lambda t: (t + 1) * t)(torch.tanh(x))",
        "x=f64[B,7]: torch.tanh(x) + 1",
        "x, y: torch.tanh(x) + y",
    ],
)
def test_a_tanh_with_other_readers_or_in_another_sum_stays_a_tanh(text: str, captured) -> None:
    kernel_source = kernel(captured, source(text, "f32"))
    assert "_tanh" in kernel_source
    assert "sigmoid" not in kernel_source


@pytest.mark.parametrize("dtype", ["f32", "f16"])
def test_mish_is_accurate_for_large_positive_and_negative_inputs(dtype: str, captured) -> None:
    kernel_source = kernel(captured, source("x: torch.nn.functional.mish(x * 40) + torch.nn.functional.mish(x)", dtype))
    assert "log" not in kernel_source.split("@triton.jit")[-1]
