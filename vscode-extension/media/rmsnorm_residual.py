"""RMSNorm of the residual stream, as transformer blocks do it before attention and MLP."""

import torch


# mtmc: x=bf16[B,S,D] residual=bf16[B,S,D] weight=bf16[D] B=8 S=2048 D=4096
def rmsnorm_residual(x, residual, weight, eps: float = 1e-6):
    hidden = x + residual
    hidden32 = hidden.float()
    variance = hidden32.pow(2).mean(-1, keepdim=True)
    normed = hidden32 * torch.rsqrt(variance + eps)
    return normed.to(x.dtype) * weight, hidden
