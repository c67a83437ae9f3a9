"""Short calls of several parts that do not wait for one another."""

import torch
import torch.nn as nn
import torch.nn.functional as F


# mtmc: x=bf16[B,1024] wq=bf16[1024,1024] wk=bf16[256,1024] wv=bf16[256,1024] B=64
def qkv(x: torch.Tensor, wq: torch.Tensor, wk: torch.Tensor, wv: torch.Tensor):
    return F.linear(x, wq) * 0.125, F.linear(x, wk), F.linear(x, wv)


class Towers(nn.Module):
    """Two towers of a recommender, and their cosine."""

    def __init__(self) -> None:
        super().__init__()
        self.user = nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 128))
        self.item = nn.Sequential(nn.Linear(192, 512), nn.ReLU(), nn.Linear(512, 128))

    # mtmc: user=f32[B,256] item=f32[B,192] B=2048
    def forward(self, user: torch.Tensor, item: torch.Tensor) -> torch.Tensor:
        return F.cosine_similarity(self.user(user), self.item(item))


# mtmc: a=f32[N,64] b=f32[N,32] c=f32[N,128] wa=f32[64] wb=f32[32] wc=f32[128] N=4096
def embeddings(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor, wa: torch.Tensor, wb: torch.Tensor, wc: torch.Tensor):
    return [F.layer_norm(t, t.shape[-1:], w) for t, w in ((a, wa), (b, wb), (c, wc))]
