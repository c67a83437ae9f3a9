"""Loops over time as they are trained: each call is followed by its backward pass."""

from __future__ import annotations

import torch


# mtmc: a=f32[B,T,D]@0.5..1.0 b=f32[B,T,D] h0=f32[B,D] B=16 T=512 D=512 grad=a,b,h0
def linear_recurrence(a, b, h0):
    h = h0
    outs = []
    for t in range(a.shape[1]):
        h = a[:, t] * h + b[:, t]
        outs.append(h)
    return torch.stack(outs, 1)


# mtmc: x=f32[B,T,D] f=f32[B,T,D] h0=f32[B,D] B=16 T=512 D=512 grad=x,f,h0
def min_gru(x, f, h0):
    out = torch.empty_like(x)
    h = h0
    for t in range(x.shape[1]):
        gate = torch.sigmoid(f[:, t])
        h = (1 - gate) * h + gate * torch.tanh(x[:, t])
        out[:, t] = h
    return out


# mtmc: x=f32[B,T,D] decay=f32[D] threshold=f32[D]@0.5..1.5 B=32 T=256 D=512 grad=x,decay,threshold
def leaky_units(x, decay, threshold):
    v = torch.zeros_like(x[:, 0])
    rate = torch.sigmoid(decay)
    outs = []
    for t in range(x.shape[1]):
        v = rate * v + x[:, t]
        fired = torch.sigmoid(4.0 * (v - threshold))
        outs.append(fired)
        v = v - fired * threshold
    return torch.stack(outs, 1)


# mtmc: x=f32[B,T,H] h0=f32[B,H] u=f32[H,H]@-0.1..0.1 b=f32[H] B=32 T=256 H=128 grad=x,h0,u,b
def elman(x, h0, u, b):
    h = h0
    outs = []
    for t in range(x.shape[1]):
        h = torch.tanh(x[:, t] + h @ u + b)
        outs.append(h)
    return torch.stack(outs, 1)


# mtmc: u=f32[B,L,D] delta=f32[B,L,D]@0.0..0.5 A=f32[D,N]@-2.0..0.0 B_in=f32[B,L,N] C=f32[B,L,N] B=8 L=512 D=256 N=16
# mtmc: grad=u,delta,A,B_in,C
def selective_scan(u, delta, A, B_in, C):
    decay = torch.exp(delta.unsqueeze(-1) * A)
    inputs = delta.unsqueeze(-1) * B_in.unsqueeze(2) * u.unsqueeze(-1)
    state = u.new_zeros(u.shape[0], u.shape[2], A.shape[1])
    ys = []
    for i in range(u.shape[1]):
        state = decay[:, i] * state + inputs[:, i]
        ys.append((state * C[:, i].unsqueeze(1)).sum(-1))
    return torch.stack(ys, 1)


# mtmc: q=f32[B,H,T,K] k=f32[B,H,T,K] v=f32[B,H,T,V] g=f32[B,H,T]@0.9..1.0 B=4 H=8 T=256 K=64 V=64 grad=q,k,v,g
def decayed_attention(q, k, v, g):
    state = q.new_zeros(q.shape[0], q.shape[1], q.shape[3], v.shape[3])
    out = torch.empty_like(v)
    for t in range(q.shape[2]):
        state = g[:, :, t, None, None] * state + k[:, :, t, :, None] * v[:, :, t, None, :]
        out[:, :, t] = (q[:, :, t, :, None] * state).sum(2)
    return out


# mtmc: rewards=f32[T,N] values=f32[T,N] T=1024 N=1024 grad=values
def advantages(rewards, values, gamma: float = 0.99, lam: float = 0.95):
    out = torch.zeros_like(rewards)
    last = torch.zeros_like(rewards[0])
    for t in reversed(range(rewards.shape[0])):
        following = values[t + 1] if t < rewards.shape[0] - 1 else torch.zeros_like(last)
        delta = rewards[t] + gamma * following - values[t]
        last = delta + gamma * lam * last
        out[t] = last
    return out


# mtmc: scores=f32[B,T,S] moves=f32[S,S] B=32 T=256 S=32 grad=scores,moves
def partition_function(scores, moves):
    alpha = scores[:, 0]
    for t in range(1, scores.shape[1]):
        alpha = torch.logsumexp(alpha.unsqueeze(2) + moves, dim=1) + scores[:, t]
    return torch.logsumexp(alpha, dim=1)
