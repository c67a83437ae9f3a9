"""What the reference's process computed for each case, kept in its memory as far as that goes, else in files. Runs in workers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from mtmc_lsp.measure.running import is_interpreted

GPU_PART = 0.06
"""The part of a GPU's memory that is kept: what is timed and verified there needs most of it."""
HOST_BYTES = 1 << 30

_kept: dict[str, Any] = {}


def keep(path: str, value: Any, *, in_file: bool = False) -> None:
    """Keep tensors for this process, in whatever mappings and lists; in the file only where there is no room.

    Args:
        path: the file, and the name that they are found by.
        value: what holds the tensors.
        in_file: whether the file holds them already.
    """
    _kept.pop(path, None)
    held: dict[str, int] = {}
    for other in _kept.values():
        _count(other, held)
    _count(value, held)
    if all(size <= _room(device) for device, size in held.items()):
        _kept[path] = value
    elif not in_file:
        torch.save(value, path)


def is_there(path: str) -> bool:
    """Whether :func:`kept` finds it: a process that was started anew has nothing in its memory."""
    return path in _kept or Path(path).exists()


def kept(path: str, device: str) -> Any:
    """What was kept, on ``device`` where it comes from a file."""
    return _kept[path] if path in _kept else torch.load(path, weights_only=True, map_location=device)


def own_device() -> str:
    """Where this process compares."""
    return "cuda" if torch.cuda.is_available() and not is_interpreted() else "cpu"


def _room(device: str) -> float:
    return GPU_PART * torch.cuda.mem_get_info()[1] if device == "cuda" else HOST_BYTES


def _count(value: Any, held: dict[str, int]) -> None:
    """Add the bytes of all tensors in ``value`` to those of their devices."""
    if isinstance(value, torch.Tensor):
        held[value.device.type] = held.get(value.device.type, 0) + value.numel() * value.element_size()
    elif isinstance(value, (dict, list, tuple)):
        for part in value.values() if isinstance(value, dict) else value:
            _count(part, held)
