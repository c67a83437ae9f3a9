"""Assorted numerics: PDE stencils, particles, rotations, rendering, time series, finance."""

import math

import torch
import torch.nn as nn
import torch.nn.functional as F


# ---------------------------------------------------------------- PDE stencils


def laplacian(u, dx):
    """5-point Laplacian, periodic."""
    return (
        torch.roll(u, 1, -1) + torch.roll(u, -1, -1) + torch.roll(u, 1, -2) + torch.roll(u, -1, -2) - 4.0 * u
    ) / (dx * dx)


# mtmc: u=f32[B,H,W] u_prev=f32[B,H,W] c=f32[H,W]@0.5..1.5 B=8 H=1024 W=1024
def wave_step(u, u_prev, c, dt: float = 0.1, dx: float = 1.0, damping: float = 0.002):
    """Leapfrog step of the 2D wave equation with a slightly absorbing medium."""
    lap = laplacian(u, dx)
    u_next = (2.0 - damping * dt) * u - (1.0 - damping * dt) * u_prev + (c * dt) ** 2 * lap
    return u_next, u


# mtmc: T=f32[B,D,H,W] kappa=f32[D,H,W]@0.1..1 source=f32[D,H,W] B=2 D=96 H=160 W=160
def heat3d_interior(T, kappa, source, dt: float = 0.05):
    """Explicit heat step, Dirichlet: the outer layer keeps its values."""
    c = T[:, 1:-1, 1:-1, 1:-1]
    lap = (
        T[:, 2:, 1:-1, 1:-1]
        + T[:, :-2, 1:-1, 1:-1]
        + T[:, 1:-1, 2:, 1:-1]
        + T[:, 1:-1, :-2, 1:-1]
        + T[:, 1:-1, 1:-1, 2:]
        + T[:, 1:-1, 1:-1, :-2]
        - 6 * c
    )
    out = T.clone()
    out[:, 1:-1, 1:-1, 1:-1] = c + dt * (kappa[1:-1, 1:-1, 1:-1] * lap + source[1:-1, 1:-1, 1:-1])
    return out


def minmod(a, b):
    return 0.5 * (torch.sign(a) + torch.sign(b)) * torch.minimum(a.abs(), b.abs())


# mtmc: q=f32[N,M] vel=f32[N,M]@-1.0..1.0 N=4096 M=3000
def muscl_advection(q, vel, cfl: float = 0.4):
    """Second order upwind advection along the last axis with a minmod limiter."""
    ql = torch.roll(q, 1, dims=-1)
    qr = torch.roll(q, -1, dims=-1)
    slope = minmod(q - ql, qr - q)
    left = q + 0.5 * slope
    right = torch.roll(q - 0.5 * slope, -1, dims=-1)
    flux = torch.where(vel > 0, vel * left, vel * right)
    return q - cfl * (flux - torch.roll(flux, 1, dims=-1))


# mtmc: p=f32[N,N] rhs=f32[N,N] N=768
def jacobi_pressure(p, rhs, iters: int = 20, omega: float = 0.8):
    """Weighted Jacobi sweeps of the pressure Poisson equation, Neumann walls."""
    for _ in range(iters):
        pp = F.pad(p[None, None], (1, 1, 1, 1), mode="replicate")[0, 0]
        nb = pp[:-2, 1:-1] + pp[2:, 1:-1] + pp[1:-1, :-2] + pp[1:-1, 2:]
        p = (1 - omega) * p + omega * 0.25 * (nb - rhs)
    # remove the null space
    return p - p.mean()


# ---------------------------------------------------------------- particles, graphs


# mtmc: pos=f32[B,N,3]@0..12.0 charge=f32[B,N] B=4 N=1000
def lj_coulomb_energy(pos, charge, box: float = 12.0, sigma: float = 0.3, epsilon: float = 1.0, cutoff: float = 2.5):
    """Energy and forces per particle, minimum image convention, shifted LJ + reaction field."""
    n = pos.shape[1]
    d = pos[:, :, None, :] - pos[:, None, :, :]
    d = d - box * torch.round(d / box)
    r2 = (d * d).sum(-1)
    eye = torch.eye(n, dtype=torch.bool, device=pos.device)
    inside = (r2 < cutoff * cutoff) & ~eye
    r2 = torch.where(inside, r2.clamp(min=0.01), torch.ones_like(r2))
    sr6 = (sigma * sigma / r2) ** 3
    shift = (sigma / cutoff) ** 12 - (sigma / cutoff) ** 6
    e_lj = 4 * epsilon * (sr6 * sr6 - sr6 - shift)
    r = torch.sqrt(r2)
    qq = charge[:, :, None] * charge[:, None, :]
    e_c = qq * (1.0 / r + r2 / (2 * cutoff**3) - 1.5 / cutoff)
    energy = torch.where(inside, e_lj + e_c, torch.zeros_like(r2)).sum(-1) * 0.5
    f_scalar = 24 * epsilon * (2 * sr6 * sr6 - sr6) / r2 + qq * (1 / (r2 * r) - 1 / cutoff**3)
    f_scalar = f_scalar * inside
    force = (f_scalar[..., None] * d).sum(2)
    return energy, force


