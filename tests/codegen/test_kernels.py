"""Kernels of the built-in coder equal the user's code under Triton's interpreter."""

from __future__ import annotations

import pytest

from tests.codegen.harness import fused, verified

NORM = """import torch
# mtmc: x=f32[B,D] w=f32[D] B=6 D=50
def f(x, w):
    h = x * 2.0 + 1.0
    v = h.var(-1, keepdim=True, unbiased=False)
    return (h - h.mean(-1, keepdim=True)) * torch.rsqrt(v + 1e-5) * w, v
"""
SOFTMAX = """import torch
# mtmc: x=f32[B,D] B=5 D=70
def f(x):
    return torch.softmax(x / 0.7, -1), torch.logsumexp(x, -1)
"""
COLUMNS = """import torch
# mtmc: x=f32[B,C,S] B=4 C=12 S=10
def f(x):
    return x.sum(1), x.amax(1), x.argmax(1)
"""
ROTARY = """import torch
# mtmc: q=f32[B,S,16] c=f32[S,16] s=f32[S,16] B=2 S=9
def f(q, c, s):
    a, b = q[..., :8], q[..., 8:]
    return q * c + torch.cat((-b, a), -1) * s
"""
GROUP = """import torch
import torch.nn.functional as F
# mtmc: x=f32[B,16,H,5] w=f32[16] b=f32[16] B=2 H=3
def f(x, w, b):
    return F.silu(F.group_norm(x, 4, w, b))
"""
LOSS = """import torch
import torch.nn.functional as F
# mtmc: x=f32[N,V] t=i64[N]@0..V-1 N=6 V=40
def f(x, t):
    return F.cross_entropy(x, t, reduction="none", label_smoothing=0.1)
"""
SCAN = """import torch
# mtmc: x=f32[N,V] N=6 V=70
def f(x):
    return torch.cumsum(x * 2, -1)
"""
LINEAR = """import torch
import torch.nn.functional as F
# mtmc: x=f32[B,S,K] w=f32[N,K] b=f32[N] r=f32[B,S,N] B=2 S=20 K=40 N=24
def f(x, w, b, r):
    return F.gelu(F.linear(F.silu(x), w, b)) + r
"""
BATCHED = """import torch
# mtmc: x=f32[B,M,K] y=f32[B,N,K] B=3 M=40 K=40 N=24
def f(x, y):
    return torch.bmm(x, y.transpose(1, 2)) - 1.0
"""
ATTENTION = """import torch
# mtmc: q=f32[B,S,16] k=f32[B,T,16] v=f32[B,T,16] m=f32[S,T] B=3 S=20 T=33
def f(q, k, v, m):
    return torch.softmax(q @ k.transpose(-1, -2) * 0.25 + m, -1) @ v
"""
SDPA = """import torch
import torch.nn.functional as F
# mtmc: q=f16[B,S,16] B=3 S=20
def f(q):
    return F.scaled_dot_product_attention(q, q, q, is_causal=True)
"""
HUGE = """import torch
# mtmc: q=f32[B,S,16]@-3e6..3e6 k=f32[B,T,16]@-3e6..3e6 v=f32[B,T,16] B=2 S=20 T=33
def f(q, k, v):
    return torch.softmax(q @ k.transpose(-1, -2) * 0.25, -1) @ v
"""
EMBED = """import torch
import torch.nn.functional as F
# mtmc: i=i64[B,S]@0..V-1 w=f32[V,D] B=2 S=5 V=11 D=12
def f(i, w):
    return F.embedding(i, w) * 2.0
"""
DROPOUT = """import torch
import torch.nn.functional as F
# mtmc: x=f32[N,H] N=30 H=20
def f(x):
    return F.dropout(torch.relu(x), 0.3)
"""
TRANSPOSED = """import torch
# mtmc: x=f32[N,M]{1,N} y=f32[N,M] N=20 M=30
def f(x, y):
    return torch.tanh(x) + y.log1p().nan_to_num() if False else torch.tanh(x) + torch.exp(y)
"""
SMALL = {"block_m": 16, "block_n": 16, "block_k": 16, "group_m": 4, "warps": 4, "stages": 2}
CASES = {
    "norm, whole rows": (NORM, {"rows": 2, "block": 64}),
    "norm, loop over blocks": (NORM, {"rows": 1, "block": 32, "loop": True}),
    "online softmax": (SOFTMAX, {"rows": 1, "block": 32, "loop": True}),
    "softmax, several rows": (SOFTMAX, {"rows": 4, "block": 128}),
    "reduction of the middle dimension": (COLUMNS, {"rows": 4, "block": 16}),
    "reduction of the middle dimension, looped": (COLUMNS, {"rows": 8, "block": 4, "loop": True}),
    "rotary": (ROTARY, {"rows": 4, "block": 16}),
    "group norm and silu": (GROUP, {"rows": 1, "block": 64}),
    "group norm and silu, looped": (GROUP, {"rows": 1, "block": 32, "loop": True}),
    "cross entropy": (LOSS, {"rows": 2, "block": 64}),
    "scan": (SCAN, {"rows": 2, "block": 16}),
    "linear with work on both sides": (LINEAR, {**SMALL, "precision": "ieee"}),
    "linear by split operands": (LINEAR, {**SMALL, "precision": "fp16x3"}),
    "linear, weights split as they are read": (
        LINEAR,
        {**SMALL, "precision": "fp16x3-promoted", "split_on_load": "right"},
    ),
    "linear, rows split as they are read": (LINEAR, {**SMALL, "precision": "fp16x3-promoted", "split_on_load": "left"}),
    "batch of products, weights split as they are read": (
        BATCHED,
        {**SMALL, "precision": "fp16x3-promoted", "split_on_load": "right"},
    ),
    "batch of products, rows split as they are read": (
        BATCHED,
        {**SMALL, "precision": "fp16x3-promoted", "split_on_load": "left"},
    ),
    "unfused attention": (ATTENTION, {"block_m": 16, "block_n": 16, "warps": 4, "stages": 2}),
    "attention of scores that no fused exponent holds": (HUGE, {"block_m": 16, "block_n": 16, "warps": 4, "stages": 2}),
    "causal attention in half precision": (SDPA, {"block_m": 16, "block_n": 32, "warps": 4, "stages": 2}),
    "embedding": (EMBED, {"rows": 2, "block": 16}),
    "dropout by seed": (DROPOUT, {"rows": 1, "block": 64}),
    "strided input": (TRANSPOSED, {"rows": 4, "block": 32}),
}


@pytest.mark.parametrize("name", CASES)
def test_a_fused_kernel_equals_the_users_code(name: str, captured) -> None:
    text, config = CASES[name]
    capture = captured(text, "f")
    verdict = verified(capture, fused(capture, text, config))
    assert verdict.is_correct, verdict.reason


def test_rendering_is_deterministic(captured) -> None:
    capture = captured(NORM, "f")
    assert fused(capture, NORM).source == fused(capture, NORM).source


def test_the_original_body_stays_for_calls_that_the_guard_rejects(captured) -> None:
    capture = captured(NORM, "f")
    source = fused(capture, NORM).source
    assert NORM.split("\n", 3)[3] in source
    assert source.count("# mtmc: dispatch") == 1


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("1e-05", "1e-02"),
        ("mask=col_mask", "mask=cols < 3"),
        ("tl.store(", "tl.load("),
    ],
)
def test_a_wrong_kernel_is_not_verified(captured, old: str, new: str) -> None:
    from dataclasses import replace

    capture = captured(NORM, "f")
    good = fused(capture, NORM, {"rows": 1, "block": 64})
    assert old in good.source
    bad = replace(good, source=good.source.replace(old, new))
    assert not verified(capture, bad).is_correct
