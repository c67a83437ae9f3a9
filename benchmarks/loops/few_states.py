"""Few states and many steps: one iteration after another leaves a GPU idle."""

from __future__ import annotations

import torch


# mtmc: a=f32[B,T,D]@0..1 b=f32[B,T,D] B=4 T=16384 D=64
def long_recurrence(a, b):
    h = torch.zeros_like(b[:, 0])
    out = torch.empty_like(b)
    for t in range(b.shape[1]):
        h = a[:, t] * h + b[:, t]
        out[:, t] = h
    return out


# mtmc: rewards=f32[T,N] values=f32[T,N] dones=f32[T,N]@0..1 next_value=f32[N] next_done=f32[N]@0..1 T=8192 N=16
def advantages_of_few(rewards, values, dones, next_value, next_done, gamma: float = 0.99, gae_lambda: float = 0.95):
    following = torch.cat([values[1:], next_value.unsqueeze(0)])
    alive = 1.0 - torch.cat([dones[1:], next_done.unsqueeze(0)])
    deltas = rewards + gamma * following * alive - values
    advantages = torch.zeros_like(rewards)
    last = torch.zeros_like(next_value)
    for t in reversed(range(rewards.shape[0])):
        last = deltas[t] + gamma * gae_lambda * alive[t] * last
        advantages[t] = last
    return advantages


# mtmc: x=f32[T] T=32768
def smoothed_series(x, weight: float = 0.01):
    out = torch.empty_like(x)
    mean = x[0]
    for t in range(x.shape[0]):
        mean = torch.lerp(mean, x[t], weight)
        out[t] = mean
    return out


# mtmc: scores=f32[B,T] B=8 T=16384
def running_log_sum_exp(scores):
    top = torch.full_like(scores[:, 0], -1e30)
    total = torch.zeros_like(top)
    out = torch.empty_like(scores)
    for t in range(scores.shape[1]):
        higher = torch.maximum(top, scores[:, t])
        total = total * torch.exp(top - higher) + torch.exp(scores[:, t] - higher)
        top = higher
        out[:, t] = top + torch.log(total)
    return out


# mtmc: x=f32[B,T] b=f32[3] a=f32[2]@-0.5..0.5 B=4 T=16384
def long_biquad(x, b, a):
    out = torch.zeros_like(x)
    for t in range(2, x.shape[1]):
        forward = b[0] * x[:, t] + b[1] * x[:, t - 1] + b[2] * x[:, t - 2]
        out[:, t] = forward - a[0] * out[:, t - 1] - a[1] * out[:, t - 2]
    return out


# mtmc: prices=f32[N,T]@1..2 N=16 T=16384
def drawdowns(prices):
    high = prices[:, 0]
    out = torch.empty_like(prices)
    for t in range(prices.shape[1]):
        high = torch.maximum(high, prices[:, t])
        out[:, t] = 1 - prices[:, t] / high
    return out