# mtmc: x=f32[N,64] edge_index=i64[2,E]@0..N-1 edge_dist=f32[E]@0..6.0 centers=f32[16]@0..5.0 w=f32[16,64] N=50000 E=300000
def cfconv_message(x, edge_index, edge_dist, centers, w, cutoff: float = 5.0, gamma: float = 10.0):
    """SchNet: radial basis -> filter, gather, multiply, sum at the receiving atoms."""
    src, dst = edge_index[0], edge_index[1]
    rbf = torch.exp(-gamma * (edge_dist[:, None] - centers[None, :]) ** 2)
    env = 0.5 * (torch.cos(edge_dist * math.pi / cutoff) + 1.0)
    env = env * (edge_dist < cutoff).float()
    filt = F.softplus(rbf @ w) - math.log(2.0)
    msg = x[src] * filt * env[:, None]
    out = torch.zeros_like(x).index_add_(0, dst, msg)
    deg = torch.zeros(x.shape[0], device=x.device, dtype=x.dtype)
    deg = deg.scatter_add_(0, dst, torch.ones_like(edge_dist))
    return out / deg.clamp(min=1.0)[:, None]


# ---------------------------------------------------------------- geometry


def quat_mul(a, b):
    aw, ax, ay, az = a.unbind(-1)
    bw, bx, by, bz = b.unbind(-1)
    return torch.stack(
        (
            aw * bw - ax * bx - ay * by - az * bz,
            aw * bx + ax * bw + ay * bz - az * by,
            aw * by - ax * bz + ay * bw + az * bx,
            aw * bz + ax * by - ay * bx + az * bw,
        ),
        dim=-1,
    )


# mtmc: q=f32[N,4] omega=f32[N,3] v=f32[N,3] N=1000000
def integrate_and_rotate(q, omega, v, dt: float = 0.01):
    """First order quaternion integration, then v from the body to the world frame."""
    zero = torch.zeros_like(omega[..., :1])
    q = q + 0.5 * dt * quat_mul(q, torch.cat([zero, omega], dim=-1))
    q = F.normalize(q, dim=-1)
    w, u = q[..., :1], q[..., 1:]
    t = 2 * torch.cross(u, v, dim=-1)
    return q, v + w * t + torch.cross(u, t, dim=-1)


# mtmc: quats=f32[N,4] scales=f32[N,3]@-5.0..-1.0 N=800000
def gaussian_covariance(quats, scales):
    """3D Gaussian splatting: the upper triangle of R S S^T R^T."""
    q = F.normalize(quats, dim=-1)
    w, x, y, z = torch.unbind(q, -1)
    R = torch.stack(
        [
            1 - 2 * (y**2 + z**2), 2 * (x * y - w * z), 2 * (x * z + w * y),
            2 * (x * y + w * z), 1 - 2 * (x**2 + z**2), 2 * (y * z - w * x),
            2 * (x * z - w * y), 2 * (y * z + w * x), 1 - 2 * (x**2 + y**2),
        ],
        dim=-1,
    ).view(q.shape[:-1] + (3, 3))  # fmt: skip
    M = R * torch.exp(scales)[:, None, :]
    cov = M @ M.transpose(1, 2)
    return torch.stack([cov[:, 0, 0], cov[:, 0, 1], cov[:, 0, 2], cov[:, 1, 1], cov[:, 1, 2], cov[:, 2, 2]], dim=-1)


C0 = 0.28209479177387814
C1 = 0.4886025119029199
C2 = [1.0925484305920792, -1.0925484305920792, 0.31539156525252005, -1.0925484305920792, 0.5462742152960396]


