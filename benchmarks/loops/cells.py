"""Recurrent networks as people write them by hand, with matrix products in each step."""

from __future__ import annotations

import torch
import torch.nn as nn


# mtmc: x=f32[B,T,X] W=f32[X,H]@-0.1..0.1 U=f32[H,H]@-0.1..0.1 b=f32[H] B=32 T=512 X=64 H=128
def elman(x, W, U, b):
    h = torch.zeros(x.shape[0], U.shape[0], device=x.device, dtype=x.dtype)
    out = torch.empty(x.shape[0], x.shape[1], U.shape[0], device=x.device, dtype=x.dtype)
    for t in range(x.shape[1]):
        h = torch.tanh(x[:, t] @ W + h @ U + b)
        out[:, t] = h
    return out


class GRUSteps(nn.Module):
    def __init__(self, width: int, hidden: int):
        super().__init__()
        self.cell = nn.GRUCell(width, hidden)
        self.hidden = hidden

    # mtmc: x=f32[T,B,X] T=512 B=64 X=64 init: width=64 hidden=64
    def forward(self, x):
        h = x.new_zeros(x.shape[1], self.hidden)
        outs = []
        for x_t in x:
            h = self.cell(x_t, h)
            outs.append(h)
        return torch.stack(outs), h


class GatedMemory(nn.Module):
    """An LSTM with one linear layer per gate."""

    def __init__(self, width: int, hidden: int):
        super().__init__()
        self.forget_gate = nn.Linear(width + hidden, hidden)
        self.input_gate = nn.Linear(width + hidden, hidden)
        self.candidate = nn.Linear(width + hidden, hidden)
        self.output_gate = nn.Linear(width + hidden, hidden)
        self.hidden = hidden

    # mtmc: x=f32[B,T,X] B=64 T=256 X=32 init: width=32 hidden=128
    def forward(self, x):
        h = x.new_zeros(x.shape[0], self.hidden)
        c = x.new_zeros(x.shape[0], self.hidden)
        outs = []
        for t in range(x.shape[1]):
            z = torch.cat([x[:, t], h], dim=1)
            c = torch.sigmoid(self.forget_gate(z)) * c + torch.sigmoid(self.input_gate(z)) * torch.tanh(
                self.candidate(z)
            )
            h = torch.sigmoid(self.output_gate(z)) * torch.tanh(c)
            outs.append(h)
        return torch.stack(outs, dim=1), (h, c)


class Tagger(nn.Module):
    """A recurrent network with an output layer in each step."""

    def __init__(self, width: int, hidden: int, tags: int):
        super().__init__()
        self.recurrent = nn.Linear(width + hidden, hidden)
        self.output = nn.Linear(hidden, tags)

    # mtmc: x=f32[T,B,X] h=f32[B,H] T=256 B=8 X=512 H=256 init: width=512 hidden=256 tags=128
    def forward(self, x, h):
        outs = []
        for t in range(x.size(0)):
            h = torch.tanh(self.recurrent(torch.cat((x[t], h), dim=1)))
            outs.append(self.output(h))
        return torch.stack(outs, dim=0)


# mtmc: x=f32[B,T,N,D] R=f32[N,D,D]@-0.1..0.1 b=f32[N,D] B=16 T=512 N=8 D=64
def recurrent_heads(x, R, b):
    h = torch.zeros_like(x[:, 0])
    out = torch.empty_like(x)
    for t in range(x.shape[1]):
        h = torch.tanh(x[:, t] + torch.einsum("bnd,nde->bne", h, R) + b)
        out[:, t] = h
    return out


# mtmc: q=f32[B,T,K] k=f32[B,T,K]@-0.2..0.2 v=f32[B,T,V] g=f32[B,T]@0..1 B=64 T=512 K=64 V=64
def linear_attention(q, k, v, g):
    state = torch.zeros(q.shape[0], q.shape[2], v.shape[2], device=q.device, dtype=q.dtype)
    outs = []
    for t in range(q.shape[1]):
        state = state * g[:, t, None, None] + torch.bmm(k[:, t].unsqueeze(2), v[:, t].unsqueeze(1))
        outs.append(torch.bmm(q[:, t].unsqueeze(1), state).squeeze(1))
    return torch.stack(outs, dim=1)
