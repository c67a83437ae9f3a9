"""What the reference's process computed for each case, kept in its memory as far as that goes, else in files. Runs in workers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from mtmc_lsp.process.worker.tensor_ipc import export_, import_
from mtmc_lsp.verify.worker.run_target import is_interpreted

GPU_PART = 0.25
"""The part of what is free of a GPU's memory that is kept: what is timed and verified there needs most of it."""
HOST_BYTES = 1 << 30
FILE_BYTES = 2 << 30
"""What is larger is sooner computed again than written to a disk and read back."""

_kept: dict[str, Any] = {}


def keep(path: str, value: Any, *, or_file: bool) -> None:
    """Keep tensors for this process, in whatever mappings and lists, as far as there is room.

    Args:
        path: a file, and the name that they are found by.
        value: what holds the tensors.
        or_file: whether they go to the file where there is no room, up to ``FILE_BYTES``; else they are then made again when
            they are needed.
    """
    _kept.pop(path, None)
    held: dict[str, int] = {}
    for other in _kept.values():
        _count(other, held)
    _count(value, held)
    mine: dict[str, int] = {}
    _count(value, mine)
    if all(held[device] <= _room(device, held[device]) for device in mine):
        _kept[path] = value
    elif or_file and sum(mine.values()) <= FILE_BYTES:
        export_(value, path, in_memory=False)


def is_there(path: str) -> bool:
    """Whether :func:`kept` finds it: a process that was started anew has nothing in its memory."""
    return path in _kept or Path(path).exists()


def in_memory(path: str) -> bool:
    """Whether this process has it in its memory."""
    return path in _kept


def kept(path: str, device: str) -> Any:
    """What was kept, on ``device`` where it comes from a file."""
    return _kept[path] if path in _kept else import_(path, device)


def own_device() -> str:
    """Where this process compares."""
    return "cuda" if torch.cuda.is_available() and not is_interpreted() else "cpu"


def _room(device: str, held: int) -> float:
    """Bytes that may be kept in all, of what is free but for that, and for what torch holds back."""
    if device != "cuda":
        return HOST_BYTES
    idle = torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
    return GPU_PART * float(torch.cuda.mem_get_info()[0] + idle + held)


def _count(value: Any, held: dict[str, int]) -> None:
    """Add the bytes of all tensors in ``value`` to those of their devices."""
    if isinstance(value, torch.Tensor):
        held[value.device.type] = held.get(value.device.type, 0) + value.numel() * value.element_size()
    elif isinstance(value, (dict, list, tuple)):
        for part in value.values() if isinstance(value, dict) else value:
            _count(part, held)
