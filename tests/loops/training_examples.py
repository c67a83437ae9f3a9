"""Loops over time steps that are trained, as people write them."""

TRAINED = """
import torch
import torch.nn.functional as F


# mtmc: a=f32[B,T,D]@0..1 b=f32[B,T,D] h0=f32[B,D] B=3 T=20 D=5 grad=a,b,h0
def recurrence(a, b, h0):
    h = h0
    outs = []
    for t in range(a.shape[1]):
        h = a[:, t] * h + b[:, t]
        outs.append(h)
    return torch.stack(outs, 1)


# mtmc: x=f32[B,T,D] decay=f32[D] B=3 T=20 D=5 grad=x,decay
def leaky(x, decay):
    out = torch.empty_like(x)
    h = torch.zeros_like(x[:, 0])
    for t in range(x.shape[1]):
        h = torch.sigmoid(decay) * h + torch.tanh(x[:, t] + h)
        out[:, t] = h
    return out


# mtmc: x=f32[B,T,D] h0=f32[B,D] w=f32[D,D] u=f32[D,D]@-0.4..0.4 b=f32[D] B=3 T=20 D=5 grad=x,h0,w,u,b
def elman(x, h0, w, u, b):
    h = h0
    outs = []
    for t in range(x.shape[1]):
        h = torch.tanh(x[:, t] @ w + h @ u + b)
        outs.append(h)
    return torch.stack(outs, 1), h


# mtmc: u=f32[B,L,D] delta=f32[B,L,D]@0..1 A=f32[D,N]@-2..0 Bm=f32[B,L,N] C=f32[B,L,N] B=2 L=20 D=6 N=4 grad=u,delta,A,Bm,C
def ssm(u, delta, A, Bm, C):
    dA = torch.exp(delta.unsqueeze(-1) * A)
    dBu = delta.unsqueeze(-1) * Bm.unsqueeze(2) * u.unsqueeze(-1)
    x = torch.zeros(u.shape[0], u.shape[2], A.shape[1], device=u.device)
    ys = []
    for i in range(u.shape[1]):
        x = dA[:, i] * x + dBu[:, i]
        ys.append((x * C[:, i].unsqueeze(1)).sum(-1))
    return torch.stack(ys, 1)


# mtmc: tokens=i64[B,T]@0..9 table=f32[V,D] a=f32[D] B=3 T=20 D=5 V=10 grad=table,a
def embedded(tokens, table, a):
    h = torch.zeros(tokens.shape[0], table.shape[1], device=table.device)
    for t in range(tokens.shape[1]):
        h = a * h + F.embedding(tokens[:, t], table)
    return h


# mtmc: x=f32[B,T,D] lengths=i64[B]@0..20 w=f32[D] B=3 T=20 D=5 grad=x,w
def masked(x, lengths, w):
    h = x[:, 0] * w
    out = torch.zeros_like(x)
    for t in range(1, x.shape[1]):
        mask = (t < lengths).unsqueeze(-1)
        h = torch.where(mask, torch.sigmoid(w) * h + x[:, t] * x[:, t - 1], h)
        out[:, t] = h / (t + 1)
    return out, h


# mtmc: rewards=f32[T,N] values=f32[T,N] T=20 N=6 grad=values
def advantages(rewards, values, gamma: float = 0.99):
    out = torch.zeros_like(rewards)
    last = 0
    for t in reversed(range(rewards.shape[0])):
        following = values[t + 1] if t < rewards.shape[0] - 1 else 0.0
        delta = rewards[t] + gamma * following - values[t]
        out[t] = last = delta + gamma * 0.9 * last
    return out


# mtmc: q=f32[B,T,K] k=f32[B,T,K] v=f32[B,T,K] beta=f32[B,T]@0..1 B=2 T=20 K=8 grad=q,k,v,beta
def delta_rule(q, k, v, beta):
    k = F.normalize(k, dim=-1)
    S = torch.zeros(q.shape[0], q.shape[2], v.shape[2], device=q.device)
    outs = []
    for t in range(q.shape[1]):
        old = torch.einsum("bk,bkv->bv", k[:, t], S)
        S = S + torch.einsum("bk,bv->bkv", k[:, t], beta[:, t, None] * (v[:, t] - old))
        outs.append(torch.einsum("bk,bkv->bv", q[:, t], S))
    return torch.stack(outs, 1)


# mtmc: x=f32[B,T,D] a=f32[D] b=f32[D] B=3 T=20 D=5 grad=x,a,b
def two_layers(x, a, b):
    h = torch.zeros_like(x[:, 0])
    first = []
    for t in range(x.shape[1]):
        h = torch.sigmoid(a) * h + x[:, t]
        first.append(h)
    y = torch.stack(first, 1)
    g = torch.zeros_like(h)
    out = torch.empty_like(x)
    for t in range(x.shape[1] - 1, -1, -1):
        g = torch.tanh(b * g + y[:, t])
        out[:, t] = g
    return out


# mtmc: x=bf16[B,T,D] a=bf16[B,T,D]@0..1 B=3 T=20 D=5 grad=x,a
def half(x, a):
    h = torch.zeros(x.shape[0], x.shape[2], device=x.device)
    outs = []
    for t in range(x.shape[1]):
        h = a[:, t].float() * h + x[:, t].float()
        outs.append(h.to(x.dtype))
    return torch.stack(outs, 1)


# mtmc: x=f32[B,T,D] h0=f32[B,D] B=3 T=20 D=5 grad=x,h0
def in_place(x, h0):
    h = h0.clone()
    out = []
    for t in range(x.shape[1]):
        h *= 0.9
        h += x[:, t]
        out.append(h + 1)
    return torch.stack(out, 1)


# mtmc: x=f32[B,T,D] w=f32[D,D] B=3 T=20 D=5 grad=x,w
def detached(x, w):
    h = torch.zeros_like(x[:, 0])
    loss = x.new_zeros(())
    for t in range(x.shape[1]):
        h = torch.tanh(x[:, t] + h.detach() @ w)
        loss = loss + (h * h).mean()
    return loss
"""

NAMES = [line[4:].partition("(")[0] for line in TRAINED.splitlines() if line.startswith("def ")]
