import torch


# mtmc: x=f32[T,B,G] w=f32[H,G]@-0.2..0.2 B=32 T=64 H=48 G=192
def lstm(x, w):
    h = c = torch.zeros(x.shape[1], w.shape[0], device=x.device)
    outs = []
    for t in range(x.shape[0]):
        i, f, g, o = (x[t] + h @ w).chunk(4, dim=1)
        c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
        h = torch.sigmoid(o) * torch.tanh(c)
        outs.append(h)
    return torch.stack(outs)
