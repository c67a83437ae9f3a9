"""Estimates of reinforcement learning, filters, and iterations to a fixed point."""

from __future__ import annotations

import torch


# mtmc: rewards=f32[T,N] values=f32[T,N] dones=f32[T,N]@0..1 next_value=f32[N] next_done=f32[N]@0..1 T=1024 N=4096
def generalised_advantages(
    rewards, values, dones, next_value, next_done, gamma: float = 0.99, gae_lambda: float = 0.95
):
    steps = rewards.shape[0]
    advantages = torch.zeros_like(rewards)
    last = 0
    for t in reversed(range(steps)):
        if t == steps - 1:
            alive = 1.0 - next_done
            following = next_value
        else:
            alive = 1.0 - dones[t + 1]
            following = values[t + 1]
        delta = rewards[t] + gamma * following * alive - values[t]
        advantages[t] = last = delta + gamma * gae_lambda * alive * last
    return advantages, advantages + values


# mtmc: log_rhos=f32[T,B] discounts=f32[T,B]@0..1 rewards=f32[T,B] values=f32[T,B] bootstrap=f32[B] T=512 B=4096
def v_trace(log_rhos, discounts, rewards, values, bootstrap):
    rhos = torch.clamp(torch.exp(log_rhos), max=1.0)
    following = torch.cat([values[1:], bootstrap.unsqueeze(0)])
    deltas = rhos * (rewards + discounts * following - values)
    acc = torch.zeros_like(bootstrap)
    out = []
    for t in range(discounts.shape[0] - 1, -1, -1):
        acc = deltas[t] + discounts[t] * rhos[t] * acc
        out.append(acc)
    out.reverse()
    return torch.stack(out, dim=0) + values


# mtmc: x=f32[B,T,C] B=16 T=2000 C=80
def per_channel_energy(x, s: float = 0.025, alpha: float = 0.98, delta: float = 2.0, r: float = 0.5, eps: float = 1e-6):
    frames = []
    smooth = x[:, 0]
    for t in range(x.shape[1]):
        smooth = (1 - s) * smooth + s * x[:, t]
        frames.append(smooth)
    m = torch.stack(frames, dim=1)
    return (x.abs() / (eps + m.abs()) ** alpha + delta) ** r - delta**r


# mtmc: x=f32[B,T] b=f32[3] a=f32[2]@-0.5..0.5 B=256 T=4096
def biquad(x, b, a):
    out = torch.zeros_like(x)
    for t in range(2, x.shape[1]):
        forward = b[0] * x[:, t] + b[1] * x[:, t - 1] + b[2] * x[:, t - 2]
        out[:, t] = forward - a[0] * out[:, t - 1] - a[1] * out[:, t - 2]
    return out


# mtmc: scores=f32[B,N] B=4096 N=256
def sparsemax_by_bisection(scores, iterations: int = 40):
    low = scores.max(dim=-1, keepdim=True).values - 1
    high = low + 1
    for _ in range(iterations):
        middle = (low + high) / 2
        mass = torch.clamp(scores - middle, min=0).sum(dim=-1, keepdim=True)
        low = torch.where(mass >= 1, middle, low)
        high = torch.where(mass >= 1, high, middle)
    p = torch.clamp(scores - low, min=0)
    return p / p.sum(dim=-1, keepdim=True)


# mtmc: prices=f32[N,T]@1..2 N=8192 T=1024
def relative_strength(prices, period: int = 14):
    gain = torch.zeros_like(prices[:, 0])
    loss = torch.zeros_like(prices[:, 0])
    out = torch.zeros_like(prices)
    for t in range(1, prices.size(1)):
        change = prices[:, t] - prices[:, t - 1]
        gain = (gain * (period - 1) + change.clamp(min=0)) / period
        loss = (loss * (period - 1) - change.clamp(max=0)) / period
        out[:, t] = 100 - 100 / (1 + gain / (loss + 1e-8))
    return out
