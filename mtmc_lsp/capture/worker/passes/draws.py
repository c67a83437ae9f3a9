"""Random numbers as ``rand`` and ``randn`` of a shape, and arithmetic on them, which fuses. Runs in workers.

Eager mode fills memory in its order. So the numbers are the same only for contiguous tensors; others keep their operators.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def draw_decompositions() -> dict[Any, Callable[..., Any]]:
    """The decomposition of each operation that draws numbers in the shape of a tensor."""
    aten = torch.ops.aten
    return {
        aten.rand_like.default: _like(torch.rand),
        aten.randn_like.default: _like(torch.randn),
        aten.normal_functional.default: _normal_in_place,
        aten.uniform.default: _uniform_in_place,
        aten.normal.Tensor_Tensor: _normal,
    }


def _like(draw: Callable[..., torch.Tensor]) -> Callable[..., Any]:
    def drawn(x: torch.Tensor, *, dtype: torch.dtype | None = None, **others: Any) -> Any:
        is_plain = all(value is None or value is False or value == x.device for value in others.values())
        if not is_plain or not x.is_contiguous():
            return NotImplemented
        return draw(x.shape, dtype=dtype or x.dtype, device=x.device)

    return drawn


def _normal_in_place(x: torch.Tensor, mean: float = 0.0, std: float = 1.0, *, generator: Any = None) -> Any:
    if generator is not None or not _is_like_scaled(x, (mean, std) == (0.0, 1.0)):
        return NotImplemented
    drawn = torch.randn(x.shape, dtype=x.dtype, device=x.device)
    drawn = drawn if std == 1.0 else drawn * std
    return drawn if mean == 0.0 else drawn + mean


def _uniform_in_place(x: torch.Tensor, low: float = 0.0, high: float = 1.0, *, generator: Any = None) -> Any:
    if generator is not None or not _is_like_scaled(x, (low, high) == (0.0, 1.0)):
        return NotImplemented
    drawn = torch.rand(x.shape, dtype=x.dtype, device=x.device)
    return drawn if (low, high) == (0.0, 1.0) else drawn * (high - low) + low


def _is_like_scaled(x: torch.Tensor, is_standard: bool) -> bool:
    """Whether scaled numbers of the standard distribution are those that eager mode draws, which rounds once."""
    return x.is_contiguous() and (is_standard or x.dtype in (torch.float32, torch.float64))


def _normal(mean: torch.Tensor, std: torch.Tensor, generator: Any = None) -> Any:
    """Of a mean and a deviation of the same shape; PyTorch multiplies and adds as well."""
    if generator is not None or mean.dim() != std.dim() or not (mean.is_contiguous() and std.is_contiguous()):
        return NotImplemented
    drawn = torch.randn(mean.shape, dtype=mean.dtype, device=mean.device)
    return drawn * std + mean
