"""Attention in bfloat16, beside PyTorch's own choice of kernel."""

import torch
import torch.nn.functional as F


# mtmc: q=bf16[4,32,4096,64] k=bf16[4,32,4096,64] v=bf16[4,32,4096,64]
def heads_of_64(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return F.scaled_dot_product_attention(q, k, v)


# mtmc: q=bf16[4,16,4096,128] k=bf16[4,16,4096,128] v=bf16[4,16,4096,128]
def heads_of_128(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return F.scaled_dot_product_attention(q, k, v)


# mtmc: q=bf16[4,16,4096,128] k=bf16[4,16,4096,128] v=bf16[4,16,4096,128]
def causal_heads_of_128(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)
