"""Notices whether a run draws random numbers. Runs in workers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

from mtmc_lsp.capture.worker.side_effects import is_random


class RandomDraws(TorchDispatchMode):  # type: ignore[misc]
    """Active during a run, it sees every operation; those with a generator of their library are not noticed."""

    def __init__(self) -> None:
        """Nothing has been drawn yet."""
        super().__init__()
        self.any = False

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run the operation."""
        self.any = self.any or is_random(str(func))
        return func(*args, **(kwargs or {}))
