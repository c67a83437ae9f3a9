"""A whole transformer block as one target: kernels of both passes join its parts."""

from __future__ import annotations

import re

import pytest

from tests.codegen.checker import Checker
from tests.training.targets import HEAD, cases, planned

BLOCK = """def rms_norm(x, weight, eps=1e-6):
    hidden = x.float()
    hidden = hidden * torch.rsqrt(hidden.pow(2).mean(-1, keepdim=True) + eps)
    return hidden.to(x.dtype) * weight


def rotated(x, cos, sin):
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat((-second, first), -1) * sin


class Attention(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.norm = nn.Parameter(torch.ones(width))
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)

    def forward(self, x, cos, sin):
        batch, length, width = x.shape
        normed = rms_norm(x.view(-1, width), self.norm).view_as(x)
        split = self.qkv(normed).view(batch, length, 3, self.heads, width // self.heads)
        q, k, v = (part.transpose(1, 2).contiguous() for part in split.unbind(2))
        mixed = F.scaled_dot_product_attention(rotated(q, cos, sin), rotated(k, cos, sin), v, is_causal=True)
        return x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))


class f(nn.Module):
    def __init__(self, width, heads, inner):
        super().__init__()
        self.attention = Attention(width, heads)
        self.norm = nn.Parameter(torch.ones(width))
        self.gate, self.up = nn.Linear(width, inner, bias=False), nn.Linear(width, inner, bias=False)
        self.down = nn.Linear(inner, width, bias=False)

    # mtmc: x=f32[B,S,64] cos=f32[S,32] sin=f32[S,32] B=4 S=24 grad=x
    # mtmc: init: width=64 heads=2 inner=48
    def forward(self, x, cos, sin):
        x = self.attention(x, cos, sin)
        rows = rms_norm(x.view(-1, x.shape[-1]), self.norm)
        return x + self.down(F.silu(self.gate(rows)) * self.up(rows)).view_as(x)
"""
CALL = re.compile(r"= torch\.(?!empty)(?:ops\.aten\.)?(\w+)")


@pytest.mark.slow
def test_a_transformer_block_keeps_products_attention_and_sums_of_its_weights_alone(checker: Checker) -> None:
    capture = checker.capture(HEAD + BLOCK)
    candidate = planned(capture, most=14)
    calls = CALL.findall(candidate.source.partition("def f_forward(")[2])
    others = [name for name in calls if name not in ("t", "mm", "sum") and "scaled_dot_product" not in name]
    assert others == []
    assert calls.count("sum") == 2
    assert checker.first_failure(capture, candidate, cases(capture)) == ""