# mtmc: sh=f16[N,3,9] means=f32[N,3] cam=f32[3] N=1500000
def eval_sh_color(sh, means, cam):
    """View dependent colour from degree-2 spherical harmonics."""
    dirs = means - cam
    dirs = dirs / dirs.norm(dim=-1, keepdim=True)
    x, y, z = dirs[..., 0:1], dirs[..., 1:2], dirs[..., 2:3]
    c = sh.float()
    result = C0 * c[..., 0]
    result = result - C1 * y * c[..., 1] + C1 * z * c[..., 2] - C1 * x * c[..., 3]
    xx, yy, zz = x * x, y * y, z * z
    xy, yz, xz = x * y, y * z, x * z
    result = (
        result
        + C2[0] * xy * c[..., 4]
        + C2[1] * yz * c[..., 5]
        + C2[2] * (2.0 * zz - xx - yy) * c[..., 6]
        + C2[3] * xz * c[..., 7]
        + C2[4] * (xx - yy) * c[..., 8]
    )
    return torch.clamp_min(result + 0.5, 0.0)


# mtmc: origins=f32[R,3]@-3.0..3.0 dirs=f32[R,3] lo=f32[K,3]@-1.0..0.0 hi=f32[K,3]@0.1..1.0 R=60000 K=64
def ray_aabb(origins, dirs, lo, hi, near: float = 0.0):
    """Slab test of every ray against every box: nearest hit distance (inf when there is none) and box index."""
    inv = 1.0 / torch.where(dirs.abs() < 1e-6, torch.full_like(dirs, 1e-6), dirs)
    t0 = (lo[None] - origins[:, None]) * inv[:, None]
    t1 = (hi[None] - origins[:, None]) * inv[:, None]
    t_near = torch.minimum(t0, t1).amax(-1).clamp(min=near)
    t_far = torch.maximum(t0, t1).amin(-1)
    t = torch.where(t_near <= t_far, t_near, torch.full_like(t_near, float("inf")))
    dist, idx = t.min(dim=1)
    return dist, torch.where(torch.isinf(dist), torch.full_like(idx, -1), idx)


# mtmc: sigma=f32[R,S] rgb=f32[R,S,3] z_vals=f32[R,S]@2.0..6.0 rays_d=f32[R,3] R=65536 S=96
def raw2outputs(sigma, rgb, z_vals, rays_d, white_bkgd: bool = True):
    """NeRF volume rendering."""
    z_vals = torch.cumsum(z_vals, dim=-1) * 0.01
    dists = z_vals[..., 1:] - z_vals[..., :-1]
    dists = torch.cat([dists, torch.full_like(dists[..., :1], 1e10)], -1)
    dists = dists * torch.norm(rays_d[..., None, :], dim=-1)
    alpha = 1.0 - torch.exp(-F.relu(sigma) * dists)
    ones = torch.ones_like(alpha[:, :1])
    weights = alpha * torch.cumprod(torch.cat([ones, 1.0 - alpha + 1e-10], -1), -1)[:, :-1]
    rgb_map = torch.sum(weights[..., None] * torch.sigmoid(rgb), -2)
    depth_map = torch.sum(weights * z_vals, -1)
    acc_map = torch.sum(weights, -1)
    if white_bkgd:
        rgb_map = rgb_map + (1.0 - acc_map[..., None])
    return rgb_map, depth_map, acc_map, weights


# ---------------------------------------------------------------- statistics, time series, finance


# mtmc: x=f32[N,8] y=f32[M,8] log_ls=f32[8]@-0.5..0.5 N=6000 M=3001
class Matern52Kernel(nn.Module):
    """ARD Matern-5/2 plus a linear kernel."""

    def __init__(self, outputscale=1.3, linear=0.05):
        super().__init__()
        self.outputscale = outputscale
        self.linear = linear

    def forward(self, x, y, log_ls):
        ls = log_ls.exp()
        xs, ys = x / ls, y / ls
        sq = (xs**2).sum(-1)[:, None] + (ys**2).sum(-1)[None, :] - 2.0 * xs @ ys.t()
        d = torch.sqrt(sq.clamp_min(1e-12))
        r = math.sqrt(5.0) * d
        k = (1.0 + r + r**2 / 3.0) * torch.exp(-r)
        return self.outputscale * k + self.linear * (x @ y.t())


