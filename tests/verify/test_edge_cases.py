"""Cases at the edges of a foreign candidate: sizes from its text, values and layouts."""

from __future__ import annotations

import pytest

from mtmc_lsp.core.results import VerdictStatus
from mtmc_lsp.report.phrases import verdict_line
from mtmc_lsp.verify.edge_cases import numbers_in, thresholds_in

REFERENCE = """
import torch


# mtmc: x=f32[N,D] N=37 D=24
def standard(x):
    x = x - x.mean(-1, keepdim=True)
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)
"""
ARGMAX = """
# mtmc: x=f32[N,D] N=37 D=24
def largest(x):
    return x.argmax(-1)
"""
STANDARD = """
import torch
import triton
import triton.language as tl


@triton.jit
def kernel(x_ptr, out_ptr, stride, columns, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    mask = at < columns
    x = tl.load(x_ptr + row * stride + at, mask=mask, other=0.0)
    centred = tl.where(mask, x - tl.sum(x, axis=0) / columns, 0.0)
    variance = tl.sum(centred * centred, axis=0) / columns
    tl.store(out_ptr + row * columns + at, centred * tl.rsqrt(variance + 1e-6), mask=mask)


def fast(x):
    x = x.contiguous()
    out = torch.empty_like(x)
    if x.numel():
        kernel[(x.shape[0],)](x, out, x.stride(0), x.shape[1], BLOCK=triton.next_power_of_2(x.shape[1]))
    return out
"""
LARGEST = """
import torch
import triton
import triton.language as tl


@triton.jit
def kernel(x_ptr, out_ptr, columns, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * columns + at, mask=at < columns, other=-float("inf"))
    is_nan = x != x
    key = tl.where(is_nan, float("inf"), x)
    # The first NaN comes before any number.
    first = tl.min(tl.where(is_nan, at, BLOCK), axis=0)
    best = tl.max(key, axis=0)
    found = tl.min(tl.where((key == best) & (at < columns), at, BLOCK), axis=0)
    tl.store(out_ptr + row, tl.where(first < BLOCK, first, found).to(tl.int64))


def fast(x):
    x = x.contiguous()
    out = torch.empty(x.shape[:-1], dtype=torch.int64, device=x.device)
    if out.numel():
        kernel[(x.shape[0],)](x, out, x.shape[1], BLOCK=triton.next_power_of_2(x.shape[1]))
    return out
"""
REFERENCES = {"standard": REFERENCE, "largest": ARGMAX}
WRONG = {
    "beyond 300 rows": (
        "standard",
        STANDARD.replace("    return out\n", "    return out if x.shape[0] <= 300 else out * 1.5\n"),
    ),
    "at 1 << 8 columns": (
        "standard",
        STANDARD.replace("    return out\n", "    return out if x.shape[1] != 1 << 8 else out * 1.5\n"),
    ),
    "a variance that cancels": (
        "standard",
        STANDARD.replace(
            "variance = tl.sum(centred * centred, axis=0) / columns",
            "variance = tl.sum(x * x, axis=0) / columns - (tl.sum(x, axis=0) / columns) * (tl.sum(x, axis=0) / columns)",
        ),
    ),
    "rows of zeros": ("standard", STANDARD.replace("tl.rsqrt(variance + 1e-6)", "tl.rsqrt(variance)")),
    "rows with a gap": (
        "standard",
        STANDARD.replace("x = x.contiguous()", "x = x if x.stride(1) == 1 else x.contiguous()").replace(
            "x, out, x.stride(0)", "x, out, x.shape[1]"
        ),
    ),
}


@pytest.mark.parametrize("way", WRONG)
def test_a_candidate_that_is_wrong_at_an_edge_is_refused(judge, way: str) -> None:
    name, candidate = WRONG[way]
    assert candidate not in (STANDARD, LARGEST)
    verdict = judge(REFERENCES[name], name, candidate, "fast")
    assert verdict.status is VerdictStatus.INCORRECT, verdict.reason


@pytest.mark.parametrize(("name", "candidate"), [("standard", STANDARD), ("largest", LARGEST)])
def test_an_honest_kernel_is_right_at_all_edges(judge, name: str, candidate: str) -> None:
    verdict = judge(REFERENCES[name], name, candidate, "fast")
    assert verdict.status is VerdictStatus.CORRECT, verdict.reason
    cases = {check.case for check in verdict.checks}
    assert all(any(word in case for case in cases) for word in ("sliced", "offset", "zero rows", "ties", "extreme"))


