import torch
import triton
import triton.language as tl


@triton.jit
def add(a, b):
    return a + b


@triton.jit
def scan_kernel(x_ptr, y_ptr, row_stride, col_stride, L, BLOCK: tl.constexpr):
    pid = tl.program_id(0)
    i = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + pid * row_stride + i * col_stride, mask=i < L, other=0.0)
    tl.store(y_ptr + pid * L + i, tl.associative_scan(x, 0, add), mask=i < L)


def running_sum(x):
    n, length = x.shape
    y = torch.empty(n, length, dtype=x.dtype, device=x.device)
    if y.numel():
        scan_kernel[n, 1, 1](x, y, x.stride(0), x.stride(1), length, triton.next_power_of_2(length))
    return y