# mtmc: wav=f32[B,L] B=64 L=160000
def framed_log_energy(wav, frame: int = 400, hop: int = 160, preemph: float = 0.97, floor: float = 1e-8):
    """Pre-emphasis, Povey-like window, per-frame log energy and zero crossing rate."""
    wav = torch.cat([wav[:, :1], wav[:, 1:] - preemph * wav[:, :-1]], dim=1)
    frames = wav.unfold(-1, frame, hop)
    frames = frames - frames.mean(dim=-1, keepdim=True)
    n = torch.arange(frame, device=wav.device, dtype=wav.dtype)
    win = (0.5 - 0.5 * torch.cos(2 * math.pi * n / (frame - 1))).pow(0.85)
    zcr = (frames[..., 1:] * frames[..., :-1] < 0).float().mean(dim=-1)
    energy = torch.log((frames * win).pow(2).sum(-1).clamp(min=floor))
    return energy, zcr


# mtmc: price=f64[A,T]@50.0..150.0 A=2000 T=1500
def bollinger_features(price, window: int = 20, k: float = 2.0):
    """Rolling mean/std by cumulative sums, band position, log returns and their drawdown."""
    csum = F.pad(price.cumsum(-1), (1, 0))
    csum2 = F.pad((price * price).cumsum(-1), (1, 0))
    mean = (csum[:, window:] - csum[:, :-window]) / window
    var = (csum2[:, window:] - csum2[:, :-window]) / window - mean**2
    std = var.clamp(min=0).sqrt()
    tail = price[:, window - 1 :]
    position = (tail - mean) / (k * std + 1e-12)
    ret = torch.diff(price.log(), dim=-1)
    drawdown = price / torch.cummax(price, dim=-1).values - 1
    return position, ret, drawdown.amin(-1)


def _ncdf(x):
    return 0.5 * (1.0 + torch.erf(x / math.sqrt(2.0)))


# mtmc: S=f32[N]@80.0..120.0 K=f32[N]@80.0..120.0 T=f32[N]@0.05..2.0 vol=f32[N]@0.1..0.6 is_call=bool[N] N=5000011
def black_scholes_greeks(S, K, T, vol, is_call, r: float = 0.03, div: float = 0.01):
    sqrt_t = torch.sqrt(T)
    d1 = (torch.log(S / K) + (r - div + 0.5 * vol**2) * T) / (vol * sqrt_t)
    d2 = d1 - vol * sqrt_t
    df_r, df_q = torch.exp(-r * T), torch.exp(-div * T)
    call = S * df_q * _ncdf(d1) - K * df_r * _ncdf(d2)
    put = K * df_r * _ncdf(-d2) - S * df_q * _ncdf(-d1)
    price = torch.where(is_call, call, put)
    delta = torch.where(is_call, df_q * _ncdf(d1), -df_q * _ncdf(-d1))
    pdf = torch.exp(-0.5 * d1**2) / math.sqrt(2 * math.pi)
    gamma = df_q * pdf / (S * vol * sqrt_t)
    vega = S * df_q * pdf * sqrt_t
    return price, delta, gamma, vega


# mtmc: mean=f32[B,4] cov=f32[B,4,4] accel=f32[B,2] z=f32[B,2] B=400000
def kalman_predict_gate(mean, cov, accel, z, dt: float = 0.1, q: float = 0.5, r: float = 0.2):
    """Constant velocity model (x, y, vx, vy): predict, then the Mahalanobis distance of the measurement."""
    Fm = torch.eye(4, device=mean.device, dtype=mean.dtype)
    Fm[0, 2] = dt
    Fm[1, 3] = dt
    G = torch.zeros(4, 2, device=mean.device, dtype=mean.dtype)
    G[0, 0] = G[1, 1] = 0.5 * dt * dt
    G[2, 0] = G[3, 1] = dt
    cov = cov @ cov.transpose(-1, -2)  # square root form in, full covariance out
    mean = mean @ Fm.t() + accel @ G.t()
    cov = Fm @ cov @ Fm.t() + q * (G @ G.t())
    S = cov[:, :2, :2] + r * torch.eye(2, device=mean.device, dtype=mean.dtype)
    det = S[:, 0, 0] * S[:, 1, 1] - S[:, 0, 1] * S[:, 1, 0]
    y = z - mean[:, :2]
    maha = (S[:, 1, 1] * y[:, 0] ** 2 - (S[:, 0, 1] + S[:, 1, 0]) * y[:, 0] * y[:, 1] + S[:, 0, 0] * y[:, 1] ** 2) / det
    return mean, cov, maha
