"""A kernel whose result nothing reads is noted, and a failure has the same sizes in its reason and its check."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from mtmc_lsp.core.results import CheckStatus, Verdict, VerdictStatus

Judge = Callable[..., Verdict]
SCALED = "import torch\n\n\n# mtmc: x=f32[N,D] N=12 D=40\ndef scaled(x):\n    return x.abs() * 2.0 + 1.0\n"
KERNELS = """import torch
import triton
import triton.language as tl


@triton.jit
def magnitude(x_ptr, out_ptr, count, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out_ptr + at, tl.abs(tl.load(x_ptr + at, mask=at < count)), mask=at < count)


@triton.jit
def affine(x_ptr, out_ptr, count, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out_ptr + at, WORK, mask=at < count)


def fast(x):
    x = x.contiguous()
    middle, out = torch.empty_like(x), torch.empty_like(x)
    if x.numel():
        grid = (triton.cdiv(x.numel(), 128),)
        magnitude[grid](x, middle, x.numel(), BLOCK=128)
        affine[grid](SOURCE, out, x.numel(), BLOCK=128)
    return out
"""
LOADED = "tl.load(x_ptr + at, mask=at < count)"


def unused(verdict: Verdict) -> list[str]:
    return [note for note in verdict.notes if "are the same without" in note]


def test_a_kernel_whose_result_nothing_reads_is_noted(judge: Judge) -> None:
    used = KERNELS.replace("SOURCE", "middle").replace("WORK", f"{LOADED} * 2.0 + 1.0")
    verdict = judge(SCALED, "scaled", used, "fast")
    assert verdict.is_correct and not unused(verdict), verdict.reason
    beside = KERNELS.replace("SOURCE", "x").replace("WORK", f"tl.abs({LOADED}) * 2.0 + 1.0")
    verdict = judge(SCALED, "scaled", beside, "fast")
    assert verdict.is_correct, verdict.reason
    assert unused(verdict) == ["the results on the first case are the same without magnitude"]


def test_a_kernel_that_waits_for_a_disabled_one_ends(judge: Judge) -> None:
    """New memory holds NaN until the first kernel stores the magnitude, which is a number."""
    reference = SCALED.replace("x.abs()", "torch.where(x == x, x, 0.0).abs()")
    number = f"tl.where({LOADED} == {LOADED}, {LOADED}, 0.0)"
    waiting = KERNELS.replace("SOURCE", "middle").replace(f"tl.abs({LOADED})", f"tl.abs({number})")
    poll = f"    value = {LOADED}\n    while tl.sum((value != value).to(tl.int32), 0) > 0:\n        value = {LOADED}\n"
    waiting = waiting.replace("    tl.store(out_ptr + at, WORK", f"{poll}    tl.store(out_ptr + at, value * 2.0 + 1.0")
    verdict = judge(reference, "scaled", waiting, "fast")
    assert verdict.is_correct and not unused(verdict), verdict.reason


def test_the_failing_check_has_the_sizes_of_the_reason(judge: Judge, tmp_path: Path) -> None:
    wrong = KERNELS.replace("SOURCE", "middle").replace("WORK", f"{LOADED} * 2.0 + 1.01")
    verdict = judge(SCALED, "scaled", wrong, "fast", reproduction=tmp_path / "failure.py")
    assert verdict.status is VerdictStatus.INCORRECT
    failed = [check for check in verdict.checks if check.status is CheckStatus.FAILED]
    assert {f"(on {check.case})" for check in failed} == {verdict.reason[verdict.reason.index("(on ") :]}
    assert "(on N=1, D=1, " in verdict.reason
