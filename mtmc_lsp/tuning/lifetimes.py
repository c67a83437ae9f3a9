"""When the tensors of a launcher are in memory, and how many bytes that takes at most."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

LEAST_BYTES = 1 << 20
"""Smaller tensors are kept until the launcher returns: torch's allocator takes memory in pieces of 2 MiB."""
LEAST_SAVING = 0.02
"""The part of the peak that must be saved."""


@dataclass
class Lifetime:
    """A tensor with its views, and the numbers of the statements that create it and use it last."""

    size: float
    first: int
    last: int
    is_kept: bool = False
    """Whether the launcher returns it."""


def released(lifetimes: Sequence[Lifetime]) -> list[Lifetime]:
    """The tensors that a launcher drops after their last use: large ones before a further allocation, if that lowers the peak."""
    large = [each for each in lifetimes if each.size >= LEAST_BYTES]
    last_allocation = max((each.first for each in large), default=0)
    found = [each for each in large if not each.is_kept and each.last < last_allocation]
    whole = sum(each.size for each in lifetimes)
    return found if found and peak(lifetimes, found) <= (1 - LEAST_SAVING) * whole else []


def peak(lifetimes: Sequence[Lifetime], dropped: Sequence[Lifetime]) -> float:
    """The most bytes that are in memory at once."""
    changes: dict[int, float] = {}
    for each in lifetimes:
        changes[each.first] = changes.get(each.first, 0.0) + each.size
    for each in dropped:
        changes[each.last + 1] = changes.get(each.last + 1, 0.0) - each.size
    most = total = 0.0
    for statement in sorted(changes):
        total += changes[statement]
        most = max(most, total)
    return most
