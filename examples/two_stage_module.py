"""A small module with two stages: gated features, then a normalised projection of their statistics."""

import torch
from torch import nn


# mtmc: x=f32[B,L,512] B=64 L=1024 init: width=512
class TwoStage(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.gate = nn.Parameter(torch.zeros(width))
        self.shift = nn.Parameter(torch.zeros(width))
        self.eps = 1e-5

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        features = self.norm(x) * torch.sigmoid(self.gate) + self.shift
        energy = features.pow(2).mean(dim=1)
        return energy / (energy.amax(dim=-1, keepdim=True) + self.eps)
