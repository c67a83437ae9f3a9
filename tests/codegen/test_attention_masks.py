"""Attention with a causal or sliding-window mask skips blocks of keys that no query sees, however the mask is written."""

from __future__ import annotations

import pytest

from mtmc_lsp.core.sizes import Size
from mtmc_lsp.core.workload import Capture
from mtmc_lsp.ir.attention_mask import Band, attention_band, hides_keys
from mtmc_lsp.ir.attention_pattern import attention_form
from mtmc_lsp.ir.lower import lower
from mtmc_lsp.ir.regions import CannotFuse, Region, analyse
from mtmc_lsp.verify.cases import Case, version_cases
from tests.codegen.checker import Checker
from tests.codegen.harness import fused

CONFIG = {"block_m": 16, "block_n": 16, "warps": 4, "stages": 2}
HEAD = """import math
import torch
import torch.nn.functional as F


# mtmc: q=f32[B,T,16] k=f32[B,S,16] v=f32[B,S,16] B=2 T=50 S=50
def f(q, k, v):
    T, S = q.shape[1], k.shape[1]
    scores = q @ k.transpose(-2, -1) / math.sqrt(16)
"""
WRITTEN = {
    "triu of ones": (
        "mask = torch.triu(torch.ones(T, S, dtype=torch.bool, device=q.device), diagonal=1)\n"
        "scores = scores.masked_fill(mask, float('-inf'))",
        (None, 0),
    ),
    "tril of float ones, compared with 0": (
        "mask = torch.tril(torch.ones(T, S, device=q.device))\nscores = scores.masked_fill(mask == 0, float('-inf'))",
        (None, 0),
    ),
    "a mask that is added": (
        "scores = scores + torch.full((T, S), float('-inf'), device=q.device).triu(1)",
        (None, 0),
    ),
    "positions compared": (
        "i = torch.arange(T, device=q.device)[:, None]\n"
        "j = torch.arange(S, device=q.device)[None, :]\n"
        "scores = torch.where(i >= j, scores, float('-inf'))",
        (None, 0),
    ),
    "a sliding window": (
        "i = torch.arange(T, device=q.device)[:, None]\n"
        "j = torch.arange(S, device=q.device)[None, :]\n"
        "scores = scores.masked_fill((j > i) | (j < i - 17), float('-inf'))",
        (-17, 0),
    ),
    "a window ahead": (
        "i = torch.arange(T, device=q.device)[:, None]\n"
        "j = torch.arange(S, device=q.device)[None, :]\n"
        "scores = scores.masked_fill(~((i - j).lt(1) & (j - i < 5)), float('-inf'))",
        (0, 4),
    ),
    "a large negative number": (
        "mask = torch.triu(torch.ones(T, S, dtype=torch.bool, device=q.device), diagonal=1)\n"
        "scores = scores.masked_fill(mask, -1e9)",
        (None, None),
    ),
    "everything but a band": (
        "i = torch.arange(T, device=q.device)[:, None]\n"
        "j = torch.arange(S, device=q.device)[None, :]\n"
        "scores = scores.masked_fill((i - j).eq(3), float('-inf'))",
        (None, None),
    ),
}

CROSS = """import torch
import torch.nn.functional as F


# mtmc: q=f16[B,2,T,16] k=f16[B,2,S,16] v=f16[B,2,S,16] B=2 T=33 S=70
def f(q, k, v):
    T, S = q.shape[2], k.shape[2]
    i = torch.arange(T, device=q.device)[:, None] + (S - T)
    j = torch.arange(S, device=q.device)[None, :]
    return F.scaled_dot_product_attention(q, k, v, attn_mask=j <= i)
"""


def text(name: str) -> str:
    body = WRITTEN[name][0].replace("\n", "\n    ")
    return f"{HEAD}    {body}\n    return torch.softmax(scores, -1) @ v\n"


