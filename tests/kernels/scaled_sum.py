"""A kernel with a load that does not change in its loop, and its launcher."""

from __future__ import annotations

from tests.kernels.observing import HEADER

KERNEL = (
    HEADER
    + """\
@triton.jit
def scaled_sum_kernel(x_ptr, scale_ptr, out_ptr, N, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    total = 0.0
    for start in range(0, N, BLOCK):
        scale = tl.load(scale_ptr + row)
        offsets = start + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + row * N + offsets, mask=offsets < N, other=0.0)
        total += tl.sum(x * scale)
    tl.store(out_ptr + row, total)
"""
)
LAUNCHER = """

# mtmc: x=f32[M,N] scale=f32[M] M=40 N=300
def scaled_sum(x, scale):
    out = torch.empty_like(scale)
    scaled_sum_kernel[(x.shape[0],)](x, scale, out, x.shape[1], BLOCK=64)
    return out
"""
