"""Heads of queries and fewer of keys: the same twice, in one launch (side by side)."""

import torch


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    a, b = x.chunk(2, -1)
    return x * cos + torch.cat([-b, a], -1) * sin


# mtmc: q=bf16[B,32,S,128] k=bf16[B,8,S,128] cos=bf16[S,128] sin=bf16[S,128] B=1 S=1024
def rope(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor):
    return rotate(q, cos, sin), rotate(k, cos, sin)


def norm(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    y = x.float()
    return (y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype) * w


# mtmc: q=bf16[B,S,32,128] k=bf16[B,S,8,128] wq=bf16[128] wk=bf16[128] B=1 S=1024
def qk_norm(q: torch.Tensor, k: torch.Tensor, wq: torch.Tensor, wk: torch.Tensor):
    return norm(q, wq), norm(k, wk)