def test_numbers_in_a_text_are_found_also_where_they_are_computed() -> None:
    text = "BLOCK = 1 << 10\nTILE = 4 * 16\nif n > 300 and m < 2 ** 80 and k == 3 and 9 ** 9 ** 9 and True: x = 1e6\n"
    assert numbers_in(text) == [1024, 300, 80, 64, 16, 10, 9, 4]
    assert numbers_in("def (") == []


PRODUCT = """
import torch


# mtmc: x=f32[N,K] w=f32[K,M] N=48 K=32 M=24
def product(x, w):
    return torch.relu(x @ w) * 2.0
"""
SCALED = """
import torch
import triton
import triton.language as tl


@triton.jit
def kernel(x_ptr, out_ptr, count, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at, mask=at < count)
    tl.store(out_ptr + at, WORK, mask=at < count)


def fast(INPUTS):
    x = TORCH
    x = x.contiguous()
    out = torch.empty_like(x)
    if x.numel():
        kernel[(triton.cdiv(x.numel(), 256),)](x, out, x.numel(), BLOCK=256)
    return out
"""
CHAIN = """
import torch


# mtmc: x=f32[N,D] N=37 D=24
def chain(x):
    return (torch.relu(x) * 2.0 + 1.0).abs()
"""


@pytest.mark.parametrize(
    ("reference", "name", "inputs", "in_torch", "in_kernel", "label"),
    [
        (PRODUCT, "product", "x, w", "x @ w", "tl.where(x < 0, 0.0, x) * 2.0", "library"),
        (CHAIN, "chain", "x", "torch.relu(x) * 2.0", "tl.abs(x + 1.0)", "mixed"),
        (CHAIN, "chain", "x", "x", "tl.abs(tl.where(x < 0, 0.0, x) * 2.0 + 1.0)", "kernel"),
    ],
)
def test_the_verdict_tells_what_does_the_arithmetic(
    judge, reference: str, name: str, inputs: str, in_torch: str, in_kernel: str, label: str
) -> None:
    candidate = SCALED.replace("WORK", in_kernel).replace("INPUTS", inputs).replace("TORCH", in_torch)
    verdict = judge(reference, name, candidate, "fast")
    assert (verdict.status, verdict.computed_by) == (VerdictStatus.CORRECT, label), verdict.reason
    assert (f"{label}: operations outside of its kernels do" in verdict_line(verdict)) == (label != "kernel")


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ("torch.manual_seed(0)", "torch's random state"),
        ("torch.set_default_dtype(torch.float64)", "the default dtype"),
        ("import os; os.environ['OMP_WAIT_POLICY'] = 'active'", "environment variables"),
        ("import random; random.seed(0)", "Python's random state"),
    ],
)
def test_a_candidate_that_changes_global_state_is_refused(judge, change: str, name: str) -> None:
    candidate = STANDARD.replace("    return out\n", f"    {change}\n    return out\n")
    verdict = judge(REFERENCE, "standard", candidate, "fast")
    assert verdict.status is VerdictStatus.INCORRECT
    assert f"global state: it changes {name}" in verdict.reason


COUNTING = {
    "a global": ("CALLS = []\n", "    CALLS.append(0)\n", "len(CALLS)", "CALLS"),
    "a default": ("", "    seen.append(0)\n", "len(seen)", "defaults of fast"),
    "an attribute": ("", "    fast.calls = getattr(fast, 'calls', 0) + 1\n", "fast.calls", "fast.calls"),
}


@pytest.mark.parametrize("place", COUNTING)
def test_a_candidate_that_is_wrong_after_thousands_of_calls_is_refused_and_a_harmless_count_is_not(
    judge, place: str
) -> None:
    before, count, number, name = COUNTING[place]
    candidate = STANDARD.replace("def fast(x):", f"{before}def fast(x, seen=[]):")
    harmless = candidate.replace("    return out\n", f"{count}    return out\n")
    assert judge(REFERENCE, "standard", harmless, "fast").status is VerdictStatus.CORRECT
    wrong = harmless.replace("    return out\n", f"    return out if {number} < 5000 else out * 1.5\n")
    verdict = judge(REFERENCE, "standard", wrong, "fast")
    assert verdict.status is VerdictStatus.INCORRECT
    assert f"the results change when {name} is as after many calls" in verdict.reason


