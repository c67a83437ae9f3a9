"""A case with offsets beyond 2^31 is planned if memory suffices, and otherwise omitted with a reason."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from honest import PRODUCT, own
from pairs import HONEST, REFERENCE

from mtmc_lsp.core.graph import InputKind
from mtmc_lsp.core.results import CheckStatus
from mtmc_lsp.verify.int32_overflow import FAR, far_sizes, too_slow

PLENTY = 1e12


@pytest.mark.parametrize(
    ("text", "name", "enlarged"),
    [(REFERENCE, "rms", "N"), (own("x + 1"), "own", "N"), (PRODUCT, "product", "M")],
    ids=["rows", "elements", "product"],
)
def test_one_leading_size_is_enlarged_until_an_offset_passes(text: str, name: str, enlarged: str, judge: Any) -> None:
    """And no further: one row less, and all offsets fit."""
    capture = judge.capture(text, name)
    sizes, why = far_sizes(capture, PLENTY)
    assert why == ""
    assert {n for n in sizes if sizes[n] != capture.graph.sizes[n]} == {enlarged}
    arguments = [item.type for item in capture.graph.inputs if item.kind is InputKind.ARGUMENT]
    assert max(kind.numel.value(sizes) for kind in arguments) > FAR
    less = {**sizes, enlarged: sizes[enlarged] - 1}
    assert max(kind.numel.value(less) for kind in arguments) <= FAR


SERIES = """
import torch

# mtmc: x=f32[T,N] T=4096 N=16
def series(x):
    h = torch.zeros_like(x[0])
    out = torch.empty_like(x)
    for t in range(x.shape[0]):
        h = 0.5 * h + x[t]
        out[t] = h
    return out
"""


def test_a_loop_of_the_user_gets_no_more_iterations(judge: Any) -> None:
    """Eager mode would run 134 million of them, while nothing else uses the GPU."""
    assert far_sizes(judge.capture(SERIES, "series"), PLENTY)[0] == {}
    batched = SERIES.replace("f32[T,N]", "f32[N,T]").replace("x[0]", "x[:, 0]").replace("x[t]", "x[:, t]")
    batched = batched.replace("out[t]", "out[:, t]").replace("x.shape[0]", "x.shape[1]")
    sizes, _ = far_sizes(judge.capture(batched, "series"), PLENTY)
    assert (sizes["T"], sizes["N"]) == (4096, FAR // 4096 + 1)


STEPS = """
import torch

# mtmc: u=f32[B,N] B=64 N=256
def steps(u):
    for _ in range(300):
        u = u + 0.2 * (torch.roll(u, 1, dims=1) - u)
    return u
"""


def test_a_loop_over_the_whole_tensor_is_left_out_if_the_budget_is_too_short(judge: Any) -> None:
    """Per iteration, 4 operations write 2^31 numbers and read as many: 300 x 4 x 2 x 4 bytes x 2^31."""
    capture = judge.capture(STEPS, "steps")
    sizes, _ = far_sizes(capture, PLENTY)
    bandwidth, seconds = 4e12, 300 * 4 * 2 * 4 * (1 << 31) / 4e12
    assert too_slow(capture, sizes, bandwidth, 2.1 * seconds) == ""
    assert too_slow(capture, sizes, bandwidth, 1.9 * seconds) == (
        "a call of your code takes at least 5 s at such sizes, and 10 s of the budget are left"
    )
    assert too_slow(capture, sizes, 0.0, 1.0) == ""


def test_a_loop_over_rows_is_not_slow(judge: Any) -> None:
    batched = SERIES.replace("f32[T,N]", "f32[N,T]").replace("x[0]", "x[:, 0]").replace("x[t]", "x[:, t]")
    batched = batched.replace("out[t]", "out[:, t]").replace("x.shape[0]", "x.shape[1]")
    capture = judge.capture(batched, "series")
    assert too_slow(capture, far_sizes(capture, PLENTY)[0], 4e12, 1.0) == ""


def test_without_memory_there_are_none(judge: Any) -> None:
    sizes, why = far_sizes(judge.capture(REFERENCE, "rms"), 24e9)
    assert sizes == {}
    assert "GB are needed, 19 GB may be used" in why


def test_without_a_size_that_varies_there_are_none(judge: Any) -> None:
    fixed = replace(judge.capture(REFERENCE, "rms"), variable_sizes=("D",))
    assert far_sizes(fixed, PLENTY) == ({}, "no leading size of an argument can be enlarged so far")


def test_without_a_gpu_the_check_is_skipped_and_says_so(judge: Any) -> None:
    verdict = judge(REFERENCE, "rms", HONEST, "fast", far=True)
    assert verdict.is_correct, verdict.reason
    skipped = [check for check in verdict.checks if check.name == "offsets beyond 2^31"]
    assert [(check.status, check.detail) for check in skipped] == [(CheckStatus.SKIPPED, "there is no GPU")]