def region_of(capture: Capture) -> tuple[Region, Band]:
    ir = lower(capture.graph)
    region = analyse(ir, tuple(node.name for node in capture.graph.nodes))
    form = attention_form([ir.prims[name] for name in region.prims])
    assert form is not None
    return region, attention_band(ir, region, form)


@pytest.mark.parametrize("name", WRITTEN)
def test_the_visible_range_is_derived_from_the_mask(checker: Checker, name: str) -> None:
    capture = checker.capture(text(name))
    first, last = WRITTEN[name][1]
    _, band = region_of(capture)
    assert band == Band(*(None if limit is None else Size.of(limit) for limit in (first, last)))
    candidate = fused(capture, text(name), CONFIG)
    assert ("first_key" in candidate.source, "end_key" in candidate.source) == (first is not None, last is not None)
    for sizes in ({"B": 2, "T": 50, "S": 50}, {"B": 1, "T": 1, "S": 1}, {"B": 1, "T": 33, "S": 33}):
        assert checker.failures(capture, [candidate], Case(sizes, "normal", 5)) == [""]


def test_queries_aligned_to_the_end_of_longer_keys_see_all_previous_keys(checker: Checker) -> None:
    capture = checker.capture(CROSS)
    _, band = region_of(capture)
    assert band == Band(last=Size.symbol("S") - Size.symbol("T"))
    candidate = fused(capture, CROSS, CONFIG)
    for sizes in ({"B": 2, "T": 33, "S": 70}, {"B": 1, "T": 1, "S": 19}, {"B": 1, "T": 40, "S": 17}):
        assert checker.failures(capture, [candidate], Case(sizes, "normal", 5)) == [""]
    assert checker.compile_errors(capture, candidate) == []


@pytest.mark.parametrize(
    ("name", "masked_at_the_edge"),
    [
        ("triu of ones", True),
        ("positions compared", True),
        ("a mask that is added", False),
        ("a sliding window", False),
    ],
)
def test_keys_that_all_queries_of_a_block_see_are_not_masked(
    checker: Checker, name: str, masked_at_the_edge: bool
) -> None:
    capture = checker.capture(text(name))
    candidate = fused(capture, text(name), CONFIG)
    assert ("if at_edge:" in candidate.source) is masked_at_the_edge
    assert ("edge_key" in candidate.source) is masked_at_the_edge
    assert checker.compile_errors(capture, candidate) == []


@pytest.mark.parametrize("shift", [-20, -1, 0, 7, 16, 100])
def test_the_masked_range_starts_where_the_first_query_of_a_block_sees_no_more_keys(
    checker: Checker, shift: int
) -> None:
    """Also for an edge before the first key or after the last, and next to a mask that is loaded for every key."""
    source = f"""import torch


# mtmc: q=f32[B,T,16] k=f32[B,S,16] v=f32[B,S,16] keep=bool[T,S] B=2 T=50 S=50
def f(q, k, v, keep):
    i = torch.arange(q.shape[1], device=q.device)[:, None]
    j = torch.arange(k.shape[1], device=q.device)[None, :]
    scores = q @ k.transpose(-2, -1) * 0.25
    scores = scores.masked_fill(~keep, float("-inf")).masked_fill(j > i + {shift}, float("-inf")) / 2
    return torch.softmax(scores, -1) @ v
"""
    capture = checker.capture(source)
    candidate = fused(capture, source, CONFIG)
    assert "if at_edge:" in candidate.source
    for sizes in ({"B": 2, "T": 50, "S": 50}, {"B": 1, "T": 33, "S": 70}):
        assert checker.failures(capture, [candidate], Case(sizes, "normal", 5)) == [""]


def test_a_causal_mask_halves_the_estimated_work(checker: Checker) -> None:
    capture = checker.capture(text("triu of ones"))
    _, band = region_of(capture)
    assert band.share(64, 64, {}) == pytest.approx(0.5, abs=0.01)
    assert band.share(0, 0, {}) == 1.0


