"""The inner dimension is split; partial products go to memory, and a second kernel adds them up in order."""

import torch
import triton
import triton.language as tl


@triton.jit
def partial_kernel(x_ptr, w_ptr, part_ptr, M, N, K, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    split = tl.program_id(2)
    k = split * BK + tl.arange(0, BK)
    x = tl.load(x_ptr + m[:, None] * K + k[None, :], mask=(m[:, None] < M) & (k[None, :] < K), other=0.0)
    w = tl.load(w_ptr + k[:, None] * N + n[None, :], mask=(k[:, None] < K) & (n[None, :] < N), other=0.0)
    where = part_ptr + split * M * N + m[:, None] * N + n[None, :]
    tl.store(where, tl.dot(x, w, allow_tf32=False), mask=(m[:, None] < M) & (n[None, :] < N))


@triton.jit
def finish_kernel(part_ptr, bias_ptr, out_ptr, MN, N, splits, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    total = tl.load(bias_ptr + i % N, mask=i < MN, other=0.0)
    product = tl.zeros((BLOCK,), dtype=tl.float32)
    for s in range(splits):
        product += tl.load(part_ptr + s * MN + i, mask=i < MN, other=0.0)
    y = product + total
    tl.store(out_ptr + i, 0.5 * y * (1 + tl.erf(y * 0.7071067811865476)), mask=i < MN)


def linear_gelu(x, weight, bias):
    x, weight, bias = (t.contiguous() for t in (x, weight, bias))
    M, K = x.shape
    N = weight.shape[1]
    out = torch.empty(M, N, dtype=x.dtype, device=x.device)
    if not out.numel():
        return out
    splits = triton.cdiv(K, 32)
    parts = torch.empty(max(splits, 1), M, N, dtype=torch.float32, device=x.device)
    if splits:
        partial_kernel[(triton.cdiv(M, 32), triton.cdiv(N, 32), splits)](x, weight, parts, M, N, K, BM=32, BN=32, BK=32)
    finish_kernel[(triton.cdiv(M * N, 128),)](parts, bias, out, M * N, N, splits, BLOCK=128)
    return out
