"""A program must not store beyond the end of a tensor, although the results do not show it."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from mtmc_lsp.core.results import Verdict, VerdictStatus

Judge = Callable[..., Verdict]
REFERENCE = "import torch\n\n\n# mtmc: x=f32[N] N=1000\ndef reference(x):\n    return torch.exp(x) * 2\n"
CANDIDATE = """import torch
import triton
import triton.language as tl


@triton.jit
def kernel(x_ptr, out_ptr, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at, mask=at < n)
    tl.store(out_ptr + at, tl.exp(x) * 2, mask=at < n)


def fast(x):
    x = x.contiguous()
    out = torch.empty_like(x)
    if x.numel():
        kernel[(triton.cdiv(x.numel(), 64),)](x, out, x.numel(), BLOCK=64)
    return out
"""


@pytest.mark.parametrize("mask", ["at < n + 1", "at <= n", "at >= 0"])
def test_a_store_beyond_the_end_is_refused_with_its_line(judge: Judge, mask: str) -> None:
    text = CANDIDATE.replace("tl.exp(x) * 2, mask=at < n", f"tl.exp(x) * 2, mask={mask}")
    verdict = judge(REFERENCE, "reference", text, "fast")
    assert verdict.status is VerdictStatus.INCORRECT
    assert verdict.reason.startswith("a store of kernel (line 10) writes beyond the memory of a tensor"), verdict.reason


def test_a_store_to_a_part_of_a_larger_tensor_may_go_beyond_the_part(judge: Judge) -> None:
    larger = "torch.empty(x.numel() + 64, dtype=x.dtype, device=x.device)[: x.numel()]"
    text = CANDIDATE.replace("torch.empty_like(x)", larger).replace("* 2, mask=at < n", "* 2")
    verdict = judge(REFERENCE, "reference", text, "fast")
    assert verdict.status is VerdictStatus.CORRECT, verdict.reason
