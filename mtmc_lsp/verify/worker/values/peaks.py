"""Values by which an element that a reduction or scan leaves out shows. Runs in workers."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from mtmc_lsp.verify.cases import AT_BLOCKS, PEAKS_DOWN, PEAKS_EVERYWHERE, PEAKS_IN_PART
from mtmc_lsp.verify.worker.comparison.batched_reads import computable

LEAST_LENGTH = 16
"""Shorter dimensions get no peaks, unless all are shorter: every element would be at an end."""
HEIGHT, HIGHEST = 8.0, 64.0
"""The least and largest peak of a line; between them it grows with the length, so that it still shows in a sum."""
OPPOSITE = 0.75
"""The height of the opposite peak of the same line: their sum is not 0."""
SPREAD = 0.25
"""Peaks of different lines differ by up to this part."""
LAST = 1.5
"""The peak of the last line is so many times as high: an extreme of all lines is there."""
STEP = 1.5
"""The peaks along one dimension are so many times as high as those along the next: each line keeps its extremes."""
PATTERNS = 4
LEAST_RANGE = 16
"""Ranges of whole numbers that are narrower get no peaks."""
LARGE = 256.0
"""bfloat16 has no number between it and the one 2 above."""
EARLY, OFTEN = 16, 0.25
"""The part of a line in which large values are, as a divisor, and their share of it."""
SMALLEST, LARGEST = 0.25, 0.95
"""The range of the others."""


def with_peaks(value: torch.Tensor, distribution: str, generator: torch.Generator) -> torch.Tensor:
    """Values with one large positive and one large negative element in each line of each long dimension.

    By turns they are at the last and the first element, and on both sides of the beginning of a block: of the last one, or of
    any. The sizes of blocks follow the distribution's name. One distribution has them the other way round, and one leaves every
    second line as it is.
    """
    if distribution == PEAKS_EVERYWHERE:
        return _with_peaks_everywhere(value, generator)
    kind, _, listed = distribution.partition(AT_BLOCKS)
    blocks = [int(number) for number in listed.split(", ") if number]
    result = computable(value).clone()
    dims = long_dims(value.shape)
    for i, dim in enumerate(reversed(dims) if value.numel() else ()):
        height = _height(value.shape[dim], kind) * STEP**i
        lines = result.movedim(dim, -1)
        flat = lines.reshape(-1, value.shape[dim])
        # Peaks of the first dimension are in few of the other lines, whose extremes they would be.
        begin = _beginnings(flat, blocks, generator, last_only=i > 0)
        _set_peaks(flat, height, kind, begin, generator)
        result = flat.view(lines.shape).movedim(-1, dim)
    return result.to(value.dtype)


def _with_peaks_everywhere(value: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """The extremes of each row are one element further than those of the row before; so are those of columns."""
    result = computable(value).clone()
    if not value.numel() or not value.dim():
        return result.to(value.dtype)
    lines = result.reshape(-1, value.shape[-1])
    count, length = lines.shape
    number = torch.arange(count, device=value.device)
    heights = HEIGHT * (1.0 + SPREAD * torch.rand(count, generator=generator, device=value.device))
    lines[number, (number + length // 2) % length] = (-OPPOSITE * heights).to(lines.dtype)
    lines[number, number % length] = heights.to(lines.dtype)
    return lines.view(value.shape).to(value.dtype)


def with_peaks_in_range(
    value: torch.Tensor, distribution: str, generator: torch.Generator, low: float, high: float
) -> torch.Tensor:
    """The same with the highest peak at an end of a range, and the other values around its middle.

    Whole numbers of a narrow range stay as they are: most of them are extremes.
    """
    if value.dtype is torch.bool or not value.numel() or (not value.is_floating_point() and high - low < LEAST_RANGE):
        return value
    normal = torch.randn(value.shape, generator=generator, device=generator.device)
    peaks = with_peaks(normal, distribution, generator)
    part = (peaks / peaks.abs().max()).double()
    result = 0.5 * (low + high) + 0.5 * (high - low) * part
    return (result if value.is_floating_point() else result.round()).to(value.dtype)


def with_rare_large(value: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Positive values, large ones at the beginning of each line: a running total in bfloat16 then loses most of the others."""
    device = value.device
    is_early = torch.zeros((), dtype=torch.bool, device=device)
    for dim in long_dims(value.shape):
        length = value.shape[dim]
        early = torch.arange(length, device=device) < max(1, length // EARLY)
        is_early = is_early | early.view([length if i == dim else 1 for i in range(value.dim())])
    small, choice = (torch.rand(value.shape, generator=generator, device=device) for _ in range(2))
    others = SMALLEST + small * (LARGEST - SMALLEST)
    return torch.where(is_early & (choice < OFTEN), torch.full_like(small, LARGE), others).to(value.dtype)


def long_dims(shape: Sequence[int]) -> list[int]:
    """The dimensions that may be reduced in blocks; the last one if there is none."""
    last = [len(shape) - 1] if shape and shape[-1] > 1 else []
    return [dim for dim, size in enumerate(shape) if size >= LEAST_LENGTH] or last


def _height(length: int, kind: str) -> float:
    return HEIGHT if kind == PEAKS_IN_PART else min(max(HEIGHT, math.sqrt(length) / 2), HIGHEST)


def _set_peaks(lines: torch.Tensor, height: float, kind: str, begin: torch.Tensor, generator: torch.Generator) -> None:
    count, length = lines.shape
    device, last = lines.device, length - 1
    number = torch.arange(count, device=device)
    is_left, pattern = torch.zeros(count, dtype=torch.bool, device=device), number % PATTERNS
    if kind == PEAKS_IN_PART:
        is_left, pattern = number % 2 == 1, number // 2 % PATTERNS
    # An extreme of all lines is the last element.
    is_left[-1], pattern[-1] = False, 0
    if kind == PEAKS_DOWN:
        pattern = pattern ^ 1
    positions = (torch.full_like(begin, last), torch.zeros_like(begin), begin, begin - 1)
    high = torch.stack(positions)[pattern, number]
    low = torch.stack(positions)[pattern ^ 1, number]
    heights = height * (1.0 + SPREAD * torch.rand(count, generator=generator, device=device))
    heights[-1] = LAST * (1.0 + SPREAD) * height
    for position, peak in ((low, -OPPOSITE * heights), (high, heights)):
        before = lines[number, position]
        lines[number, position] = torch.where(is_left, before, peak.to(lines.dtype))


def _beginnings(
    lines: torch.Tensor, blocks: Sequence[int], generator: torch.Generator, *, last_only: bool
) -> torch.Tensor:
    """For each line the beginning of a block other than the first: of the last block, or by turns of any."""
    (count, length), device = lines.shape, lines.device
    powers = [1 << k for k in reversed(range((length - 1).bit_length()))]
    possible = torch.tensor([size for size in blocks if size < length] or powers, device=device)
    size = possible[torch.arange(count, device=device) // PATTERNS % len(possible)]
    most = (length - 1) // size
    chosen = 1 + (torch.rand(count, generator=generator, device=device) * most).long().clamp_max(most - 1)
    is_last = (torch.arange(count, device=device) // 2 % 2 == 0) | last_only
    return torch.where(is_last, most, chosen) * size
