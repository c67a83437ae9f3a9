import torch


# mtmc: x=f32[B,T,X] W=f32[X,H] U=f32[H,H] b=f32[H] B=4 T=64 X=16 H=32
def elman(x, W, U, b):
    h = torch.zeros(x.shape[0], U.shape[0], device=x.device)
    outs = []
    for t in range(x.shape[1]):
        h = torch.tanh(x[:, t] @ W + h @ U + b)
        outs.append(h)
    return torch.stack(outs, dim=1)