UNNAMED = """import torch
import torch.nn.functional as F


def f(q, k, v):
    return F.scaled_dot_product_attention(q, k, v)


def get_inputs():
    return [torch.rand(2, 3, 5, 16), torch.rand(2, 3, 7, 16), torch.rand(2, 3, 7, 16)]
"""


@pytest.mark.parametrize("code", [CROSS, UNNAMED], ids=["named sizes", "sizes without names"])
def test_keys_and_values_of_different_lengths_run_the_original_code(checker: Checker, code: str) -> None:
    """The kernel would read values out of bounds; eager code raises the user's error."""
    capture = checker.capture(code)
    assert len(capture.variable_sizes) == len(
        {size for item in capture.graph.inputs for size in item.type.shape} - {Size.of(2), Size.of(3), Size.of(16)}
    )
    candidate = fused(capture, code, CONFIG)
    assert "v.shape == k.shape" in candidate.source


WAYS = {
    "numbers cut off": ("f32", "scores = (scores * 9).long() * 0.5\nscores = scores.masked_fill(j > i, float('-inf'))"),
    "truth values": ("f32", "scores = scores.bool() * 0.5\nscores = scores.masked_fill(j > i, float('-inf'))"),
    "nothing is seen": ("f32", "scores = scores.masked_fill(torch.ones_like(scores, dtype=torch.bool), float('-inf'))"),
    "a factor that float32 holds as 0": (
        "f16",
        "scores = (scores.float() * 1e-30 * 1e-30).masked_fill(j > i, float('-inf'))",
    ),
    "a factor beyond float32": ("f32", "scores = (scores / 1e-320).masked_fill(j > i, float('-inf')) * 1e-300"),
    "two edges, the far one first": (
        "f32",
        "scores = scores.masked_fill(j > i + 20, float('-inf')).masked_fill(j > i, float('-inf'))",
    ),
    "two edges, the near one first": (
        "f16",
        "scores = scores.masked_fill(j > i, float('-inf')).masked_fill(~(j <= i + 20), float('-inf'))",
    ),
    "the least number instead of minus infinity": (
        "f16",
        "scores = scores.float().masked_fill(j > i - 5, torch.finfo(torch.float32).min)",
    ),
    "a number that a factor makes infinite": ("f16", "scores = scores.float().masked_fill(j > i - 5, -9e37) * 3"),
    "in double precision on the way": (
        "f32",
        "scores = (scores.double() * 0.3).masked_fill(j > i, float('-inf')).float()",
    ),
    "a factor outside the mask": ("f32", "scores = scores.masked_fill(j > i, float('-inf')) * 2"),
}


@pytest.mark.parametrize("way", WAYS)
def test_operations_on_scores_are_preserved(checker: Checker, way: str) -> None:
    dtype, body = WAYS[way]
    lines = body.replace("\n", "\n    ")
    source = f"""import torch


# mtmc: q={dtype}[B,T,16] k={dtype}[B,S,16] v={dtype}[B,S,16] B=2 T=50 S=50
def f(q, k, v):
    i = torch.arange(q.shape[1], device=q.device)[:, None]
    j = torch.arange(k.shape[1], device=q.device)[None, :]
    scores = q @ k.transpose(-2, -1) * 0.25
    {lines}
    return torch.softmax(scores, -1).to(v.dtype) @ v
"""
    capture = checker.capture(source)
    candidate = fused(capture, source, CONFIG)
    for sizes in ({"B": 2, "T": 50, "S": 50}, {"B": 1, "T": 33, "S": 70}):
        assert checker.failures(capture, [candidate], Case(sizes, "normal", 5)) == [""]
    assert checker.compile_errors(capture, candidate) == []


def test_a_mask_argument_with_the_lowest_finite_number_gives_no_nan(checker: Checker) -> None:
    """In base 2 the mask becomes infinite. A fully masked query must still give the mean of all values, not NaN."""
    source = """import torch


# mtmc: q=f16[B,T,16] k=f16[B,S,16] v=f16[B,S,16] bias=f32[T,S]@-3.3e38..-3.0e38 B=2 T=50 S=50
def f(q, k, v, bias):
    scores = (q @ k.transpose(-2, -1) * 0.25).float() + bias
    return torch.softmax(scores, -1).to(v.dtype) @ v
"""
    capture = checker.capture(source)
    candidate = fused(capture, source, CONFIG)
    assert checker.failures(capture, [candidate], Case({"B": 2, "T": 50, "S": 50}, "normal", 5)) == [""]


