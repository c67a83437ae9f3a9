"""Numbers from many tensors, read from the device together. Runs in workers.

Each read waits for the device, and where several processes share a GPU, for its next turn, which is milliseconds: a network has
hundreds of tensors, and hundreds of turns per case are minutes per candidate.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import TypeVar

import torch

Name = TypeVar("Name", bound=Hashable)


def numbers(scalars: Sequence[torch.Tensor]) -> list[float]:
    """The values of tensors of one element each, by one read from each device."""
    found = [0.0] * len(scalars)
    places: dict[torch.device, list[int]] = {}
    for i, scalar in enumerate(scalars):
        places.setdefault(scalar.device, []).append(i)
    for indices in places.values():
        together = torch.stack([scalars[i].detach().reshape(()).to(torch.float64) for i in indices])
        for i, value in zip(indices, together.tolist(), strict=True):
            found[i] = float(value)
    return found


def unlike(pairs: Mapping[Name, tuple[torch.Tensor, torch.Tensor]]) -> set[Name]:
    """The names of pairs that are not equal, NaN being equal to NaN."""
    found = {name for name, (a, b) in pairs.items() if a.shape != b.shape or a.dtype != b.dtype}
    left = [name for name in pairs if name not in found]
    # Numbers that are no NaN are equal in nearly all pairs: only of the others more is asked.
    values = {name: tuple(map(computable, pairs[name])) for name in left}
    left = _true(left, ((a != b).any() for a, b in values.values()))
    return found | set(_true(left, (_differ(*values[name]).any() for name in left)))


def computable(value: torch.Tensor) -> torch.Tensor:
    """The same numbers in a dtype that has arithmetic and comparisons, which float8 has not."""
    return value.float() if value.is_floating_point() and value.element_size() == 1 else value


def _differ(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return (a != b) & ~((a != a) & (b != b))


def _true(names: Sequence[Name], flags: Iterable[torch.Tensor]) -> list[Name]:
    return [name for name, flag in zip(names, numbers(list(flags)), strict=True) if flag]
