"""User code that draws random numbers on the host releases the GPU meanwhile. Runs in workers."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from mtmc_lsp.process.gpu_lock import unshared

DRAWING = frozenset({"rand", "randn", "randint", "normal", "randperm", "rand_like", "randn_like", "randint_like"})
LEAST = 1 << 18
"""Fewer numbers take less than a millisecond."""


class DrawingUnshared(TorchFunctionMode):  # type: ignore[misc]
    """Lets other runs time meanwhile: half a second for 50 million numbers of 16 bits."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        options = kwargs or {}
        name = getattr(function, "__name__", "")
        if name in DRAWING and _is_on_host(args, options) and _elements(args, options) >= LEAST:
            with unshared():
                return function(*args, **options)
        return function(*args, **options)


def _is_on_host(args: Sequence[Any], options: Mapping[str, Any]) -> bool:
    tensors = [item for item in (*args, *options.values()) if isinstance(item, torch.Tensor)]
    device = options.get("device") or (tensors[0].device if tensors else torch.get_default_device())
    return torch.device(device).type == "cpu" and all(tensor.device.type == "cpu" for tensor in tensors)


def _elements(args: Sequence[Any], options: Mapping[str, Any]) -> int:
    """The numbers that a call draws, as far as its arguments tell."""
    values = [*args, *(options[name] for name in ("size", "n") if name in options)]
    tensors = [item.numel() for item in values if isinstance(item, torch.Tensor)]
    shapes = [item for item in values if isinstance(item, (tuple, list))]
    sizes = shapes[0] if shapes else [item for item in values if isinstance(item, int)]
    return tensors[0] if tensors else math.prod(item for item in sizes if isinstance(item, int)) if sizes else 0
