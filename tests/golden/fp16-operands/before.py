import torch
import torch.nn.functional as F


# mtmc: x=f32[B,18,H,W] w=f32[6,18,3,3] B=2 H=5 W=6
def conv_tanh(x, w):
    return torch.tanh(F.conv2d(x, w, padding=1))
