"""Caches the inputs and expected results of each case in the reference's process, or else in files. Runs in workers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from mtmc_lsp.process.worker.tensor_ipc import export_, import_
from mtmc_lsp.verify.worker.oracle_runs.limits import Attempt
from mtmc_lsp.verify.worker.run_target import is_interpreted

GPU_PART = 0.25
"""The part of the GPU's free memory that the cache may use: verification and timing need most of it."""
HOST_BYTES = 1 << 30
ATTEMPT = ":attempt"
FILE_BYTES = 2 << 30
"""Larger values are faster to compute again than to write to a disk and read back."""

_cache: dict[str, Any] = {}
_bytes: dict[str, dict[str, int]] = {}
"""By key of a cached value: the bytes of its tensors on each device."""


def store(path: str, value: Any, *, or_file: bool) -> None:
    """Cache tensors in this process if there is room.

    Args:
        path: the path of a file, and the key of the value.
        value: mappings and lists with tensors.
        or_file: whether to write the file if there is no room, up to ``FILE_BYTES``; otherwise the value is not cached.
    """
    _cache.pop(path, None)
    added: dict[str, int] = {}
    _count(value, added)
    total = dict(added)
    for key in _cache:
        for device, size in _bytes[key].items():
            total[device] = total.get(device, 0) + size
    if all(total[device] <= _limit(device, total[device]) for device in added):
        _cache[path], _bytes[path] = value, added
    elif or_file and sum(added.values()) <= FILE_BYTES:
        export_(value, path, in_memory=False)


def is_cached(path: str) -> bool:
    """Whether :func:`load` can return it; the memory of a restarted process is empty."""
    return path in _cache or Path(path).exists()


def in_memory(path: str) -> bool:
    """Whether the value is in this process's memory."""
    return path in _cache


def load(path: str, device: str) -> Any:
    """The cached value; if it comes from a file, its tensors are on ``device``."""
    return _cache[path] if path in _cache else import_(path, device)


def keep_attempt(path: str, attempt: Attempt) -> None:
    """Keep the runs of the expected results that are cached at ``path``, until more draws are needed; nothing without them."""
    key = path + ATTEMPT
    _cache.pop(key, None)
    # What it shares with the expected results is counted there.
    if attempt.runs is not None and in_memory(path):
        store(key, {"attempt": attempt, "tensors": attempt.tensors}, or_file=False)


def last_attempt(path: str) -> Attempt | None:
    """The attempt that :func:`keep_attempt` has kept."""
    kept = _cache.get(path + ATTEMPT)
    attempt: Attempt | None = kept["attempt"] if kept is not None else None
    return attempt


def comparison_device() -> str:
    """The device on which this process compares results."""
    return "cuda" if torch.cuda.is_available() and not is_interpreted() else "cpu"


def _limit(device: str, total: int) -> float:
    """Bytes that the cache may use: a part of the memory that is free, unused in torch's allocator, or used by the cache."""
    if device != "cuda":
        return HOST_BYTES
    idle = torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
    return GPU_PART * float(torch.cuda.mem_get_info()[0] + idle + total)


def _count(value: Any, total: dict[str, int]) -> None:
    """Add the bytes of all tensors in ``value`` to those of their devices."""
    if isinstance(value, torch.Tensor):
        total[value.device.type] = total.get(value.device.type, 0) + value.numel() * value.element_size()
    elif isinstance(value, (dict, list, tuple)):
        for part in value.values() if isinstance(value, dict) else value:
            _count(part, total)
