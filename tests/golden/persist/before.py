import torch


# mtmc: x=f32[M,N] weight=f32[N] M=48 N=64
def rms_norm(x, weight):
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * weight
