"""First layers of networks of images: convolutions of three channels (the order of windows)."""

import torch
from torch import nn


class Stem(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64)

    # mtmc: x=f32[64,3,224,224]
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.norm(self.conv(x)))
