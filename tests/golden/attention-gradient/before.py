import torch


# mtmc: q=f32[B,S,32] k=f32[B,S,32] v=f32[B,S,32] B=2 S=48 grad=q,k,v
def attention(q, k, v):
    return torch.softmax(q @ k.transpose(-1, -2) / 8, -1) @ v
