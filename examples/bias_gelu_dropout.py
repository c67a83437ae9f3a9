"""What follows the first linear layer of an MLP in training."""

import torch
import torch.nn.functional as F


# mtmc: x=f32[N,H] bias=f32[H] N=8192 H=4096
def bias_gelu_dropout(x: torch.Tensor, bias: torch.Tensor, p: float = 0.1) -> torch.Tensor:
    return F.dropout(F.gelu(x + bias), p=p, training=True)
