"""Stencils: neighbours of each element through rolls along dynamic sizes, written back row by row."""

from __future__ import annotations

import pytest

from mtmc_lsp.ir.lower import lower
from tests.codegen.harness import fused, verified
from tests.planning.situations import fully_fused, start

TEXT = """
import torch


# mtmc: u=f32[B,H,W] B=3 H=12 W=17
def wave(u):
    near = torch.roll(u, 1, -1) + torch.roll(u, -1, -1) + torch.roll(u, (2, -1), dims=(1, 0))
    return u * 0.9 + near - 4 * u


# mtmc: u=f32[B,H] B=3 H=12
def flat(u):
    return torch.roll(u, 5) * 2 + torch.roll(u, 0, 0)


# mtmc: p=f32[B,H,W] B=2 H=12 W=17
def sweeps(p):
    for _ in range(3):
        p = 0.25 * (torch.roll(p, 1, -1) + torch.roll(p, -1, -1) + torch.roll(p, 1, -2) + torch.roll(p, -1, -2))
    return p


# mtmc: u=f32[B,H] B=3 H=4
def past_the_end(u):
    return torch.roll(u * 2, 6, 1) + u
"""


@pytest.mark.parametrize(("name", "conditions"), [("wave", {"W > 1", "H > 2", "B > 1"}), ("flat", {"B * H > 5"})])
def test_rolls_along_a_dynamic_size_are_one_kernel(name: str, conditions: set[str], captured) -> None:
    capture = captured(TEXT, name)
    assert conditions <= set(capture.graph.conditions)
    assert not lower(capture.graph).opaque
    verdict = verified(capture, fused(capture, TEXT))
    assert verdict.is_correct, verdict.reason


def test_rolls_beyond_the_size_run_the_original_code(captured) -> None:
    capture = captured(TEXT, "past_the_end")
    assert lower(capture.graph).opaque == {"roll"}
    assert not any(">" in text for text in capture.graph.conditions)
    assert verified(capture, fully_fused(capture, start(capture, TEXT))).reason == ""


def test_the_code_of_repeated_rolls_reads_each_neighbour_at_one_index(captured) -> None:
    """As two slices each, the rolls of three sweeps would be 8 ** 3 reads."""
    capture = captured(TEXT, "sweeps")
    candidate = fully_fused(capture, start(capture, TEXT))
    verdict = verified(capture, candidate)
    assert verdict.is_correct, verdict.reason
    for kernel in candidate.source.split("@triton.jit")[1:]:
        assert kernel.count("tl.load(") <= 4**3
        assert len(kernel.splitlines()) < 600
