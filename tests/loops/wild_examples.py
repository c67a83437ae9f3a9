"""Loops in forms that people write less often, with few steps."""

WILD = """
import math
import torch
import torch.nn as nn
import torch.nn.functional as F
from dataclasses import dataclass


# mtmc: x=f32[B,T,D] B=2 T=18 D=5
def filled_backwards(x):
    B, T, D = x.shape
    h = x.new_zeros(B, D)
    seen, outs = [], [None] * T
    for t in range(T - 1, -1, -1):
        h = torch.tanh(x[:, t] + 0.5 * h)
        outs[t] = h
    return torch.stack(outs, 1), h


# mtmc: x=f32[B,T] B=3 T=18
def filled_after_the_first(x):
    T = x.shape[1]
    levels = [None for _ in range(T)]
    levels[0] = x[:, 0]
    for t in range(1, T):
        levels[t] = 0.9 * levels[t - 1] + 0.1 * x[:, t]
    return torch.stack(levels, dim=1), levels[-1]


# mtmc: r=f32[T,B] v=f32[T,B] last=f32[B] T=18 B=3
def filled_with_zeros(r, v, last):
    T = len(r)
    advantages = [0.0] * (T + 1)
    for t in reversed(range(T)):
        following = last if t == T - 1 else v[t + 1]
        advantages[t] = r[t] + 0.99 * following - v[t] + 0.9 * advantages[t + 1]
    return torch.stack(advantages[:-1])


# mtmc: x=f32[B,D,T] k=f32[D,4] B=2 D=6 T=20
def window(x, k):
    h = torch.zeros_like(x[..., 0])
    out = []
    for t in range(3, x.shape[-1]):
        h = 0.9 * h + torch.tanh((x[..., t - 3 : t + 1] * k).sum(-1))
        out.append(h)
    return torch.stack(out, -1)


# mtmc: x=f32[B,T] B=2 T=18
def counted(x):
    h = torch.zeros_like(x[:, 0])
    t = 0
    while t < x.shape[1]:
        h = 0.5 * h + x[:, t]
        t = t + 1
    return h


# mtmc: x=f32[B,T] B=2 T=18
def held_range(x):
    h, out = torch.zeros_like(x[:, 0]), []
    steps = reversed(range(1, x.shape[1]))
    for t in steps:
        h = 0.5 * h + x[:, t] - x[:, t - 1]
        out.append(h)
    out = list(reversed(out))
    return torch.stack(out, 1)


# mtmc: u=f32[T,D] A=f32[N,N]@-0.2..0.2 B=f32[N,D] C=f32[M,N] T=18 N=16 D=3 M=4
def vectors(u, A, B, C):
    x = torch.zeros(A.shape[0], device=u.device)
    ys = []
    for t in range(u.shape[0]):
        x = A @ x + torch.mv(B, u[t])
        ys.append(C @ x)
    return torch.stack(ys)


# mtmc: q=f32[T,D] k=f32[T,D] v=f32[T,D] T=18 D=16
def outer_products(q, k, v):
    W = torch.zeros(q.shape[1], q.shape[1], device=q.device)
    out = []
    for t in range(q.shape[0]):
        W = 0.9 * W + torch.outer(v[t], k[t]) / (1 + torch.dot(k[t], k[t]))
        out.append(W @ q[t])
    return torch.stack(out)


# mtmc: b=f32[B,N,N] B=2 N=8
def padded_grid(b):
    p = torch.zeros_like(b)
    for _ in range(20):
        q = F.pad(p, (1, 1, 1, 1))
        p = 0.25 * (q[:, 1:-1, :-2] + q[:, 1:-1, 2:] + q[:, :-2, 1:-1] + q[:, 2:, 1:-1] - b)
    return p


# mtmc: z=f32[B,T] B=3 T=18
def numbers(z, q: float = 1e-3, r: float = 0.1):
    level, p, scale = z[:, 0], 1.0, 1.0
    out = [level]
    for t in range(1, z.shape[1]):
        p, scale = p + q, scale * 0.99
        k = p / (p + r)
        level = level + k * (z[:, t] - level) * math.sqrt(scale)
        p = (1 - k) * p
        out.append(level)
    return torch.stack(out, 1)


# mtmc: r=f32[T,B] T=18 B=4
def numbers_and_scalars(r):
    mean, count = 0.0, 1e-4
    out = torch.empty_like(r)
    for t in range(r.shape[0]):
        total = count + r.shape[1]
        mean = mean + (r[t].mean() - mean) * r.shape[1] / total
        count = total
        out[t] = r[t] - mean
    return out


class Spiking(nn.Module):
    def __init__(self):
        super().__init__()
        self.mem = None

    def forward(self, x):
        self.mem = 0.9 * self.mem + x
        spikes = (self.mem > 1.0).float()
        self.mem = self.mem - spikes
        return spikes


# mtmc: x=f32[T,B,D] T=18 B=2 D=8
class Attributes(nn.Module):
    def __init__(self):
        super().__init__()
        self.cell = Spiking()

    def forward(self, x):
        self.cell.mem = torch.zeros_like(x[0])
        out = []
        for t in range(x.shape[0]):
            out.append(self.cell(x[t]))
        return torch.stack(out), self.cell.mem


class Average:
    def __init__(self, x):
        self.level, self.count = torch.zeros_like(x), 0

    def update(self, x):
        self.count += 1
        self.level = self.level + (x - self.level) / self.count
        return self.level


# mtmc: x=f32[B,T] B=2 T=18
def object_with_states(x):
    average = Average(x[:, 0])
    out = []
    for x_t in x.unbind(1):
        out.append(average.update(x_t))
    return torch.stack(out, 1), average.level


@dataclass
class Pair:
    h: torch.Tensor
    c: torch.Tensor


# mtmc: x=f32[B,T] B=2 T=18
def dataclass_state(x):
    s = Pair(torch.zeros_like(x[:, 0]), torch.zeros_like(x[:, 0]))
    out = []
    for x_t in x.unbind(1):
        c = 0.9 * s.c + torch.sigmoid(x_t + s.h)
        s = Pair(h=torch.tanh(c), c=c)
        out.append(s.h)
    return torch.stack(out, 1), s.c


# mtmc: z=f32[B,N] B=3 N=32
def last_value(z):
    low = z.max(-1, keepdim=True).values - 1
    width = torch.ones_like(low)
    for _ in range(20):
        width = width / 2
        p = torch.clamp(z - low - width, min=0)
        low = torch.where(p.sum(-1, keepdim=True) >= 1, low + width, low)
    return p / p.sum(-1, keepdim=True)
"""
NAMES = (
    "filled_backwards filled_after_the_first filled_with_zeros window counted held_range vectors outer_products padded_grid "
    "numbers numbers_and_scalars Attributes object_with_states dataclass_state last_value"
).split()
