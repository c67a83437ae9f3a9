"""A program must not load what another of its threads stored, without a barrier between."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy
import pytest

from mtmc_lsp.core.results import Verdict, VerdictStatus
from mtmc_lsp.verify.worker.interpreter.accesses import MOST_UNMARKED, Positions
from mtmc_lsp.verify.worker.interpreter.memory import Memories, Selection

Judge = Callable[..., Verdict]
REFERENCE = """import torch


# mtmc: x=f32[N,D] N=12 D=40
def reference(x):
    e = torch.exp(x)
    return e + torch.roll(e, 1, -1)
"""
KERNEL = """import torch
import triton
import triton.language as tl


@triton.jit
def kernel(x_ptr, scratch_ptr, flags_ptr, out_ptr, columns, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    mask = cols < columns
    x = tl.load(x_ptr + row * columns + cols, mask=mask, other=0.0)
    BODY


def fast(x):
    x = x.contiguous()
    out, scratch = torch.empty_like(x), torch.zeros_like(x)
    flags = torch.zeros(max(x.shape[0], 1), dtype=torch.int32, device=x.device)
    rows, columns = x.shape
    if x.numel():
        kernel[(rows,)](x, scratch, flags, out, columns, BLOCK=triton.next_power_of_2(columns))
    return out
"""
STORE = "tl.store(scratch_ptr + row * columns + cols, tl.exp(x), mask=mask)"
BEFORE = "before = tl.where(cols == 0, columns - 1, cols - 1)"
LOADS = (
    "first = tl.load(scratch_ptr + row * columns + cols, mask=mask)",
    "second = tl.load(scratch_ptr + row * columns + before, mask=mask)",
    "tl.store(out_ptr + row * columns + cols, first + second, mask=mask)",
)
WRONG = {
    "shifted": (STORE, BEFORE, *LOADS),
    "after a reduction": (STORE, "x = x + tl.sum(x, axis=0) * 0.0", BEFORE, *LOADS),
    "barrier too early": ("tl.debug_barrier()", STORE, BEFORE, *LOADS),
    "another shape": (
        STORE,
        "tile = tl.load(scratch_ptr + row * columns + cols[None, :], mask=mask[None, :])",
        "first = tl.reshape(tile, (BLOCK,))",
        "tl.debug_barrier()",
        BEFORE,
        *LOADS[1:],
    ),
    "another value": (
        "tl.store(out_ptr + row * columns + cols, x, mask=mask)",
        "before = tl.where(cols == 0, columns - 1, cols - 1)",
        "shifted = tl.exp(tl.load(x_ptr + row * columns + before, mask=mask)) + tl.exp(tl.load(",
        "    x_ptr + row * columns + tl.where(before == 0, columns - 1, before - 1), mask=mask))",
        "tl.store(out_ptr + row * columns + before, shifted, mask=mask)",
    ),
}
HONEST = {
    "barrier": (STORE, "tl.debug_barrier()", BEFORE, *LOADS),
    "atomic operation": (STORE, "tl.atomic_add(flags_ptr + row, 1)", BEFORE, *LOADS),
    "same position": (
        STORE,
        LOADS[0],
        "before = tl.where(cols == 0, columns - 1, cols - 1)",
        "second = tl.exp(tl.load(x_ptr + row * columns + before, mask=mask))",
        LOADS[2],
    ),
    "same value": (
        "before = tl.where(cols == 0, columns - 1, cols - 1)",
        "result = tl.exp(x) + tl.exp(tl.load(x_ptr + row * columns + before, mask=mask))",
        "tl.store(out_ptr + row * columns + cols, result, mask=mask)",
        "tl.store(out_ptr + row * columns + tl.arange(0, 1), tl.sum(tl.where(cols == 0, result, 0.0)))",
    ),
    "stored once": (
        "for i in range(0, tl.cdiv(columns, 8)):",
        "    at = i * 8 + tl.arange(0, 8)",
        "    inside = at < columns",
        "    other = tl.where(at == 0, columns - 1, at - 1)",
        "    e = tl.exp(tl.load(x_ptr + row * columns + at, mask=inside))",
        "    e += tl.exp(tl.load(x_ptr + row * columns + other, mask=inside))",
        "    tl.store(out_ptr + row * columns + at, e, mask=inside)",
    ),
}


def candidate(lines: tuple[str, ...]) -> str:
    return KERNEL.replace("BODY", "\n    ".join(lines))


@pytest.mark.parametrize("name", WRONG)
def test_an_access_to_what_another_thread_stored_is_refused_with_its_line(judge: Judge, name: str) -> None:
    text = candidate(WRONG[name])
    verdict = judge(REFERENCE, "reference", text, "fast")
    assert verdict.status is VerdictStatus.INCORRECT
    last = "row * columns + before" if name != "another shape" else "cols[None, :]"
    lines = [number for number, line in enumerate(text.splitlines(), 1) if last in line and "x_ptr" not in line]
    access = "a store of kernel (line {}) overwrites" if name == "another value" else "a load of kernel (line {}) reads"
    assert verdict.reason.startswith(access.format(lines[-1] if name != "another shape" else lines[0])), verdict.reason
    assert "tl.debug_barrier()" in verdict.reason


@pytest.mark.parametrize("name", HONEST)
def test_programs_whose_threads_wait_or_share_nothing_are_certified(judge: Judge, name: str) -> None:
    verdict = judge(REFERENCE, "reference", candidate(HONEST[name]), "fast")
    assert verdict.status is VerdictStatus.CORRECT, verdict.reason


def test_the_stores_of_a_long_loop_are_not_compared_one_by_one() -> None:
    """Each access would be compared with all stores before."""
    tensor: Any = numpy.zeros(4 * (2 * MOST_UNMARKED + 1), numpy.float32)
    mask: Any = numpy.ones(4, dtype=bool)
    start = tensor.ctypes.data
    memories, positions = Memories([(start, start + tensor.nbytes)]), Positions("kernel")

    def elements(first: int) -> Selection:
        selection = memories.select(start + 4 * (first + numpy.arange(4, dtype=numpy.uint64)), mask, 4)
        assert selection is not None
        return selection

    positions.synchronize(0, is_alone=True)
    for block in range(2 * MOST_UNMARKED):
        at = elements(4 * block)
        assert not positions.store(0, at, numpy.ones(4, numpy.float32), mask, is_wide=False, is_repeated=True)
    assert not positions._stored, "the stores are marked"
    assert not positions.load(0, elements(4), mask, is_wide=False)
    assert positions.load(0, elements(5), mask, is_wide=False)
    positions.synchronize(0, is_alone=True)
    assert not positions.load(0, elements(5), mask, is_wide=False)
