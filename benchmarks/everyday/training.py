"""Losses, optimizers and quantisation, as people write them."""

from __future__ import annotations

import torch
import torch.nn.functional as F


# mtmc: p=f32[N] g=f32[N] m=f32[N] v=f32[N]@0..1 N=30000000
def adamw_step(p, g, m, v):
    m.mul_(0.9).add_(g, alpha=0.1)
    v.mul_(0.95).addcmul_(g, g, value=0.05)
    denom = (v / 0.0975).sqrt().add_(1e-8)
    p.mul_(1 - 1e-4).addcdiv_(m / 0.19, denom, value=-3e-4)
    return p


# mtmc: ema=f32[N] p=bf16[N] N=50000000
def ema_update(ema, p):
    ema.lerp_(p.float(), 0.001)
    return ema


# mtmc: student=f32[N,C] teacher=f32[N,C] N=8192 C=1000
def distillation(student, teacher):
    t = 4.0
    log_q = F.log_softmax(student / t, dim=-1)
    p = F.softmax(teacher / t, dim=-1)
    return F.kl_div(log_q, p, reduction="batchmean") * t * t


# mtmc: z1=f32[N,D] z2=f32[N,D] N=2048 D=128
def info_nce(z1, z2):
    z1, z2 = F.normalize(z1, dim=-1), F.normalize(z2, dim=-1)
    logits = z1 @ z2.t() / 0.07
    labels = torch.arange(z1.shape[0], device=z1.device)
    return 0.5 * (F.cross_entropy(logits, labels) + F.cross_entropy(logits.t(), labels))


# mtmc: x=f32[N,D] c=f32[K,D] N=16384 D=64 K=256
def squared_distances(x, c):
    return (x.square().sum(-1, keepdim=True) - 2 * x @ c.t() + c.square().sum(-1)).clamp_min(0)


# mtmc: x=bf16[N,D] N=8192 D=4096
def quantize_rowwise(x):
    scale = x.abs().amax(dim=-1, keepdim=True).float().clamp(min=1e-8) / 127.0
    q = torch.clamp(torch.round(x.float() / scale), -128, 127).to(torch.int8)
    return q, scale


# mtmc: x=f16[N,K] w=i8[M,K]@-127..127 scale=f16[M] N=1024 K=4096 M=4096
def int8_weight_linear(x, w, scale):
    return x @ (w.to(x.dtype) * scale[:, None]).t()


# mtmc: x=f32[N] N=20000000
def fake_quant(x):
    q = torch.clamp(torch.round(x * 16.0), -128.0, 127.0)
    return q / 16.0


# mtmc: mean=f32[N,D] log_std=f32[D] action=f32[N,D] N=100000 D=17
def gaussian_log_prob(mean, log_std, action):
    std = log_std.exp()
    z = (action - mean) / std
    return (-0.5 * z * z - log_std - 0.9189385332).sum(-1)


# mtmc: ratio=f32[N] adv=f32[N] value=f32[N] old=f32[N] ret=f32[N] N=2000000
def ppo_loss(ratio, adv, value, old, ret):
    adv = (adv - adv.mean()) / (adv.std() + 1e-8)
    policy = -torch.min(ratio * adv, ratio.clamp(0.8, 1.2) * adv).mean()
    clipped = old + (value - old).clamp(-0.2, 0.2)
    critic = 0.5 * torch.max((value - ret) ** 2, (clipped - ret) ** 2).mean()
    return policy + 0.5 * critic


# mtmc: x=f32[B,T] B=4096 T=1000
def discounted_returns(x):
    t = torch.arange(x.shape[1], device=x.device, dtype=x.dtype)
    w = 0.99**t
    return (x * w).flip(1).cumsum(1).flip(1) / w


# mtmc: gates=f32[B,4*H] c=f32[B,H] B=8192 H=1024
def lstm_cell(gates, c):
    i, f, g, o = gates.chunk(4, 1)
    c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
    return torch.sigmoid(o) * torch.tanh(c), c
