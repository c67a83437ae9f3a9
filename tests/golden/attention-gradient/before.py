import torch


# mtmc: q=bf16[B,S,32] k=bf16[B,S,32] v=bf16[B,S,32] B=2 S=48 grad=q,k,v
def attention(q, k, v):
    return torch.softmax(q @ k.transpose(-1, -2) / 8, -1) @ v
