import torch


# mtmc: x=f32[M,N] M=16 N=96
def running_mean(x):
    count = torch.arange(1, x.shape[1] + 1)
    return torch.cumsum(x, 1) / count
