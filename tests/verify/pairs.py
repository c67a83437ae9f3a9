"""A reference and an honest candidate in files of their own, as somebody else would write them."""

from __future__ import annotations

REFERENCE = """import torch


# mtmc: x=f32[N,D] w=f32[D] N=13 D=24
def rms(x, w, eps: float = 1e-5):
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * w
"""

HONEST = """import torch
import triton
import triton.language as tl


@triton.jit
def kernel(x_ptr, w_ptr, out_ptr, columns, eps, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    mask = cols < columns
    x = tl.load(x_ptr + row * columns + cols, mask=mask, other=0.0)
    scale = tl.rsqrt(tl.sum(x * x, axis=0) / columns + eps)
    w = tl.load(w_ptr + cols, mask=mask, other=0.0)
    tl.store(out_ptr + row * columns + cols, x * scale * w, mask=mask)


def fast(inp, weight, eps=1e-5):
    assert inp.is_cuda, "for the GPU"
    inp, weight = inp.contiguous(), weight.contiguous()
    out = torch.empty_like(inp)
    if out.numel():
        kernel[(inp.shape[0],)](inp, weight, out, inp.shape[1], eps, BLOCK=triton.next_power_of_2(inp.shape[1]))
    return out
"""

MODEL = """import torch
from torch import nn


class Model(nn.Module):
    def __init__(self, width, scale):
        super().__init__()
        self.gain = nn.Parameter(torch.ones(width))
        self.scale = scale

    def forward(self, x):
        return torch.relu(x * self.gain) * self.scale


def get_inputs():
    return [torch.rand(8, 32)]


def get_init_inputs():
    return [32, 2.0]
"""

MODEL_NEW = """import torch
import triton
import triton.language as tl
from torch import nn


@triton.jit
def scaled_relu(x_ptr, gain_ptr, out_ptr, count, width, scale, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = at < count
    x = tl.load(x_ptr + at, mask=mask) * tl.load(gain_ptr + at % width, mask=mask)
    tl.store(out_ptr + at, tl.where(x > 0, x, tl.where(x == x, 0.0, x)) * scale, mask=mask)


class ModelNew(nn.Module):
    def __init__(self, width, scale):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.scale = scale

    def forward(self, x):
        x = x.contiguous()
        out = torch.empty_like(x)
        scaled_relu[(triton.cdiv(x.numel(), 128),)](
            x, self.weight, out, x.numel(), x.shape[1], self.scale, BLOCK=128
        )
        return out
"""
"""In KernelBench's format; its parameter has another name than the reference's."""

POINTWISE = """import torch
import triton
import triton.language as tl


@triton.jit
def kernel(x_ptr, out_ptr, count, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = at < count
    x = tl.load(x_ptr + at, mask=mask)
    tl.store(out_ptr + at, FORMULA, mask=mask)


def fast(x):
    x = x.contiguous()
    out = torch.empty_like(x)
    if out.numel():
        kernel[(triton.cdiv(x.numel(), 64),)](x, out, x.numel(), BLOCK=64)
    return out
"""
"""Any formula of ``x``, one element by one."""


def changed(text: str, *changes: tuple[str, str]) -> str:
    """The text with others in place of some of it; each must be there."""
    for old, new in changes:
        assert old in text, old
        text = text.replace(old, new)
    return text
