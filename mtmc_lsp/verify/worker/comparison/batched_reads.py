"""Reads numbers of many tensors from the device at once. Runs in workers.

Each read waits for the device. If several processes share a GPU, it also waits for the next time slice, which takes
milliseconds. A network has hundreds of tensors, so separate reads for each case would take minutes per candidate.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import TypeVar

import torch

Name = TypeVar("Name", bound=Hashable)


def numbers(scalars: Sequence[torch.Tensor]) -> list[float]:
    """The values of single-element tensors, with one read per device."""
    values = [0.0] * len(scalars)
    indices_of: dict[torch.device, list[int]] = {}
    for i, scalar in enumerate(scalars):
        indices_of.setdefault(scalar.device, []).append(i)
    for indices in indices_of.values():
        stacked = torch.stack([scalars[i].detach().reshape(()).to(torch.float64) for i in indices])
        for i, value in zip(indices, stacked.tolist(), strict=True):
            values[i] = float(value)
    return values


def unequal(pairs: Mapping[Name, tuple[torch.Tensor, torch.Tensor]]) -> set[Name]:
    """The names of pairs that are not equal; NaN equals NaN."""
    other_types = {name for name, (a, b) in pairs.items() if a.shape != b.shape or a.dtype != b.dtype}
    candidates = [name for name in pairs if name not in other_types]
    # Almost all pairs are equal without NaN, so only the others get the more expensive comparison.
    values = {name: tuple(map(computable, pairs[name])) for name in candidates}
    candidates = _flagged(candidates, ((a != b).any() for a, b in values.values()))
    return other_types | set(_flagged(candidates, (_differ(*values[name]).any() for name in candidates)))


def computable(value: torch.Tensor) -> torch.Tensor:
    """The same numbers in a dtype with arithmetic and comparisons, which float8 lacks."""
    return value.float() if value.is_floating_point() and value.element_size() == 1 else value


def _differ(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return (a != b) & ~((a != a) & (b != b))


def _flagged(names: Sequence[Name], flags: Iterable[torch.Tensor]) -> list[Name]:
    return [name for name, flag in zip(names, numbers(list(flags)), strict=True) if flag]