def test_a_candidate_with_a_cache_is_certified(judge) -> None:
    candidate = STANDARD.replace("def fast(x):", "import functools\n\nBLOCKS = {}\n\n\ndef fast(x):")
    block = "BLOCKS.setdefault(x.shape[1], triton.next_power_of_2(x.shape[1]))"
    candidate = candidate.replace("triton.next_power_of_2(x.shape[1])", block)
    verdict = judge(REFERENCE, "standard", candidate, "fast")
    assert verdict.status is VerdictStatus.CORRECT, verdict.reason


def test_a_candidate_that_changes_global_state_on_import_is_refused(judge) -> None:
    candidate = STANDARD.replace("@triton.jit", "torch.set_default_dtype(torch.float64)\n\n\n@triton.jit", 1)
    candidate = candidate.replace("torch.empty_like(x)", "torch.empty_like(x, dtype=torch.float32)")
    verdict = judge(REFERENCE, "standard", candidate, "fast")
    assert verdict.status is VerdictStatus.INCORRECT
    assert "global state: it changes the default dtype" in verdict.reason


def test_thresholds_of_values_are_found() -> None:
    text = "def f(x, n):\n    y = tl.where(x > 13.75, x, 0)\n    return tl.minimum(y, 6) if n == 300 else y * 2.5"
    assert thresholds_in(text) == [300.0, 13.75, 6.0]
    assert thresholds_in("def (") == []


def test_a_mistake_above_a_threshold_of_values_is_found(judge) -> None:
    honest = STANDARD.replace("x = tl.load", "raw = tl.load").replace("centred = ", "x = WRONG\n    centred = ")
    text = honest.replace("WRONG", "tl.where((raw > 1234.5) & (raw < 1300.0), raw * 1.01, raw)")
    assert judge(REFERENCE, "standard", honest.replace("WRONG", "raw"), "fast").is_correct
    assert judge(REFERENCE, "standard", text, "fast").status is VerdictStatus.INCORRECT


def test_a_candidate_may_refuse_sizes_above_the_workloads_with_an_exception(judge) -> None:
    limited = "    x = x.contiguous()\n    if x.shape[1] > LIMIT:\n        raise ValueError('too wide')\n"
    text = STANDARD.replace("    x = x.contiguous()\n", limited)
    verdict = judge(REFERENCE, "standard", text.replace("LIMIT", "500"), "fast")
    assert verdict.is_correct, verdict.reason
    assert any("it raises ValueError: too wide" in note for note in verdict.notes)
    refused = judge(REFERENCE, "standard", text.replace("LIMIT", "20"), "fast")
    assert refused.status is VerdictStatus.RUNTIME_ERROR


def test_messages_name_shapes_where_sizes_have_no_names(judge) -> None:
    unnamed = REFERENCE.replace("x=f32[N,D] N=37 D=24", "x=f32[37,24]")
    verdict = judge(unnamed, "standard", STANDARD.replace("+ 1e-6", "+ 1e-2"), "fast")
    assert "(on x[" in verdict.reason and "s0" not in verdict.reason


RUNNING = """
import torch


# mtmc: x=f32[N,D] N=5 D=64
def running(x):
    return x.cumsum(-1)
"""


def test_a_running_sum_may_add_one_number_after_the_other(judge) -> None:
    """Torch on a CPU adds in double precision; the error of float32 grows with the square root of the length."""
    begin, end = STANDARD.index("    centred ="), STANDARD.index("\n\n\ndef fast")
    stored = "    tl.store(out_ptr + row * columns + at, {}, mask=mask)"
    honest = STANDARD[:begin] + stored.format("tl.cumsum(x, 0)") + STANDARD[end:]
    assert judge(RUNNING, "running", honest, "fast").is_correct
    rounded = honest.replace("tl.cumsum(x, 0)", "tl.cumsum(x.to(tl.bfloat16).to(tl.float32), 0)")
    assert judge(RUNNING, "running", rounded, "fast").status is VerdictStatus.INCORRECT
