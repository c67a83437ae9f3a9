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


NORM = (
    HEADER
    + """\
@triton.jit
def norm_kernel(x_ptr, mean_ptr, var_ptr, n, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    x_ptr += row * n
    mean = 0
    _mean = tl.zeros([BLOCK], dtype=tl.float32)
    for off in range(0, n, BLOCK):
        cols = off + tl.arange(0, BLOCK)
        a = tl.load(x_ptr + cols, mask=cols < n, other=0.0).to(tl.float32)
        _mean += a
    mean = tl.sum(_mean, axis=0) / n
    # the variance
    _var = tl.zeros([BLOCK], dtype=tl.float32)
    for off in range(0, n, BLOCK):
        cols = off + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + cols, mask=cols < n, other=0.0).to(tl.float32)
        x = tl.where(cols < n, x - mean, 0.0)
        _var += x * x
    var = tl.sum(_var, axis=0) / n
    tl.store(mean_ptr + row, mean)
    tl.store(var_ptr + row, var)


# mtmc: x=f32[M,N] M=40 N=300
def norm(x):
    x = x + 1000.0
    mean, var = torch.empty_like(x[:, 0]), torch.empty_like(x[:, 0])
    norm_kernel[(x.shape[0],)](x, mean, var, x.shape[1], BLOCK=16)
    return mean, var
"""
)
WELFORD = """\
    # the variance
    _var = tl.zeros([BLOCK], dtype=tl.float32)
    _count = tl.zeros_like(_mean)
    for off in range(0, n, BLOCK):
        cols = off + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + cols, mask=cols < n, other=0.0).to(tl.float32)
        _count += tl.where(cols < n, 1.0, 0.0)
        delta = tl.where(cols < n, x - _mean, 0.0)
        _mean += delta / tl.maximum(_count, 1.0)
        _var += delta * (x - _mean)
    mean = tl.sum(_count * _mean, axis=0) / n
    var = tl.sum(_var + _count * (_mean - mean) * (_mean - mean), axis=0) / n
"""


def test_a_mean_and_a_variance_come_from_one_loop() -> None:
    text = applied(NORM, "one-pass")
    assert f"    _mean = tl.zeros([BLOCK], dtype=tl.float32)\n{WELFORD}    tl.store(mean_ptr + row, mean)\n" in text


@pytest.mark.parametrize(
    "change",
    [
        ("    # the variance", "    tl.store(mean_ptr + row, mean)"),
        ("    # the variance", "    scale = mean * 2"),
        ("tl.where(cols < n, x - mean, 0.0)", "tl.where(cols < n, x - 2 * mean, 0.0)"),
        ("tl.where(cols < n, x - mean, 0.0)", "tl.where(cols < n, x - mean, 1.0)"),
        ("tl.where(cols < n, x - mean, 0.0)", "tl.where(cols <= n, x - mean, 0.0)"),
        ("tl.where(cols < n, x - mean, 0.0)", "x - mean"),
        ("_var += x * x", "_var += x"),
        ("        _mean += a", "        _mean += a * a"),
        ("    tl.store(mean_ptr", "    tl.store(var_ptr, tl.sum(a))\n    tl.store(mean_ptr"),
        ("mean = tl.sum(_mean, axis=0) / n", "mean = tl.sum(_mean, axis=0) / (n - 1)"),
        ("var = tl.sum(_var, axis=0) / n", "var = tl.sum(_var, axis=0) / (n - 1)"),
        ("        x = tl.load(x_ptr + cols,", "        x = tl.load(x_ptr + 2 * cols,"),
    ],
)
def test_a_variance_stays_apart_if_its_elements_or_its_uses_differ(change: tuple[str, str]) -> None:
    changed = NORM.replace(*change)
    assert changed != NORM
    assert proposed(changed, "one-pass") == []


def test_one_pass_computes_the_same_variance_far_from_zero(observe: Observing) -> None:
    text = applied(NORM, "one-pass")
    sizes = [{"M": 3, "N": 70}, {"M": 2, "N": 16}, {"M": 2, "N": 5}]
    for trace in observe(text, "norm", *sizes, original=NORM):
        assert not trace.faults, trace.faults
    naive = text.replace(" + _count * (_mean - mean) * (_mean - mean)", "")
    assert naive != text
    assert any(trace.faults for trace in observe(naive, "norm", *sizes, original=NORM))
