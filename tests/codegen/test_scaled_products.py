"""Products that the user's code runs in TF32, on float16 operands with a scale for each row and column."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from mtmc_lsp.core.protocols import CannotCode
from mtmc_lsp.core.run import Candidate
from mtmc_lsp.core.workload import Capture
from tests.codegen.harness import compile_errors, fused, results, verified

HEAD = "import torch\nimport torch.nn.functional as F\n\n\n"
LINEAR = """# mtmc: x=f32[B,K] w=f32[N,K] b=f32[N] B=40 K=72 N=24
def f(x, w, b):
    return F.relu(F.linear(x, w, b))
"""
BATCHED = """# mtmc: a=f32[B,M,K] b=f32[B,K,N] B=2 M=34 K=70 N=24
def f(a, b):
    return torch.relu(torch.bmm(a, b)) + 1.0
"""
CONSTANT = """# mtmc: a=f32[M,300] b=f32[300,N] M=40 N=24
def f(a, b):
    return torch.tanh(a @ b / 100)
"""
COMPUTED = """# mtmc: a=f32[M,K] b=f32[K,N] g=f32[M] M=34 K=70 N=36
def f(a, b, g):
    return (a * g[:, None]).exp() @ b
"""
PLAIN = """# mtmc: a=f32[M,K] b=f32[K,N] M=48 K=64 N=32
def f(a, b):
    return a @ b
