"""Losses, optimiser steps and other things that a training loop calls."""

import torch
import torch.nn as nn
import torch.nn.functional as F


# ----------------------------------------------------------------------------
# losses
# ----------------------------------------------------------------------------


# mtmc: logits=bf16[N,V] labels=i64[N]@0..V-1 loss_mask=bool[N] N=2048 V=50257
def lm_loss_smooth_z(logits, labels, loss_mask, smoothing: float = 0.1, z_weight: float = 1e-4):
    """Label-smoothed cross entropy with z-loss, averaged over the unmasked tokens."""
    logits = logits.float()
    lse = torch.logsumexp(logits, dim=-1)
    nll = lse - logits.gather(-1, labels.unsqueeze(-1)).squeeze(-1)
    smooth = lse - logits.mean(dim=-1)
    loss = (1.0 - smoothing) * nll + smoothing * smooth
    loss = loss + z_weight * lse**2
    mask = loss_mask.float()
    denom = mask.sum().clamp(min=1.0)
    accuracy = ((logits.argmax(-1) == labels).float() * mask).sum() / denom
    return (loss * mask).sum() / denom, accuracy


def get_batch_logps(logits, labels, ignore_index=-100):
    labels = labels[:, 1:].clone()
    logits = logits[:, :-1]
    mask = labels != ignore_index
    labels = labels.masked_fill(~mask, 0)
    per_token = torch.gather(logits.float().log_softmax(-1), 2, labels.unsqueeze(2)).squeeze(2)
    return (per_token * mask).sum(-1)


# mtmc: policy_logits=bf16[B,T,V] ref_logps=f32[B]@-900.0..-600.0 labels=i64[B,T]@0..V-1 B=4 T=512 V=32000
def dpo_loss(policy_logits, ref_logps, labels, beta: float = 0.1, label_smoothing: float = 0.05):
    """First half of the batch is chosen, second half rejected; reference log-probs are precomputed."""
    logps = get_batch_logps(policy_logits, labels)
    chosen, rejected = logps.chunk(2)
    ref_chosen, ref_rejected = ref_logps.chunk(2)
    logits = (chosen - rejected) - (ref_chosen - ref_rejected)
    losses = -F.logsigmoid(beta * logits) * (1 - label_smoothing) - F.logsigmoid(-beta * logits) * label_smoothing
    chosen_rewards = beta * (chosen - ref_chosen).detach()
    rejected_rewards = beta * (rejected - ref_rejected).detach()
    return losses.mean(), (chosen_rewards > rejected_rewards).float().mean()


# mtmc: logps=f32[P*8,T]@-4.0..-0.01 old_logps=f32[P*8,T]@-4.0..-0.01 ref_logps=f32[P*8,T]@-4.0..-0.01 rewards=f32[P*8] mask=bool[P*8,T] P=256 T=2048
def grpo_loss(
    logps, old_logps, ref_logps, rewards, mask, group: int = 8, eps_low: float = 0.2, eps_high: float = 0.28, beta: float = 0.04
):
    """Group-relative advantages, asymmetric clipping, k3 KL penalty; mean over tokens, then over completions."""
    grouped = rewards.view(-1, group)
    adv = (grouped - grouped.mean(dim=1, keepdim=True)) / (grouped.std(dim=1, keepdim=True) + 1e-4)
    adv = adv.view(-1, 1)
    ratio = torch.exp(logps - old_logps)
    clipped = torch.clamp(ratio, 1 - eps_low, 1 + eps_high)
    per_token = -torch.min(ratio * adv, clipped * adv)
    delta = ref_logps - logps
    kl = torch.exp(delta) - delta - 1
    per_token = per_token + beta * kl
    m = mask.float()
    length = m.sum(-1).clamp(min=1)
    loss = ((per_token * m).sum(-1) / length).mean()
    clip_frac = ((ratio > 1 + eps_high) & (adv > 0) & mask).float().sum() / m.sum().clamp(min=1)
    mean_kl = ((kl * m).sum(-1) / length).mean()
    return loss, mean_kl, clip_frac


# mtmc: logits=f32[N,A] actions=i64[N]@0..A-1 old_logp=f32[N]@-4.0..-1.0 adv=f32[N] value=f32[N] old_value=f32[N] ret=f32[N] N=1000000 A=18
def ppo_loss(
    logits, actions, old_logp, adv, value, old_value, ret, clip: float = 0.2, vf_coef: float = 0.5, ent_coef: float = 0.01
):
    logp_all = F.log_softmax(logits, dim=-1)
    logp = logp_all.gather(1, actions[:, None])[:, 0]
    entropy = -(logp_all.exp() * logp_all).sum(-1).mean()

    adv = (adv - adv.mean()) / (adv.std() + 1e-8)
    ratio = (logp - old_logp).exp()
    pg_loss = torch.max(-adv * ratio, -adv * ratio.clamp(1 - clip, 1 + clip)).mean()

    v_clipped = old_value + (value - old_value).clamp(-clip, clip)
    v_loss = 0.5 * torch.max((value - ret) ** 2, (v_clipped - ret) ** 2).mean()
    return pg_loss - ent_coef * entropy + vf_coef * v_loss


