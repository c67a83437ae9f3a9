"""Losses of contrastive, segmentation and preference training, as their users write them."""

from __future__ import annotations

LOSSES: dict[str, str] = {
    "layer norm in a block": """# mtmc: module=train x=f32[B,64] B=32 grad=x
class f(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(64)

    def forward(self, x):
        return self.norm(x) + x
""",
    "clip": """# mtmc: image=f32[B,D] text=f32[B,D] scale=f32[] B=32 D=64 grad=image,text,scale
def f(image, text, scale):
    image = F.normalize(image, dim=-1)
    text = F.normalize(text, dim=-1)
    logits = scale.exp() * image @ text.t()
    labels = torch.arange(image.shape[0], device=image.device)
    return (F.cross_entropy(logits, labels) + F.cross_entropy(logits.t(), labels)) / 2
""",
    "dice": """# mtmc: logits=f32[B,C,H,W] target=i64[B,H,W]@0..C-1 B=2 C=4 H=16 W=16 grad=logits
def f(logits, target, smooth=1.0):
    p = logits.softmax(1)
    onehot = F.one_hot(target, logits.shape[1]).permute(0, 3, 1, 2).float()
    inter = (p * onehot).sum((0, 2, 3))
    total = p.sum((0, 2, 3)) + onehot.sum((0, 2, 3))
    return 1 - ((2 * inter + smooth) / (total + smooth)).mean()
""",
    "focal": """# mtmc: logits=f32[B,C] target=i64[B]@0..C-1 B=64 C=32 grad=logits
def f(logits, target, gamma=2.0, alpha=0.25):
    ce = F.cross_entropy(logits, target, reduction="none")
    return (alpha * (1 - torch.exp(-ce)) ** gamma * ce).mean()
""",
    "ppo": """# mtmc: logits=f32[B,T,V] actions=i64[B,T]@0..V-1 old=f32[B,T] adv=f32[B,T] values=f32[B,T] returns=f32[B,T]
# mtmc: mask=bool[B,T] B=4 T=16 V=32 grad=logits,values
def f(logits, actions, old, adv, values, returns, mask, clip=0.2, vf=0.5, ent=0.01):
    logp = F.log_softmax(logits, -1)
    ratio = (logp.gather(-1, actions.unsqueeze(-1)).squeeze(-1) - old).exp()
    adv = (adv - adv.mean()) / (adv.std() + 1e-8)
    policy = -torch.min(ratio * adv, ratio.clamp(1 - clip, 1 + clip) * adv)
    entropy = -(logp.exp() * logp).sum(-1)
    loss = policy + vf * (values - returns) ** 2 - ent * entropy
    return (loss * mask).sum() / mask.sum().clamp(min=1)
""",
    "dpo": """# mtmc: chosen=f32[B,T,V] rejected=f32[B,T,V] cl=i64[B,T]@0..V-1 rl=i64[B,T]@0..V-1 rc=f32[B] rr=f32[B]
# mtmc: B=4 T=8 V=32 grad=chosen,rejected
def f(chosen, rejected, cl, rl, rc, rr, beta=0.1):
    pc = torch.gather(chosen.log_softmax(-1), 2, cl.unsqueeze(2)).squeeze(2).sum(-1)
    pr = torch.gather(rejected.log_softmax(-1), 2, rl.unsqueeze(2)).squeeze(2).sum(-1)
    logits = beta * ((pc - rc) - (pr - rr))
    return -F.logsigmoid(logits).mean(), (beta * (pc - rc)).detach(), (beta * (pr - rr)).detach()
""",
    "grpo": """# mtmc: logp=f32[G,T]@-3..0 old=f32[G,T]@-3..0 ref=f32[G,T]@-3..0 rewards=f32[G] mask=f32[G,T]@0..1
# mtmc: G=8 T=32 grad=logp
def f(logp, old, ref, rewards, mask, eps=0.2, beta=0.04):
    adv = (rewards - rewards.mean()) / (rewards.std() + 1e-4)
    ratio = torch.exp(logp - old)
    clipped = torch.clamp(ratio, 1 - eps, 1 + eps) * adv.unsqueeze(1)
    kl = torch.exp(ref - logp) - (ref - logp) - 1
    per_token = -torch.min(ratio * adv.unsqueeze(1), clipped) + beta * kl
    return ((per_token * mask).sum(1) / mask.sum(1)).mean()
""",
}
