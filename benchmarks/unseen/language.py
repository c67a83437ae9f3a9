"""Pieces of our transformer code base (training and serving)."""

import math

import torch
import torch.nn as nn
import torch.nn.functional as F


# ------------------------------------------------------------------------------ norms


def _rms(x, eps):
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)


# mtmc: x=bf16[B,S,D] weight=bf16[D] B=4 S=4096 D=2304
def gemma_rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float = 1e-6) -> torch.Tensor:
    # Llama does x.to(float16) * w whilst Gemma is (x * w).to(float16)
    output = _rms(x.float(), eps)
    output = output * (1.0 + weight.float())
    return output.type_as(x)


def rotate_half(x):
    x1, x2 = x.chunk(2, dim=-1)
    return torch.cat((-x2, x1), dim=-1)


# mtmc: q=bf16[B,S,HQ,128] k=bf16[B,S,HK,128] q_weight=bf16[128] k_weight=bf16[128] position_ids=i64[B,S]@0..32767 B=2 S=4096 HQ=32 HK=8
def qk_norm_rope(q, k, q_weight, k_weight, position_ids, theta: float = 1000000.0, eps: float = 1e-6):
    """Qwen3 attention prologue: per-head RMSNorm on q and k, then rotary, output as [B, H, S, D]."""
    dim = q.shape[-1]
    q = (_rms(q.float(), eps).to(q.dtype) * q_weight).transpose(1, 2)
    k = (_rms(k.float(), eps).to(k.dtype) * k_weight).transpose(1, 2)
    inv_freq = 1.0 / (theta ** (torch.arange(0, dim, 2, dtype=torch.float32, device=q.device) / dim))
    freqs = position_ids[:, :, None].float() * inv_freq[None, None, :]
    emb = torch.cat((freqs, freqs), dim=-1)
    cos = emb.cos().to(q.dtype).unsqueeze(1)
    sin = emb.sin().to(q.dtype).unsqueeze(1)
    q_embed = (q * cos) + (rotate_half(q) * sin)
    k_embed = (k * cos) + (rotate_half(k) * sin)
    return q_embed, k_embed


# mtmc: x=f16[B,S,H,80] freqs=f32[S,16] B=4 S=2048 H=32
def partial_rope_interleaved(x, freqs):
    """GPT-NeoX/GLM style: only the first 32 of the head dims rotate, pairs are interleaved."""
    rot_dim = freqs.shape[-1] * 2
    x_rot, x_pass = x[..., :rot_dim], x[..., rot_dim:]
    xc = torch.view_as_complex(x_rot.float().reshape(*x_rot.shape[:-1], -1, 2))
    fc = torch.polar(torch.ones_like(freqs), freqs)
    out = torch.view_as_real(xc * fc[None, :, None, :]).flatten(-2)
    return torch.cat([out.type_as(x), x_pass], dim=-1)


# ------------------------------------------------------------------------------ attention


def get_alibi_slopes(n_heads, device):
    start = 2 ** (-(2 ** -(math.log2(n_heads) - 3)))
    return torch.tensor([start * start**i for i in range(n_heads)], device=device)


# mtmc: q=bf16[B,16,S,64] k=bf16[B,16,S,64] v=bf16[B,16,S,64] B=4 S=1024
def alibi_attention(q, k, v):
    b, h, s, d = q.shape
    scores = torch.matmul(q, k.transpose(-2, -1)) / math.sqrt(d)
    pos = torch.arange(s, device=q.device)
    rel = (pos[None, :] - pos[:, None]).float()
    bias = get_alibi_slopes(h, q.device)[:, None, None] * rel
    scores = scores.float() + bias
    scores = scores.masked_fill(rel > 0, float("-inf"))
    probs = torch.softmax(scores, dim=-1).to(v.dtype)
    return torch.matmul(probs, v)


# mtmc: q=bf16[B,HQ,S,D] k=bf16[B,HK,S,D] v=bf16[B,HK,S,D] B=1 HQ=16 HK=4 S=2048 D=128
def sliding_window_attention(q, k, v, window: int = 512, softcap: float = 50.0):
    """Gemma2 local layer: GQA, logit soft cap, window."""
    n_rep = q.shape[1] // k.shape[1]
    k = k.repeat_interleave(n_rep, dim=1)
    v = v.repeat_interleave(n_rep, dim=1)
    attn = q @ k.transpose(2, 3) * q.shape[-1] ** -0.5
    attn = torch.tanh(attn / softcap) * softcap
    i = torch.arange(q.shape[2], device=q.device)
    causal = i[:, None] >= i[None, :]
    local = i[:, None] - i[None, :] < window
    attn = attn.masked_fill(~(causal & local), torch.finfo(attn.dtype).min)
    attn = F.softmax(attn, dim=-1, dtype=torch.float32).to(q.dtype)
    return attn @ v


