"""Loops over time steps whose states are scans."""

SCANS = """
import torch
import torch.nn.functional as F


# mtmc: x=f32[B,T,D] B=3 T=37 D=5
def running_sum(x):
    h = torch.zeros_like(x[:, 0])
    out = torch.empty_like(x)
    for t in range(x.shape[1]):
        h = h + x[:, t]
        out[:, t] = h
    return out, h


# mtmc: x=f32[T] T=50
def one_series(x):
    out = torch.empty_like(x)
    mean = x[0]
    for t in range(x.shape[0]):
        mean = torch.lerp(mean, x[t], 0.1)
        out[t] = mean
    return out


# mtmc: x=f32[B,T] B=3 T=37
def extremes(x):
    high, low = x[:, 0], x[:, 0]
    drawdown = torch.zeros_like(x)
    for t in range(x.shape[1]):
        high = torch.maximum(high, x[:, t])
        low = torch.minimum(low, x[:, t])
        drawdown[:, t] = high - low
    return drawdown, high


# mtmc: x=f32[T,B] T=37 B=6
def cusum(x):
    s = torch.zeros_like(x[0])
    out = torch.empty_like(x)
    for t in range(x.shape[0]):
        s = torch.clamp(s + x[t] - 0.2, min=0.0)
        out[t] = s
    return out


# mtmc: x=f32[B,T] B=3 T=37
def log_sum_exp(x):
    m = torch.full_like(x[:, 0], -1e30)
    s = torch.zeros_like(m)
    out = torch.empty_like(x)
    for t in range(x.shape[1]):
        new = torch.maximum(m, x[:, t])
        s = s * torch.exp(m - new) + torch.exp(x[:, t] - new)
        m = new
        out[:, t] = m + torch.log(s)
    return out


# mtmc: x=f32[B,T,D] done=f32[B,T] B=3 T=37 D=5
def resets(x, done):
    h = torch.zeros_like(x[:, 0])
    outs = []
    for t in range(x.shape[1]):
        h = torch.where(done[:, t, None] > 0.5, x[:, t], 0.9 * h + x[:, t])
        outs.append(h)
    return torch.stack(outs, 1)


# mtmc: x=f32[B,T] b=f32[3] a=f32[2]@-0.5..0.5 B=6 T=37
def biquad(x, b, a):
    out = torch.zeros_like(x)
    for t in range(2, x.shape[1]):
        forward = b[0] * x[:, t] + b[1] * x[:, t - 1] + b[2] * x[:, t - 2]
        out[:, t] = forward - a[0] * out[:, t - 1] - a[1] * out[:, t - 2]
    return out


# mtmc: w=f32[C]@-5..0 u=f32[C] k=f32[B,T,C] v=f32[B,T,C] B=2 T=37 C=5
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


# mtmc: x=f32[B,T,D]@0.5..1.5 B=3 T=37 D=5
def running_product(x):
    p = torch.ones_like(x[:, 0])
    out = torch.empty_like(x)
    for t in range(x.shape[1]):
        p = p * x[:, t]
        out[:, t] = p
    return out


# mtmc: x=f64[B,T,D] B=3 T=37 D=5
def chained(x):
    fast = torch.zeros_like(x[:, 0])
    slow = torch.zeros_like(x[:, 0])
    out = torch.empty_like(x)
    for t in range(x.shape[1]):
        slow = 0.95 * slow + 0.05 * fast
        fast = 0.7 * fast + 0.3 * x[:, t]
        out[:, t] = fast - slow
    return out, slow


# mtmc: x=f32[B,T,D] lengths=i64[B]@0..37 B=3 T=37 D=5
def lengths(x, lengths):
    h = x.new_zeros(x.shape[0], x.shape[2])
    outs = []
    for t, x_t in enumerate(x.unbind(1)):
        mask = (t < lengths).unsqueeze(-1)
        h = torch.where(mask, 0.9 * h + torch.relu(x_t), h)
        outs.append(h / (t + 1))
    return torch.stack(outs, dim=1), h


# mtmc: x=f32[B,T,D] B=3 T=37 D=5
def energy(x):
    e = torch.zeros_like(x[:, 0, 0])
    out = torch.empty_like(x)
    for t in range(x.shape[1]):
        e = 0.8 * e + 0.2 * (x[:, t] * x[:, t]).sum(-1)
        out[:, t] = x[:, t] / (1.0 + e[:, None])
    return out, e


# mtmc: x=f32[B,T] B=3 T=37
def differences(x):
    last = torch.zeros_like(x[:, 0])
    out = torch.empty_like(x)
    for t in reversed(range(x.shape[1])):
        out[:, t] = x[:, t] - last
        last = x[:, t] * 2
    return out, last


# mtmc: x=f32[T,B] T=37 B=6
def limited(x):
    s = torch.zeros_like(x[0])
    outs = []
    for x_t in x:
        s = torch.minimum(s + x_t, torch.ones_like(s))
        outs.append(s)
    return torch.stack(outs)


# mtmc: x=i64[B,T]@0..100 B=3 T=37
def largest_index(x):
    best = torch.zeros_like(x[:, 0])
    out = torch.empty_like(x)
    for t in range(x.shape[1]):
        best = torch.maximum(best, x[:, t])
        out[:, t] = best
    return out


# mtmc: prices=f32[N,T]@1..2 N=5 T=37
def strength(prices):
    gain = torch.zeros_like(prices[:, 0])
    loss = torch.zeros_like(prices[:, 0])
    out = torch.zeros_like(prices)
    for t in range(1, prices.size(1)):
        change = prices[:, t] - prices[:, t - 1]
        gain = (gain * 13 + change.clamp(min=0)) / 14
        loss = (loss * 13 - change.clamp(max=0)) / 14
        out[:, t] = 100 - 100 / (1 + gain / (loss + 1e-8))
    return out


# mtmc: x=f32[B,T] B=3 T=37
def all_positive(x):
    fine = torch.ones(x.shape[0], dtype=torch.bool, device=x.device)
    out = torch.zeros(x.shape, dtype=torch.bool, device=x.device)
    for t in range(x.shape[1]):
        fine = fine & (x[:, t] > -1.5)
        out[:, t] = fine
    return out


# mtmc: x=f32[T,B] d=f32[T,B] T=37 B=6
def forward_score(x, d):
    h = x[0]
    out = torch.empty_like(x)
    for t in range(x.shape[0]):
        h = torch.logaddexp(h + d[t], x[t])
        out[t] = h
    return out
"""
NAMES = (
    "running_sum one_series extremes cusum log_sum_exp resets biquad wkv running_product chained lengths energy differences "
    "limited largest_index strength all_positive forward_score"
).split()
