"""An fp32 GEMM with a long epilogue, in KernelBench's format."""

import torch
import torch.nn as nn
import torch.nn.functional as F


class Model(nn.Module):
    def __init__(self, in_features: int, out_features: int, scale: float):
        super().__init__()
        self.linear = nn.Linear(in_features, out_features)
        self.gain = nn.Parameter(torch.ones(out_features))
        self.scale = scale

    def forward(self, x: torch.Tensor, skip: torch.Tensor) -> torch.Tensor:
        y = self.linear(x)
        y = F.gelu(y) * self.gain
        y = torch.clamp(y * self.scale, -3.0, 3.0)
        return F.silu(y + skip)


batch_size = 4096
in_features = 4096
out_features = 4096


def get_inputs():
    return [torch.randn(batch_size, in_features), torch.randn(batch_size, out_features)]


def get_init_inputs():
    return [in_features, out_features, 0.5]
