"""Loops over time steps as people write them, with few steps."""

LOOPS = """
import torch
import torch.nn.functional as F


# mtmc: a=f32[B,T,D] b=f32[B,T,D] B=3 T=20 D=5
def recurrence(a, b):
    batch, steps, width = a.shape
    h = torch.zeros(batch, width, dtype=a.dtype, device=a.device)
    out = torch.empty_like(a)
    for t in range(steps):
        h = a[:, t] * h + b[:, t]
        out[:, t] = h
    return out


# mtmc: x=f32[T,B,D] y=f32[T,B,D] T=20 B=3 D=5
def gated(x, y):
    c = torch.zeros_like(x[0])
    outs = []
    for x_t, y_t in zip(x, y):
        c = torch.sigmoid(x_t) * c + torch.tanh(y_t)
        h = torch.sigmoid(y_t) * torch.tanh(c)
        outs.append(h)
    return torch.stack(outs), (h, c)


# mtmc: x=f32[B,T,D] lengths=i64[B]@0..20 B=3 T=20 D=5
def masked(x, lengths):
    h = x.new_zeros(x.shape[0], x.shape[2])
    outs = []
    for t, x_t in enumerate(x.unbind(1)):
        h = torch.where((t < lengths)[:, None], torch.tanh(x_t + h), h)
        outs.append(h / (t + 1))
    return torch.stack(outs, dim=1), h


# mtmc: rewards=f32[T,B] values=f32[T,B] done=f32[T,B] last_value=f32[B] last_done=f32[B] T=20 B=6
def advantages(rewards, values, done, last_value, last_done, gamma: float = 0.99, lam: float = 0.95):
    out = torch.zeros_like(rewards)
    total = 0
    steps = rewards.shape[0]
    for t in reversed(range(steps)):
        if t == steps - 1:
            alive, following = 1.0 - last_done, last_value
        else:
            alive, following = 1.0 - done[t + 1], values[t + 1]
        delta = rewards[t] + gamma * following * alive - values[t]
        out[t] = total = delta + gamma * lam * alive * total
    return out, out + values


# mtmc: rewards=f32[T,B] values=f32[S,B] T=20 S=21 B=6
def from_the_end(rewards, values):
    out = []
    g = 0.0
    for t in range(rewards.size(0) - 1, -1, -1):
        g = rewards[t] + 0.9 * values[t + 1] - values[t] + 0.8 * g
        out.insert(0, g)
    return torch.stack(out)


# mtmc: x=f32[B,T,D] alpha=f32[D]@0..1 B=3 T=20 D=5
def moving_average(x, alpha):
    out = torch.zeros_like(x)
    out[:, 0] = x[:, 0]
    for t in range(1, x.shape[1]):
        out[:, t] = alpha * x[:, t] + (1 - alpha) * out[:, t - 1]
    return out


# mtmc: u=f32[B,L,D] delta=f32[B,L,D]@0..1 A=f32[D,N]@-2..0 B_=f32[B,L,N] C=f32[B,L,N] skip=f32[D] B=2 L=20 D=6 N=5
def selective_scan(u, delta, A, B_, C, skip):
    decay = torch.exp(delta.unsqueeze(-1) * A)
    drive = delta.unsqueeze(-1) * B_.unsqueeze(2) * u.unsqueeze(-1)
    x = torch.zeros(u.shape[0], u.shape[2], A.shape[1], device=u.device)
    ys = []
    for i in range(u.shape[1]):
        x = decay[:, i] * x + drive[:, i]
        ys.append((x * C[:, i].unsqueeze(1)).sum(-1))
    return torch.stack(ys, dim=1) + u * skip


# mtmc: x=f32[B,D,N] drive=f32[B,L,D] B_=f32[B,L,N] C=f32[B,L,N] B=2 L=20 D=6 N=5
def products(x, drive, B_, C):
    ys, zs = [], []
    for i in range(drive.shape[1]):
        x = 0.9 * x + torch.einsum("bd,bn->bdn", drive[:, i], B_[:, i])
        ys.append(torch.einsum("bdn,bn->bd", x, C[:, i]))
        zs.append(torch.matmul(x, C[:, i].unsqueeze(-1)).squeeze(-1))
    return torch.stack(ys, dim=1), torch.stack(zs, dim=1)


# mtmc: x=f32[B,T,D] h=f32[B,D] B=3 T=20 D=5
def in_place(x, h):
    for t in range(x.size(1)):
        h *= 0.9
        h += x[:, t]
    return h


# mtmc: x=f32[B,T,D] B=3 T=20 D=5
def two_back(x):
    out = x.clone()
    for t in range(2, x.shape[1]):
        out[:, t] = 0.5 * out[:, t - 1] - 0.3 * out[:, t - 2] + x[:, t]
    return out


# mtmc: x=f32[B,D] B=3 D=5
def bisection(x):
    low, high = torch.zeros_like(x), x.clamp(min=1.0)
    for _ in range(24):
        middle = (low + high) / 2
        low = torch.where(middle * middle <= x, middle, low)
        high = torch.where(middle * middle <= x, high, middle)
    return (low + high) / 2


# mtmc: x=f32[B,T,D] B=3 T=20 D=5
def counted(x):
    h = torch.zeros(1, x.shape[2], device=x.device)
    k = 0
    out = torch.zeros_like(x)
    for _ in range(x.shape[1]):
        h = h + x[:, k]
        out[:, k] += h
        k += 1
    return out


# mtmc: x=f32[B,T,D] B=3 T=20 D=5
def read_afterwards(x):
    h = torch.zeros_like(x[:, 0])
    for t in range(x.shape[1]):
        x_t = x[:, t]
        h = h * 0.5 + x_t
    return h + x_t * t


# mtmc: x=f32[B,T,D] B=3 T=20 D=5
def normalised(x):
    p = torch.full_like(x[:, 0], 0.2)
    out = torch.empty_like(x)
    for t in range(x.shape[1]):
        p = torch.softmax(torch.log(p + 1e-6) + x[:, t], dim=-1)
        out[:, t] = p
    return out


# mtmc: x=f16[B,T,D] B=3 T=20 D=5
def half(x):
    h = torch.zeros_like(x[:, 0])
    outs = []
    for x_t in reversed(x.unbind(1)):
        h = 0.9 * h + x_t
        outs.append(h)
    outs.reverse()
    return torch.stack(outs, dim=1)


# mtmc: x=f32[B,T,D] B=3 T=20 D=5
def in_place_rows(x):
    for t in range(1, x.shape[1]):
        x[:, t] += 0.5 * x[:, t - 1]
    return x


# mtmc: x=f32[B,T,D] B=3 T=20 D=5
def pairs(x):
    state = (torch.zeros_like(x[:, 0]), torch.zeros_like(x[:, 0]))
    outs = [x[:, :1]]
    for t in range(1, x.shape[1]):
        h, c = state
        c = 0.5 * c + x[:, t]
        h = torch.tanh(c) * h + 1
        state = (h, c)
        outs.append(h.unsqueeze(1))
    return torch.cat(outs, dim=1)


# mtmc: x=f32[B,T] B=3 T=20
def seen_so_far(x):
    count = torch.zeros(x.shape[0], dtype=torch.long, device=x.device)
    seen = torch.zeros(x.shape[0], dtype=torch.bool, device=x.device)
    out = torch.zeros(x.shape, dtype=torch.long, device=x.device)
    for t in range(x.shape[1]):
        seen = seen | (x[:, t] > 1)
        count = torch.where(seen, count + 1, count)
        out[:, t] = count
    return out, seen


# mtmc: x=f32[B,T,H,D] g=f32[B,T,H] B=2 T=20 H=3 D=5
def of_unit_norm(x, g):
    state = torch.zeros(x.shape[0], x.shape[2], x.shape[3], device=x.device)
    y = torch.zeros_like(x)
    for t in range(x.shape[1]):
        state = state * torch.exp(-F.softplus(g[:, t]))[..., None] + x[:, t]
        y[:, t] = state / state.norm(dim=-1, keepdim=True).clamp(min=1.0)
    return y


class Cell(torch.nn.Module):
    def __init__(self, width):
        super().__init__()
        self.decay = torch.nn.Parameter(torch.rand(width))
        self.scale = 0.5

    def step(self, h, x_t):
        return h * torch.sigmoid(self.decay) + self.scale * x_t

    # mtmc: x=f32[B,T,D] B=3 T=20 D=5 init: width=5
    def forward(self, x):
        h, outs = torch.zeros_like(x[:, 0]), []
        for t in range(x.shape[1]):
            h = self.step(h, x[:, t])
            outs.append(F.relu(h))
        return torch.stack(outs, dim=1)


# mtmc: delta=f32[B,T] discount=f32[B,T]@0..1 B=6 T=20
def differences_in_a_list(delta, discount):
    sums = [torch.zeros_like(delta[:, 0])]
    for t in reversed(range(delta.shape[1])):
        sums.append(delta[:, t] + discount[:, t] * sums[-1])
    return torch.flip(torch.stack(sums[1:], 1), dims=[1])


# mtmc: x=f32[T,B] T=20 B=6
def smoothed_backwards(x):
    out = [x[-1]]
    for t in range(x.shape[0] - 2, -1, -1):
        out.insert(0, 0.9 * out[0] + 0.1 * x[t])
    return torch.stack(out)
"""
NAMES = (
    "recurrence gated masked advantages from_the_end moving_average selective_scan in_place two_back bisection products "
    "counted read_afterwards normalised half in_place_rows pairs seen_so_far of_unit_norm differences_in_a_list "
    "smoothed_backwards Cell"
).split()
