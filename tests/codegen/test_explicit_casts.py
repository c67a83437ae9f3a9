"""Explicit casts to 16-bit and 8-bit dtypes: readers see rounded values, and bit views are not numbers."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.codegen.checker import Checker, greedy
from tests.codegen.harness import compile_errors, fused, some_cases, verified
from tests.planning.situations import fully_fused, start

ROUNDED = {
    "what a rounding leaves": "hi = x.half().float(); return hi, (x - hi) * 2048.0",
    "what is too large": "y = (x * 30000.0).half(); return torch.isinf(y), y.float() * 0.5",
    "a norm of halves": "y = x.half(); return (y * torch.rsqrt(y.float().pow(2).mean(-1, keepdim=True))).half() * 3.0",
}


def text_of(body: str) -> str:
    lines = "\n".join(f"    {line.strip()}" for line in body.split(";"))
    return f"import torch\n# mtmc: x=f32[N,D] N=16 D=40\ndef f(x):\n{lines}\n"


@pytest.mark.parametrize("name", ROUNDED)
def test_explicit_casts_are_rounded_for_their_readers(name: str, captured) -> None:
    text = text_of(ROUNDED[name])
    capture = captured(text, "f")
    candidate = fully_fused(capture, start(capture, text))
    assert ".to(tl.float16).to(tl.float32)" in candidate.source
    assert verified(capture, candidate).reason == ""


WHOLE = {
    "whole numbers": ("i64[N,D]@2000..70000", "y = x.half(); return torch.isinf(y), y.float() + 1.0"),
    "a literal": ("f32[N,D]", "return torch.full_like(x, 0.1).half().float() * x"),
    "what is copied": (
        "f32[N,D]",
        "y = torch.zeros_like(x, dtype=torch.float16); y.copy_(x); return (x - y.float()) * 2048.0",
    ),
}


@pytest.mark.parametrize("name", WHOLE)
def test_casts_of_computed_values_are_rounded_too(name: str, captured) -> None:
    kind, body = WHOLE[name]
    text = text_of(body).replace("f32[N,D]", kind)
    capture = captured(text, "f")
    assert verified(capture, fully_fused(capture, start(capture, text))).reason == ""


def test_float8_inputs_are_supported(captured) -> None:
    text = text_of("return x.float() * 2.0").replace("f32[N,D]", "f8e4m3[N,D]")
    capture = captured(text, "f")
    assert compile_errors(capture, fused(capture, text), ["sm_90"]) == []
    assert verified(capture, fused(capture, text)).reason == ""


@pytest.mark.parametrize("kind", ["float8_e4m3fn", "float8_e5m2"])
def test_float8_results_are_compared(captured, kind: str) -> None:
    """PyTorch supports comparison, multiplication and isinf for all floats except these."""
    text = text_of(f"y = torch.tanh(x) * 3.0; return y.to(torch.{kind}), y")
    capture = captured(text, "f")
    candidate = fully_fused(capture, start(capture, text))
    assert verified(capture, candidate).reason == ""
    # Only the kernel changes: the guard would reject a change of the function.
    wrong = replace(candidate, source=candidate.source.replace("_tanh(x) * 3.0", "_tanh(x) * 2.0"))
    assert wrong.source != candidate.source
    assert "result 0 values" in verified(capture, wrong).reason


@pytest.mark.parametrize(
    ("kind", "largest", "triton_dtype"), [("float8_e4m3fn", 448.0, "float8e4nv"), ("float8_e5m2", 57344.0, "float8e5")]
)
def test_float8_casts_within_their_range_are_rounded_for_their_readers(
    checker: Checker, kind: str, largest: float, triton_dtype: str
) -> None:
    capture = checker.capture(
        text_of(f"y = (x * 3.0).clamp(-{largest}, {largest}).half().to(torch.{kind}); return y.float() - x")
    )
    candidate = greedy(capture, {})
    assert f".to(tl.{triton_dtype}).to(tl.float32)" in candidate.source
    assert len(candidate.launches) == 1
    assert checker.compile_errors(capture, candidate) == []
    assert checker.first_failure(capture, candidate, some_cases(capture)) == ""


@pytest.mark.parametrize("body", ["x * 3.0", "(x * 3.0).clamp(max=448.0)", "(x * 3.0).clamp(-500.0, 448.0)"])
def test_float8_casts_that_may_overflow_stay_torch_calls(captured, body: str) -> None:
    text = text_of(f"return ({body}).to(torch.float8_e4m3fn).float() * 2.0 - x")
    capture = captured(text, "f")
    candidate = fully_fused(capture, start(capture, text))
    assert candidate.launches
    assert "torch.float8_e4m3fn" in candidate.source.partition("def f_launch")[2].partition("def f_triton")[0]
    assert verified(capture, candidate).reason == ""


def test_a_cast_that_is_only_stored_is_rounded_by_the_store(captured) -> None:
    text = text_of("return torch.tanh(x).half()")
    capture = captured(text, "f")
    assert ".to(tl.float16).to(" not in fused(capture, text).source


def test_bit_views_stay_torch_calls(captured) -> None:
    text = text_of("return (x.view(torch.int32) & 0x7FFFFFFF) + 1")
    capture = captured(text, "f")
    candidate = fully_fused(capture, start(capture, text))
    assert "torch.int32" in candidate.source.partition("def f_launch")[2]
    assert verified(capture, candidate).reason == ""


def test_the_sign_of_nan_is_zero(captured) -> None:
    text = text_of('return torch.sign(torch.where(x > 1.0, float("nan"), x)) * 2.0')
    capture = captured(text, "f")
    assert torch.sign(torch.tensor(float("nan"))) == 0.0
    assert verified(capture, fused(capture, text)).reason == ""


def test_the_size_of_a_slice_stays_dynamic(captured) -> None:
    text = "import torch\n# mtmc: x=f32[B,T] B=4 T=100\ndef f(x):\n    return torch.tanh(x[:, 1:] - 0.97 * x[:, :-1])\n"
    capture = captured(text, "f")
    assert [str(size) for size in capture.graph.inputs[0].type.shape] == ["B", "T"]
    candidate = fully_fused(capture, start(capture, text))
    assert verified(capture, candidate).reason == ""
