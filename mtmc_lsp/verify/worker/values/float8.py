"""Operations that PyTorch lacks for float8 tensors, or for their values in float64. Runs in workers."""

from __future__ import annotations

import torch

SCALED_PRODUCT = "_scaled_mm"
"""The product of float8 operands, which PyTorch computes in no other dtype."""


def reversed_and_scaled(value: torch.Tensor, factor: float) -> torch.Tensor:
    """The values in the opposite order along each dimension, times ``factor``, in the same dtype."""
    dims = tuple(range(value.dim()))
    if value.element_size() > 1:
        return value.flip(dims) * factor
    largest = torch.finfo(value.dtype).max
    return (value.float().flip(dims) * factor).clamp(-largest, largest).to(value.dtype)


def scaled_product(
    left: torch.Tensor,
    right: torch.Tensor,
    scale_a: torch.Tensor,
    scale_b: torch.Tensor,
    bias: torch.Tensor | None = None,
    scale_result: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    use_fast_accum: bool = False,
) -> torch.Tensor:
    """``torch._scaled_mm`` in float64; the arguments have its names, and the last two change nothing here.

    Raises:
        NotImplementedError: the scales belong to blocks of the operands.
    """
    shapes = (left.shape[0], 1), (1, right.shape[1])
    for scale, shape in zip((scale_a, scale_b), shapes, strict=True):
        if scale.numel() > 1 and scale.shape != shape:
            raise NotImplementedError(f"scales of shape {tuple(scale.shape)}, which belong to blocks")
    scales = [scale.double() if scale.dim() == 2 else scale.double().reshape(()) for scale in (scale_a, scale_b)]
    result = (left.double() @ right.double()) * scales[0] * scales[1]
    if bias is not None:
        result = result + bias.double()
    return result if scale_result is None else result * scale_result.double()
