"""Sound kernels, each with its launcher, its reference and a directive."""

from __future__ import annotations

from benchmarks.kernel_faults.second import SECOND
from benchmarks.kernel_faults.third import THIRD

HEADER = """\
import torch
import triton
import triton.language as tl


"""

FIRST = {
    "add": """\
@triton.jit
def add_kernel(x_ptr, y_ptr, out_ptr, n_elements, BLOCK_SIZE: tl.constexpr):
    pid = tl.program_id(axis=0)
    offsets = pid * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE)
    mask = offsets < n_elements
    x = tl.load(x_ptr + offsets, mask=mask)
    y = tl.load(y_ptr + offsets, mask=mask)
    tl.store(out_ptr + offsets, x + y, mask=mask)


def add_reference(x, y):
    return x + y


# mtmc: x=f32[N] y=f32[N] N=98432 reference=add_reference
def add(x, y):
    out = torch.empty_like(x)
    n_elements = out.numel()
    grid = lambda meta: (triton.cdiv(n_elements, meta["BLOCK_SIZE"]),)
    add_kernel[grid](x, y, out, n_elements, BLOCK_SIZE=1024)
    return out
""",
    "softmax": """\
@triton.jit
def softmax_kernel(out_ptr, in_ptr, in_row_stride, out_row_stride, n_cols, BLOCK_SIZE: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK_SIZE)
    mask = cols < n_cols
    # Lanes outside the row must not change the maximum.
    x = tl.load(in_ptr + row * in_row_stride + cols, mask=mask, other=-float("inf"))
    e = tl.exp(x - tl.max(x, axis=0))
    tl.store(out_ptr + row * out_row_stride + cols, e / tl.sum(e, axis=0), mask=mask)


def softmax_reference(x):
    return torch.softmax(x, dim=-1)


# mtmc: x=f32[M,N] M=1823 N=781 reference=softmax_reference
def softmax(x):
    n_rows, n_cols = x.shape
    BLOCK_SIZE = triton.next_power_of_2(n_cols)
    out = torch.empty_like(x)
    softmax_kernel[(n_rows,)](out, x, x.stride(0), out.stride(0), n_cols, BLOCK_SIZE=BLOCK_SIZE)
    return out
""",
    "layer_norm": """\
@triton.jit
def layer_norm_kernel(x_ptr, w_ptr, b_ptr, y_ptr, stride, N, eps, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    mask = cols < N
    x = tl.load(x_ptr + row * stride + cols, mask=mask, other=0.0).to(tl.float32)
    mean = tl.sum(x, axis=0) / N
    centred = tl.where(mask, x - mean, 0.0)
    variance = tl.sum(centred * centred, axis=0) / N
    scale = 1 / tl.sqrt(variance + eps)
    w = tl.load(w_ptr + cols, mask=mask)
    b = tl.load(b_ptr + cols, mask=mask)
    tl.store(y_ptr + row * stride + cols, centred * scale * w + b, mask=mask)


def layer_norm_reference(x, w, b, eps=1e-5):
    return torch.nn.functional.layer_norm(x, (x.shape[-1],), w, b, eps)


# mtmc: x=f32[M,N] w=f32[N] b=f32[N] M=512 N=1151 reference=layer_norm_reference
def layer_norm(x, w, b, eps=1e-5):
    y = torch.empty_like(x)
    M, N = x.shape
    layer_norm_kernel[(M,)](x, w, b, y, x.stride(0), N, eps, BLOCK=triton.next_power_of_2(N))
    return y
""",
    "matmul": """\
@triton.jit
def matmul_kernel(
    a_ptr, b_ptr, c_ptr, M, N, K,
    stride_am, stride_ak, stride_bk, stride_bn, stride_cm, stride_cn,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):
    pid_m = tl.program_id(0).to(tl.int64)
    pid_n = tl.program_id(1)
    offs_m = pid_m * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_n = pid_n * BLOCK_N + tl.arange(0, BLOCK_N)
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for k in range(0, K, BLOCK_K):
        offs_k = k + tl.arange(0, BLOCK_K)
        a = tl.load(a_ptr + offs_m[:, None] * stride_am + offs_k[None, :] * stride_ak,
                    mask=(offs_m[:, None] < M) & (offs_k[None, :] < K), other=0.0)
        b = tl.load(b_ptr + offs_k[:, None] * stride_bk + offs_n[None, :] * stride_bn,
                    mask=(offs_k[:, None] < K) & (offs_n[None, :] < N), other=0.0)
        acc += tl.dot(a, b)
    c_mask = (offs_m[:, None] < M) & (offs_n[None, :] < N)
    tl.store(c_ptr + offs_m[:, None] * stride_cm + offs_n[None, :] * stride_cn, acc.to(tl.float16), mask=c_mask)


def matmul_reference(a, b):
    return a @ b


# mtmc: a=f16[M,K] b=f16[K,N] M=512 N=384 K=320 reference=matmul_reference
def matmul(a, b):
    M, K = a.shape
    K, N = b.shape
    c = torch.empty((M, N), device=a.device, dtype=torch.float16)
    grid = (triton.cdiv(M, 32), triton.cdiv(N, 32))
    matmul_kernel[grid](
        a, b, c, M, N, K,
        a.stride(0), a.stride(1), b.stride(0), b.stride(1), c.stride(0), c.stride(1),
        BLOCK_M=32, BLOCK_N=32, BLOCK_K=16,
    )
    return c
""",
    "attention": """\
@triton.jit
def attend_kernel(q_ptr, k_ptr, v_ptr, out_ptr, n_keys, scale, D: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, D)
    q = tl.load(q_ptr + row * D + d)
    m = -float("inf")
    total = 0.0
    acc = tl.zeros((D,), dtype=tl.float32)
    for start in range(0, n_keys, BLOCK):
        keys = start + tl.arange(0, BLOCK)
        valid = keys < n_keys
        k = tl.load(k_ptr + keys[:, None] * D + d[None, :], mask=valid[:, None], other=0.0)
        scores = tl.sum(q[None, :] * k, axis=1) * scale
        scores = tl.where(valid, scores, -float("inf"))
        new_m = tl.maximum(m, tl.max(scores, axis=0))
        p = tl.exp(scores - new_m)
        rescale = tl.exp(m - new_m)
        v = tl.load(v_ptr + keys[:, None] * D + d[None, :], mask=valid[:, None], other=0.0)
        total = total * rescale + tl.sum(p, axis=0)
        acc = acc * rescale + tl.sum(p[:, None] * v, axis=0)
        m = new_m
    tl.store(out_ptr + row * D + d, acc / total)


def attend_reference(q, k, v):
    return torch.softmax(q @ k.T / 32**0.5, dim=-1) @ v


# mtmc: q=f32[S,32] k=f32[T,32] v=f32[T,32] S=256 T=300 reference=attend_reference
def attend(q, k, v):
    out = torch.empty_like(q)
    attend_kernel[(q.shape[0],)](q, k, v, out, k.shape[0], 32**-0.5, D=32, BLOCK=32)
    return out
""",
    "transpose": """\
@triton.jit
def transpose_kernel(x_ptr, y_ptr, M, N, BLOCK: tl.constexpr):
    rows = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = (rows[:, None] < M) & (cols[None, :] < N)
    tile = tl.load(x_ptr + rows[:, None] * N + cols[None, :], mask=inside)
    tl.store(y_ptr + cols[None, :] * M + rows[:, None], tile, mask=inside)


def transpose_reference(x):
    return x.T.contiguous()


# mtmc: x=f32[M,N] M=1000 N=700 reference=transpose_reference
def transpose(x):
    M, N = x.shape
    y = torch.empty((N, M), device=x.device, dtype=x.dtype)
    transpose_kernel[(triton.cdiv(M, 16), triton.cdiv(N, 16))](x, y, M, N, BLOCK=16)
    return y
""",
    "histogram": """\
@triton.jit
def histogram_kernel(x_ptr, counts_ptr, n, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < n
    bins = tl.load(x_ptr + offsets, mask=mask, other=0)
    tl.atomic_add(counts_ptr + bins, 1, mask=mask)


def histogram_reference(x):
    return torch.zeros(16, dtype=torch.int32, device=x.device).index_add(0, x, torch.ones_like(x, dtype=torch.int32))


# mtmc: x=i64[N]@0..15 N=20000 reference=histogram_reference
def histogram(x):
    counts = torch.zeros(16, dtype=torch.int32, device=x.device)
    n = x.numel()
    histogram_kernel[(triton.cdiv(n, 128),)](x, counts, n, BLOCK=128)
    return counts
""",
    "cumsum": """\
@triton.jit
def cumsum_kernel(x_ptr, y_ptr, n_cols, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    carry = 0.0
    for start in range(0, tl.cdiv(n_cols, BLOCK)):
        cols = start * BLOCK + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + row * n_cols + cols, mask=cols < n_cols, other=0.0)
        y = tl.cumsum(x, axis=0) + carry
        tl.store(y_ptr + row * n_cols + cols, y, mask=cols < n_cols)
        carry += tl.sum(x, axis=0)


def cumsum_reference(x):
    return torch.cumsum(x, dim=-1)


# mtmc: x=f32[M,N] M=64 N=1000 reference=cumsum_reference
def cumsum(x):
    y = torch.empty_like(x)
    cumsum_kernel[(x.shape[0],)](x, y, x.shape[1], BLOCK=64)
    return y
""",
    "embedding": """\
@triton.jit
def embedding_kernel(ids_ptr, table_ptr, out_ptr, n_ids, dim, BLOCK_ROWS: tl.constexpr, BLOCK_DIM: tl.constexpr):
    rows = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    cols = tl.program_id(1) * BLOCK_DIM + tl.arange(0, BLOCK_DIM)
    row_mask = rows < n_ids
    mask = row_mask[:, None] & (cols[None, :] < dim)
    ids = tl.load(ids_ptr + rows, mask=row_mask, other=0)
    values = tl.load(table_ptr + ids[:, None] * dim + cols[None, :], mask=mask)
    tl.store(out_ptr + rows[:, None] * dim + cols[None, :], values, mask=mask)


def embedding_reference(ids, table):
    return torch.nn.functional.embedding(ids, table)


# mtmc: ids=i64[N]@0..V-1 table=f32[V,D] N=4000 V=1000 D=200 reference=embedding_reference
def embedding(ids, table):
    n_ids, dim = ids.numel(), table.shape[1]
    out = torch.empty((n_ids, dim), device=table.device, dtype=table.dtype)
    grid = (triton.cdiv(n_ids, 8), triton.cdiv(dim, 32))
    embedding_kernel[grid](ids, table, out, n_ids, dim, BLOCK_ROWS=8, BLOCK_DIM=32)
    return out
""",
    "column_sum": """\
@triton.jit
def column_sum_kernel(x_ptr, out_ptr, M, N, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    rows = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    cols = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    x = tl.load(x_ptr + rows[:, None] * N + cols[None, :], mask=(rows[:, None] < M) & (cols[None, :] < N), other=0.0)
    tl.atomic_add(out_ptr + cols, tl.sum(x, axis=0), mask=cols < N)


def column_sum_reference(x):
    return x.sum(dim=0)


# mtmc: x=f32[M,N] M=1000 N=300 reference=column_sum_reference
def column_sum(x):
    M, N = x.shape
    out = torch.zeros(N, device=x.device, dtype=x.dtype)
    column_sum_kernel[(triton.cdiv(M, 16), triton.cdiv(N, 32))](x, out, M, N, BLOCK_M=16, BLOCK_N=32)
    return out
""",
    "row_max": """\
@triton.jit
def row_max_kernel(x_ptr, out_ptr, n_cols, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    best = tl.full((BLOCK,), float("-inf"), dtype=tl.float32)
    for start in range(0, n_cols, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + row * n_cols + cols, mask=cols < n_cols, other=float("-inf"))
        best = tl.maximum(best, x)
    tl.store(out_ptr + row, tl.max(best, axis=0))


def row_max_reference(x):
    return x.amax(dim=-1)


# mtmc: x=f32[M,N] M=500 N=900 reference=row_max_reference
def row_max(x):
    out = torch.empty(x.shape[0], device=x.device, dtype=x.dtype)
    row_max_kernel[(x.shape[0],)](x, out, x.shape[1], BLOCK=64)
    return out
""",
    "rms_norm": """\
@triton.jit
def rms_norm_kernel(x_ptr, w_ptr, y_ptr, n_cols, eps, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    squares = tl.zeros((BLOCK,), dtype=tl.float32)
    for start in range(0, n_cols, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + row * n_cols + cols, mask=cols < n_cols, other=0.0).to(tl.float32)
        squares += x * x
    scale = tl.rsqrt(tl.sum(squares, axis=0) / n_cols + eps)
    for start in range(0, n_cols, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        mask = cols < n_cols
        x = tl.load(x_ptr + row * n_cols + cols, mask=mask).to(tl.float32)
        w = tl.load(w_ptr + cols, mask=mask).to(tl.float32)
        tl.store(y_ptr + row * n_cols + cols, (x * scale * w).to(tl.float16), mask=mask)


def rms_norm_reference(x, w, eps=1e-6):
    wide = x.float()
    return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps) * w.float()).half()


# mtmc: x=f16[M,N] w=f16[N] M=256 N=1500 reference=rms_norm_reference
def rms_norm(x, w, eps=1e-6):
    y = torch.empty_like(x)
    rms_norm_kernel[(x.shape[0],)](x, w, y, x.shape[1], eps, BLOCK=128)
    return y
""",
}
"""Name of the launcher to the text below :data:`HEADER`."""

KERNELS = {**FIRST, **SECOND, **THIRD}
assert len(KERNELS) == len(FIRST) + len(SECOND) + len(THIRD), "two kernels have one name"


def source(name: str) -> str:
    """The file with one sound kernel."""
    return HEADER + KERNELS[name]
