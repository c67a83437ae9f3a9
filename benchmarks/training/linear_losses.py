"""A linear layer with a large vocabulary, followed by its loss, in plain torch, at the sizes of Liger-Kernel's benchmarks."""

import torch
import torch.nn.functional as F


# mtmc: x=bf16[N,D] weight=bf16[V,D] target=i64[N]@0..V-1 N=8192 D=4096 V=128256 grad=x,weight
def fused_linear_cross_entropy(x, weight, target):
    return F.cross_entropy((x @ weight.T).float(), target)


# mtmc: x=bf16[N,D] weight=bf16[V,D] target=i64[N]@0..V-1 N=32768 D=4096 V=128256 grad=x,weight
def fused_linear_cross_entropy_32768(x, weight, target):
    return F.cross_entropy((x @ weight.T).float(), target)


# mtmc: x=bf16[N,D] weight=bf16[V,D] target=i64[N]@0..V-1 N=8192 D=2304 V=256000 grad=x,weight
def fused_linear_cross_entropy_softcap(x, weight, target, softcap=30.0, z_weight=1e-4):
    logits = softcap * torch.tanh((x @ weight.T).float() / softcap)
    return F.cross_entropy(logits, target) + z_weight * torch.logsumexp(logits, -1).square().mean()


# mtmc: x=bf16[B,T,D] weight=bf16[V,D]@-0.02..0.02 bias=bf16[V] target=i64[B,T]@0..V-1 reference=f32[B]
# mtmc: B=32 T=512 D=1024 V=128256 grad=x,weight,bias
def fused_linear_dpo(x, weight, bias, target, reference, beta=0.1):
    logp = torch.log_softmax(F.linear(x, weight, bias).float(), -1)
    logp = logp.gather(-1, target[..., None]).squeeze(-1).sum(-1)
    half = logp.shape[0] // 2
    chosen, rejected = logp[:half] - reference[:half], logp[half:] - reference[half:]
    return -F.logsigmoid(beta * (chosen - rejected)).mean()


# mtmc: x=bf16[B,T,D] weight=bf16[V,D]@-0.02..0.02 target=i64[B,T]@0..V-1 old=f32[B,T]@-12..-11
# mtmc: reference=f32[B,T]@-12..-11 advantage=f32[B] mask=f32[B,T]@0..1 B=8 T=1024 D=4096 V=128256 grad=x,weight
def fused_linear_grpo(x, weight, target, old, reference, advantage, mask, clip=0.2, beta=0.04):
    logp = torch.log_softmax((x @ weight.T).float(), -1).gather(-1, target[..., None]).squeeze(-1)
    ratio = torch.exp(logp - old)
    gain = torch.minimum(ratio * advantage[:, None], ratio.clamp(1 - clip, 1 + clip) * advantage[:, None])
    delta = reference - logp
    penalty = torch.exp(delta) - delta - 1
    return -((gain - beta * penalty) * mask).sum() / mask.sum()


# mtmc: x=bf16[N,D] weight=bf16[V,D]@-0.02..0.02 teacher_x=bf16[N,D] teacher_weight=bf16[V,D]@-0.02..0.02
# mtmc: N=8192 D=4096 V=128256 grad=x,weight
def fused_linear_kl_divergence(x, weight, teacher_x, teacher_weight):
    student = torch.log_softmax((x @ weight.T).float(), -1)
    teacher = torch.log_softmax((teacher_x @ teacher_weight.T).float(), -1)
    return F.kl_div(student, teacher, reduction="batchmean", log_target=True)


# mtmc: x=bf16[N,D] weight=bf16[V,D]@-0.02..0.02 teacher_x=bf16[N,D] teacher_weight=bf16[V,D]@-0.02..0.02
# mtmc: N=8192 D=4096 V=128256 grad=x,weight
def fused_linear_js_divergence(x, weight, teacher_x, teacher_weight, beta=0.5):
    log_q = torch.log_softmax((x @ weight.T).float(), -1)
    log_p = torch.log_softmax((teacher_x @ teacher_weight.T).float(), -1)
    log_m = torch.log(torch.lerp(log_q.exp(), log_p.exp(), beta))
    loss = beta * (log_p.exp() * (log_p - log_m)).sum(-1) + (1 - beta) * (log_q.exp() * (log_q - log_m)).sum(-1)
    return loss.mean()
