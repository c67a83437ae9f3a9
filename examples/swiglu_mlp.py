"""The gated MLP of LLaMA-like models."""

import torch
import torch.nn.functional as F
from torch import nn


# mtmc: x=f32[B,S,1024] B=4 S=1024 init: dim=1024 hidden=2816
class SwiGLU(nn.Module):
    def __init__(self, dim: int, hidden: int):
        super().__init__()
        self.gate = nn.Linear(dim, hidden, bias=False)
        self.up = nn.Linear(dim, hidden, bias=False)
        self.down = nn.Linear(hidden, dim, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gated = F.silu(self.gate(x)) * self.up(x)
        return self.down(gated)
