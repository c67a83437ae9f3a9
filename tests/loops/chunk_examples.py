"""Loops whose state is a sum of outer products: linear attention with and without decays, and delta rules."""

CHUNKS = """
import torch
import torch.nn.functional as F


# mtmc: q=f32[B,T,K] k=f32[B,T,K] v=f32[B,T,V] B=2 T=37 K=5 V=6
def plain(q, k, v):
    S = torch.zeros(q.shape[0], q.shape[2], v.shape[2], device=q.device)
    outs = []
    for t in range(q.shape[1]):
        S = S + torch.bmm(k[:, t].unsqueeze(2), v[:, t].unsqueeze(1))
        outs.append(torch.bmm(q[:, t].unsqueeze(1), S).squeeze(1))
    return torch.stack(outs, 1), S


# mtmc: q=f32[B,H,T,K] k=f32[B,H,T,K] v=f32[B,H,T,V] B=2 H=3 T=37 K=5 V=6
def retention(q, k, v):
    gamma = 1 - 2.0 ** (-5 - torch.arange(q.shape[1], device=q.device, dtype=q.dtype))
    S = q.new_zeros(q.shape[0], q.shape[1], q.shape[3], v.shape[3])
    out = torch.empty_like(v)
    for n in range(q.shape[2]):
        S = gamma[None, :, None, None] * S + k[:, :, n, :, None] * v[:, :, n, None, :]
        out[:, :, n] = (q[:, :, n, :, None] * S).sum(2)
    return out


# mtmc: q=f32[B,T,K] k=f32[B,T,K] v=f32[B,T,V] g=f32[B,T]@0..1 B=2 T=37 K=5 V=6
def gated(q, k, v, g):
    S = torch.zeros(q.shape[0], q.shape[2], v.shape[2], device=q.device)
    outs = []
    for t in range(q.shape[1]):
        S = S * g[:, t, None, None] + torch.bmm(k[:, t].unsqueeze(2), v[:, t].unsqueeze(1))
        outs.append(torch.bmm(q[:, t].unsqueeze(1), S).squeeze(1))
    return torch.stack(outs, 1)


# mtmc: q=f32[B,H,T,K] k=f32[B,H,T,K] v=f32[B,H,T,V] g=f32[B,H,T,K] B=1 H=2 T=37 K=5 V=6
def gla(q, k, v, g):
    g = F.logsigmoid(g) / 4
    S = q.new_zeros(q.shape[0], q.shape[1], q.shape[3], v.shape[3])
    o = torch.empty_like(v)
    for t in range(q.shape[2]):
        S = S * g[:, :, t].exp()[..., None] + k[:, :, t, :, None] * v[:, :, t, None, :]
        o[:, :, t] = (q[:, :, t, :, None] * q.shape[3] ** -0.5 * S).sum(-2)
    return o, S


# mtmc: x=f32[B,L,H,P] dt=f32[B,L,H] A=f32[H]@0..2 Bm=f32[B,L,N] Cm=f32[B,L,N] D=f32[H] B=2 L=37 H=3 P=6 N=5
def ssd(x, dt, A, Bm, Cm, D):
    dt = F.softplus(dt)
    state = x.new_zeros(x.shape[0], x.shape[2], x.shape[3], Bm.shape[2])
    ys = []
    for i in range(x.shape[1]):
        dA = torch.exp(-dt[:, i] * torch.exp(A))
        dBx = torch.einsum("bh,bn,bhp->bhpn", dt[:, i], Bm[:, i], x[:, i])
        state = state * dA[..., None, None] + dBx
        ys.append(torch.einsum("bhpn,bn->bhp", state, Cm[:, i]) + D[:, None] * x[:, i])
    return torch.stack(ys, 1)


# mtmc: r=f32[B,T,H,N] k=f32[B,T,H,N] v=f32[B,T,H,N] w=f32[B,T,H,N]@-4..0 u=f32[H,N] B=2 T=37 H=2 N=5
def rwkv6(r, k, v, w, u):
    state = torch.zeros(r.shape[0], r.shape[2], r.shape[3], r.shape[3], device=r.device)
    out = torch.zeros_like(v)
    for t in range(r.shape[1]):
        kv = k[:, t].unsqueeze(-1) * v[:, t].unsqueeze(-2)
        out[:, t] = (r[:, t].unsqueeze(-1) * (state + u.unsqueeze(-1) * kv)).sum(-2)
        state = torch.exp(-torch.exp(w[:, t])).unsqueeze(-1) * state + kv
    return out, state


# mtmc: q=f32[B,T,K] k=f32[B,T,K] v=f32[B,T,V] B=2 T=37 K=5 V=6
def normalised(q, k, v):
    q, k = F.elu(q) + 1, F.elu(k) + 1
    S = torch.zeros(q.shape[0], q.shape[2], v.shape[2], device=q.device)
    z = torch.zeros(q.shape[0], q.shape[2], device=q.device)
    out = torch.empty_like(v)
    for t in range(q.shape[1]):
        S = S + k[:, t, :, None] * v[:, t, None, :]
        z = z + k[:, t]
        out[:, t] = (q[:, t, :, None] * S).sum(1) / ((q[:, t] * z).sum(1, keepdim=True) + 1e-6)
    return out


# mtmc: q=f16[B,T,K] k=f16[B,T,K] v=f16[B,T,V] S=f32[B,K,V] lengths=i64[B]@1..37 B=2 T=37 K=5 V=6
def half_until(q, k, v, S, lengths):
    outs = []
    for t in range(q.shape[1]):
        live = (t < lengths).float()[:, None, None]
        S = torch.where(live > 0, 0.9 * S + k[:, t].float().unsqueeze(2) * v[:, t].float().unsqueeze(1), S)
        outs.append((S * q[:, t].float().unsqueeze(2)).sum(1).to(q.dtype))
    return torch.stack(outs, 1), S


# mtmc: q=f32[B,T,K] k=f32[B,T,K]@-0.5..0.5 v=f32[B,T,V] beta=f32[B,T]@0..1 B=2 T=37 K=5 V=6
def delta(q, k, v, beta):
    S = torch.zeros(q.shape[0], q.shape[2], v.shape[2], device=q.device)
    out = torch.empty_like(v)
    for t in range(q.shape[1]):
        error = (v[:, t] - (k[:, t, :, None] * S).sum(1)) * beta[:, t, None]
        S = S + k[:, t, :, None] * error[:, None, :]
        out[:, t] = (q[:, t, :, None] * S).sum(1)
    return out


# mtmc: q=f32[B,N,T,K]@-0.5..0.5 k=f32[B,N,T,K]@-0.5..0.5 v=f32[B,N,T,V] beta=f32[B,N,T]@0..1 g=f32[B,N,T]@-1..0 B=2 N=2 T=37 K=5 V=6
def gated_delta(q, k, v, beta, g):
    S = torch.zeros(q.shape[0], q.shape[1], q.shape[3], v.shape[3], device=q.device)
    out = torch.zeros_like(v)
    for t in range(q.shape[2]):
        S = S * g[:, :, t].exp()[..., None, None]
        error = (v[:, :, t] - torch.einsum("bhk,bhkv->bhv", k[:, :, t], S)) * beta[:, :, t][..., None]
        S = S + torch.einsum("bhk,bhv->bhkv", k[:, :, t], error)
        out[:, :, t] = torch.einsum("bhk,bhkv->bhv", q[:, :, t], S)
    return out, S


# mtmc: q=f32[B,T,K] k=f32[B,T,K] v=f32[B,T,V] g=f32[B,T,V]@0..1 B=2 T=37 K=5 V=6
def gate_of_values(q, k, v, g):
    S = torch.zeros(q.shape[0], q.shape[2], v.shape[2], device=q.device)
    out = torch.empty_like(v)
    for t in range(q.shape[1]):
        S = g[:, t, None, :] * S + k[:, t, :, None] * v[:, t, None, :]
        out[:, t] = (q[:, t, :, None] * S).sum(1)
    return out


# mtmc: q=f32[B,T,K] k=f32[B,T,K] v=f32[B,T,V] B=2 T=37 K=5 V=6
def fast_weights(q, k, v):
    S = torch.zeros(q.shape[0], q.shape[2], v.shape[2], device=q.device)
    out = torch.empty_like(v)
    for t in range(q.shape[1]):
        S = torch.tanh(S + k[:, t, :, None] * v[:, t, None, :])
        out[:, t] = (q[:, t, :, None] * S).sum(1)
    return out


# mtmc: q=f32[B,T,K] k=f32[B,T,K] v=f32[B,T,V] B=2 T=37 K=5 V=6
def sum_in_update(q, k, v):
    S = torch.zeros(q.shape[0], q.shape[2], v.shape[2], device=q.device)
    out = torch.empty_like(v)
    for t in range(q.shape[1]):
        S = 0.9 * S + k[:, t, :, None] + v[:, t, None, :]
        out[:, t] = (q[:, t, :, None] * S).sum(1)
    return out


# mtmc: q=f32[B,T,K] k=f32[B,T,K] v=f32[B,T,V] B=2 T=37 K=5 V=6
def bounded_correction(q, k, v):
    S = torch.zeros(q.shape[0], q.shape[2], v.shape[2], device=q.device)
    out = torch.empty_like(v)
    for t in range(q.shape[1]):
        error = torch.tanh(v[:, t] - (k[:, t, :, None] * S).sum(1))
        S = S + k[:, t, :, None] * error[:, None, :]
        out[:, t] = (q[:, t, :, None] * S).sum(1)
    return out
"""
NAMES = "plain retention gated gla ssd rwkv6 normalised half_until".split()
DELTA_RULES = ["delta", "gated_delta"]
REFUSED = {
    "gate_of_values": "the gate varies along the values",
    "fast_weights": "the update of S is not affine in it",
    "sum_in_update": "the update adds no outer product to the state",
    "bounded_correction": "the update is not linear in what it reads of the state",
}
"""Loops of other forms, with the reason."""
