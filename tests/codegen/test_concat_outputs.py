"""Concatenated results: each part is written directly to its position, and shared work is computed once."""

from __future__ import annotations

import pytest

from tests.codegen.harness import fused, verified
from tests.planning.situations import fully_fused, region_and_program, start

TEXT = """
import torch


# mtmc: x=f32[B,T,16] cos=f32[T,8] sin=f32[T,8] B=3 T=7
def rope(x, cos, sin):
    a, b = x[..., :8], x[..., 8:]
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


# mtmc: x=f16[B,T] w=f16[T] B=5 T=70
def interleaved(x, w):
    return torch.stack([x * w, x + w, x - w], dim=-1)


# mtmc: x=f32[B,T] B=5 T=6
def scan(x):
    h, found = torch.zeros_like(x[:, 0]), []
    for t in range(x.shape[1]):
        h = torch.tanh(h * 0.5 + x[:, t])
        found.append(h)
    return torch.stack(found, 1), h


# mtmc: x=f32[B,D,N] a=f32[D,N] B=3 D=5 N=12
def states(x, a):
    first = x * a
    second = first * a + x
    return torch.stack([first.sum(-1), second.sum(-1), (first + second).amax(-1)], 1), second


# mtmc: x=f32[B,T] B=5 T=33
def doubled(x):
    y = x.exp()
    return torch.cat([y, y, y * 2], 0), torch.cat([x, x + 1], 1)


# mtmc: x=f32[B,T] y=f32[B,T] B=5 T=33
def apart(x, y):
    return torch.cat([x.sin(), y.cos()], 1)


# mtmc: x=f32[B,T] B=5 T=33
def read_again(x):
    y = torch.stack([x.sin(), x.cos()])
    return y, y.flip(0) * 2
"""
PARTS = {"rope": 2, "interleaved": 3, "scan": 6, "states": 3, "doubled": 5, "apart": 0, "read_again": 0}


@pytest.mark.parametrize("name", PARTS)
def test_parts_with_the_same_axes_are_written_to_their_position(name: str, captured) -> None:
    capture = captured(TEXT, name)
    if name not in ("doubled", "read_again"):
        _, region = region_and_program(capture)
        assert sum(map(len, region.parts.values())) == PARTS[name]
        verdict = verified(capture, fused(capture, TEXT))
        assert verdict.is_correct, verdict.reason
    assert verified(capture, fully_fused(capture, start(capture, TEXT))).reason == ""
