"""Recurrent cells as people write them: loops with matrix products in their body."""

CELLS = """
import torch
import torch.nn as nn
import torch.nn.functional as F


# mtmc: x=f32[B,T,X] W=f32[X,H]@-0.5..0.5 U=f32[H,H]@-0.5..0.5 b=f32[H] B=3 T=20 X=5 H=7
def elman(x, W, U, b):
    h = torch.zeros(x.shape[0], U.shape[0], device=x.device)
    out = torch.empty(x.shape[0], x.shape[1], U.shape[0], device=x.device)
    for t in range(x.shape[1]):
        h = torch.tanh(x[:, t] @ W + h @ U + b)
        out[:, t] = h
    return out


# mtmc: x=f32[B,T,X] h=f32[B,H] W=f32[X,G]@-0.5..0.5 U=f32[H,G]@-0.5..0.5 b=f32[G] B=3 T=20 X=5 H=7 G=21
def gru(x, h, W, U, b):
    out = torch.empty(x.shape[0], x.shape[1], h.shape[1], device=x.device)
    for t in range(x.shape[1]):
        i_r, i_z, i_n = (x[:, t] @ W + b).chunk(3, dim=1)
        h_r, h_z, h_n = (h @ U).chunk(3, dim=1)
        r = torch.sigmoid(i_r + h_r)
        z = torch.sigmoid(i_z + h_z)
        n = torch.tanh(i_n + r * h_n)
        h = (1 - z) * n + z * h
        out[:, t] = h
    return out, h


class Vanilla(nn.Module):
    def __init__(self, width, hidden, out):
        super().__init__()
        self.i2h = nn.Linear(width + hidden, hidden)
        self.h2o = nn.Linear(hidden, out)

    # mtmc: x=f32[T,B,X] h=f32[B,H] T=20 B=3 X=5 H=7 init: width=5 hidden=7 out=4
    def forward(self, x, h):
        outs = []
        for t in range(x.size(0)):
            h = torch.tanh(self.i2h(torch.cat((x[t], h), dim=1)))
            outs.append(self.h2o(h))
        return torch.stack(outs, dim=0)


class LSTM(nn.Module):
    def __init__(self, width, hidden):
        super().__init__()
        self.forget = nn.Linear(width + hidden, hidden)
        self.input = nn.Linear(width + hidden, hidden)
        self.candidate = nn.Linear(width + hidden, hidden)
        self.output = nn.Linear(width + hidden, hidden)
        self.hidden = hidden

    def step(self, x, state):
        h, c = state
        z = torch.cat([x, h], -1)
        c = torch.sigmoid(self.forget(z)) * c + torch.sigmoid(self.input(z)) * torch.tanh(self.candidate(z))
        return torch.sigmoid(self.output(z)) * torch.tanh(c), c

    # mtmc: x=f32[B,T,X] B=3 T=20 X=5 init: width=5 hidden=7
    def forward(self, x):
        h = c = x.new_zeros(x.shape[0], self.hidden)
        outs = []
        for t in range(x.shape[1]):
            h, c = self.step(x[:, t], (h, c))
            outs.append(h.unsqueeze(1))
        return torch.cat(outs, dim=1), (h, c)


class GRUCell(nn.Module):
    def __init__(self, width, hidden):
        super().__init__()
        self.cell = nn.GRUCell(width, hidden)

    # mtmc: x=f32[T,B,X] h=f32[B,H] T=20 B=3 X=5 H=7 init: width=5 hidden=7
    def forward(self, x, h):
        outs = []
        for x_t in x:
            h = self.cell(x_t, h)
            outs.append(h)
        return torch.stack(outs)


class LSTMCell(nn.Module):
    def __init__(self, width, hidden):
        super().__init__()
        self.cell = nn.LSTMCell(width, hidden)
        self.hidden = hidden

    # mtmc: x=f32[B,T,X] B=3 T=20 X=5 init: width=5 hidden=7
    def forward(self, x):
        h, c = x.new_zeros(x.shape[0], self.hidden), x.new_zeros(x.shape[0], self.hidden)
        outs = []
        for t in range(x.shape[1] - 1, -1, -1):
            h, c = self.cell(x[:, t], (h, c))
            outs.append(h)
        return torch.stack(outs, 1), c


class Stacked(nn.Module):
    def __init__(self, width, hidden):
        super().__init__()
        self.first, self.second = nn.RNNCell(width, hidden), nn.RNNCell(hidden, 9, nonlinearity="relu")

    # mtmc: x=f32[B,T,X] h=f32[B,H] g=f32[B,G] B=3 T=20 X=5 H=7 G=9 init: width=5 hidden=7
    def forward(self, x, h, g):
        outs = []
        for t in range(x.shape[1]):
            h = self.first(x[:, t], h)
            g = self.second(h, g)
            outs.append(g)
        return torch.stack(outs, 1)


class Masked(nn.Module):
    def __init__(self, hidden):
        super().__init__()
        self.recurrent = nn.Linear(hidden, hidden, bias=False)
        self.norm = nn.LayerNorm(hidden)

    # mtmc: x=f32[B,T,H] lengths=i64[B]@0..20 B=3 T=20 H=7 init: hidden=7
    def forward(self, x, lengths):
        h = torch.zeros_like(x[:, 0])
        for t in range(x.shape[1]):
            new = torch.tanh(self.norm(x[:, t] + self.recurrent(h)))
            h = torch.where((t < lengths)[:, None], new, h)
        return h


# mtmc: x=f32[B,N,T,D] h=f32[B,N,D] U=f32[D,D]@-0.4..0.4 B=2 N=3 T=20 D=6
def heads(x, h, U):
    out = torch.zeros_like(x)
    for t in range(x.shape[2]):
        h = 0.5 * h + torch.tanh(F.linear(h, U)) * x[:, :, t]
        out[:, :, t] = h
    return out, h


# mtmc: x=f32[B,T,X] V=f32[H,X]@-0.5..0.5 U=f32[X,H]@-0.5..0.5 B=3 T=20 X=5 H=7
def bottleneck(x, V, U):
    h = torch.zeros(x.shape[0], U.shape[1], device=x.device)
    outs = []
    for t in range(x.shape[1]):
        y = h @ V + torch.relu(x[:, t])
        h = torch.sin(y @ U)
        outs.append(y)
    return torch.stack(outs, 1)


# mtmc: x=f32[B,T,H] A=f32[H,H]@-0.4..0.4 B=3 T=20 H=7
def einsums(x, A):
    h = torch.zeros_like(x[:, 0])
    out = torch.empty_like(x)
    for t in range(x.shape[1]):
        h = torch.einsum("bi,ij->bj", h, A) + x[:, t]
        out[:, t] = h
    return out


# mtmc: x=f32[B,T,N,D] R=f32[N,D,D]@-0.4..0.4 b=f32[N,D] B=2 N=3 T=20 D=6
def block_diagonal(x, R, b):
    h = torch.zeros_like(x[:, 0])
    out = torch.empty_like(x)
    for t in range(x.shape[1]):
        h = torch.tanh(x[:, t] + torch.einsum("bnd,nde->bne", h, R) + b)
        out[:, t] = h
    return out


# mtmc: x=f16[B,T,H] A=f16[H,H]@-0.2..0.2 B=3 T=20 H=7
def half(x, A):
    h = torch.zeros_like(x[:, 0])
    out = torch.empty_like(x)
    for t in range(x.shape[1]):
        h = torch.tanh(h @ A + x[:, t])
        out[:, t] = h
    return out


# mtmc: x=f64[B,T,H] A=f64[H,H]@-0.4..0.4 B=3 T=20 H=7
def double(x, A):
    h = x.new_zeros(x.shape[0], x.shape[2])
    for t in range(x.shape[1]):
        h = torch.tanh(torch.mm(h, A) + x[:, t])
    return h


# mtmc: q=f32[B,T,K] k=f32[B,T,K] v=f32[B,T,V] g=f32[B,T]@0..1 B=2 T=20 K=5 V=6
def linear_attention(q, k, v, g):
    S = torch.zeros(q.shape[0], q.shape[2], v.shape[2], device=q.device)
    outs = []
    for t in range(q.shape[1]):
        S = S * g[:, t, None, None] + torch.bmm(k[:, t].unsqueeze(2), v[:, t].unsqueeze(1))
        outs.append(torch.bmm(q[:, t].unsqueeze(1), S).squeeze(1))
    return torch.stack(outs, 1)


# mtmc: q=f32[B,N,T,K]@-0.5..0.5 k=f32[B,N,T,K]@-0.5..0.5 v=f32[B,N,T,V] beta=f32[B,N,T]@0..1 g=f32[B,N,T]@-1..0 B=2 N=2 T=20 K=5 V=6
def gated_delta(q, k, v, beta, g):
    S = torch.zeros(q.shape[0], q.shape[1], q.shape[3], v.shape[3], device=q.device)
    out = torch.zeros_like(v)
    for t in range(q.shape[2]):
        S = S * g[:, :, t].exp()[..., None, None]
        error = (v[:, :, t] - torch.einsum("bhk,bhkv->bhv", k[:, :, t], S)) * beta[:, :, t][..., None]
        S = S + torch.einsum("bhk,bhv->bhkv", k[:, :, t], error)
        out[:, :, t] = torch.einsum("bhk,bhkv->bhv", q[:, :, t], S)
    return out, S
"""
NAMES = (
    "elman gru Vanilla LSTM GRUCell LSTMCell Stacked Masked heads bottleneck einsums block_diagonal half double linear_attention gated_delta"
).split()
