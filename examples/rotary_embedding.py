"""Rotary position embedding in the rotate-half form of Hugging Face's LLaMA."""

import torch


# mtmc: q=bf16[B,H,S,128] cos=bf16[S,128] sin=bf16[S,128] B=8 H=32 S=2048
def apply_rotary(q: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    half = q.shape[-1] // 2
    first, second = q[..., :half], q[..., half:]
    rotated = torch.cat((-second, first), dim=-1)
    return q * cos + rotated * sin
