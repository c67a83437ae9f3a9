import torch.nn.functional as F


# mtmc: x=f16[M,K] w=f16[N,K] bias=f16[N] M=48 K=64 N=32
def linear_gelu(x, w, bias):
    return F.gelu(F.linear(x, w, bias))
