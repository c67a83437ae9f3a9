import torch


# mtmc: x=f32[M,N] M=16 N=400
def log_sum(x):
    return torch.logsumexp(x * 0.5, -1)
