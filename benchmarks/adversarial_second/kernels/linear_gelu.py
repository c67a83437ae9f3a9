import torch
import triton
import triton.language as tl


@triton.jit
def linear_gelu_kernel(
    x_ptr, weight_ptr, bias_ptr, out_ptr, M, N, K, x_row, x_col, w_row, w_col, b_stride,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0) * BM + tl.arange(0, BM)
    cols = tl.program_id(1) * BN + tl.arange(0, BN)
    total = tl.zeros((BM, BN), dtype=tl.float32)
    for start in range(0, K, BK):
        inner = start + tl.arange(0, BK)
        x_mask = (rows[:, None] < M) & (inner[None, :] < K)
        w_mask = (inner[:, None] < K) & (cols[None, :] < N)
        x = tl.load(x_ptr + rows[:, None] * x_row + inner[None, :] * x_col, mask=x_mask, other=0.0)
        w = tl.load(weight_ptr + inner[:, None] * w_row + cols[None, :] * w_col, mask=w_mask, other=0.0)
        total += tl.dot(x, w, input_precision="ieee")
    y = total + tl.load(bias_ptr + cols * b_stride, mask=cols < N, other=0.0)[None, :]
    y = 0.5 * y * (1.0 + tl.erf(y * 0.7071067811865476))
    tl.store(out_ptr + rows[:, None] * N + cols[None, :], y, mask=(rows[:, None] < M) & (cols[None, :] < N))


def linear_gelu(x, weight, bias):
    M, K = x.shape
    N = weight.shape[1]
    out = torch.empty((M, N), dtype=x.dtype, device=x.device)
    grid = (triton.cdiv(M, 32), triton.cdiv(N, 32))
    if out.numel():
        linear_gelu_kernel[grid](
            x, weight, bias, out, M, N, K, *x.stride(), *weight.stride(), bias.stride(0), BM=32, BN=32, BK=32
        )
    return out
