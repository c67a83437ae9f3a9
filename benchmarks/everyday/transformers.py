"""Pieces of language models, as people write them."""

from __future__ import annotations

import math

import torch
import torch.nn as nn
import torch.nn.functional as F


class RMSNorm(nn.Module):
    def __init__(self, dim: int, eps: float = 1e-6):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(dim))

    def _norm(self, x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)

    # mtmc: x=bf16[B,T,D] B=4 T=2047 D=5120 init: dim=5120
    def forward(self, x):
        output = self._norm(x.float()).type_as(x)
        return output * self.weight


# mtmc: x=bf16[B,T,H,64] cos=f32[T,32] sin=f32[T,32] B=4 T=2048 H=16
def apply_rotary_interleaved(x, cos, sin):
    x1, x2 = x[..., ::2].float(), x[..., 1::2].float()
    c, s = cos[None, :, None, :], sin[None, :, None, :]
    y = torch.stack((x1 * c - x2 * s, x1 * s + x2 * c), dim=-1)
    return y.flatten(-2).to(x.dtype)


# mtmc: h=bf16[N,2*D] N=8192 D=5632
def swiglu(h):
    gate, up = h.chunk(2, dim=-1)
    return F.silu(gate) * up


# mtmc: x=f16[N,D] w=f16[D] b=f16[D] N=6000 D=3000
def geglu_tanh_bias(x, w, b):
    x = x * w + b
    return 0.5 * x * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * x**3)))


# mtmc: q=bf16[B,H,T,128] k=bf16[B,H,T,128] scale=f32[H,1,1] B=2 H=16 T=2048
def qk_norm(q, k, scale):
    q = F.normalize(q.float(), dim=-1) * scale
    k = F.normalize(k.float(), dim=-1)
    return q.to(torch.bfloat16), k.to(torch.bfloat16)


# mtmc: q=f16[B,H,T,64] k=f16[B,H,T,64] v=f16[B,H,T,64] slopes=f32[H] B=2 H=12 T=1500
def alibi_attention(q, k, v, slopes):
    T = q.shape[-2]
    pos = torch.arange(T, device=q.device)
    bias = -(pos[:, None] - pos[None, :]).abs().float()
    scores = (q @ k.transpose(-1, -2)).float() / math.sqrt(q.shape[-1])
    scores = scores + slopes[:, None, None] * bias
    scores = scores.masked_fill(pos[None, :] > pos[:, None], float("-inf"))
    return scores.softmax(-1).to(v.dtype) @ v


class CausalSelfAttention(nn.Module):
    def __init__(self, n_embd: int, n_head: int):
        super().__init__()
        self.c_attn = nn.Linear(n_embd, 3 * n_embd)
        self.c_proj = nn.Linear(n_embd, n_embd)
        self.n_head = n_head

    # mtmc: x=f32[B,T,C] B=8 T=1024 C=768 init: n_embd=768 n_head=12
    def forward(self, x):
        B, T, C = x.size()
        q, k, v = self.c_attn(x).split(C, dim=2)
        k = k.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        q = q.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        v = v.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.c_proj(y.transpose(1, 2).contiguous().view(B, T, C))


# mtmc: q=f16[B,8,T,64] k=f16[B,8,S,64] v=f16[B,8,S,64] keep=bool[B,S] B=4 T=512 S=777
def padded_cross_attention(q, k, v, keep):
    scores = torch.einsum("bhtd,bhsd->bhts", q, k) * 0.125
    scores = scores.masked_fill(~keep[:, None, None, :], torch.finfo(scores.dtype).min)
    return torch.einsum("bhts,bhsd->bhtd", torch.softmax(scores, dim=-1), v)


# mtmc: x=f32[B,T,D] residual=f32[B,T,D] weight=f32[D] bias=f32[D] B=16 T=512 D=1024
def dropout_add_layernorm(x, residual, weight, bias):
    h = F.dropout(x, p=0.1, training=True) + residual
    return F.layer_norm(h, (h.shape[-1],), weight, bias, 1e-5), h


# mtmc: logits=f32[N,V] N=4096 V=32000
def soft_cap(logits):
    return 30.0 * torch.tanh(logits / 30.0)


# mtmc: logits=bf16[N,V] labels=i64[N]@0..V-1 N=2048 V=50304
def cross_entropy_z_loss(logits, labels):
    logits = logits.float()
    lse = torch.logsumexp(logits, dim=-1)
    picked = logits.gather(-1, labels[:, None]).squeeze(-1)
    return (lse - picked).mean() + 1e-4 * lse.square().mean()


# mtmc: x=bf16[N,K] w=bf16[M,K] a=bf16[16,K] b=bf16[M,16] N=4096 K=2048 M=2048
def lora_linear(x, w, a, b):
    return x @ w.t() + (x @ a.t()) @ b.t() * 2.0


# mtmc: hidden=f32[B,T,D] mask=i64[B,T]@0..1 B=64 T=512 D=768
def masked_mean_pool(hidden, mask):
    m = mask.unsqueeze(-1).to(hidden.dtype)
    return (hidden * m).sum(1) / m.sum(1).clamp(min=1e-9)


# mtmc: logits=f32[N,E] N=32768 E=64
def switch_gate(logits):
    probs = F.softmax(logits, dim=-1)
    index = probs.argmax(dim=-1)
    mask = F.one_hot(index, logits.shape[-1]).to(probs.dtype)
    density = mask.mean(0)
    balance = (density * probs.mean(0)).sum() * logits.shape[-1]
    return index, (probs * mask).sum(-1), balance
