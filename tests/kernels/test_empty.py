"""Results that a launch writes completely need no values before."""

from __future__ import annotations

import pytest

from mtmc_lsp.kernels.messages import FaultKind
from tests.kernels.observing import HEADER, Observing
from tests.kernels.proposing import applied, proposed

DOUBLE = (
    HEADER
    + """\
@triton.jit
def double_kernel(x_ptr, out_ptr, n, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < n
    x = tl.load(x_ptr + offsets, mask=mask, other=0.0)
    tl.store(out_ptr + offsets, 2.0 * x, mask=mask)


# mtmc: x=f32[N] N=4096
def double(x):
    out = torch.zeros_like(x)  # the result
    n = x.numel()
    grid = (triton.cdiv(n, 256),)
    double_kernel[grid](x, out, n, BLOCK=256)
    return out
"""
)
ROWS = (
    HEADER
    + """\
@triton.jit
def rows_kernel(x_ptr, out_ptr, N, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    columns = tl.arange(0, BLOCK)
    inside = columns < N
    x = tl.load(x_ptr + row * N + columns, mask=inside, other=0.0)
    tl.store(out_ptr + row * N + columns, x - tl.max(x), mask=inside)


def rows(x):
    M, N = x.shape
    out = torch.zeros((M, N), device=x.device, dtype=x.dtype)
    BLOCK = triton.next_power_of_2(N)
    rows_kernel[(M,)](x, out, N, BLOCK=BLOCK)
    return out
"""
)


def test_a_result_that_blocks_of_programs_cover_is_created_without_values() -> None:
    text = applied(DOUBLE, "empty")
    assert text == DOUBLE.replace("torch.zeros_like(x)", "torch.empty_like(x)")
    by_hand = DOUBLE.replace("triton.cdiv(n, 256)", "(n + 256 - 1) // 256")
    assert "torch.empty_like(x)" in applied(by_hand, "empty")


def test_a_result_whose_rows_are_one_block_each_is_created_without_values() -> None:
    assert "out = torch.empty((M, N), device=x.device, dtype=x.dtype)" in applied(ROWS, "empty")


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(("triton.cdiv(n, 256)", "n // 256"), id="the last block has no program"),
        pytest.param(("triton.cdiv(n, 256)", "min(8, triton.cdiv(n, 256))"), id="fewer programs than blocks"),
        pytest.param(("n = x.numel()", "n = limit"), id="a length that the caller chooses"),
        pytest.param(("mask = offsets < n", "mask = (offsets < n) & (offsets > 3)"), id="a mask that leaves elements out"),
        pytest.param(("2.0 * x, mask=mask)", "2.0 * x, mask=mask & (x > 0))"), id="a mask of loaded values"),
        pytest.param(("    tl.store", "    if n > 99:\n        tl.store"), id="a condition"),
        pytest.param(("    mask =", "    if n < 99:\n        return\n    mask ="), id="an early end"),
        pytest.param(("other=0.0)", "other=0.0)\n    x += tl.load(out_ptr + offsets, mask=mask)"), id="a read"),
        pytest.param(("tl.store(out_ptr + offsets, 2.0 * x, mask=mask)", "tl.atomic_add(out_ptr + offsets, x, mask=mask)"), id="an addition"),
        pytest.param(("    n = x", "    out[0] = 1.0\n    n = x"), id="a write before the launch"),
        pytest.param(("torch.zeros_like(x)", "cache.zeros(x)\n    again = out"), id="another name of the tensor"),
    ],
)  # fmt: skip
def test_values_stay_where_the_kernel_may_leave_elements_unwritten(change: tuple[str, str]) -> None:
    assert change[0] in DOUBLE
    text = DOUBLE.replace(*change).replace("def double(x)", "def double(x, limit, cache)")
    assert proposed(text, "empty") == []


def test_rows_that_are_longer_than_their_block_keep_their_values() -> None:
    assert proposed(ROWS.replace("triton.next_power_of_2(N)", "1024"), "empty") == []


def test_observation_shows_elements_that_nothing_writes(observe: Observing) -> None:
    text = applied(DOUBLE, "empty")
    assert observe(text, "double", {"N": 300})[0].is_sound
    short = text.replace("grid = (triton.cdiv(n, 256),)", "grid = (1,)")
    assert [fault.kind for fault in observe(short, "double", {"N": 300})[0].faults] == [FaultKind.NOT_WRITTEN]
