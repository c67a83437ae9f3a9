"""Counts how often a call reads the contents of tensors in Python, and how much. Runs in workers.

Such a read may decide what is computed, so a candidate that reads is tried on more values. Whole tensors that become arrays or
lists may be all that it computes with.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

READS = frozenset(
    "item tolist numpy cpu __bool__ __int__ __float__ __complex__ __index__ __array__ __contains__ __dlpack__ __format__ "
    "__repr__ __iter__ equal allclose is_nonzero nonzero unique storage untyped_storage".split()
)
"""Names of functions that return contents as Python objects, numpy arrays or bytes, or depend on them."""


CONVERSIONS = frozenset(("numpy", "tolist", "__array__", "__dlpack__"))
"""Those of them that give all contents."""


class HostReads(TorchFunctionMode):  # type: ignore[misc]  # torch is not typed here
    """Counts the reads in calls."""

    def __init__(self) -> None:
        """Start at zero."""
        super().__init__()
        self.count = 0
        self.converted = 0
        """The largest number of floating-point elements that one read converted."""

    def call(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call a function of the candidate. Code around it, which reads random states and results, is not counted."""
        with self:
            return function(*args, **kwargs)

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        name = getattr(function, "__name__", "")
        self.count += name in READS
        if name in CONVERSIONS and isinstance(args[0], torch.Tensor) and args[0].is_floating_point():
            self.converted = max(self.converted, args[0].numel())
        return function(*args, **(kwargs or {}))
