"""float32 products of programs that allow TF32."""

import torch
import torch.nn.functional as F

torch.set_float32_matmul_precision("high")


# mtmc: x=f32[B,2048] w=f32[2048,2048] b=f32[2048] B=2048
def layer_of_2048(x, w, b):
    return F.relu(F.linear(x, w, b))


# mtmc: x=f32[B,4096] w=f32[4096,4096] B=4096
def product_of_4096(x, w):
    return x @ w


# mtmc: a=f32[B,1024,1024] b=f32[B,1024,1024] B=16
def batch_of_1024(a, b):
    return torch.bmm(a, b)