"""
SMALL = {
    "block_m": 16, "block_n": 16, "block_k": 16, "group_m": 4, "warps": 4, "stages": 2, "precision": "fp16-scaled",
}  # fmt: skip
CASES = {
    "linear": (LINEAR, {}),
    "tiles moved by hardware": (LINEAR, {"tma": True}),
    "persistent": (LINEAR, {"persist": 2}),
    "parts along K": (LINEAR, {"split_k": 2}),
    "stream-K": (LINEAR, {"stream_k": 4}),
    "batched": (BATCHED, {}),
    "batched, tiles moved by hardware": (BATCHED, {"tma": True}),
    "K is a number": (CONSTANT, {}),
    "a computed operand": (COMPUTED, {}),
}
TF32 = 2.0**-11
"""Largest relative error of a number that is rounded to 11 bits."""


def in_tf32(capture: Capture) -> Capture:
    """A capture of a program that allows TF32. A setting in the text would stay in the process that all tests share."""
    return replace(capture, graph=replace(capture.graph, fp32_matmul="tf32"))


def as_allowed(candidate: Candidate) -> Candidate:
    """A candidate whose guard reads that TF32 is allowed."""
    setting = "torch.backends.cuda.matmul.allow_tf32"
    assert setting in candidate.source
    return replace(candidate, source=candidate.source.replace(setting, "True"))


@pytest.mark.parametrize("name", CASES)
def test_a_product_is_as_exact_as_in_tf32(name: str, captured) -> None:
    text, config = CASES[name]
    capture = in_tf32(captured(HEAD + text, "f"))
    candidate = fused(capture, HEAD + text, {**SMALL, **config})
    assert "tl.float16" in candidate.source
    verdict = verified(capture, as_allowed(candidate))
    assert verdict.is_correct, verdict.reason


def test_its_kernels_compile(captured) -> None:
    for text, config in ((LINEAR, {"tma": True}), (BATCHED, {}), (LINEAR, {"split_k": 2})):
        capture = in_tf32(captured(HEAD + text, "f"))
        candidate = fused(capture, HEAD + text, {**SMALL, "block_m": 64, "block_n": 64, "block_k": 64, **config})
        assert not compile_errors(capture, candidate, ("sm_80", "sm_90"))


def test_the_guard_asks_whether_tf32_is_allowed(captured) -> None:
    capture = in_tf32(captured(HEAD + LINEAR, "f"))
    assert "_may_products_use_tf32()" in fused(capture, HEAD + LINEAR, SMALL).source


def test_full_precision_refuses_it(captured) -> None:
    capture = captured(HEAD + LINEAR, "f")
    with pytest.raises(CannotCode, match="precision cannot be 'fp16-scaled': that is for float32 products"):
        fused(capture, HEAD + LINEAR, SMALL)


def test_verification_refuses_it_where_full_precision_is_set(captured) -> None:
    capture = in_tf32(captured(HEAD + LINEAR, "f"))
    candidate = fused(capture, HEAD + LINEAR, SMALL)
    assert not verified(captured(HEAD + LINEAR, "f"), as_allowed(candidate)).is_correct
    refused = verified(capture, candidate)
    assert "no kernel was launched" in refused.reason, "the guard refuses where full precision is set"


def product(captured, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """``a @ b`` by the kernels."""
    capture: Capture = in_tf32(captured(HEAD + PLAIN, "f"))
    return results(capture, as_allowed(fused(capture, HEAD + PLAIN, SMALL)), {"a": a, "b": b})[0]


def operands() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    return torch.randn(48, 64, generator=generator), torch.randn(64, 32, generator=generator)


def tf32_bound(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """The largest error of each element of ``a @ b`` if both operands are rounded to 11 bits, and sums are in float32."""
    terms = a.double().abs() @ b.double().abs()
    return (2 * TF32 + TF32**2 + a.shape[1] * 2.0**-23) * terms


@pytest.mark.parametrize("small", [1e-3, 1e-6, 1e-12])
def test_rows_with_a_wide_range_are_as_exact_as_in_tf32(small: float, captured) -> None:
    """Results that only small elements determine are off by at most 2 ** -38 times the largest element of the row."""
    a, b = operands()
    a[:, ::2] *= small
    a[:, 1::2] *= 1e3
    b[1::2, :8] = 0.0
    error, bound = (product(captured, a, b).double() - a.double() @ b.double()).abs(), tf32_bound(a, b)
    assert error[:, 8:].le(bound[:, 8:]).all()
    largest = a.abs().amax(1, keepdim=True).double() @ b.abs().sum(0, keepdim=True).double()
    assert error[:, :8].le((bound + 2.0**-38 * largest)[:, :8]).all()


@pytest.mark.parametrize("factors", [(1e38, 1e-30), (1e-38, 1e30), (1e-41, 1e10), (1e18, 1e18), (1e-20, 1e-16)])
def test_the_scales_neither_overflow_nor_underflow(factors: tuple[float, float], captured) -> None:
    a, b = operands()
    a, b = a.clamp(-3, 3) * factors[0], b * factors[1]
    error = (product(captured, a, b).double() - a.double() @ b.double()).abs()
    assert error.le(tf32_bound(a, b) + 1e-40).all()


def test_zeros_infinities_and_nan_are_those_of_a_float32_product(captured) -> None:
    a, b = operands()
    a[3] = 0.0
    a[5, 7], a[6, 8], a[9, 10], a[11, :2] = torch.inf, -torch.inf, torch.nan, torch.inf
    a[12, 4], a[12, 5] = 1e30, torch.inf
    b[:, 3], b[7, 4], b[20, 5], b[:, 6] = 0.0, 1e-30, torch.inf, 1e-30 * b[:, 6]
    b[21, 8] = 1e30
    expected, result = a @ b, product(captured, a, b)
    assert torch.equal(result.isnan(), expected.isnan())
    assert torch.equal(result.isposinf(), expected.isposinf())
    assert torch.equal(result.isneginf(), expected.isneginf())
    finite = expected.isfinite()
    assert (result - expected)[finite].abs().le(tf32_bound(a.nan_to_num(0, 0, 0), b.nan_to_num(0, 0, 0))[finite]).all()


def test_subnormal_numbers_keep_the_bits_that_they_have(captured) -> None:
    a, b = operands()
    a[4] = 1e-41 * a[4]
    a[8] = 0.0
    a[8, 0] = 2.0**-149
    error = (product(captured, a, b).double() - a.double() @ b.double()).abs()
    assert error.le(tf32_bound(a, b) + 2.0**-149).all()
