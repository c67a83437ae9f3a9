"""Caches the inputs and expected results of each case in the reference's process, or else in files. Runs in workers.

Large values on the GPU move to the host, because other processes need the GPU's memory.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from mtmc_lsp.process.worker.gpu_memory import when_others_need_memory
from mtmc_lsp.process.worker.tensor_ipc import export_, import_
from mtmc_lsp.verify.worker.oracle_runs.limits import Attempt
from mtmc_lsp.verify.worker.run_target import is_interpreted

GPU_PART = 0.125
"""The part of the GPU's free memory that the cache may use: verification and timing need most of it."""
HOST_BYTES = 1 << 30
MOVED_BYTES, MOVED_PART = 16 << 30, 0.125
"""Limits for values from the GPU on the host: in bytes, and as a share of its free memory. The smaller one counts."""
MOVED = "moved"
"""The key of their bytes in :data:`_bytes`."""
ATTEMPT = ":attempt"
"""The end of the key of the runs that gave the expected results."""
FILE_BYTES = 2 << 30
"""Larger values are faster to compute again than to write to a disk and read back."""

_cache: dict[str, Any] = {}
_bytes: dict[str, dict[str, int]] = {}
"""By key of a cached value: the bytes of its tensors on each device."""


@dataclass(frozen=True)
class _Moved:
    """A tensor of the GPU on the host."""

    tensor: torch.Tensor


def store(path: str, value: Any, *, or_file: bool) -> None:
    """Cache tensors in this process if there is room, on the GPU or on the host.

    Args:
        path: the path of a file, and the key of the value.
        value: mappings and lists with tensors.
        or_file: whether to write the file if there is no room, up to ``FILE_BYTES``; otherwise the value is not cached.
    """
    _cache.pop(path, None)
    added: dict[str, int] = {}
    _count(value, added)
    if _keep(path, value, added) or _keep_on_host(path, value, added):
        return
    if or_file and sum(added.values()) <= FILE_BYTES:
        export_(value, path, in_memory=False)


def is_cached(path: str) -> bool:
    """Whether :func:`load` can return it; the memory of a restarted process is empty."""
    return path in _cache or Path(path).exists()


def in_memory(path: str) -> bool:
    """Whether the value is in this process's memory."""
    return path in _cache


def load(path: str, device: str) -> Any:
    """The cached value; if it comes from a file, its tensors are on ``device``."""
    if path not in _cache:
        return import_(path, device)
    value = _cache[path]
    return (
        _mapped(value, _Moved, lambda moved: moved.tensor.to(comparison_device())) if MOVED in _bytes[path] else value
    )


@when_others_need_memory
def move_to_host() -> None:
    """Move all values from the GPU to the host; those for which it has no room are computed again when they are needed."""
    for path in [path for path in _cache if path.endswith(ATTEMPT)]:
        del _cache[path]
    for path in [path for path in _cache if "cuda" in _bytes[path]]:
        value, added = _cache.pop(path), _bytes[path]
        _keep_on_host(path, value, added)


def _keep(path: str, value: Any, added: dict[str, int]) -> bool:
    """Keep a value with these bytes; whether there is room."""
    total = dict(added)
    for key in _cache:
        for device, size in _bytes[key].items():
            total[device] = total.get(device, 0) + size
    has_room = all(total[device] <= _limit(device, total[device]) for device in added)
    if has_room:
        _cache[path], _bytes[path] = value, added
    return has_room


def _keep_on_host(path: str, value: Any, added: dict[str, int]) -> bool:
    """Keep a value with its tensors of the GPU on the host; whether that is possible."""
    if "cuda" not in added:
        return False
    moved = {MOVED if device == "cuda" else device: size for device, size in added.items()}
    if not _keep(path, None, moved):
        return False
    try:
        _cache[path] = _mapped(value, torch.Tensor, _moved)
    except _KeepsNoLayout:
        del _cache[path]
        return False
    return True


class _KeepsNoLayout(Exception):
    """A copy of a tensor has other strides."""


def _moved(tensor: torch.Tensor) -> Any:
    if _device(tensor) != "cuda":
        return tensor
    copy = tensor.detach().to("cpu", copy=True)
    if copy.stride() != tensor.stride():
        raise _KeepsNoLayout
    return _Moved(copy)


def _mapped(value: Any, kind: type[Any], change: Callable[[Any], Any]) -> Any:
    """The same structure with ``change`` applied to each object of a kind."""
    if isinstance(value, kind):
        return change(value)
    if isinstance(value, dict):
        return {key: _mapped(part, kind, change) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)([_mapped(part, kind, change) for part in value])
    return value


def keep_attempt(path: str, attempt: Attempt, inputs: str = "") -> None:
    """Keep the runs of the expected results that are cached at ``path``, until more draws are needed; nothing without them.

    Args:
        inputs: the key of the inputs, which the runs hold, too: without them the runs are not kept.
    """
    key = path + ATTEMPT
    _cache.pop(key, None)
    # What it shares with the expected results and the inputs is counted there.
    is_counted = all(name in _cache and MOVED not in _bytes[name] for name in (path, *([inputs] if inputs else [])))
    if attempt.runs is not None and is_counted:
        added: dict[str, int] = {}
        _count(attempt.tensors, added)
        _keep(key, attempt, added)


def last_attempt(path: str) -> Attempt | None:
    """The attempt that :func:`keep_attempt` has kept."""
    attempt: Attempt | None = _cache.get(path + ATTEMPT)
    return attempt


def comparison_device() -> str:
    """The device on which this process compares results."""
    return "cuda" if torch.cuda.is_available() and not is_interpreted() else "cpu"


def _limit(device: str, total: int) -> float:
    """Bytes that the cache may use: a part of the memory that is free, unused in torch's allocator, or used by the cache."""
    if device == MOVED:
        return min(MOVED_BYTES, MOVED_PART * os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    if device != "cuda":
        return HOST_BYTES
    idle = torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
    return GPU_PART * float(torch.cuda.mem_get_info()[0] + idle + total)


def _device(tensor: torch.Tensor) -> str:
    return str(tensor.device.type)


def _count(value: Any, total: dict[str, int]) -> None:
    """Add the bytes of all tensors in ``value`` to those of their devices."""
    if isinstance(value, torch.Tensor):
        device = _device(value)
        total[device] = total.get(device, 0) + value.numel() * value.element_size()
    elif isinstance(value, (dict, list, tuple)):
        for part in value.values() if isinstance(value, dict) else value:
            _count(part, total)
