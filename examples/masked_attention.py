"""Attention with an additive mask, written out."""

import math

import torch


# mtmc: q=bf16[B,H,S,64] k=bf16[B,H,T,64] v=bf16[B,H,T,64] mask=bf16[S,T] B=4 H=16 S=1024 T=1024
def masked_attention(q, k, v, mask):
    scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
    weights = torch.softmax(scores + mask, dim=-1)
    return weights @ v
