import torch
import triton
import triton.language as tl


@triton.jit
def masked_softmax_kernel(x_ptr, mask_ptr, out_ptr, n_cols, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    inside = cols < n_cols
    x = tl.load(x_ptr + row * n_cols + cols, mask=inside, other=float("-inf"))
    hidden = tl.load(mask_ptr + row * n_cols + cols, mask=inside, other=0)
    x = tl.where(hidden != 0, -1e9, x)
    numerator = tl.exp(x - tl.max(x, axis=0))
    total = tl.sum(tl.where(inside, numerator, 0.0), axis=0)
    tl.store(out_ptr + row * n_cols + cols, numerator / total, mask=inside)


def masked_softmax(x, mask):
    x, mask = x.contiguous(), mask.contiguous()
    out = torch.empty_like(x)
    if x.numel():
        masked_softmax_kernel[(x.shape[0],)](x, mask, out, x.shape[1], BLOCK=triton.next_power_of_2(x.shape[1]))
    return out
