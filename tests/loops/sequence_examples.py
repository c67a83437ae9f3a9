"""Loops whose bodies read tables, keep states in containers, or compute with the number of the iteration."""

SEQUENCES = """
import math

import torch
import torch.nn.functional as F


# mtmc: x=f32[B,T,D] B=3 T=20 D=5
def running_mean(x):
    mean = torch.zeros_like(x[:, 0])
    outs = []
    for t in range(x.shape[1]):
        mean = mean + (x[:, t] - mean) / float(t + 1)
        outs.append(mean)
    return torch.stack(outs, 1)


# mtmc: x=f32[B,T,D] decay=f32[D]@0..1 B=3 T=20 D=5
def positional_decay(x, decay):
    acc = torch.zeros_like(x[:, 0])
    outs = []
    for t in range(x.shape[1]):
        acc = acc + x[:, t] * torch.exp(-decay * t) + math.sqrt(1.0) * torch.sin(torch.tensor(0.1) * t)
        outs.append(acc)
    return torch.stack(outs, 1)


# mtmc: tokens=i64[B,T]@0..49 table=f32[V,D] w=f32[D,D] B=3 T=20 V=50 D=6
def embedding_rnn(tokens, table, w):
    h = torch.zeros(tokens.shape[0], table.shape[1], device=table.device)
    outs = []
    for t in range(tokens.shape[1]):
        e = F.embedding(tokens[:, t], table)
        h = torch.tanh(e + h @ w)
        outs.append(h)
    return torch.stack(outs, 1)


# mtmc: tokens=i64[B,T]@0..49 table=f32[S,V] B=3 T=20 V=50 S=6
def table_reads(tokens, table):
    h = torch.zeros(table.shape[0], tokens.shape[0], device=table.device)
    outs = []
    for t in range(tokens.shape[1]):
        h = 0.9 * h + table[:, tokens[:, t]]
        outs.append(h)
    return torch.stack(outs)


# mtmc: emissions=f32[B,T,N] trans=f32[N,N] tags=i64[B,T]@0..6 mask=f32[B,T]@0..1 B=4 T=20 N=7
def crf_score(emissions, trans, tags, mask):
    B, T, N = emissions.shape
    idx = torch.arange(B, device=emissions.device)
    score = emissions[idx, 0, tags[:, 0]]
    for t in range(1, T):
        score = score + (trans[tags[:, t - 1], tags[:, t]] + emissions[idx, t, tags[:, t]]) * mask[:, t]
    return score


# mtmc: x=f32[B,T,D] a=f32[B,T,D]@0..1 B=3 T=20 D=5
def list_states(x, a):
    states = [torch.zeros_like(x[:, 0]) for _ in range(3)]
    outs = []
    for t in range(x.shape[1]):
        inp = x[:, t]
        for l in range(3):
            states[l] = a[:, t] * states[l] + inp
            inp = torch.tanh(states[l])
        outs.append(inp)
    return torch.stack(outs, 1), torch.stack(states)


# mtmc: x=f32[B,T,D] a=f32[B,T,D]@0..1 B=3 T=20 D=5
def dict_only(x, a):
    state = {"h": torch.zeros_like(x[:, 0]), "m": torch.full_like(x[:, 0], -1e9)}
    outs = []
    for t in range(x.shape[1]):
        state["h"] = a[:, t] * state["h"] + x[:, t]
        state["m"] = torch.maximum(state["m"], x[:, t])
        outs.append(state["h"] - state["m"])
    return torch.stack(outs, 1), state["m"]



# mtmc: x=f32[B,T,K] w=f32[T,K,D] B=3 T=20 K=4 D=6
def a_matrix_for_each_step(x, w):
    h = torch.zeros(x.shape[0], w.shape[2], device=x.device)
    outs = []
    for t in range(x.shape[1]):
        h = 0.9 * h + x[:, t] @ w[t]
        outs.append(h)
    return torch.stack(outs, 1)


# mtmc: x=f32[B,T] B=4 T=20
def warmed_up(x, rate: float = 0.1):
    h = torch.zeros_like(x[:, 0])
    for t in range(x.shape[1]):
        h = h + min(1.0, (t + 1) / 8) * rate * x[:, t] - math.exp(-t) * (t % 3) + torch.tensor(t) * 0.25
    return h
"""

NAMES = [line[4:].partition("(")[0] for line in SEQUENCES.splitlines() if line.startswith("def ")]