# mtmc: q=f16[B,32,128] k_new=f16[B,8,128] v_new=f16[B,8,128] k_cache=f16[B,8,T,128] v_cache=f16[B,8,T,128] seq_lens=i64[B]@1..T-1 B=32 T=2048
def decode_step(q, k_new, v_new, k_cache, v_cache, seq_lens):
    """One token of every sequence: write k/v into the cache, attend to what is there."""
    B, Hkv, T, D = k_cache.shape
    rows = torch.arange(B, device=q.device)
    k_cache[rows, :, seq_lens] = k_new
    v_cache[rows, :, seq_lens] = v_new
    qg = q.view(B, Hkv, -1, D)
    scores = torch.einsum("bhgd,bhtd->bhgt", qg, k_cache).float() * (D**-0.5)
    valid = torch.arange(T, device=q.device)[None, :] <= seq_lens[:, None]
    scores = scores.masked_fill(~valid[:, None, None, :], float("-inf"))
    p = scores.softmax(-1).to(q.dtype)
    out = torch.einsum("bhgt,bhtd->bhgd", p, v_cache)
    return out.reshape(B, -1)


# mtmc: q=f32[B,H,N,64] k=f32[B,H,N,64] v=f32[B,H,N,64] mask=bool[B,N] B=8 H=12 N=2000
def linear_attention(q, k, v, mask, eps: float = 1e-6):
    """elu(x) + 1 feature map, non causal."""
    q = F.elu(q) + 1
    k = F.elu(k) + 1
    k = k.masked_fill(~mask[:, None, :, None], 0.0)
    kv = torch.einsum("bhnd,bhnm->bhdm", k, v)
    z = 1 / (torch.einsum("bhnd,bhd->bhn", q, k.sum(dim=2)) + eps)
    return torch.einsum("bhnd,bhdm,bhn->bhnm", q, kv, z)


# ------------------------------------------------------------------------------ MLPs


# mtmc: x=bf16[T,2*I] I=5504 T=4096
def clamped_swiglu(x, alpha: float = 1.702, limit: float = 7.0):
    """gpt-oss activation: gate and up are interleaved, both clamped."""
    x_glu, x_linear = x[..., ::2], x[..., 1::2]
    x_glu = x_glu.clamp(min=None, max=limit)
    x_linear = x_linear.clamp(min=-limit, max=limit)
    out_glu = x_glu * torch.sigmoid(alpha * x_glu)
    return out_glu * (x_linear + 1)


# mtmc: x=f16[B,S,768] B=8 S=1024 init: dim=768 hidden=2048
class GEGLUFeedForward(nn.Module):
    def __init__(self, dim, hidden, dropout=0.0):
        super().__init__()
        self.wi = nn.Linear(dim, 2 * hidden, bias=False).half()
        self.wo = nn.Linear(hidden, dim, bias=False).half()
        self.norm_weight = nn.Parameter(torch.ones(dim, dtype=torch.float16))
        self.dropout = nn.Dropout(dropout)

    def forward(self, x):
        h = _rms(x.float(), 1e-5).type_as(x) * self.norm_weight
        gate, value = self.wi(h).chunk(2, dim=-1)
        h = F.gelu(gate, approximate="tanh") * value
        return x + self.wo(self.dropout(h))


# mtmc: x=f32[N,1024] residual=f32[N,1024] bias=f32[1024] weight=f32[1024] beta=f32[1024] N=16384
def bias_residual_layernorm_squared_relu(x, residual, bias, weight, beta, alpha: float = 1.0):
    # DeepNorm post-LN followed by the Primer activation
    h = residual * alpha + (x + bias)
    normed = F.layer_norm(h, (h.shape[-1],), weight, beta, eps=1e-5)
    return h, F.relu(normed).square()


# ------------------------------------------------------------------------------ MoE


