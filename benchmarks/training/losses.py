"""Losses over a large vocabulary and of preference training, in plain torch, at the sizes of Liger-Kernel's benchmarks."""

import torch
import torch.nn.functional as F


# mtmc: logits=bf16[N,V] target=i64[N]@0..V-1 N=4096 V=128256 grad=logits
def cross_entropy(logits, target):
    return F.cross_entropy(logits.float(), target)


# mtmc: logits=f32[N,V] target=i64[N]@0..V-1 N=4096 V=32000 grad=logits
def smoothed_cross_entropy(logits, target):
    return F.cross_entropy(logits, target, label_smoothing=0.1)


# mtmc: student=f32[N,V] teacher=f32[N,V] N=2048 V=32000 grad=student
def kl_divergence(student, teacher):
    return F.kl_div(F.log_softmax(student, -1), F.softmax(teacher, -1), reduction="batchmean")


# mtmc: student=f32[N,V] teacher=f32[N,V] N=2048 V=32000 grad=student
def js_divergence(student, teacher, beta=0.5):
    log_p, log_q = F.log_softmax(student, -1), F.log_softmax(teacher, -1)
    p, q = log_p.exp(), log_q.exp()
    log_m = torch.log(beta * q + (1 - beta) * p)
    return (beta * q * (log_q - log_m) + (1 - beta) * p * (log_p - log_m)).sum(-1).mean()


# mtmc: chosen=f32[B,S,V] rejected=f32[B,S,V] chosen_ids=i64[B,S]@0..V-1 rejected_ids=i64[B,S]@0..V-1 reference=f32[B]
# mtmc: B=4 S=512 V=32000 grad=chosen,rejected
def dpo(chosen, rejected, chosen_ids, rejected_ids, reference, beta=0.1):
    chosen_logp = F.log_softmax(chosen, -1).gather(-1, chosen_ids[..., None]).squeeze(-1).sum(-1)
    rejected_logp = F.log_softmax(rejected, -1).gather(-1, rejected_ids[..., None]).squeeze(-1).sum(-1)
    return -F.logsigmoid(beta * (chosen_logp - rejected_logp - reference)).mean()


# mtmc: logp=f32[B,S] old=f32[B,S] reference=f32[B,S] advantage=f32[B] mask=f32[B,S]@0..1 B=64 S=2048 grad=logp
def grpo(logp, old, reference, advantage, mask, clip=0.2, beta=0.04):
    ratio = torch.exp(logp - old)
    gain = torch.minimum(ratio * advantage[:, None], ratio.clamp(1 - clip, 1 + clip) * advantage[:, None])
    delta = reference - logp
    penalty = torch.exp(delta) - delta - 1
    return -((gain - beta * penalty) * mask).sum() / mask.sum()


# mtmc: logp=f32[B,S] old=f32[B,S] advantage=f32[B,S] values=f32[B,S] returns=f32[B,S] B=64 S=2048 grad=logp,values
def ppo(logp, old, advantage, values, returns, clip=0.2):
    ratio = torch.exp(logp - old)
    policy = -torch.minimum(ratio * advantage, ratio.clamp(1 - clip, 1 + clip) * advantage).mean()
    return policy + 0.5 * (values - returns).pow(2).mean()


# mtmc: logits=f32[N,C] target=f32[N,C]@0..1 N=8192 C=256 grad=logits
def focal(logits, target, gamma=2.0, alpha=0.25):
    p = torch.sigmoid(logits)
    entropy = F.binary_cross_entropy_with_logits(logits, target, reduction="none")
    p_t = p * target + (1 - p) * (1 - target)
    weight = alpha * target + (1 - alpha) * (1 - target)
    return (weight * (1 - p_t) ** gamma * entropy).mean()


# mtmc: image=f32[B,D] text=f32[B,D] scale=f32[] B=1024 D=512 grad=image,text,scale
def clip_loss(image, text, scale):
    image, text = F.normalize(image, dim=-1), F.normalize(text, dim=-1)
    logits = scale.exp() * image @ text.t()
    labels = torch.arange(logits.shape[0], device=logits.device)
    return (F.cross_entropy(logits, labels) + F.cross_entropy(logits.t(), labels)) / 2


# mtmc: logits=f32[B,C,H,W] target=f32[B,C,H,W]@0..1 B=8 C=4 H=256 W=256 grad=logits
def dice(logits, target, eps=1.0):
    p = torch.sigmoid(logits)
    intersection = (p * target).sum((2, 3))
    return 1 - ((2 * intersection + eps) / (p.sum((2, 3)) + target.sum((2, 3)) + eps)).mean()
