"""Stochastic rounding of float64 tensors to narrower floats. Runs in workers."""

from __future__ import annotations

import torch

BITS = 52
"""The bits of a float64 significand that are stored."""
PIECE = 1 << 26
"""Elements for which numbers are drawn at a time: those of a larger tensor would need as much memory as the tensor."""


def rounded_at_random(
    plain: torch.Tensor, dtype: torch.dtype, generator: torch.Generator, shape: tuple[int, ...]
) -> torch.Tensor:
    """Each element as one of its two neighbours in ``dtype``, the nearer one more often (Parker's random rounding).

    The bits that ``dtype`` lacks are replaced by a carry: a random integer below the first kept bit is added, and they are cut
    off. So numbers that ``dtype`` can hold, infinities and NaN stay as they are. Numbers beyond its largest stay finite.
    Subnormal numbers of ``dtype`` are rounded to the nearest one. This takes five operations, because loops of small operations
    spend their time in launches.

    Args:
        plain: a float64 tensor; it stays as it is.
        dtype: a float of at least two bytes and fewer bits than float64.
        generator: draws the integers.
        shape: how many integers are drawn; it broadcasts to the tensor's shape.
    """
    info = torch.finfo(dtype)
    # A sum with this number has the spacing of subnormal numbers of `dtype`.
    grid = 1.5 * 2.0**BITS * info.tiny * info.eps
    step = round(info.eps * 2.0**BITS)
    # In place, because tensors may have gigabytes.
    rounded = (plain + grid).sub_(grid)
    if rounded.numel() > PIECE and shape == tuple(plain.shape) and rounded.is_contiguous():
        for part in rounded.view(-1).split(PIECE):
            _round_at_random(part, step, generator, tuple(part.shape))
        return rounded
    _round_at_random(rounded, step, generator, shape)
    return rounded


def _round_at_random(values: torch.Tensor, step: int, generator: torch.Generator, shape: tuple[int, ...]) -> None:
    """Replace the bits below ``step`` by a carry, in place."""
    draw = torch.empty(shape, dtype=torch.int64, device=values.device).random_(0, step, generator=generator)
    values.view(torch.int64).add_(draw).bitwise_and_(-step)


def rounded_sum(
    plain: torch.Tensor, dtype: torch.dtype, summed: torch.Tensor, generator: torch.Generator, shape: tuple[int, ...]
) -> torch.Tensor:
    """Sums of ``summed``, rounded at random: also those that ``dtype`` can hold, unless all summands are whole numbers."""
    draw = torch.rand(shape, generator=generator, device=plain.device, dtype=plain.dtype)
    has_fractions = (summed != summed.round()).any()
    is_exact = (plain.to(dtype) == plain) & ~has_fractions
    # Far enough to reach the next number.
    epsilon = torch.finfo(dtype).eps
    width = torch.where(has_fractions, 3.0 * epsilon, epsilon)
    rounded = draw.sub_(0.5).mul_(width).add_(1.0) * plain
    # In place, because tensors may have gigabytes.
    rounded.copy_(rounded.to(dtype))
    return torch.where(is_exact | ~torch.isfinite(rounded), plain, rounded)