def test_unsupported_attention_uses_other_kernels(checker: Checker) -> None:
    """Float64 did not compile."""
    source = """import torch


# mtmc: q=f64[2,50,16] k=f64[2,50,16] v=f64[2,50,16]
def f(q, k, v):
    return torch.softmax(q @ k.transpose(-2, -1), -1) @ v
"""
    capture = checker.capture(source)
    ir = lower(capture.graph)
    with pytest.raises(CannotFuse):
        analyse(ir, tuple(node.name for node in capture.graph.nodes))


def test_a_product_is_not_fused_into_the_subtraction_of_its_maximum(checker: Checker) -> None:
    """In float32 the maximum minus itself must be 0, also without a mask between product and subtraction."""
    source = """import torch


# mtmc: q=f32[B,T,16] k=f32[B,S,16] v=f32[B,S,16] s=f32[1]@1e10..2e10 B=2 T=50 S=50
def f(q, k, v, s):
    mask = torch.triu(torch.ones(q.shape[1], k.shape[1], dtype=torch.bool, device=q.device), diagonal=1)
    scores = (q @ k.transpose(-2, -1) * s).masked_fill(mask, float("-inf"))
    return torch.softmax(scores, -1) @ v
"""
    capture = checker.capture(source)
    candidate = fused(capture, source, CONFIG)
    body = candidate.source[candidate.source.index("if at_edge:") :]
    assert body.index("scores == scores") < body.index("tl.exp2")
    assert checker.failures(capture, [candidate], Case({"B": 2, "T": 50, "S": 50}, "normal", 5)) == [""]


@pytest.mark.parametrize(
    ("body", "is_limited"),
    [
        (
            "scores = scores.masked_fill(torch.ones(T, S, dtype=torch.bool, device=q.device).triu(1), float('-inf'))",
            True,
        ),
        ("scores = scores * 2.0", False),
        ("scores = scores.masked_fill(torch.ones(T, S, dtype=torch.bool, device=q.device).triu(1), -1e9)", False),
    ],
)
def test_no_case_has_nan_among_values_that_a_mask_hides(checker: Checker, body: str, is_limited: bool) -> None:
    """The weight 0 of a hidden key would make NaN of them, and the kernel does not read them."""
    capture = checker.capture(f"{HEAD}    {body}\n    return torch.softmax(scores, -1) @ v\n")
    assert hides_keys(lower(capture.graph)) is is_limited
    distributions = {case.distribution for case in version_cases(capture, interpreted=True, seed=7)}
    assert "normal" in distributions and ("nan" in distributions) is not is_limited


def test_a_mask_whose_segments_are_sums_hides_keys_too(checker: Checker) -> None:
    body = (
        "i = torch.arange(T, device=q.device)\n    segment = (i[:, None] >= starts[None, :]).sum(-1)\n"
        "    allowed = (segment[:, None] == segment[None, :]) & (i[:, None] >= i[None, :])\n"
        "    scores = (q @ q.transpose(-2, -1)).masked_fill(~allowed, float('-inf'))"
    )
    head = HEAD.replace("k=f32[B,S,16] v=f32[B,S,16]", "v=f32[B,T,16] starts=i64[7]@0..50").replace("S=50", "")
    head = head.replace("f(q, k, v)", "f(q, v, starts)").replace("T, S = q.shape[1], k.shape[1]", "T = q.shape[1]")
    head = head[: head.index("    scores")]
    capture = checker.capture(f"{head}    {body}\n    return torch.softmax(scores, -1) @ v\n")
    assert hides_keys(lower(capture.graph))
