"""Cross entropy with label smoothing, per token, padding left out by the caller."""

import torch


# mtmc: logits=f32[N,V] target=i64[N]@0..V-1 N=4096 V=32000
def label_smoothed_cross_entropy(logits, target, smoothing: float = 0.1):
    log_probs = torch.log_softmax(logits, dim=-1)
    nll = -log_probs.gather(-1, target.unsqueeze(-1)).squeeze(-1)
    smooth = -log_probs.mean(dim=-1)
    loss = (1.0 - smoothing) * nll + smoothing * smooth
    return loss.mean()
