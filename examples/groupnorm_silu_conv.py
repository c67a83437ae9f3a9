"""The convolution block of diffusion U-Nets: normalise, activate, convolve, add."""

import torch
import torch.nn.functional as F
from torch import nn


# mtmc: x=f32[B,128,H,W] B=32 H=64 W=64 init: channels=128 groups=32
class ConvBlock(nn.Module):
    def __init__(self, channels: int, groups: int):
        super().__init__()
        self.norm = nn.GroupNorm(groups, channels)
        self.conv = nn.Conv2d(channels, channels, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = F.silu(self.norm(x))
        h = self.conv(h)
        return (x + h) * 0.7071
