"""Two kernels: scale of each row first, then all elements in tiles."""

import torch
import triton
import triton.language as tl
from torch import nn


@triton.jit
def scale_kernel(x_ptr, scale_ptr, width, eps, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    cols = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * width + cols, mask=cols < width, other=0.0)
    tl.store(scale_ptr + row, tl.rsqrt(tl.sum(x * x, axis=0) / width + eps))


@triton.jit
def apply_kernel(x_ptr, scale_ptr, weight_ptr, gate_ptr, out_ptr, count, width, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = i < count
    weight = tl.load(weight_ptr + i % width, mask=inside, other=0.0)
    gate = tl.load(gate_ptr + i % width, mask=inside, other=0.0)
    x = tl.load(x_ptr + i, mask=inside, other=0.0) * tl.load(scale_ptr + i // width, mask=inside, other=0.0)
    tl.store(out_ptr + i, x * weight / (1 + tl.exp(-gate)), mask=inside)


class GatedNorm(nn.Module):
    """Root mean square norm with a gate."""

    def __init__(self, width: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width))
        self.gate = nn.Parameter(torch.randn(width))
        self.eps = eps

    def extra_repr(self) -> str:
        return f"eps={self.eps}"

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        flat = x.reshape(-1, x.shape[-1]).contiguous()
        out = torch.empty_like(flat)
        rows, width = flat.shape
        if flat.numel():
            scale = torch.empty(rows, device=x.device, dtype=torch.float32)
            scale_kernel[(rows,)](flat, scale, width, self.eps, triton.next_power_of_2(width))
            apply_kernel[(triton.cdiv(flat.numel(), 128),)](
                flat, scale, self.weight, self.gate, out, flat.numel(), width, BLOCK=128
            )
        return out.view(x.shape)
