"""Loops that combine the elements of a small state: paths, alignments, assignments, filters."""

from __future__ import annotations

import torch
import torch.nn.functional as F


# mtmc: scores=f32[B,T,N] changes=f32[N,N] B=32 T=512 N=48
def best_path(scores, changes):
    best = scores[:, 0]
    came_from = []
    for t in range(1, scores.shape[1]):
        best, index = (best.unsqueeze(2) + changes).max(dim=1)
        best = best + scores[:, t]
        came_from.append(index)
    return best, torch.stack(came_from, dim=1)


# mtmc: scores=f32[T,B,N] changes=f32[N,N] lengths=i64[B]@1..512 T=512 B=64 N=32
def partition_function(scores, changes, lengths):
    alpha = scores[0]
    for t in range(1, scores.shape[0]):
        following = torch.logsumexp(alpha.unsqueeze(2) + changes, dim=1) + scores[t]
        alpha = torch.where((t < lengths).unsqueeze(1), following, alpha)
    return torch.logsumexp(alpha, dim=1)


# mtmc: log_probs=f32[B,T,S] may_skip=bool[B,S] B=32 T=400 S=61
def alignment_score(log_probs, may_skip):
    """The forward pass of CTC over labels with blanks between them."""
    low = torch.finfo(log_probs.dtype).min / 2
    alpha = torch.full_like(log_probs[:, 0], low)
    alpha[:, :2] = log_probs[:, 0, :2]
    for t in range(1, log_probs.shape[1]):
        one = F.pad(alpha[:, :-1], (1, 0), value=low)
        two = torch.where(may_skip, F.pad(alpha[:, :-2], (2, 0), value=low), low)
        alpha = torch.logsumexp(torch.stack([alpha, one, two]), dim=0) + log_probs[:, t]
    return torch.logaddexp(alpha[:, -1], alpha[:, -2])


# mtmc: affinity=f32[B,N,N] B=256 N=64
def soft_assignment(affinity, temperature: float = 0.5, n_iters: int = 50):
    log_p = affinity / temperature
    for _ in range(n_iters):
        log_p = log_p - torch.logsumexp(log_p, dim=2, keepdim=True)
        log_p = log_p - torch.logsumexp(log_p, dim=1, keepdim=True)
    return log_p.exp()


# mtmc: z=f32[B,T,1] motion=f32[4,4]@-0.4..0.4 seen=f32[1,4] B=512 T=256
def track(z, motion, seen):
    """A Kalman filter with four states and one measurement."""
    batch = z.shape[0]
    x = torch.zeros(batch, 4, 1, device=z.device)
    P = torch.eye(4, device=z.device).expand(batch, 4, 4)
    noise = 0.01 * torch.eye(4, device=z.device)
    out = []
    for t in range(z.shape[1]):
        x = motion @ x
        P = motion @ P @ motion.T + noise
        S = seen @ P @ seen.T + 0.1
        gain = P @ seen.T / S
        x = x + gain * (z[:, t].unsqueeze(-1) - seen @ x)
        P = P - gain @ (seen @ P)
        out.append(x.squeeze(-1))
    return torch.stack(out, dim=1)


# mtmc: u=f32[B,N] B=1024 N=256
def heat(u, rate: float = 0.2, n_steps: int = 500):
    step = 0
    while step < n_steps:
        u = u + rate * (torch.roll(u, 1, dims=1) - 2 * u + torch.roll(u, -1, dims=1))
        step += 1
    return u