# mtmc: rewards=f32[T,E] values=f32[T+1,E] dones=bool[T,E] T=64 E=16384
def gae(rewards, values, dones, gamma: float = 0.99, lam: float = 0.95):
    """Generalised advantage estimation, time first."""
    not_done = 1.0 - dones.float()
    advantages = torch.zeros_like(rewards)
    last = torch.zeros_like(rewards[0])
    for t in range(rewards.shape[0] - 1, -1, -1):
        delta = rewards[t] + gamma * values[t + 1] * not_done[t] - values[t]
        last = delta + gamma * lam * not_done[t] * last
        advantages[t] = last
    return advantages, advantages + values[:-1]


# mtmc: image=f32[N,512] text=f32[N,512] logit_scale=f32[1]@2.0..3.0 N=4096
def clip_contrastive_loss(image, text, logit_scale):
    image = image / image.norm(dim=-1, keepdim=True)
    text = text / text.norm(dim=-1, keepdim=True)
    logits = logit_scale.exp() * image @ text.t()
    labels = torch.arange(logits.shape[0], device=logits.device)
    return (F.cross_entropy(logits, labels) + F.cross_entropy(logits.t(), labels)) / 2


# mtmc: feats=f16[N,128] labels=i64[N]@0..99 N=4096
def supcon_loss(feats, labels, temperature: float = 0.1):
    """Supervised contrastive loss; rows without a positive do not count."""
    z = F.normalize(feats.float(), dim=1)
    sim = z @ z.T / temperature
    sim = sim - sim.max(dim=1, keepdim=True).values.detach()
    self_mask = torch.eye(z.shape[0], dtype=torch.bool, device=z.device)
    pos = (labels[:, None] == labels[None, :]) & ~self_mask
    exp_sim = sim.exp().masked_fill(self_mask, 0.0)
    log_prob = sim - torch.log(exp_sim.sum(1, keepdim=True) + 1e-12)
    n_pos = pos.sum(1)
    mean_log_prob = (log_prob * pos).sum(1) / n_pos.clamp(min=1)
    has_pos = (n_pos > 0).float()
    return -(mean_log_prob * has_pos).sum() / has_pos.sum().clamp(min=1.0)


# mtmc: student=f16[N,C] teacher=f16[N,C] target=i64[N]@0..C-1 N=32768 C=1000
def distillation_loss(student, teacher, target, T: float = 4.0, alpha: float = 0.7):
    student, teacher = student.float(), teacher.float()
    soft = F.kl_div(
        F.log_softmax(student / T, dim=1),
        F.log_softmax(teacher / T, dim=1),
        reduction="batchmean",
        log_target=True,
    )
    hard = F.cross_entropy(student, target)
    return alpha * T * T * soft + (1.0 - alpha) * hard


# ----------------------------------------------------------------------------
# optimisers (flat parameter buffers, as in our ZeRO shards)
# ----------------------------------------------------------------------------


# mtmc: param=f32[N] grad=bf16[N] exp_avg=f32[N] exp_avg_sq=f32[N]@0..1 N=16000000
@torch.no_grad()
def adamw_step_(
    param,
    grad,
    exp_avg,
    exp_avg_sq,
    step: int = 100,
    lr: float = 3e-4,
    beta1: float = 0.9,
    beta2: float = 0.95,
    eps: float = 1e-8,
    weight_decay: float = 0.1,
):
    """In place; returns the bf16 copy for the forward pass."""
    g = grad.float()
    param.mul_(1 - lr * weight_decay)
    exp_avg.mul_(beta1).add_(g, alpha=1 - beta1)
    exp_avg_sq.mul_(beta2).addcmul_(g, g, value=1 - beta2)
    bias1 = 1 - beta1**step
    bias2 = 1 - beta2**step
    denom = (exp_avg_sq.sqrt() / bias2**0.5).add_(eps)
    param.addcdiv_(exp_avg, denom, value=-lr / bias1)
    return param.to(torch.bfloat16)


# mtmc: p=bf16[M,N] g=bf16[M,N] m=f32[M,N] ema=f32[M,N] M=4096 N=5000
@torch.no_grad()
def lion_ema_step(p, g, m, ema, lr: float = 1e-4, b1: float = 0.9, b2: float = 0.99, wd: float = 0.1, decay: float = 0.999):
    """Lion, functional, plus the EMA of the weights."""
    gf = g.float()
    update = torch.sign(b1 * m + (1 - b1) * gf)
    new_p = p.float() * (1 - lr * wd) - lr * update
    new_m = b2 * m + (1 - b2) * gf
    new_ema = torch.lerp(ema, new_p, 1 - decay)
    return new_p.to(p.dtype), new_m, new_ema


