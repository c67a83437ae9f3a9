"""Pieces of diffusion models and autoencoders, as people write them."""

from __future__ import annotations

import math

import torch
import torch.nn as nn
import torch.nn.functional as F


# mtmc: t=f32[N] N=4096
def timestep_embedding(t):
    half = 160
    freqs = torch.exp(-math.log(10000.0) * torch.arange(half, device=t.device, dtype=torch.float32) / half)
    args = t[:, None] * freqs[None]
    return torch.cat([torch.cos(args), torch.sin(args)], dim=-1)


# mtmc: x=bf16[B,T,D] shift=bf16[B,D] scale=bf16[B,D] B=8 T=1025 D=1152
def modulate(x, shift, scale):
    x = F.layer_norm(x, (x.shape[-1],), eps=1e-6)
    return x * (1 + scale.unsqueeze(1)) + shift.unsqueeze(1)


# mtmc: x=bf16[B,T,D] y=bf16[B,T,D] gate=bf16[B,D] B=8 T=1024 D=1152
def gated_residual(x, y, gate):
    return x + gate.unsqueeze(1) * y


class ResBlockHead(nn.Module):
    def __init__(self, channels: int, groups: int):
        super().__init__()
        self.norm = nn.GroupNorm(groups, channels)

    # mtmc: x=f32[B,C,H,W] emb=f32[B,2*C] B=8 C=320 H=64 W=64 init: channels=320 groups=32
    def forward(self, x, emb):
        scale, shift = emb[:, :, None, None].chunk(2, dim=1)
        return F.silu(self.norm(x) * (1 + scale) + shift)


# mtmc: mu=f32[B,C,H,W] logvar=f32[B,C,H,W] eps=f32[B,C,H,W] B=32 C=4 H=64 W=64
def reparameterize(mu, logvar, eps):
    logvar = torch.clamp(logvar, -30.0, 20.0)
    z = mu + torch.exp(0.5 * logvar) * eps
    kl = 0.5 * torch.sum(mu.pow(2) + logvar.exp() - 1.0 - logvar, dim=[1, 2, 3])
    return z, kl


# mtmc: x=f32[B,C,H,W] eps=f32[B,C,H,W] a=f32[B] B=16 C=3 H=256 W=256
def predict_x0(x, eps, a):
    a = a[:, None, None, None]
    x0 = (x - (1 - a).sqrt() * eps) / a.sqrt()
    return x0.clamp(-1, 1)


# mtmc: cond=f16[B,C,H,W] uncond=f16[B,C,H,W] B=8 C=4 H=128 W=128
def guidance_rescaled(cond, uncond):
    out = uncond + 7.5 * (cond - uncond)
    std_cond = cond.float().std(dim=(1, 2, 3), keepdim=True)
    std_out = out.float().std(dim=(1, 2, 3), keepdim=True)
    rescaled = out * (std_cond / std_out).to(out.dtype)
    return 0.7 * rescaled + 0.3 * out


# mtmc: x=f32[B,C,2*H,2*W] B=16 C=64 H=56 W=56
def space_to_depth(x):
    b, c, h, w = x.shape
    x = x.view(b, c, h // 2, 2, w // 2, 2)
    return x.permute(0, 3, 5, 1, 2, 4).reshape(b, 4 * c, h // 2, w // 2)
