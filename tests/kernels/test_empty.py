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


LOOP = (
    HEADER
    + """\
@triton.jit
def loop_kernel(x_ptr, out_ptr, lengths_ptr, N, end, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    for start in range(0, N, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        inside = columns < N
        x = tl.load(x_ptr + row * N + columns, mask=inside, other=0.0)
        tl.store(out_ptr + row * N + columns, x, mask=inside)


def loop(x, lengths, limit):
    M, N = x.shape
    out = torch.zeros((M, N), device=x.device, dtype=x.dtype)
    loop_kernel[(M,)](x, out, lengths, N, limit, BLOCK=64)
    return out
"""
)


@pytest.mark.parametrize(
    ("text", "change"),
    [
        pytest.param(DOUBLE, ("    grid =", "    if limit:\n        n = limit\n    grid ="), id="a length that a branch changes"),
        pytest.param(DOUBLE, ("    grid =", "    n -= limit\n    grid ="), id="a length that is reduced"),
        pytest.param(DOUBLE, ("n = x.numel()", "n = x.numel() // 4 * 4"), id="a length that is rounded down"),
        pytest.param(DOUBLE, ("(triton.cdiv(n, 256),)", "(limit,)"), id="programs that the caller counts"),
        pytest.param(DOUBLE, ("(triton.cdiv(n, 256),)", "(16,)"), id="a number of programs"),
        pytest.param(DOUBLE, ("+ tl.arange(0, BLOCK)", "+ tl.arange(0, BLOCK) % 128"), id="offsets that wrap around"),
        pytest.param(ROWS, ("[(M,)]", "[(M >> 1,)]"), id="fewer programs than rows"),
        pytest.param(ROWS, ("next_power_of_2(N)", "next_power_of_2(min(N, 1024))"), id="a block with a limit"),
        pytest.param(ROWS, ("zeros((M, N)", "zeros((M, triton.cdiv(N, 64) * 64)"), id="rows that are padded"),
        pytest.param(ROWS, ("    inside =", "    N = tl.minimum(N, 99)\n    inside ="), id="a length that the kernel limits"),
        pytest.param(LOOP, ("range(0, N,", "range(0, end,"), id="a loop whose end the caller chooses"),
        pytest.param(LOOP, ("range(0, N,", "range(0, tl.load(lengths_ptr + row),"), id="a loop whose end is loaded"),
    ],
)  # fmt: skip
def test_values_stay_where_other_calls_may_write_fewer_elements(text: str, change: tuple[str, str]) -> None:
    text = text.replace("def double(x)", "def double(x, limit)").replace("def rows(x)", "def rows(x, limit)")
    assert proposed(text, "empty")
    assert change[0] in text
    assert proposed(text.replace(*change), "empty") == []


def test_rows_that_are_longer_than_their_block_keep_their_values() -> None:
    assert proposed(ROWS.replace("triton.next_power_of_2(N)", "1024"), "empty") == []


def test_observation_shows_elements_that_nothing_writes(observe: Observing) -> None:
    text = applied(DOUBLE, "empty")
    assert observe(text, "double", {"N": 300})[0].is_sound
    short = text.replace("grid = (triton.cdiv(n, 256),)", "grid = (1,)")
    assert [fault.kind for fault in observe(short, "double", {"N": 300})[0].faults] == [FaultKind.NOT_WRITTEN]