# mtmc: g1=f32[4096,1024] g2=f32[1024,4096] g3=f32[32000,512] g4=f32[1024] scale=f32[1]@1.0..4.0
def unscale_and_clip(g1, g2, g3, g4, scale, max_norm: float = 1.0):
    """Undo the loss scale, global norm clip; non-finite gradients become a zero update."""
    grads = [g1, g2, g3, g4]
    inv = 1.0 / scale
    grads = [g * inv for g in grads]
    norms = torch.stack([torch.linalg.vector_norm(g, 2.0) for g in grads])
    total = torch.linalg.vector_norm(norms, 2.0)
    coef = torch.clamp(max_norm / (total + 1e-6), max=1.0)
    coef = torch.where(torch.isfinite(total), coef, torch.zeros_like(coef))
    g1, g2, g3, g4 = [g * coef for g in grads]
    return g1, g2, g3, g4, total


# ----------------------------------------------------------------------------
# quantisation
# ----------------------------------------------------------------------------


# mtmc: w=bf16[O,4096] O=4096
def quantize_int4_groupwise(w, group: int = 128):
    """Asymmetric 4 bit, two values per byte."""
    o, i = w.shape
    g = w.float().reshape(o, i // group, group)
    lo, hi = g.amin(-1, keepdim=True), g.amax(-1, keepdim=True)
    scale = (hi - lo).clamp(min=1e-5) / 15.0
    zero = torch.round(-lo / scale).clamp(0, 15)
    q = (torch.round(g / scale) + zero).clamp(0, 15).to(torch.uint8).reshape(o, i)
    packed = q[:, 0::2] | (q[:, 1::2] << 4)
    return packed, scale.squeeze(-1).to(w.dtype), zero.squeeze(-1).to(torch.uint8)


# mtmc: packed=u8[4096,K//2]@0..255 scale=f16[4096,K//64]@0.001..0.02 zero=u8[4096,K//64]@0..15 x=f16[M,K] M=16 K=4096
def int4_linear(packed, scale, zero, x, group: int = 64):
    o = packed.shape[0]
    low = packed & 0xF
    high = packed >> 4
    q = torch.stack([low, high], dim=-1).reshape(o, -1, group)
    w = (q.to(x.dtype) - zero.to(x.dtype).unsqueeze(-1)) * scale.unsqueeze(-1)
    return F.linear(x, w.reshape(o, -1))


# mtmc: x=f32[N,1024] N=12000 init: channels=1024
class LSQFakeQuant(nn.Module):
    """Per-channel fake quantisation with learned step size; straight-through by detach."""

    def __init__(self, channels, bits=8):
        super().__init__()
        self.qmin, self.qmax = -(2 ** (bits - 1)), 2 ** (bits - 1) - 1
        self.log_step = nn.Parameter(torch.full((channels,), -3.0))
        self.offset = nn.Parameter(torch.zeros(channels))

    def forward(self, x):
        step = F.softplus(self.log_step) + 1e-6
        v = (x - self.offset) / step
        v_clamped = torch.clamp(v, self.qmin, self.qmax)
        v_hat = v_clamped + (torch.round(v_clamped) - v_clamped).detach()
        return v_hat * step + self.offset


# ----------------------------------------------------------------------------
# blocks in train mode
# ----------------------------------------------------------------------------


# mtmc: x=f32[B,H] residual=f32[B,H] bias=f32[H] weight=f32[H] beta=f32[H] B=10000 H=1536
def bias_dropout_add_norm(x, residual, bias, weight, beta, p: float = 0.1, training: bool = True):
    out = F.dropout(x + bias, p=p, training=training) + residual
    return F.layer_norm(out, (out.shape[-1],), weight, beta), out


# mtmc: x=f16[B,128,H,W] shortcut=f16[B,128,H,W] running_mean=f32[128] running_var=f32[128]@0.5..1.5 weight=f32[128] bias=f32[128] B=32 H=56 W=56
def bn_train_add_relu(x, shortcut, running_mean, running_var, weight, bias, momentum: float = 0.1, eps: float = 1e-5):
    """Batch norm in train mode, by hand so that the statistics can be synced; updates the running ones in place."""
    xf = x.float()
    n = xf.numel() / xf.shape[1]
    mean = xf.mean(dim=(0, 2, 3))
    var = xf.var(dim=(0, 2, 3), unbiased=False)
    running_mean.mul_(1 - momentum).add_(momentum * mean)
    running_var.mul_(1 - momentum).add_(momentum * var * n / (n - 1))
    scale = weight * torch.rsqrt(var + eps)
    shift = bias - mean * scale
    y = xf * scale[None, :, None, None] + shift[None, :, None, None]
    return F.relu(y.to(x.dtype) + shortcut)
