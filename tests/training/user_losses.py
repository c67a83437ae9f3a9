"""Linear layers with losses over a vocabulary, as training code writes them: masks, smoothing, biases, teachers."""

from __future__ import annotations

USER_LOSSES: dict[str, str] = {
    "everything in one cross entropy": """# mtmc: x=f32[B,S,D] weight=f32[V,D] bias=f32[V] labels=i64[B,S]@0..199 B=2 S=9 D=32 V=200 grad=x,weight,bias
def f(x, weight, bias, labels, softcap=30.0, z_weight=1e-4, smoothing=0.1):
    logits = F.linear(x, weight, bias).float().view(-1, weight.shape[0])
    logits = softcap * torch.tanh(logits / softcap)
    labels = labels.view(-1)
    loss = F.cross_entropy(logits, labels, ignore_index=3, label_smoothing=smoothing)
    is_used = (labels != 3).float()
    z = torch.logsumexp(logits, dim=-1).pow(2) * is_used
    return loss + z_weight * z.sum() / is_used.sum().clamp(min=1.0)
""",
    "labels that are shifted by padding": """# mtmc: hidden=f32[B,S,D] weight=f32[V,D] labels=i64[B,S]@0..199 B=2 S=9 D=32 V=200 grad=hidden,weight
def f(hidden, weight, labels):
    logits = (hidden @ weight.t()).float()
    labels = F.pad(labels, (0, 1), value=-100)
    shifted = labels[..., 1:].contiguous()
    return F.cross_entropy(logits.view(-1, logits.size(-1)), shifted.view(-1), ignore_index=-100)
""",
    "a sum over the batch divided by the tokens": """# mtmc: hidden=f32[N,D] weight=f32[V,D] labels=i64[N]@0..199 tokens=f32[] N=18 D=32 V=200 grad=hidden,weight
def f(hidden, weight, labels, tokens):
    return F.cross_entropy(F.linear(hidden, weight), labels, reduction="sum", ignore_index=5) / tokens.abs().clamp(min=1.0)
""",
    "preferences of pairs": """# mtmc: x=f32[B,S,D] weight=f32[V,D] bias=f32[V] labels=i64[B,S]@0..199 ref=f32[B] B=4 S=8 D=32 V=200 grad=x,weight,bias
def f(x, weight, bias, labels, ref, beta=0.1):
    logits = F.linear(x, weight, bias)
    mask = labels != 3
    labels = torch.where(mask, labels, 0)
    logps = torch.gather(logits.log_softmax(-1), dim=2, index=labels.unsqueeze(2)).squeeze(2)
    logps = (logps * mask).sum(-1)
    half = x.shape[0] // 2
    chosen, rejected = logps[:half] - ref[:half], logps[half:] - ref[half:]
    losses = -F.logsigmoid(beta * (chosen - rejected))
    return losses.mean(), (beta * chosen).detach(), (beta * rejected).detach()
""",
    "preferences with a likelihood": """# mtmc: x=f32[B,S,D] weight=f32[V,D] labels=i64[B,S]@0..199 B=4 S=8 D=32 V=200 grad=x,weight
def f(x, weight, labels, beta=0.1):
    logp = F.log_softmax(x @ weight.T, -1).gather(-1, labels[..., None]).squeeze(-1).mean(-1)
    half = x.shape[0] // 2
    chosen, rejected = logp[:half], logp[half:]
    odds = (chosen - rejected) - (torch.log1p(-chosen.exp()) - torch.log1p(-rejected.exp()))
    return -chosen.mean() - beta * F.logsigmoid(odds).mean()
""",
    "a policy relative to its group": """# mtmc: x=f32[B,S,D] weight=f32[V,D] ids=i64[B,S]@0..199 old=f32[B,S]@-6..-5 ref=f32[B,S]@-6..-5 adv=f32[B] mask=f32[B,S]@0..1
# mtmc: B=3 S=7 D=32 V=200 grad=x,weight
def f(x, weight, ids, old, ref, adv, mask, temperature=0.9, low=0.2, high=0.28, beta=0.04):
    logits = (x @ weight.T).float() / temperature
    mask = (mask > 0.3).float()
    logps = torch.gather(logits, -1, ids.unsqueeze(-1)).squeeze(-1) - torch.logsumexp(logits, -1)
    ratio = torch.exp(logps - old)
    first = ratio * adv.unsqueeze(1)
    second = torch.clamp(ratio, 1 - low, 1 + high) * adv.unsqueeze(1)
    per_token = -torch.min(first, second)
    per_token = per_token + beta * (torch.exp(ref - logps) - (ref - logps) - 1)
    return ((per_token * mask).sum(-1) / mask.sum(-1).clamp(min=1.0)).mean()
""",
    "distillation with labels": """# mtmc: x=f32[N,D] w=f32[V,D] y=f32[N,E] u=f32[V,E] labels=i64[N]@0..199 N=16 D=32 E=48 V=200 grad=x,w
def f(x, w, y, u, labels, temperature=2.0, alpha=0.5):
    student = x @ w.T
    with torch.no_grad():
        teacher = y @ u.T
    soft = F.kl_div(
        F.log_softmax(student / temperature, -1), F.softmax(teacher / temperature, -1), reduction="batchmean"
    )
    hard = F.cross_entropy(student, labels, ignore_index=3)
    return alpha * temperature**2 * soft + (1 - alpha) * hard
""",
    "a symmetric divergence of used tokens": """# mtmc: x=f32[N,D] w=f32[V,D] b=f32[V] y=f32[N,D] u=f32[V,D] labels=i64[N]@0..199 N=16 D=32 V=200 grad=x,w,b
def f(x, w, b, y, u, labels, beta=0.5):
    log_q, log_p = F.linear(x, w, b).log_softmax(-1), F.linear(y, u).log_softmax(-1)
    log_m = torch.log(torch.lerp(log_q.exp(), log_p.exp(), beta))
    left = F.kl_div(log_m, log_p, reduction="none", log_target=True)
    right = F.kl_div(log_m, log_q, reduction="none", log_target=True)
    rows = (beta * left + (1 - beta) * right).sum(-1)
    is_used = labels != 3
    return (rows * is_used).sum() / is_used.sum().clamp(min=1)
""",
    "a reverse divergence": """# mtmc: x=f32[N,D] w=f32[V,D] y=f32[N,D] u=f32[V,D] N=16 D=32 V=200 grad=x,w
def f(x, w, y, u):
    log_q, log_p = F.log_softmax(x @ w.T, -1), F.log_softmax(y @ u.T, -1)
    return (log_q.exp() * (log_q - log_p)).sum(-1).mean()
""",
    "a head and a loss as modules": """class f(nn.Module):
    def __init__(self, d=32, v=200):
        super().__init__()
        self.head = nn.Linear(d, v)
        self.loss = nn.CrossEntropyLoss(ignore_index=3, label_smoothing=0.05)

    # mtmc: hidden=f32[2,8,32] labels=i64[2,8]@0..199 grad=hidden
    def forward(self, hidden, labels):
        logits = self.head(hidden)
        return self.loss(logits.view(-1, logits.shape[-1]), labels.view(-1))
""",
}
