"""Attention in Einstein's notation."""

import torch


# mtmc: q=bf16[B,H,S,D] k=bf16[B,H,S,D] v=bf16[B,H,S,D] B=2 H=8 S=1024 D=64
def plain(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    s = torch.einsum("bhid,bhjd->bhij", q, k) * 0.125
    return torch.einsum("bhij,bhjd->bhid", s.softmax(-1), v)


# mtmc: q=bf16[B,S,H,D] k=bf16[B,S,H,D] v=bf16[B,S,H,D] B=2 H=8 S=1024 D=64
def rows(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    s = torch.einsum("bihd,bjhd->bhij", q, k) * 0.125
    return torch.einsum("bhij,bjhd->bihd", s.softmax(-1), v)


# mtmc: q=bf16[B,H,S,D] k=bf16[B,H,S,D] v=bf16[B,H,S,D] B=2 H=8 S=1024 D=64
def window(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    i = torch.arange(q.shape[2], device=q.device)
    keep = (i[None, :] <= i[:, None]) & (i[:, None] - i[None, :] < 256)
    s = torch.einsum("bhid,bhjd->bhij", q, k) * 0.125
    s = s.masked_fill(~keep, float("-inf"))
    return torch.einsum("bhij,bhjd->bhid", s.softmax(-1), v)
