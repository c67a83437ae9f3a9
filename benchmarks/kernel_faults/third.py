"""Eight further kernels as others write them. Their 31 faults are in :mod:`benchmarks.kernel_faults.third_faults`."""

from __future__ import annotations

THIRD = {
    "bin_counts": """\
@triton.jit
def histogram_kernel(x_ptr, hist_ptr, n, BINS: tl.constexpr, BLOCK: tl.constexpr):
    pid = tl.program_id(0)
    offs = pid * BLOCK + tl.arange(0, BLOCK)
    valid = offs < n
    bin = tl.load(x_ptr + offs, mask=valid, other=0)
    tl.atomic_add(hist_ptr + bin, 1, mask=valid)


def histogram_ref(x):
    return torch.zeros(64, dtype=torch.int32, device=x.device).index_add(0, x, torch.ones_like(x, dtype=torch.int32))


# mtmc: x=i64[N]@0..63 N=5000 reference=histogram_ref
def histogram(x):
    hist = torch.zeros(64, dtype=torch.int32, device=x.device)
    histogram_kernel[(triton.cdiv(x.numel(), 256),)](x, hist, x.numel(), BINS=64, BLOCK=256)
    return hist
""",
    "rope": """\
@triton.jit
def rope_kernel(x_ptr, cos_ptr, sin_ptr, out_ptr, seq_len, x_row_stride, half, BLOCK_HALF: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    pos = row % seq_len
    i = tl.arange(0, BLOCK_HALF)
    m = i < half
    cos = tl.load(cos_ptr + pos * half + i, mask=m, other=0.0)
    sin = tl.load(sin_ptr + pos * half + i, mask=m, other=0.0)
    lo = tl.load(x_ptr + row * x_row_stride + i, mask=m, other=0.0)
    hi = tl.load(x_ptr + row * x_row_stride + half + i, mask=m, other=0.0)
    tl.store(out_ptr + row * x_row_stride + i, lo * cos - hi * sin, mask=m)
    tl.store(out_ptr + row * x_row_stride + half + i, hi * cos + lo * sin, mask=m)


def rope_ref(x, cos, sin):
    lo, hi = x.chunk(2, -1)
    return torch.cat((lo * cos - hi * sin, hi * cos + lo * sin), -1)


# mtmc: x=f32[B,S,2*H] cos=f32[S,H] sin=f32[S,H] B=4 S=60 H=40 reference=rope_ref
def rope(x, cos, sin):
    B, S, D = x.shape
    out = torch.empty_like(x)
    rope_kernel[(B * S,)](x, cos, sin, out, S, x.stride(1), D // 2, BLOCK_HALF=triton.next_power_of_2(D // 2))
    return out
""",
    "fused_layer_norm": """\
@triton.jit
def _layer_norm_fwd(X, Y, W, B, stride, N, eps, BLOCK_N: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    X += row * stride
    Y += row * stride
    cols = tl.arange(0, BLOCK_N)
    x = tl.load(X + cols, mask=cols < N, other=0.0).to(tl.float32)
    mean = tl.sum(x, axis=0) / N
    xbar = tl.where(cols < N, x - mean, 0.0)
    var = tl.sum(xbar * xbar, axis=0) / N
    rstd = 1 / tl.sqrt(var + eps)
    mask = cols < N
    w = tl.load(W + cols, mask=mask).to(tl.float32)
    b = tl.load(B + cols, mask=mask).to(tl.float32)
    tl.store(Y + cols, (x - mean) * rstd * w + b, mask=mask)


def fused_layer_norm_ref(x, weight, bias):
    return torch.nn.functional.layer_norm(x, (x.shape[-1],), weight, bias, 1e-5)


# mtmc: x=f32[M,N] weight=f32[N] bias=f32[N] M=120 N=300 reference=fused_layer_norm_ref
def fused_layer_norm(x, weight, bias):
    M, N = x.shape
    y = torch.empty_like(x)
    _layer_norm_fwd[(M,)](x, y, weight, bias, x.stride(0), N, 1e-5, BLOCK_N=triton.next_power_of_2(N))
    return y
""",
    "quantize_rows": """\
@triton.jit
def _quantize_rows(x_ptr, q_ptr, s_ptr, n_cols, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    best = tl.zeros((BLOCK,), dtype=tl.float32)
    for start in range(0, n_cols, BLOCK):
        c = start + tl.arange(0, BLOCK)
        best = tl.maximum(best, tl.abs(tl.load(x_ptr + row * n_cols + c, mask=c < n_cols, other=0.0)))
    scale = tl.max(best, axis=0) / 127.0
    tl.store(s_ptr + row, scale)
    for start in range(0, n_cols, BLOCK):
        c = start + tl.arange(0, BLOCK)
        v = tl.load(x_ptr + row * n_cols + c, mask=c < n_cols, other=0.0)
        tl.store(q_ptr + row * n_cols + c, v / scale, mask=c < n_cols)


def quantize_rows_ref(x):
    s = x.abs().amax(-1) / 127.0
    return x / s[:, None], s


# mtmc: x=f32[M,N] M=50 N=500 reference=quantize_rows_ref
def quantize_rows(x):
    q = torch.empty_like(x)
    s = torch.empty(x.shape[0], dtype=torch.float32, device=x.device)
    _quantize_rows[(x.shape[0],)](x, q, s, x.shape[1], BLOCK=128)
    return q, s
""",
    "tile_sum": """\
@triton.jit
def tile_sum_kernel(x_ptr, out_ptr, M, N, stride_m, stride_n, BM: tl.constexpr, BN: tl.constexpr):
    rm = tl.program_id(0) * BM + tl.arange(0, BM)
    acc = tl.zeros((BM,), dtype=tl.float32)
    for n0 in range(0, tl.cdiv(N, BN)):
        rn = n0 * BN + tl.arange(0, BN)
        tile = tl.load(
            x_ptr + rm[:, None] * stride_m + rn[None, :] * stride_n,
            mask=(rm[:, None] < M) & (rn[None, :] < N),
            other=0.0,
        )
        acc += tl.sum(tile, axis=1)
    tl.store(out_ptr + rm, acc, mask=rm < M)


def tile_sum_ref(x):
    return x.sum(1)


# mtmc: x=f32[M,N] M=200 N=150 reference=tile_sum_ref
def tile_sum(x):
    M, N = x.shape
    out = torch.empty(M, dtype=torch.float32, device=x.device)
    tile_sum_kernel[(triton.cdiv(M, 16),)](x, out, M, N, x.stride(0), x.stride(1), BM=16, BN=16)
    return out
""",
    "masked_dropout": """\
@triton.jit
def dropout_kernel(x_ptr, keep_ptr, out_ptr, n, p, BLOCK: tl.constexpr):
    idx = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = idx < n
    x = tl.load(x_ptr + idx, mask=inside)
    u = tl.load(keep_ptr + idx, mask=inside)
    tl.store(out_ptr + idx, tl.where(u > p, x / (1 - p), 0.0), mask=inside)


def dropout_ref(x, u):
    return torch.where(u > 0.25, x / 0.75, 0.0)


# mtmc: x=f32[N] u=f32[N]@0..1 N=10000 reference=dropout_ref
def masked_dropout(x, u):
    y = torch.empty_like(x)
    dropout_kernel[(triton.cdiv(x.numel(), 512),)](x, u, y, x.numel(), 0.25, BLOCK=512)
    return y
""",
    "two_pass_softmax": """\
@triton.jit
def long_softmax_kernel(inp, out, N, TILE: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    m = tl.full((TILE,), float("-inf"), tl.float32)
    z = tl.zeros((TILE,), tl.float32)
    for start in range(0, N, TILE):
        n = start + tl.arange(0, TILE)
        v = tl.load(inp + row * N + n, mask=n < N, other=-float("inf"))
        m_new = tl.maximum(m, v)
        safe = tl.where(m_new == float("-inf"), 0.0, m_new)
        z = z * tl.exp(m - safe) + tl.exp(v - safe)
        m = m_new
    top = tl.max(m, 0)
    total = tl.sum(z * tl.exp(m - top), 0)
    for start in range(0, N, TILE):
        n = start + tl.arange(0, TILE)
        v = tl.load(inp + row * N + n, mask=n < N, other=-float("inf"))
        tl.store(out + row * N + n, tl.exp(v - top) / total, mask=n < N)


def two_pass_softmax_ref(x):
    return torch.softmax(x, -1)


# mtmc: x=f32[M,N] M=40 N=600 reference=two_pass_softmax_ref
def two_pass_softmax(x):
    y = torch.empty_like(x)
    long_softmax_kernel[(x.shape[0],)](x, y, x.shape[1], TILE=128)
    return y
""",
    "linear_relu": """\
@triton.jit
def linear_kernel(
    a_ptr, w_ptr, b_ptr, c_ptr, M, N, K, stride_am, stride_ak, stride_wn, stride_wk, stride_cm, stride_cn,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):
    pid = tl.program_id(0)
    num_n = tl.cdiv(N, BLOCK_N)
    pid_m = pid // num_n
    pid_n = pid % num_n
    offs_m = pid_m * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_n = pid_n * BLOCK_N + tl.arange(0, BLOCK_N)
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for k in range(0, K, BLOCK_K):
        offs_k = k + tl.arange(0, BLOCK_K)
        a = tl.load(
            a_ptr + offs_m[:, None] * stride_am + offs_k[None, :] * stride_ak,
            mask=(offs_m[:, None] < M) & (offs_k[None, :] < K),
            other=0.0,
        )
        w = tl.load(
            w_ptr + offs_n[None, :] * stride_wn + offs_k[:, None] * stride_wk,
            mask=(offs_n[None, :] < N) & (offs_k[:, None] < K),
            other=0.0,
        )
        acc += tl.dot(a, w, input_precision="ieee")
    bias = tl.load(b_ptr + offs_n, mask=offs_n < N, other=0.0)
    acc = tl.maximum(acc + bias[None, :], 0.0)
    c_mask = (offs_m[:, None] < M) & (offs_n[None, :] < N)
    tl.store(c_ptr + offs_m[:, None] * stride_cm + offs_n[None, :] * stride_cn, acc, mask=c_mask)


def linear_relu_ref(x, weight, bias):
    return torch.relu(torch.nn.functional.linear(x, weight, bias))


# mtmc: x=f32[M,K] weight=f32[N,K] bias=f32[N] M=100 N=70 K=90 reference=linear_relu_ref
def linear_relu(x, weight, bias):
    M, K = x.shape
    N = weight.shape[0]
    c = torch.empty((M, N), device=x.device, dtype=x.dtype)
    grid = (triton.cdiv(M, 32) * triton.cdiv(N, 32),)
    linear_kernel[grid](
        x, weight, bias, c, M, N, K, x.stride(0), x.stride(1), weight.stride(0), weight.stride(1), c.stride(0), c.stride(1),
        BLOCK_M=32, BLOCK_N=32, BLOCK_K=16,
    )
    return c
""",
}
"""Name of the launcher to its text."""
