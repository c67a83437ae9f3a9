"""Quantisers: the last bit of a quotient decides for whole numbers, so divisions are rounded as PyTorch's own are."""

from __future__ import annotations

import pytest
import torch

from mtmc_lsp.macro.lower import lower
from tests.macro.situations import fused_as_far_as_it_goes, start
from tests.micro.harness import verified

TEXT = """
import torch


# mtmc: w=bf16[O,4,32] O=24
def four_bits(w):
    g = w.float()
    lo, hi = g.amin(-1, keepdim=True), g.amax(-1, keepdim=True)
    scale = (hi - lo).clamp(min=1e-5) / 15.0
    zero = torch.round(-lo / scale).clamp(0, 15)
    return (torch.round(g / scale) + zero).clamp(0, 15).to(torch.uint8), scale.squeeze(-1)


# mtmc: x=f32[N,70] s=f32[70]@0.01..0.1 N=30
def eight_bits(x, s):
    return (x * s.reciprocal()).round().clamp(-128, 127).to(torch.int8)


# mtmc: x=f32[N,70] s=f32[70]@0.01..0.1 N=30
def plain(x, s):
    return x / s + x / 3.0
"""
DIVISIONS = {"four_bits": {"div_rn", "times_reciprocal"}, "eight_bits": {"reciprocal_rn"}, "plain": {"div"}}


@pytest.mark.parametrize("name", DIVISIONS)
def test_divisions_that_decide_a_whole_number_are_rounded_as_torchs_are(name: str, captured) -> None:
    capture = captured(TEXT, name)
    used = {str(prim.attrs.get("fn")) for prim in lower(capture.graph).prims.values()}
    assert {fn for fn in used if "div" in fn or "reciprocal" in fn} == DIVISIONS[name]
    candidate = fused_as_far_as_it_goes(capture, start(capture, TEXT))
    assert verified(capture, candidate).reason == ""


@pytest.mark.gpu
def test_a_quotient_of_a_tensor_and_a_number_is_torchs_to_the_bit(tmp_path) -> None:
    """What PyTorch does is no promise of its documentation: this tells when it becomes another."""
    x = torch.randn(1 << 20, device="cuda")
    assert torch.equal(x / 15.0, x * torch.tensor(1 / 15.0, device="cuda"))
