import torch
import triton
import triton.language as tl


@triton.jit
def best_kernel(x_ptr, value_ptr, index_ptr, n_cols, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    inside = cols < n_cols
    x = tl.load(x_ptr + row * n_cols + cols, mask=inside, other=float("-inf"))
    strange = (x != x) & inside
    any_nan = tl.max(strange.to(tl.int32), axis=0) > 0
    top = tl.max(tl.where(strange, float("-inf"), x), axis=0)
    hit = tl.where(any_nan, strange, (x == top) & inside)
    tl.store(index_ptr + row, tl.min(tl.where(hit, cols, BLOCK), axis=0))
    tl.store(value_ptr + row, tl.where(any_nan, float("nan"), top))


def best(x):
    x = x.contiguous()
    values = torch.empty(x.shape[0], dtype=x.dtype, device=x.device)
    indices = torch.empty(x.shape[0], dtype=torch.int64, device=x.device)
    if x.shape[0]:
        best_kernel[(x.shape[0],)](x, values, indices, x.shape[1], BLOCK=triton.next_power_of_2(x.shape[1]))
    return values, indices
