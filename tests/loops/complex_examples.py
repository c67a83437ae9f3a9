"""Loops with complex states as people write them, with few steps."""

COMPLEX = """
import torch
import torch.nn as nn


# mtmc: u=f32[B,L,H] a_re=f32[H,N] a_im=f32[H,N] b_re=f32[H,N] b_im=f32[H,N] c_re=f32[H,N] c_im=f32[H,N] B=2 L=20 H=3 N=4
def s4d(u, a_re, a_im, b_re, b_im, c_re, c_im):
    A = torch.exp(torch.complex(-torch.exp(a_re), a_im))
    B = torch.complex(b_re, b_im)
    C = torch.complex(c_re, c_im)
    x = torch.zeros(u.shape[0], *A.shape, dtype=A.dtype, device=u.device)
    ys = []
    for t in range(u.shape[1]):
        x = A * x + B * u[:, t, :, None]
        ys.append((x * C).sum(-1).real)
    return torch.stack(ys, 1)


# mtmc: u=f32[B,L,H] nu=f32[N]@-3..-1 theta=f32[N]@0..3 b=f32[N,H,2] c=f32[H,N,2] d=f32[H] B=2 L=20 H=3 N=4
def lru(u, nu, theta, b, c, d):
    lam = torch.exp(torch.complex(-nu.exp(), theta))
    gamma = torch.sqrt(1 - lam.abs() ** 2)
    B, C = torch.view_as_complex(b), torch.view_as_complex(c)
    Bu = torch.einsum("blh,nh->bln", u.to(B.dtype), B * gamma.unsqueeze(-1))
    h = torch.zeros(u.shape[0], nu.shape[0], dtype=torch.complex64, device=u.device)
    out = []
    for t in range(u.shape[1]):
        h = lam * h + Bu[:, t]
        out.append(h)
    return (torch.stack(out, 1) @ C.transpose(0, 1)).real + u * d


# mtmc: u=f32[B,L,H] log_dt=f32[H]@-3..-1 a_re=f32[H,N] a_im=f32[H,N] C=f32[H,N,2] B=2 L=20 H=3 N=4
def discretised(u, log_dt, a_re, a_im, C):
    A = torch.complex(-torch.exp(a_re), a_im)
    dA = torch.exp(A * log_dt.exp().unsqueeze(-1))
    dC = torch.view_as_complex(C) * (dA - 1.0) / A
    x = torch.zeros(u.shape[0], *A.shape, dtype=A.dtype, device=u.device)
    y = torch.empty_like(u)
    for t in range(u.shape[1]):
        x = dA * x + u[:, t].unsqueeze(-1)
        y[:, t] = 2 * (x * dC).sum(-1).real
    return y


# mtmc: u=f32[B,L,N,2] r=f32[N]@0.5..0.99 phi=f32[N]@0..3 B=2 L=20 N=4
def rotations(u, r, phi):
    rot = torch.polar(r, phi)
    z = torch.view_as_complex(u)
    h = torch.zeros_like(z[:, 0])
    out = torch.zeros_like(u)
    energies = []
    for t in range(u.shape[1]):
        h = rot * h + z[:, t]
        out[:, t] = torch.view_as_real(h)
        energies.append(h.abs() + (h * torch.conj(h)).real + h.real * h.imag)
    return out, torch.stack(energies, 1), torch.view_as_real(h)


# mtmc: u=f32[B,L,N,2] r=f32[N]@0.5..0.99 phi=f32[N]@0..3 B=2 L=20 N=4
def turned(u, r, phi):
    rot = torch.polar(r, phi)
    h = 0
    ys = []
    for u_t in torch.view_as_complex(u).unbind(1):
        h = rot.conj() * h + 1j * u_t
        ys.append(torch.view_as_real(h))
    return torch.stack(ys, 1)


# mtmc: u=f32[B,L,N] r=f32[N]@0.5..0.99 phi=f32[N]@0..3 B=2 L=20 N=4
def normalised(u, r, phi):
    h = torch.zeros(u.shape[0], u.shape[2], dtype=torch.complex64)
    rot = r * torch.exp(1j * phi)
    hs = torch.empty(u.shape, dtype=torch.complex64)
    for t in range(u.shape[1]):
        h = rot * h + u[:, t]
        h = h / (1 + h.abs())
        hs[:, t] = h
    return hs.real, hs.imag, torch.angle(h)


# mtmc: u=f32[B,L,N] lengths=i64[B]@0..20 r=f32[N]@0.5..0.99 phi=f32[N]@0..3 B=2 L=20 N=4
def masked(u, lengths, r, phi):
    rot = torch.polar(r, phi)
    h = torch.zeros(u.shape[0], u.shape[2], dtype=torch.cfloat, device=u.device)
    for t in range(u.shape[1]):
        h = torch.where((t < lengths)[:, None], rot * h + u[:, t], h)
    return h.real + h.imag


# mtmc: u=f32[B,L,N] r=f32[N]@0.5..0.99 phi=f32[N]@0..3 B=2 L=20 N=4
def returned(u, r, phi):
    rot = torch.polar(r, phi)
    h = torch.zeros(u.shape[0], u.shape[2], dtype=torch.complex64)
    hs = []
    for t in range(u.shape[1]):
        h = rot * h + u[:, t]
        hs.append(h)
    return torch.stack(hs, 1), h


# mtmc: u=f32[B,L,N] r=f32[N]@0.5..0.99 phi=f32[N]@0..3 B=2 L=20 N=4
def spectrum(u, r, phi):
    return torch.fft.ifft(returned(u, r, phi)[0], dim=1).abs()


# mtmc: u=f32[B,L,H] B=2 L=20 H=3 init: width=3 states=4
class S4D(nn.Module):
    def __init__(self, width, states):
        super().__init__()
        self.log_A_real = nn.Parameter(torch.log(0.5 * torch.ones(width, states)))
        self.A_imag = nn.Parameter(3.14 * torch.arange(states).repeat(width, 1))
        self.C = nn.Parameter(torch.randn(width, states, dtype=torch.cfloat))
        self.log_dt = nn.Parameter(torch.rand(width) - 4)

    def forward(self, u):
        A = -torch.exp(self.log_A_real) + 1j * self.A_imag
        dA = torch.exp(A * self.log_dt.exp()[:, None])
        dB = (dA - 1.0) / A
        x = torch.zeros(u.shape[0], *A.shape, dtype=A.dtype, device=u.device)
        ys = []
        for t in range(u.shape[1]):
            x = dA * x + dB * u[:, t, :, None]
            ys.append(2 * (x * self.C).sum(-1).real)
        return torch.stack(ys, 1)
"""

REFUSED = """
import torch


# mtmc: u=f32[B,L,N] r=f32[N]@0.5..0.99 phi=f32[N]@0..3 B=2 L=17 N=4
def squashed(u, r, phi):
    h = torch.zeros(u.shape[0], u.shape[2], dtype=torch.complex64)
    rot = torch.polar(r, phi)
    hs = []
    for t in range(u.shape[1]):
        h = torch.tanh(rot * h + u[:, t])
        hs.append(h.real)
    return torch.stack(hs, 1)


# mtmc: u=f32[B,L,N] r=f32[N]@0.5..0.99 phi=f32[N]@0..3 B=2 L=17 N=4
def transposed(u, r, phi):
    h = torch.zeros(u.shape[0], u.shape[2], dtype=torch.complex64)
    rot = torch.polar(r, phi)
    hs = []
    for t in range(u.shape[1]):
        h = rot * h + u[:, t]
        hs.append(h)
    return torch.stack(hs, 1).real.transpose(1, 2)
"""
