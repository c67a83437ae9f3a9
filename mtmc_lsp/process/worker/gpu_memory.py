"""Returns GPU memory that a worker does not use to the driver, for the other workers of the run. Runs in workers."""

from __future__ import annotations

import contextlib
import gc
import sys
from collections.abc import Callable
from typing import Any

from mtmc_lsp.process.messages import ReleaseRequest
from mtmc_lsp.process.protocol import NoAnswer

IDLE_PART = 1 / 32
"""The share of the GPU's memory that torch's allocator may keep unused between two commands."""

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


def release(request: ReleaseRequest) -> NoAnswer:
    """Free what this worker can compute again or keep on the host."""
    for drop in _droppers:
        with contextlib.suppress(Exception):
            drop()
    return_idle_memory(ran_out=True)
    return NoAnswer()
