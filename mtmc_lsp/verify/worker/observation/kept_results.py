"""Keeps the results of all calls on a case: later calls must not change them, and changing them must not change later calls.

Runs in workers.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

FILLING = 77
"""What a user might write into a result."""


class KeptResults:
    """Results of earlier calls, and copies of them. They stay in memory, so later calls get memory at other addresses."""

    def __init__(self) -> None:
        """Start without results."""
        self._pairs: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._alive: list[Any] = []

    def keep(self, results: Iterable[Any], inputs: Mapping[str, torch.Tensor], more: Any = None) -> None:
        """Keep the results of one call, except those in memory of its inputs, which a later call may change.

        Args:
            more: further objects that stay alive.
        """
        shared = {tensor.untyped_storage().data_ptr() for tensor in inputs.values()}
        for result in results:
            if not isinstance(result, torch.Tensor) or result.layout is not torch.strided or not result.numel():
                continue
            bare = result.detach().as_subclass(torch.Tensor)
            if bare.untyped_storage().data_ptr() not in shared:
                self._pairs.append((bare, bare.clone()))
        self._alive.append((dict(inputs), more))

    def is_overwritten(self) -> bool:
        """Whether a later call changed a result."""
        # Compared as bytes: NaN equals NaN.
        return any(not torch.equal(*map(_as_bytes, pair)) for pair in self._pairs)

    def accept(self) -> None:
        """Regard the present contents as right."""
        self._pairs = [(bare, bare.clone()) for bare, _ in self._pairs]

    def overwrite(self) -> None:
        """Write into all results, as their user may."""
        for result, _ in self._pairs:
            if not _repeats_memory(result):
                result.fill_(FILLING)


def calls_until_reuse(first: Iterable[Any], later: Iterable[Any]) -> int:
    """After how many calls memory that holds the results of two calls is used up; 0 if they share none."""
    memories = {t.untyped_storage().data_ptr(): t for t in first if isinstance(t, torch.Tensor) and t.numel()}
    for result in later:
        shared = memories.get(result.untyped_storage().data_ptr()) if isinstance(result, torch.Tensor) else None
        if shared is not None:
            return 1 + int(shared.untyped_storage().nbytes() // (shared.numel() * shared.element_size()))
    return 0


def _as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def _repeats_memory(tensor: torch.Tensor) -> bool:
    return any(size > 1 and stride == 0 for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
