"""A maximum and a sum of exponentials come from one loop, and stay apart if that could change a result."""

from __future__ import annotations

import pytest

from tests.kernels.observing import HEADER, Observing
from tests.kernels.proposing import applied, proposed

SOFTMAX = (
    HEADER
    + """\
@triton.jit
def softmax_kernel(x_ptr, out_ptr, n, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    peak = -float("inf")
    for start in range(0, n, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + row * n + columns, mask=columns < n, other=-float("inf"))
        peak = tl.maximum(peak, tl.max(x, axis=0))
    total = 0.0  # of exponentials
    for start in range(0, n, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + row * n + columns, mask=columns < n, other=-float("inf"))
        total += tl.sum(tl.exp(x - peak), axis=0)
    for start in range(0, n, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + row * n + columns, mask=columns < n)
        tl.store(out_ptr + row * n + columns, tl.exp(x - peak) / total, mask=columns < n)


# mtmc: x=f32[M,N] M=40 N=300
def softmax(x):
    out = torch.empty_like(x)
    softmax_kernel[(x.shape[0],)](x, out, x.shape[1], BLOCK=16)
    return out
"""
)
MERGED = """\
    peak = -float("inf")
    total = 0.0  # of exponentials
    for start in range(0, n, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + row * n + columns, mask=columns < n, other=-float("inf"))
        new_peak = tl.maximum(peak, tl.max(x, axis=0))
        peak_shift = tl.where(new_peak == float("-inf"), 0.0, new_peak)
        total = total * tl.exp(peak - peak_shift) + tl.sum(tl.exp(x - peak_shift), axis=0)
        peak = new_peak
    for start in range(0, n, BLOCK):
"""
NAMED = SOFTMAX.replace(
    "        total += tl.sum(tl.exp(x - peak), axis=0)",
    "        numerator = tl.exp(x - peak)\n        total = total + tl.sum(numerator, axis=0)",
)
MASKED = SOFTMAX.replace("def softmax(x):\n", "def softmax(x):\n    x[:, : x.shape[1] // 2] = -float('inf')\n")
"""Whole blocks are negative infinity, as in masked attention."""


def test_both_values_come_from_one_loop_and_the_other_lines_stay() -> None:
    assert MERGED in applied(SOFTMAX, "one-pass")
    assert MERGED in applied(NAMED, "one-pass")


def test_the_maximum_of_each_row_of_a_tile_is_shifted_in_its_shape() -> None:
    tile = SOFTMAX.replace("axis=0", "axis=1").replace("x - peak)", "x - peak[:, None])")
    assert "tl.sum(tl.exp(x - peak_shift[:, None]), axis=1)" in applied(tile, "one-pass")


@pytest.mark.parametrize(
    "change",
    [
        (
            "    total = 0.0  # of exponentials\n    for start in range(0, n, BLOCK)",
            "    total = 0.0\n    for start in range(0, n - 1, BLOCK)",
        ),
        ("    total = 0.0", "    total = tl.exp(peak)"),
        ("total += tl.sum(tl.exp(x - peak), axis=0)", "total += tl.sum(tl.exp(2 * x - peak), axis=0)"),
        ("total += tl.sum(tl.exp(x - peak), axis=0)", "total += tl.sum(x - peak, axis=0)"),
        ("total += tl.sum(tl.exp(x - peak), axis=0)", "total += tl.max(tl.exp(x - peak), axis=0)"),
        ("        total += ", "        tl.store(out_ptr, peak)\n        total += "),
        ("        peak = tl.maximum(peak, tl.max(x, axis=0))", "        peak = tl.minimum(peak, tl.max(x, axis=0))"),
        ("        peak = tl", "        tl.debug_barrier()\n        peak = tl"),
    ],
)
def test_loops_stay_apart_if_their_elements_or_their_uses_differ(change: tuple[str, str]) -> None:
    changed = SOFTMAX.replace(*change)
    assert changed != SOFTMAX
    assert proposed(changed, "one-pass") == []


@pytest.mark.parametrize("text", [SOFTMAX, NAMED, MASKED])
def test_one_pass_computes_the_same(observe: Observing, text: str) -> None:
    merged = applied(text, "one-pass")
    sizes = [{"M": 3, "N": 70}, {"M": 2, "N": 16}, {"M": 2, "N": 5}]
    for trace in observe(merged, "softmax", *sizes, original=text):
        assert not trace.faults, trace.faults
    unscaled = merged.replace("total * tl.exp(peak - peak_shift)", "total")
    assert any(trace.faults for trace in observe(unscaled, "softmax", *sizes, original=text))


def test_blocks_of_negative_infinity_are_not_nan(observe: Observing) -> None:
    merged = applied(MASKED, "one-pass").replace(
        'peak_shift = tl.where(new_peak == float("-inf"), 0.0, new_peak)', "peak_shift = new_peak"
    )
    assert any(trace.faults for trace in observe(merged, "softmax", {"M": 3, "N": 70}, original=MASKED)), (
        "the guard is needed"
    )
