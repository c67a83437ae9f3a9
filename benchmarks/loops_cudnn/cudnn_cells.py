"""Recurrent layers as people write them out, with the weights of ``nn.LSTM`` and ``nn.GRU``."""

from __future__ import annotations

import torch
import torch.nn.functional as F


def lstm(x, w_ih, w_hh, b_ih, b_hh):
    h = x.new_zeros(x.shape[1], w_hh.shape[1])
    c = torch.zeros_like(h)
    outs = []
    for t in range(x.shape[0]):
        gates = F.linear(x[t], w_ih, b_ih) + F.linear(h, w_hh, b_hh)
        i, f, g, o = gates.chunk(4, dim=1)
        c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
        h = torch.sigmoid(o) * torch.tanh(c)
        outs.append(h)
    return torch.stack(outs), (h, c)


def gru(x, w_ih, w_hh, b_ih, b_hh):
    h = x.new_zeros(x.shape[1], w_hh.shape[1])
    outs = []
    for t in range(x.shape[0]):
        i_r, i_z, i_n = F.linear(x[t], w_ih, b_ih).chunk(3, dim=1)
        h_r, h_z, h_n = F.linear(h, w_hh, b_hh).chunk(3, dim=1)
        z = torch.sigmoid(i_z + h_z)
        n = torch.tanh(i_n + torch.sigmoid(i_r + h_r) * h_n)
        h = (1 - z) * n + z * h
        outs.append(h)
    return torch.stack(outs), h


# mtmc: x=f32[T,B,X] w_ih=f32[4*H,X]@-0.09..0.09 w_hh=f32[4*H,H]@-0.09..0.09 b_ih=f32[4*H]@-0.09..0.09 b_hh=f32[4*H]@-0.09..0.09
# mtmc: T=512 B=64 X=128 H=128
def lstm_128(x, w_ih, w_hh, b_ih, b_hh):
    return lstm(x, w_ih, w_hh, b_ih, b_hh)


# mtmc: x=f32[T,B,X] w_ih=f32[4*H,X]@-0.06..0.06 w_hh=f32[4*H,H]@-0.06..0.06 b_ih=f32[4*H]@-0.06..0.06 b_hh=f32[4*H]@-0.06..0.06
# mtmc: T=512 B=64 X=256 H=256
def lstm_256(x, w_ih, w_hh, b_ih, b_hh):
    return lstm(x, w_ih, w_hh, b_ih, b_hh)


# mtmc: x=f32[T,B,X] w_ih=f32[4*H,X]@-0.04..0.04 w_hh=f32[4*H,H]@-0.04..0.04 b_ih=f32[4*H]@-0.04..0.04 b_hh=f32[4*H]@-0.04..0.04
# mtmc: T=512 B=64 X=512 H=512
def lstm_512(x, w_ih, w_hh, b_ih, b_hh):
    return lstm(x, w_ih, w_hh, b_ih, b_hh)


# mtmc: x=f32[T,B,X] w_ih=f32[3*H,X]@-0.09..0.09 w_hh=f32[3*H,H]@-0.09..0.09 b_ih=f32[3*H]@-0.09..0.09 b_hh=f32[3*H]@-0.09..0.09
# mtmc: T=512 B=64 X=128 H=128
def gru_128(x, w_ih, w_hh, b_ih, b_hh):
    return gru(x, w_ih, w_hh, b_ih, b_hh)


# mtmc: x=f32[T,B,X] w_ih=f32[3*H,X]@-0.06..0.06 w_hh=f32[3*H,H]@-0.06..0.06 b_ih=f32[3*H]@-0.06..0.06 b_hh=f32[3*H]@-0.06..0.06
# mtmc: T=512 B=64 X=256 H=256
def gru_256(x, w_ih, w_hh, b_ih, b_hh):
    return gru(x, w_ih, w_hh, b_ih, b_hh)


# mtmc: x=f32[T,B,X] w_ih=f32[3*H,X]@-0.04..0.04 w_hh=f32[3*H,H]@-0.04..0.04 b_ih=f32[3*H]@-0.04..0.04 b_hh=f32[3*H]@-0.04..0.04
# mtmc: T=512 B=64 X=512 H=512
def gru_512(x, w_ih, w_hh, b_ih, b_hh):
    return gru(x, w_ih, w_hh, b_ih, b_hh)
