"""Counts how often a call reads the contents of tensors in Python. Runs in workers.

Such a read may decide what is computed, so a candidate that reads is tried on more values.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch.overrides import TorchFunctionMode

READS = frozenset(
    "item tolist numpy cpu __bool__ __int__ __float__ __complex__ __index__ __array__ __contains__ __dlpack__ __format__ "
    "__repr__ __iter__ equal allclose is_nonzero nonzero unique storage untyped_storage".split()
)
"""Names of functions that return contents as Python objects, numpy arrays or bytes, or depend on them."""


class HostReads(TorchFunctionMode):  # type: ignore[misc]  # torch is not typed here
    """Counts the reads in a context."""

    def __init__(self) -> None:
        """Start at zero."""
        super().__init__()
        self.count = 0

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        self.count += getattr(function, "__name__", "") in READS
        return function(*args, **(kwargs or {}))
