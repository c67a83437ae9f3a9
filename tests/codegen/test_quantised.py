"""Quantisers: the last bit of a quotient can change an integer, so divisions are rounded like PyTorch's."""

from __future__ import annotations

import pytest
import torch

from mtmc_lsp.ir.lower import lower
from tests.codegen.harness import verified
from tests.planning.situations import fully_fused, start

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


# mtmc: x=f32[N,T] k=i32[N,T]@0..90 N=30 T=9
def by_sizes(x, k):
    return torch.floor(x / x.shape[1]), (x.sum(-1) / x.shape[1]).round(), (x.half().exp() / x.shape[1]).floor(), (k / 7).int()


# mtmc: x=f32[N,70] N=30
def by_a_part(x):
    return (x / 0.03).round()


# mtmc: x=f32[N,70] s=f32[70]@0.01..0.1 N=30
def plain(x, s):
    return x / s + x / 3.0
"""
DIVISIONS = {
    "four_bits": {"div_rn", "times_reciprocal"},
    "eight_bits": {"reciprocal_rn"},
    "plain": {"div"},
    "by_sizes": {"div"},
    "by_a_part": {"times_reciprocal"},
}


@pytest.mark.parametrize("name", DIVISIONS)
def test_divisions_before_rounding_to_integers_match_pytorch(name: str, captured) -> None:
    capture = captured(TEXT, name)
    used = {str(prim.attrs.get("fn")) for prim in lower(capture.graph).prims.values()}
    assert {fn for fn in used if "div" in fn or "reciprocal" in fn} == DIVISIONS[name]
    candidate = fully_fused(capture, start(capture, TEXT))
    assert verified(capture, candidate).reason == ""


def test_a_reciprocal_is_rounded_once(captured) -> None:
    """1 / 0.03 differs in float32: two thirds of the edge values would change."""
    (factor,) = {
        prim.attrs["reciprocal"]
        for prim in lower(captured(TEXT, "by_a_part").graph).prims.values()
        if "reciprocal" in prim.attrs
    }
    assert factor == torch.tensor(1 / 0.03).item() != (1 / torch.tensor(0.03)).item()


@pytest.mark.gpu
def test_a_quotient_of_a_tensor_and_a_number_is_bitwise_equal_to_pytorch() -> None:
    """PyTorch does not document this behaviour; the test detects a change."""
    x = torch.randn(1 << 20, device="cuda")
    for number in (15.0, 0.03, 0.7):
        assert torch.equal(x / number, x * torch.tensor(1 / number, device="cuda"))
