import torch


# mtmc: q=bf16[B,H,S,64] k=bf16[B,H,S,64] v=bf16[B,H,S,64] B=1 H=2 S=96 grad=q,k,v
def attention(q, k, v):
    length = q.shape[-2]
    hidden = torch.ones(length, length, dtype=torch.bool, device=q.device).triu(1)
    scores = (q @ k.transpose(-1, -2) * 0.125).masked_fill(hidden, float("-inf"))
    return torch.softmax(scores, -1) @ v
