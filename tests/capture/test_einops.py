"""Targets that use einops, if it is installed."""

from __future__ import annotations

import pytest

from tests.codegen.harness import verified
from tests.planning.situations import fully_fused, start

pytest.importorskip("einops")

HEADER = """import einops
import torch
from einops import rearrange, reduce, repeat
from einops.layers.torch import Rearrange
"""
TARGETS = {
    "heads": """# mtmc: x=f32[B,4,32] B=4
def f(x):
    return torch.softmax(rearrange(x, "b n (h d) -> b h n d", h=4) * 2.0, -1)
""",
    "a mean, and a repeated value": """# mtmc: x=f32[B,4,32] B=4
def f(x):
    return reduce(x.relu() * 2, "b n d -> b d", "mean") + repeat(x[:, 0, 0], "b -> b d", d=32)
""",
    "a layer": """# mtmc: x=f32[B,3,16,16] B=2
class f(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.patches = Rearrange("b c (h p) (w q) -> b (h w) (p q c)", p=4, q=4)
    def forward(self, x):
        return torch.softmax(self.patches(x), -1) * 2
""",
}


@pytest.mark.parametrize("name", TARGETS)
def test_a_target_with_einops_is_captured_and_verified(name: str, captured) -> None:
    text = HEADER + TARGETS[name]
    capture = captured(text, "f")
    candidate = fully_fused(capture, start(capture, text))
    assert verified(capture, candidate).reason == ""