# mtmc: logits=bf16[T,256] correction_bias=f32[256] T=65536
def deepseek_group_gate(logits, correction_bias, n_group: int = 8, topk_group: int = 4, scale: float = 2.5):
    """Sigmoid scores restricted to the best groups; the weights are dense (zeros where a group is not chosen)."""
    T, E = logits.shape
    scores = logits.float().sigmoid()
    choice = scores + correction_bias[None]
    group_scores = choice.view(T, n_group, E // n_group).amax(dim=-1)
    # k-th largest without a sort
    rank = (group_scores[:, None, :] > group_scores[:, :, None]).sum(-1)
    keep = (rank < topk_group).unsqueeze(-1).expand(T, n_group, E // n_group).reshape(T, E)
    weights = torch.where(keep, scores, torch.zeros_like(scores))
    weights = weights / (weights.sum(dim=-1, keepdim=True) + 1e-20)
    return weights * scale


# mtmc: router_logits=f32[T,E] expert_index=i64[T]@0..E-1 T=262144 E=64
def switch_aux_losses(router_logits, expert_index, z_coef: float = 1e-3, aux_coef: float = 1e-2):
    num_experts = router_logits.shape[-1]
    probs = F.softmax(router_logits, dim=-1)
    log_z = torch.logsumexp(router_logits, dim=-1)
    z_loss = torch.square(log_z).mean()
    expert_mask = F.one_hot(expert_index, num_experts)
    tokens_per_expert = expert_mask.float().mean(dim=0)
    router_prob = probs.mean(dim=0)
    aux = torch.sum(tokens_per_expert * router_prob) * num_experts
    return aux_coef * aux + z_coef * z_loss


# ------------------------------------------------------------------------------ state space / recurrent


# mtmc: u=f32[B,L,D] delta=f32[B,L,D] A=f32[D,N]@-2..-0.1 Bm=f32[B,L,N] Cm=f32[B,L,N] Dskip=f32[D] B=4 L=48 D=1024 N=16
def selective_scan_ref(u, delta, A, Bm, Cm, Dskip):
    """The reference loop of Mamba."""
    b, l, d = u.shape
    delta = F.softplus(delta)
    dA = torch.exp(torch.einsum("bld,dn->bldn", delta, A))
    dBu = torch.einsum("bld,bln,bld->bldn", delta, Bm, u)
    x = torch.zeros((b, d, A.shape[1]), device=u.device, dtype=u.dtype)
    ys = []
    for i in range(l):
        x = dA[:, i] * x + dBu[:, i]
        ys.append(torch.einsum("bdn,bn->bd", x, Cm[:, i]))
    y = torch.stack(ys, dim=1)
    return y + u * Dskip


# mtmc: y=bf16[B,L,2048] z=bf16[B,L,2048] weight=f32[2048] B=4 L=4096
def mamba2_gated_norm(y, z, weight, group_size: int = 256, eps: float = 1e-5):
    """RMSNormGated with norm_before_gate=False, grouped."""
    dtype = y.dtype
    h = y.float() * F.silu(z.float())
    b, l, d = h.shape
    h = h.view(b, l, d // group_size, group_size)
    h = _rms(h, eps).view(b, l, d)
    return (h * weight).to(dtype)


# mtmc: x=f32[B,S,D] lengths=i64[B]@1..S B=16 S=1000 D=512
def sinusoidal_positions_pool(x, lengths, scale: float = 1.0):
    """Scale the embeddings, add sinusoids, mean over the tokens that are no padding."""
    b, s, d = x.shape
    position = torch.arange(s, device=x.device, dtype=x.dtype).unsqueeze(1)
    div_term = torch.exp(torch.arange(0, d, 2, device=x.device, dtype=x.dtype) * (-math.log(10000.0) / d))
    pe = torch.zeros(s, d, device=x.device, dtype=x.dtype)
    pe[:, 0::2] = torch.sin(position * div_term)
    pe[:, 1::2] = torch.cos(position * div_term)
    h = x * math.sqrt(d) + scale * pe[None]
    mask = (torch.arange(s, device=x.device)[None, :] < lengths[:, None]).unsqueeze(-1).to(x.dtype)
    pooled = (h * mask).sum(dim=1) / mask.sum(dim=1).clamp(min=1.0)
    return F.normalize(pooled, dim=-1)


# mtmc: x=f32[N,512] h=f32[N,H] w_ih=f32[3*H,512] w_hh=f32[3*H,H] b_ih=f32[3*H] b_hh=f32[3*H] N=8192 H=640
def gru_cell(x, h, w_ih, w_hh, b_ih, b_hh):
    """Written out because we need the gates for the probes."""
    gi = F.linear(x, w_ih, b_ih)
    gh = F.linear(h, w_hh, b_hh)
    i_r, i_z, i_n = gi.chunk(3, 1)
    h_r, h_z, h_n = gh.chunk(3, 1)
    reset = torch.sigmoid(i_r + h_r)
    update = torch.sigmoid(i_z + h_z)
    new = torch.tanh(i_n + reset * h_n)
    h_next = new + update * (h - new)
    return h_next, update
