"""Five kernels of other authors' styles, written after the rules of the repairs."""

from __future__ import annotations

SECOND = {
    "cross_entropy": """\
@triton.jit
def ce_kernel(logits_ptr, target_ptr, loss_ptr, n_classes, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    m = float("-inf")
    d = 0.0
    for i in range(0, n_classes, BLOCK):
        off = i + tl.arange(0, BLOCK)
        x = tl.load(logits_ptr + row * n_classes + off, mask=off < n_classes, other=float("-inf"))
        m_new = tl.maximum(m, tl.max(x))
        d = d * tl.exp(m - m_new) + tl.sum(tl.exp(x - m_new))
        m = m_new
    y = tl.load(target_ptr + row)
    xy = tl.load(logits_ptr + row * n_classes + y)
    tl.store(loss_ptr + row, m + tl.log(d) - xy)


def cross_entropy_reference(logits, target):
    return torch.nn.functional.cross_entropy(logits, target, reduction="none")


# mtmc: logits=f32[B,V] target=i64[B]@0..V-1 B=64 V=1000 reference=cross_entropy_reference
def cross_entropy(logits, target):
    loss = torch.empty(logits.shape[0], device=logits.device)
    ce_kernel[(logits.shape[0],)](logits, target, loss, logits.shape[1], BLOCK=128)
    return loss
""",
    "swiglu": """\
@triton.jit
def swiglu_kernel(a, b, c, stride, n_cols: tl.constexpr, BLOCK_SIZE: tl.constexpr):
    pid = tl.program_id(0).to(tl.int64)
    a += pid * stride
    b += pid * stride
    c += pid * stride
    col_offsets = tl.arange(0, BLOCK_SIZE)
    mask = col_offsets < n_cols
    a_row = tl.load(a + col_offsets, mask=mask, other=0).to(tl.float32)
    b_row = tl.load(b + col_offsets, mask=mask, other=0)
    c_row = a_row * tl.sigmoid(a_row) * b_row
    tl.store(c + col_offsets, c_row, mask=mask)


def swiglu_ref(a, b):
    return torch.nn.functional.silu(a) * b


# mtmc: a=f32[M,N] b=f32[M,N] M=200 N=700 reference=swiglu_ref
def swiglu(a, b):
    n_rows, n_cols = a.shape
    c = torch.empty_like(a)
    swiglu_kernel[(n_rows,)](a, b, c, c.stride(-2), n_cols=n_cols, BLOCK_SIZE=triton.next_power_of_2(n_cols))
    return c
""",
    "batched_matmul": """\
@triton.jit
def bmm_kernel(
    x, y, z, M, N, K, sxb, sxm, sxk, syb, syk, syn, szb, szm, szn, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr
):
    b = tl.program_id(2)
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    k = tl.arange(0, BK)
    xp = x + b * sxb + m[:, None] * sxm + k[None, :] * sxk
    yp = y + b * syb + k[:, None] * syk + n[None, :] * syn
    acc = tl.zeros((BM, BN), dtype=tl.float32)
    for i in range(0, tl.cdiv(K, BK)):
        rest = K - i * BK
        xt = tl.load(xp, mask=(m[:, None] < M) & (k[None, :] < rest), other=0.0)
        yt = tl.load(yp, mask=(k[:, None] < rest) & (n[None, :] < N), other=0.0)
        acc = tl.dot(xt, yt, acc, input_precision="ieee")
        xp += BK * sxk
        yp += BK * syk
    tl.store(z + b * szb + m[:, None] * szm + n[None, :] * szn, acc, mask=(m[:, None] < M) & (n[None, :] < N))


def bmm_ref(x, y):
    return torch.bmm(x, y)


# mtmc: x=f32[B,M,K] y=f32[B,K,N] B=3 M=100 N=60 K=80 reference=bmm_ref
def batched_matmul(x, y):
    B, M, K = x.shape
    N = y.shape[2]
    z = torch.empty((B, M, N), device=x.device, dtype=x.dtype)
    grid = (triton.cdiv(M, 16), triton.cdiv(N, 16), B)
    bmm_kernel[grid](x, y, z, M, N, K, *x.stride(), *y.stride(), *z.stride(), BM=16, BN=16, BK=16)
    return z
""",
    "variance": """\
@triton.jit
def var_kernel(x_ptr, out_ptr, n, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    total = tl.zeros((BLOCK,), tl.float32)
    for s in range(0, n, BLOCK):
        c = s + tl.arange(0, BLOCK)
        total += tl.load(x_ptr + row * n + c, mask=c < n, other=0.0)
    mean = tl.sum(total, 0) / n
    sq = tl.zeros((BLOCK,), tl.float32)
    for s in range(0, n, BLOCK):
        c = s + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + row * n + c, mask=c < n, other=0.0)
        diff = tl.where(c < n, x - mean, 0.0)
        sq += diff * diff
    tl.store(out_ptr + row, tl.sum(sq, 0) / n)


def var_ref(x):
    return torch.var(x, dim=-1, correction=0)


# mtmc: x=f32[M,N] M=60 N=500 reference=var_ref
def variance(x):
    out = x.new_empty(x.shape[0])
    var_kernel[(x.shape[0],)](x, out, x.shape[1], BLOCK=64)
    return out
""",
    "scatter_add": """\
@triton.jit
def scatter_kernel(src_ptr, index_ptr, out_ptr, n, dim, BLOCK: tl.constexpr):
    i = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, BLOCK)
    keep = d < dim
    value = tl.load(src_ptr + i * dim + d, mask=keep)
    to = tl.load(index_ptr + i)
    tl.atomic_add(out_ptr + to * dim + d, value, mask=keep)


def scatter_ref(src, index):
    return torch.zeros(32, src.shape[1], device=src.device).index_add(0, index, src)


# mtmc: src=f32[N,D] index=i64[N]@0..31 N=300 D=40 reference=scatter_ref
def scatter_add(src, index):
    out = src.new_zeros(32, src.shape[1])
    scatter_kernel[(src.shape[0],)](src, index, out, src.shape[0], src.shape[1], BLOCK=triton.next_power_of_2(src.shape[1]))
    return out
""",
}
"""Name of the launcher to its text."""
