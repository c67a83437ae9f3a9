"""A product with one-dimensional, grouped programs and pointers that advance."""

import triton
import triton.language as tl


@triton.jit
def gelu(v):
    return v * 0.5 * (1 + tl.math.erf(v * 0.70710678118654752))


@triton.jit
def grouped_kernel(
    A, B, C, bias, M, N, K, sa, sb, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, G: tl.constexpr
):
    pid = tl.program_id(0)
    tiles_m = tl.cdiv(M, BM)
    tiles_n = tl.cdiv(N, BN)
    group = pid // (G * tiles_n)
    size = min(tiles_m - group * G, G)
    pm = group * G + (pid % (G * tiles_n)) % size
    pn = (pid % (G * tiles_n)) // size
    rm = pm * BM + tl.arange(0, BM)
    rn = pn * BN + tl.arange(0, BN)
    rk = tl.arange(0, BK)
    a = A + (rm % M)[:, None] * sa + rk[None, :]
    b = B + rk[:, None] * sb + (rn % N)[None, :]
    acc = tl.zeros((BM, BN), tl.float32)
    for k in range(0, tl.cdiv(K, BK)):
        left = tl.load(a, mask=rk[None, :] < K - k * BK, other=0.0)
        right = tl.load(b, mask=rk[:, None] < K - k * BK, other=0.0)
        acc = tl.dot(left, right, acc, input_precision="ieee")
        a += BK
        b += BK * sb
    acc += tl.load(bias + rn, mask=rn < N, other=0.0)[None, :]
    tl.store(C + rm[:, None] * N + rn[None, :], gelu(acc), mask=(rm[:, None] < M) & (rn[None, :] < N))


def linear_gelu(x, weight, bias):
    x, weight, bias = x.contiguous(), weight.contiguous(), bias.contiguous()
    (M, K), N = x.shape, weight.shape[1]
    out = x.new_empty(M, N)
    if out.numel():
        grid = (triton.cdiv(M, 16) * triton.cdiv(N, 16),)
        grouped_kernel[grid](x, weight, out, bias, M, N, K, K, N, BM=16, BN=16, BK=16, G=2)
    return out
