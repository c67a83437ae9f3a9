"""User code for the tests of actions."""

LINEAR_SUM = """import torch
import torch.nn.functional as F
# mtmc: x=f32[M,K] w=f32[N,K] b=f32[N] M=48 K=40 N=64
def f(x, w, b):
    y = F.linear(x, w, b) / 2.0
    s = torch.sum(y, dim=1, keepdim=True)
    m = torch.max(s, dim=1, keepdim=True)[0]
    return torch.logsumexp(m, dim=1, keepdim=True) * 1.5
"""
LINEAR_TERMS = """import torch
import torch.nn.functional as F
# mtmc: x=f32[M,K] w=f32[N,K] b=f32[N] c=f32[N] M=48 K=40 N=64
def f(x, w, b, c):
    y = ((F.linear(x, w, b) - c) * 3.0 + b) / 2.0
    return F.gelu(torch.mean(y, dim=1, keepdim=True)) + x
"""
LINEAR_ROWS = """import torch
import torch.nn.functional as F
# mtmc: x=f32[B,S,K] w=f32[N,K] b=f32[N] B=4 S=24 K=40 N=32
def f(x, w, b):
    return torch.relu(F.linear(x, w, b).mean(dim=1))
"""
CONSTANTS = """import torch
# mtmc: x=f32[B,D] B=6 D=50
def f(x):
    y = (x * 3.0) / 4.0 + 1.0 - 0.25
    z = y.neg().neg() * 1
    return torch.softmax(z.t().t(), -1)
"""
CONVOLUTION = """import torch
import torch.nn.functional as F
# mtmc: x=f32[B,3,H,W] w=f32[8,3,3,3] b=f32[8] B=2 H=10 W=12
def f(x, w, b):
    y = F.conv2d(x, w, b, padding=1) * 0.5
    return torch.tanh(y) + 1.0
"""
NORMALISED = """import torch
import torch.nn.functional as F
# mtmc: x=f32[B,3,H,W] w=f32[8,3,3,3] m=f32[8] v=f32[8]@0..1 g=f32[8] c=f32[8] B=2 H=10 W=12
def f(x, w, m, v, g, c):
    y = F.batch_norm(F.conv2d(x, w), m, v + 0.5, g, c, False)
    return torch.tanh(y) + 1.0
"""
SHARED = """import torch
# mtmc: x=f32[N,M] N=40 M=48
def f(x):
    g = torch.tanh(x) * 0.5
    return g.sum(0), g.sum(1)
"""
LONG = """import torch
# mtmc: x=f32[B,D] B=4 D=200000
def f(x):
    return torch.logsumexp(x * 2.0, -1)
"""
DEEP = """import torch
# mtmc: a=f32[M,K] b=f32[K,N] M=64 K=100000 N=64
def f(a, b):
    return torch.relu(a @ b)
"""
TWO_STAGES = """import torch
# mtmc: x=f32[B,C,S] B=4 C=16 S=32
def f(x):
    y = torch.softmax(x, -1) * 2.0
    return y.sum(1) - x.amax((1, 2), keepdim=True).reshape(x.shape[0], 1)
"""
