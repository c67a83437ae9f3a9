"""The references that candidates are verified against: small enough for Triton's interpreter at their workload's sizes."""

import torch
import torch.nn.functional as F
from torch import nn


# mtmc: x=f32[N,V] N=40 V=200
def softmax(x):
    return torch.softmax(x, dim=-1)


# mtmc: x=f32[N,D] weight=f32[D] bias=f32[D] N=24 D=192
def layer_norm(x, weight, bias):
    return F.layer_norm(x, (x.shape[-1],), weight, bias, 1e-5)


# mtmc: x=f16[N,D] weight=f16[D] N=24 D=160
def rms_norm(x, weight):
    wide = x.float()
    return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype) * weight


# mtmc: x=f32[M,K] weight=f32[K,N] bias=f32[N] M=48 K=72 N=40
def linear_gelu(x, weight, bias):
    return F.gelu(x @ weight + bias)


# mtmc: x=f32[N,L] N=20 L=150
def running_sum(x):
    return torch.cumsum(x, dim=-1)


# mtmc: logits=f32[N,V] target=i64[N]@0..V-1 N=32 V=130
def cross_entropy(logits, target):
    return torch.logsumexp(logits, -1) - logits.gather(-1, target[:, None])[:, 0]


# mtmc: x=f32[B,S,D] scale=f32[D] shift=f32[B,1,D] B=3 S=20 D=40
def gated(x, scale, shift):
    return F.silu(x * scale + shift) * x


# mtmc: x=f32[N,V] mask=bool[N,V] N=24 V=100
def masked_softmax(x, mask):
    return torch.softmax(x.masked_fill(mask, -1e9), dim=-1)


# mtmc: x=f32[N,V] N=24 V=140
def best(x):
    return x.amax(-1), x.argmax(-1)


# mtmc: x=f32[B,S,64] B=3 S=10 init: width=64 eps=1e-5
class GatedNorm(nn.Module):
    def __init__(self, width, eps=1e-5):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width))
        self.gate = nn.Parameter(torch.randn(width))
        self.eps = eps

    def forward(self, x):
        normed = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)
        return normed * self.weight * torch.sigmoid(self.gate)
