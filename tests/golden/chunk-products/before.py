import torch


# mtmc: q=f32[B,H,T,64] k=f32[B,H,T,64] v=f32[B,H,T,64] decay=f32[B,H,T]@0..1 B=4 H=16 T=4096
def gated_attention(q, k, v, decay):
    state = q.new_zeros(q.shape[0], q.shape[1], 64, 64)
    out = torch.empty_like(v)
    for t in range(q.shape[2]):
        state = decay[:, :, t, None, None] * state + k[:, :, t, :, None] * v[:, :, t, None, :]
        out[:, :, t] = (q[:, :, t, :, None] * state).sum(2)
    return out
