import torch.nn.functional as F


# mtmc: gate=f32[M,N] up=f32[M,N] M=32 N=96
def swiglu(gate, up):
    return F.silu(gate) * up
