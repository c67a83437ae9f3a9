"""Recurrent cells and scans over time, as people write them before they look for a kernel."""

from __future__ import annotations

import torch
import torch.nn as nn
import torch.nn.functional as F


# mtmc: a=f32[B,T,D]@0..1 b=f32[B,T,D] B=8 T=2048 D=1024
def linear_recurrence(a, b):
    h = torch.zeros_like(b[:, 0])
    out = torch.empty_like(b)
    for t in range(b.shape[1]):
        h = a[:, t] * h + b[:, t]
        out[:, t] = h
    return out


# mtmc: u=f32[b,l,d] delta=f32[b,l,d] A_log=f32[d,n]@0..2 B=f32[b,l,n] C=f32[b,l,n] D=f32[d] b=4 l=1024 d=1024 n=16
def selective_scan(u, delta, A_log, B, C, D):
    batch, length, width = u.shape
    A = -torch.exp(A_log)
    delta = F.softplus(delta)
    delta_A = torch.exp(delta.unsqueeze(-1) * A)
    delta_B_u = delta.unsqueeze(-1) * B.unsqueeze(2) * u.unsqueeze(-1)
    state = torch.zeros(batch, width, A.shape[1], device=u.device, dtype=u.dtype)
    ys = []
    for i in range(length):
        state = delta_A[:, i] * state + delta_B_u[:, i]
        ys.append((state * C[:, i].unsqueeze(1)).sum(dim=-1))
    return torch.stack(ys, dim=1) + u * D


# mtmc: w=f32[C]@-5..0 u=f32[C] k=f32[B,T,C] v=f32[B,T,C] B=8 T=1024 C=2048
def wkv(w, u, k, v):
    numerator = torch.zeros_like(k[:, 0])
    denominator = torch.zeros_like(k[:, 0])
    largest = torch.full_like(k[:, 0], -1e38)
    decay = -torch.exp(w)
    out = torch.empty_like(v)
    for t in range(k.shape[1]):
        kt, vt = k[:, t], v[:, t]
        q = torch.maximum(largest, u + kt)
        e1, e2 = torch.exp(largest - q), torch.exp(u + kt - q)
        out[:, t] = (e1 * numerator + e2 * vt) / (e1 * denominator + e2)
        q = torch.maximum(largest + decay, kt)
        e1, e2 = torch.exp(largest + decay - q), torch.exp(kt - q)
        numerator = e1 * numerator + e2 * vt
        denominator = e1 * denominator + e2
        largest = q
    return out


class ForgetMult(nn.Module):
    """The pooling of a quasi-recurrent network: gates come from a convolution, the recurrence has no product."""

    def __init__(self, width: int):
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(width))

    # mtmc: z=f32[T,B,D] f=f32[T,B,D] o=f32[T,B,D] T=512 B=32 D=1024 init: width=1024
    def forward(self, z, f, o):
        c = torch.zeros_like(z[0])
        hs = []
        for z_t, f_t, o_t in zip(z, f, o):
            gate = torch.sigmoid(f_t + self.bias)
            c = gate * c + (1 - gate) * torch.tanh(z_t)
            hs.append(torch.sigmoid(o_t) * c)
        return torch.stack(hs), c


# mtmc: x=f32[B,T,D] lengths=i64[B]@1..1024 B=32 T=1024 D=512
def masked_accumulation(x, lengths):
    h = x.new_zeros(x.shape[0], x.shape[2])
    outs = []
    for t, x_t in enumerate(x.unbind(1)):
        mask = (t < lengths).unsqueeze(-1)
        h = torch.where(mask, 0.9 * h + torch.relu(x_t), h)
        outs.append(h)
    return torch.stack(outs, dim=1)


# mtmc: q=f32[B,H,T,K] k=f32[B,H,T,K]@-0.2..0.2 v=f32[B,H,T] beta=f32[B,H,T]@0..1 B=8 H=16 T=512 K=64
def delta_memory(q, k, v, beta):
    memory = torch.zeros_like(q[:, :, 0])
    outs = []
    for t in range(q.shape[2]):
        read = (memory * k[:, :, t]).sum(-1, keepdim=True)
        error = (v[:, :, t].unsqueeze(-1) - read) * beta[:, :, t].unsqueeze(-1)
        memory = memory + error * k[:, :, t]
        outs.append((memory * q[:, :, t]).sum(-1))
    return torch.stack(outs, dim=2)
