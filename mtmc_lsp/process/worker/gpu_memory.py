"""Returns GPU memory that a worker does not use to the driver, for the other workers of the run. Runs in workers."""

from __future__ import annotations

import contextlib
import gc
import sys
from collections.abc import Callable, Iterator
from typing import Any

from mtmc_lsp.process.messages import ReleaseRequest
from mtmc_lsp.process.protocol import NoAnswer

IDLE_PART = 1 / 32
"""The share of the GPU's memory that torch's allocator may keep unused between two commands."""

ROOM_PART = 0.4
"""The share of the free memory that work which can be left out leaves to others."""

_droppers: list[Callable[[], None]] = []


def when_others_need_memory(drop: Callable[[], None]) -> Callable[[], None]:
    """Register a function that frees GPU memory, or moves its contents to the host, because another worker needs it."""
    _droppers.append(drop)
    return drop


def return_idle_memory(*, ran_out: bool = False) -> None:
    """Return the unused memory of torch's allocator if it is a considerable share of the GPU's; called after each command.

    Args:
        ran_out: whether the command ran out of memory; then all unused memory is returned, also that of tensors in cycles.
    """
    torch: Any = sys.modules.get("torch")
    # A worker may be asked before it imports torch; a lost GPU context raises errors, which the next command reports.
    with contextlib.suppress(Exception):
        if torch is None or not torch.cuda.is_initialized():
            return
        if ran_out:
            gc.collect()
        idle = torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
        if idle > (0 if ran_out else IDLE_PART * torch.cuda.mem_get_info()[1]):
            torch.cuda.empty_cache()


@contextlib.contextmanager
def leaving_room() -> Iterator[None]:
    """Let work that can be left out raise ``torch.OutOfMemoryError`` before it takes the memory that others need meanwhile."""
    torch: Any = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        yield
        return
    free, total = torch.cuda.mem_get_info()
    used = torch.cuda.memory_allocated()
    # What torch's allocator holds and does not use is free for this process.
    free += torch.cuda.memory_reserved() - used
    torch.cuda.set_per_process_memory_fraction(min(1.0, (used + (1.0 - ROOM_PART) * free) / total))
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


def release(request: ReleaseRequest) -> NoAnswer:
    """Free what this worker can compute again or keep on the host."""
    for drop in _droppers:
        with contextlib.suppress(Exception):
            drop()
    return_idle_memory(ran_out=True)
    return NoAnswer()
