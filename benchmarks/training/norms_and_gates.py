"""Parts of a transformer in training, as they are written in plain torch, at the sizes of Liger-Kernel's benchmarks."""

import torch
import torch.nn.functional as F


# mtmc: x=bf16[N,H] weight=bf16[H] N=2048 H=4096 grad=x,weight
def rms_norm(x, weight, eps=1e-6):
    hidden = x.float()
    hidden = hidden * torch.rsqrt(hidden.pow(2).mean(-1, keepdim=True) + eps)
    return weight * hidden.to(x.dtype)


# mtmc: x=bf16[N,H] weight=bf16[H] bias=bf16[H] N=4096 H=4096 grad=x,weight,bias
def layer_norm(x, weight, bias):
    return F.layer_norm(x, (x.shape[-1],), weight, bias)


# mtmc: x=bf16[N,H] residual=bf16[N,H] weight=bf16[H] N=2048 H=4096 grad=x,residual,weight
def add_rms_norm(x, residual, weight, eps=1e-6):
    added = x + residual
    hidden = added.float()
    hidden = hidden * torch.rsqrt(hidden.pow(2).mean(-1, keepdim=True) + eps)
    return weight * hidden.to(x.dtype), added


# mtmc: gate=bf16[N,I] up=bf16[N,I] N=8192 I=11008 grad=gate,up
def swiglu(gate, up):
    return F.silu(gate) * up


# mtmc: gate=bf16[N,I] up=bf16[N,I] N=8192 I=11008 grad=gate,up
def geglu(gate, up):
    return F.gelu(gate, approximate="tanh") * up


def rotate_half(x):
    first, second = x.chunk(2, dim=-1)
    return torch.cat((-second, first), dim=-1)


# mtmc: q=bf16[B,32,S,128] k=bf16[B,8,S,128] cos=bf16[B,S,128] sin=bf16[B,S,128] B=1 S=4096 grad=q,k
def rotary(q, k, cos, sin):
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    return q * cos + rotate_half(q) * sin, k * cos + rotate_half(k) * sin
