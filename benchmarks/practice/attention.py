"""Attention with the biases and masks of models in use."""

import torch
import torch.nn.functional as F


# mtmc: q=f16[B,8,49,32] k=f16[B,8,49,32] v=f16[B,8,49,32] table=f16[169,8] index=i64[49,49]@0..168 B=512
def relative_positions_of_windows(q, k, v, table, index):
    bias = table[index.view(-1)].view(49, 49, 8).permute(2, 0, 1).contiguous()
    return torch.softmax((q * 32**-0.5) @ k.mT + bias[None], -1) @ v


# mtmc: q=f16[B,12,T,64] k=f16[B,12,T,64] v=f16[B,12,T,64] table=f16[64,12] B=4 T=1024
def clamped_distances(q, k, v, table):
    i = torch.arange(q.shape[-2], device=q.device)
    distance = (i[None, :] - i[:, None]).clamp(-32, 31) + 32
    bias = F.embedding(distance, table).permute(2, 0, 1)[None]
    return F.scaled_dot_product_attention(q, k, v, attn_mask=bias)


# mtmc: q=bf16[B,16,T,128] k=bf16[B,16,T,128] v=bf16[B,16,T,128] slopes=f32[16]@0..1 B=2 T=2048
def alibi(q, k, v, slopes):
    i = torch.arange(q.shape[-2], device=q.device)
    bias = -(i[:, None] - i[None, :]).abs() * slopes[:, None, None]
    return torch.softmax((q @ k.mT * 128**-0.5 + bias).float(), -1).to(q.dtype) @ v


# mtmc: q=bf16[B,16,T,128] k=bf16[B,16,T,128] v=bf16[B,16,T,128] B=2 T=2048
def soft_cap_and_window(q, k, v):
    i = torch.arange(q.shape[-2], device=q.device)
    s = torch.tanh(q @ k.mT * 128**-0.5 / 50.0) * 50.0
    s = s.masked_fill((i[None, :] > i[:, None]) | (i[:, None] - i[None, :] >= 512), float("-inf"))
    return F.softmax(s, -1, dtype=torch.float32).to(q.dtype) @ v


# mtmc: q=f16[12,T,64] k=f16[12,T,64] v=f16[12,T,64] starts=i32[9]@0..4096 T=4096
def packed_sequences(q, k, v, starts):
    i = torch.arange(q.shape[-2], device=q.device)
    segment = (i[:, None] >= starts[None, 1:]).sum(-1)
    allowed = (segment[:, None] == segment[None, :]) & (i[:, None] >= i[None, :])
    return (q @ k.mT * 0.125).masked_fill(~allowed, float("-inf")).softmax(-1) @ v


# mtmc: q=bf16[B,32,1,128] k=bf16[B,8,T,128] v=bf16[B,8,T,128] lengths=i64[B]@1..16384 B=8 T=16384
def decoding_of_grouped_heads(q, k, v, lengths):
    k, v = k.repeat_interleave(4, dim=1), v.repeat_interleave(4, dim=1)
    mask = torch.arange(k.shape[2], device=q.device)[None, :] < lengths[:, None]
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask[:, None, None, :])


# mtmc: q=bf16[B,32,1,128] k=bf16[B,32,T,128] v=bf16[B,32,T,128] B=1 T=65536
def decoding_of_one_sequence(q, k, v):
    scores = q @ k.transpose(-1, -2) * 128**-0.5
    return torch.softmax(scores.float(), -1).to(q.dtype) @ v


# mtmc: q=bf16[B,32,1,128] k=bf16[4096,16,8,128] v=bf16[4096,16,8,128] table=i64[B,256]@0..4095 lengths=i64[B]@1..4096 B=16
def decoding_of_pages(q, k, v, table, lengths):
    k = k[table].reshape(q.shape[0], -1, 8, 128).transpose(1, 2).repeat_interleave(4, dim=1)
    v = v[table].reshape(q.shape[0], -1, 8, 128).transpose(1, 2).repeat_interleave(4, dim=1)
    mask = torch.arange(k.shape[2], device=q.device)[None, :] < lengths[:, None]
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask[:, None, None, :])
