"""Keeps ``len(tensor)`` symbolic in a trace.

Python converts the result of ``__len__`` to an ``int``, so ``len(x)`` would fix a size that ``x.shape[0]`` leaves free.
Runs in workers.
"""

from __future__ import annotations

import builtins
import contextlib
from collections.abc import Iterator
from typing import Any

import torch


@contextlib.contextmanager
def symbolic_lengths() -> Iterator[None]:
    """Replace ``len`` by a function that returns the first size of a tensor as it is."""
    original = builtins.len

    def length(value: Any) -> Any:
        # Tensors without dimensions raise the error of the original.
        return value.shape[0] if isinstance(value, torch.Tensor) and value.dim() else original(value)

    builtins.len = length
    try:
        yield
    finally:
        builtins.len = original
