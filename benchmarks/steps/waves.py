"""Products whose tiles leave the last wave badly filled (stream-K)."""

import torch
import torch.nn.functional as F


# mtmc: x=bf16[2048,8192] w=bf16[2560,8192] b=bf16[2560]
def last_wave(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return F.gelu(F.linear(x, w, b))


# mtmc: x=f32[1024,4096] w=f32[2560,4096] b=f32[2560]
def last_wave_fp32(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return F.gelu(F.linear(x, w, b))
