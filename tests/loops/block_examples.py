"""Loops that combine the elements of a small state in any way, as people write them, with few steps."""

BLOCKS = """
import torch
import torch.nn.functional as F


# mtmc: emissions=f32[B,T,N] transitions=f32[N,N] B=3 T=20 N=5
def viterbi(emissions, transitions):
    score = emissions[:, 0]
    history = []
    for t in range(1, emissions.shape[1]):
        total = score.unsqueeze(2) + transitions
        best, index = total.max(dim=1)
        score = best + emissions[:, t]
        history.append(index)
    return score, torch.stack(history, dim=1)


# mtmc: emissions=f32[T,N] transitions=f32[N,N] T=20 N=8
def one_path(emissions, transitions):
    score = emissions[0]
    for t in range(1, emissions.shape[0]):
        score = (score[:, None] + transitions).amax(0) + emissions[t]
    return score


# mtmc: emissions=f32[T,B,N] transitions=f32[N,N] mask=bool[T,B] T=20 B=3 N=5
def log_partition(emissions, transitions, mask):
    alpha = emissions[0]
    for t in range(1, emissions.shape[0]):
        scores = alpha.unsqueeze(2) + transitions.unsqueeze(0) + emissions[t].unsqueeze(1)
        alpha = torch.where(mask[t].unsqueeze(1), torch.logsumexp(scores, dim=1), alpha)
    return torch.logsumexp(alpha, dim=1)


# mtmc: log_probs=f32[B,T,S] can_skip=bool[B,S] B=3 T=20 S=9
def ctc(log_probs, can_skip):
    alpha = torch.full_like(log_probs[:, 0], -1e4)
    alpha[:, :2] = log_probs[:, 0, :2]
    for t in range(1, log_probs.shape[1]):
        one = F.pad(alpha[:, :-1], (1, 0), value=-1e4)
        two = F.pad(alpha[:, :-2], (2, 0), value=-1e4)
        two = torch.where(can_skip, two, torch.full_like(two, -1e4))
        alpha = torch.logsumexp(torch.stack([alpha, one, two]), dim=0) + log_probs[:, t]
    return torch.logaddexp(alpha[:, -1], alpha[:, -2])


# mtmc: scores=f32[B,N,M] B=3 N=6 M=10
def sinkhorn(scores, n_iters: int = 20):
    for _ in range(n_iters):
        scores = scores - torch.logsumexp(scores, dim=-1, keepdim=True)
        scores = scores - torch.logsumexp(scores, dim=-2, keepdim=True)
    return scores.exp()


# mtmc: cost=f32[B,N,M] B=3 N=6 M=10
def potentials(cost, eps: float = 0.5, n_iters: int = 20):
    K = torch.exp(-cost / eps)
    u = torch.ones(cost.shape[0], cost.shape[1], device=cost.device)
    v = torch.ones(cost.shape[0], cost.shape[2], device=cost.device)
    for _ in range(n_iters):
        u = 1.0 / (torch.bmm(K, v.unsqueeze(-1)).squeeze(-1) + 1e-3)
        v = 1.0 / (torch.bmm(K.transpose(1, 2), u.unsqueeze(-1)).squeeze(-1) + 1e-3)
    return u.unsqueeze(-1) * K * v.unsqueeze(1)


# mtmc: z=f32[B,T,1] motion=f32[2,2] noise=f32[2,2] B=3 T=20
def kalman(z, motion, noise):
    x = torch.zeros(z.shape[0], 2, 1, device=z.device)
    P = torch.eye(2, device=z.device).expand(z.shape[0], 2, 2)
    out = []
    for t in range(z.shape[1]):
        x = motion @ x
        P = motion @ P @ motion.T + noise @ noise.T + 0.1 * torch.eye(2, device=z.device)
        gain = P[:, :, :1] / (P[:, :1, :1].abs() + 0.5)
        x = x + gain * (z[:, t].unsqueeze(1) - x[:, :1])
        P = P - gain @ P[:, :1]
        out.append(x.squeeze(-1))
    return torch.stack(out, 1)


# mtmc: z=f32[B,T,2] motion=f32[2,2] B=3 T=20
def inverse_by_stack(z, motion):
    x = torch.zeros_like(z[:, 0])
    P = torch.eye(2, device=z.device).expand(z.shape[0], 2, 2)
    out = []
    for t in range(z.shape[1]):
        P = motion @ P @ motion.T + torch.eye(2, device=z.device)
        a, b, c, d = P[:, 0, 0], P[:, 0, 1], P[:, 1, 0], P[:, 1, 1]
        det = a * d - b * c + 1.0
        inverse = torch.stack([torch.stack([d, -b], -1), torch.stack([-c, a], -1)], -2) / det[:, None, None]
        K = P @ inverse
        x = x + (K @ (z[:, t] - x).unsqueeze(-1)).squeeze(-1)
        P = P - 0.5 * K @ P
        out.append(x)
    return torch.stack(out, 1)


# mtmc: A=f32[B,N,N] B=3 N=16
def newton_schulz(A, steps: int = 16):
    X = A / A.norm(dim=(-2, -1), keepdim=True)
    for _ in range(steps):
        X = 1.5 * X - 0.5 * X @ X.mT @ X
    return X


# mtmc: x=f32[B,T,C] B=3 T=20 C=7
def diffusion(x, rate: float = 0.2):
    h = x[:, 0]
    out = []
    for t in range(x.shape[1]):
        left, right = torch.roll(h, 1, 1), torch.roll(h, -1, 1)
        h = h + rate * (left - 2 * h + right) + 0.1 * x[:, t]
        out.append(h)
    return torch.stack(out, 1)


# mtmc: x=f32[B,T,C] B=3 T=20 C=7
def running(x):
    h = torch.zeros_like(x[:, 0])
    for t in range(x.shape[1]):
        h = torch.softmax(torch.cumsum(h, dim=1) * 0.1 + x[:, t].flip(1), dim=1)
    return h


# mtmc: q=f32[B,H,T,D] k=f32[B,H,T,D] v=f32[B,H,T,D] beta=f32[B,H,T] B=2 H=2 T=20 D=5
def delta_rule_twice(q, k, v, beta):
    S = torch.zeros(q.shape[0], q.shape[1], q.shape[3], q.shape[3], device=q.device)
    out = torch.empty_like(v)
    for t in range(q.shape[2]):
        old = (S * k[:, :, t].unsqueeze(-1)).sum(-2)
        S = S + k[:, :, t].unsqueeze(-1) * ((v[:, :, t] - old) * beta[:, :, t].unsqueeze(-1)).unsqueeze(-2)
        S = S / (1.0 + S.abs().sum((-1, -2), keepdim=True))
        out[:, :, t] = (S * q[:, :, t].unsqueeze(-1)).sum(-2)
    return out


# mtmc: x=f32[B,T,N] F_=f32[B,T,N,N]@-0.3..0.3 B=2 T=20 N=6
def changing(x, F_):
    P = torch.eye(x.shape[2], device=x.device).expand(x.shape[0], x.shape[2], x.shape[2])
    for t in range(x.shape[1]):
        P = F_[:, t] @ P @ F_[:, t].transpose(1, 2) + x[:, t].unsqueeze(2)
    return P * 2


# mtmc: x=f32[B,T,C] B=3 T=20 C=7
def counted(x):
    h = torch.zeros_like(x[:, 0])
    t = 0
    while t < x.shape[1]:
        h = 0.5 * h + x[:, t] - h.mean(1, keepdim=True)
        t += 1
    return h * t
"""

NAMES = [line.split("(")[0].removeprefix("def ") for line in BLOCKS.splitlines() if line.startswith("def ")]
