import torch


# mtmc: x=f32[M,N] M=2 N=4096
def log_sum(x):
    return torch.logsumexp(x * 0.5, -1)
