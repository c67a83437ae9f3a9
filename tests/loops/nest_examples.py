"""Tables that two nested loops fill cell by cell, as people write them, with few rows and columns."""

NESTS = """
import torch


# mtmc: x=f32[B,N,D] y=f32[B,M,D] B=2 N=18 M=21 D=3
def warping(x, y):
    cost = torch.cdist(x, y)
    b, n, m = cost.shape
    table = torch.full((b, n + 1, m + 1), float("inf"), device=x.device)
    table[:, 0, 0] = 0
    for i in range(1, n + 1):
        for j in range(1, m + 1):
            best = torch.minimum(torch.minimum(table[:, i - 1, j], table[:, i, j - 1]), table[:, i - 1, j - 1])
            table[:, i, j] = cost[:, i - 1, j - 1] + best
    return table[:, n, m]


# mtmc: cost=f32[N,M] N=18 M=17
def one_pair(cost):
    n, m = cost.shape
    d = torch.full((n + 1, m + 1), 1e9)
    d[0][0] = 0.0
    for i in range(n):
        for j in range(m):
            d[i + 1][j + 1] = cost[i][j] + torch.min(torch.stack([d[i][j + 1], d[i + 1][j], d[i][j]]))
    return d[n][m]


# mtmc: cost=f32[B,N,M] B=2 N=17 M=18
def soft_minimum(cost, gamma: float = 0.7):
    r = cost.new_full((cost.shape[0], cost.shape[1] + 1, cost.shape[2] + 1), 1e6)
    r[:, 0, 0] = 0
    for i in range(1, r.shape[1]):
        for j in range(1, r.shape[2]):
            three = torch.stack((r[:, i - 1, j], r[:, i, j - 1], r[:, i - 1, j - 1]), dim=-1)
            r[:, i, j] = cost[:, i - 1, j - 1] - gamma * torch.logsumexp(-three / gamma, dim=-1)
    return r[:, 1:, 1:]


# mtmc: a=i64[B,N]@0..3 b=i64[B,M]@0..3 B=3 N=17 M=19
def edits(a, b):
    n, m = a.shape[1], b.shape[1]
    d = torch.zeros(a.shape[0], n + 1, m + 1, dtype=torch.int64, device=a.device)
    d[:, :, 0] = torch.arange(n + 1, device=a.device)
    d[:, 0] = torch.arange(m + 1, device=a.device)
    for i in range(1, n + 1):
        for j in range(1, m + 1):
            change = (a[:, i - 1] != b[:, j - 1]).long()
            d[:, i, j] = torch.minimum(torch.minimum(d[:, i - 1, j], d[:, i, j - 1]) + 1, d[:, i - 1, j - 1] + change)
    return d[:, -1, -1]


# mtmc: a=i64[N]@0..3 b=i64[M]@0..3 N=17 M=18
def common_subsequence(a, b):
    length = torch.zeros(a.size(0) + 1, b.size(0) + 1)
    for i in range(a.size(0)):
        for j in range(b.size(0)):
            longer = torch.maximum(length[i, j + 1], length[i + 1, j])
            length[i + 1, j + 1] = torch.where(a[i] == b[j], length[i, j] + 1, longer)
    return length[-1, -1]


# mtmc: score=f32[B,N,M] B=2 N=17 M=18
def affine_gaps(score, opening: float = 1.5, extending: float = 0.25):
    b, n, m = score.shape
    match = torch.zeros(b, n + 1, m + 1, device=score.device)
    down = torch.full_like(match, -1e4)
    right = torch.full_like(match, -1e4)
    for i in range(1, n + 1):
        for j in range(1, m + 1):
            down[:, i, j] = torch.maximum(match[:, i - 1, j] - opening, down[:, i - 1, j] - extending)
            right[:, i, j] = torch.maximum(match[:, i, j - 1] - opening, right[:, i, j - 1] - extending)
            gap = torch.maximum(down[:, i, j], right[:, i, j])
            match[:, i, j] = torch.maximum(match[:, i - 1, j - 1] + score[:, i - 1, j - 1], gap).clamp(min=0)
    return match.amax((1, 2))


# mtmc: blank=f32[B,T,U] label=f32[B,T,U] B=2 T=17 U=18
def transducer(blank, label):
    alpha = torch.zeros_like(blank)
    for t in range(blank.shape[1]):
        for u in range(blank.shape[2]):
            if t == 0 and u == 0:
                alpha[:, t, u] = 0.0
            elif u == 0:
                alpha[:, t, u] = alpha[:, t - 1, u] + blank[:, t - 1, u]
            elif t == 0:
                alpha[:, t, u] = alpha[:, t, u - 1] + label[:, t, u - 1]
            else:
                stay = alpha[:, t - 1, u] + blank[:, t - 1, u]
                alpha[:, t, u] = torch.logaddexp(stay, alpha[:, t, u - 1] + label[:, t, u - 1])
    return alpha[:, -1, -1] + blank[:, -1, -1]


# mtmc: gain=f32[B,N,M] B=2 N=18 M=19
def from_the_end(gain):
    b, n, m = gain.shape
    value = torch.zeros(b, n + 1, m + 1, device=gain.device)
    for i in range(n - 1, -1, -1):
        for j in reversed(range(m)):
            value[:, i, j] = gain[:, i, j] + torch.maximum(0.9 * value[:, i + 1, j], 0.8 * value[:, i, j + 1])
    return value[:, 0, 0]


# mtmc: cost=f32[B,N,M] B=2 N=18 M=20
def band(cost, width: int = 5):
    b, n, m = cost.shape
    d = torch.full((b, n + 1, m + 1), float("inf"), device=cost.device)
    d[:, 0, 0] = 0
    for i in range(1, n + 1):
        for j in range(1, m + 1):
            if abs(i - j) > width:
                continue
            d[:, i, j] = cost[:, i - 1, j - 1] + torch.minimum(d[:, i - 1, j - 1], torch.minimum(d[:, i - 1, j], d[:, i, j - 1]))
    return d[:, n, m]


# mtmc: energy=f32[B,N,M] B=2 N=17 M=18
def seam(energy):
    total = energy.clone()
    for i in range(1, energy.shape[1]):
        for j in range(energy.shape[2]):
            best = total[:, i - 1, j]
            if j > 0:
                best = torch.minimum(best, total[:, i - 1, j - 1])
            if j < energy.shape[2] - 1:
                best = torch.minimum(best, total[:, i - 1, j + 1])
            total[:, i, j] = energy[:, i, j] + best
    return total[:, -1].amin(1)


# mtmc: x=f32[B,N,M,D] left=f32[D]@0..1 up=f32[D]@0..1 B=2 N=17 M=18 D=3
def two_directions(x, left, up):
    h = torch.zeros(x.shape[0], x.shape[1] + 1, x.shape[2] + 1, x.shape[3], device=x.device)
    for i in range(x.shape[1]):
        for j in range(x.shape[2]):
            h[:, i + 1, j + 1] = torch.tanh(x[:, i, j] + left * h[:, i + 1, j] + up * h[:, i, j + 1])
    return h[:, 1:, 1:]


# mtmc: x=f32[B,N,M] w=f32[B,N,M] B=2 N=17 M=18
def rows(x, w):
    ends = []
    out = torch.zeros_like(x)
    for i in range(x.shape[1]):
        h = torch.zeros_like(x[:, 0, 0])
        row = x[:, i]
        for j in range(x.shape[2]):
            h = torch.tanh(h * w[:, i, j] + row[:, j])
            out[:, i, j] = h
        ends.append(h)
    return out, torch.stack(ends, 1)


# mtmc: x=f32[B,N,M,D] B=2 N=17 M=18 D=3
def through_all(x):
    largest = torch.zeros_like(x[:, 0, 0])
    h = x[:, 0, 0]
    ends = []
    for i in range(x.size(1)):
        for j in range(x.size(2)):
            h = 0.9 * h + x[:, i, j]
            largest = torch.maximum(largest, h)
        ends.append(h)
    return torch.stack(ends, 1), largest


# mtmc: a=f32[B,N] b=f32[B,M] B=2 N=17 M=18
def two_rows(a, b, gap: float = 0.4):
    n, m = a.size(1), b.size(1)
    above = gap * torch.arange(m + 1, device=a.device).expand(a.size(0), m + 1)
    for i in range(n):
        row = torch.empty_like(above)
        row[:, 0] = above[:, 0] + gap
        for j in range(1, m + 1):
            change = above[:, j - 1] + (a[:, i] - b[:, j - 1]).abs()
            row[:, j] = torch.minimum(change, torch.minimum(above[:, j], row[:, j - 1]) + gap)
        above = row
    return above[:, -1]


# mtmc: cost=f32[B,N,M] B=2 N=17 M=18
def first_column(cost):
    total = cost.clone()
    for i in range(1, cost.shape[1]):
        total[:, i, 0] = total[:, i - 1, 0] + cost[:, i, 0]
        for j in range(1, cost.shape[2]):
            total[:, i, j] = cost[:, i, j] + torch.maximum(total[:, i - 1, j], total[:, i, j - 1])
    return total

# mtmc: x=f32[B,N] y=f32[B,M] B=2 N=17 M=18
def one_row(x, y):
    reach = torch.full((x.shape[0], y.shape[1] + 1), 50.0, device=x.device)
    reach[:, 0] = 0
    i = 0
    while i < x.shape[1]:
        for j in range(1, y.shape[1] + 1):
            step = (x[:, i] - y[:, j - 1]).abs() + 0.1 * i
            reach[:, j] = torch.minimum(reach[:, j] + step, reach[:, j - 1] + 2 * step)
        i += 1
    return reach[:, 1:]
"""
NAMES = tuple(line.split("(")[0][4:] for line in NESTS.splitlines() if line.startswith("def "))
