import torch.nn.functional as F


# mtmc: q=f32[B,H,S,D] k=f32[B,H,S,D] v=f32[B,H,S,D] B=1 H=2 S=40 D=16
def attend(q, k, v):
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)
