"""Settings of the C library's memory allocator. Runs in workers."""

from __future__ import annotations

import ctypes
from contextlib import suppress

TRIM_THRESHOLD, MMAP_MAX = -1, -4
"""Parameters of glibc's ``mallopt``."""
KEPT_BYTES = 1 << 30
"""So much freed memory at the end of the heap stays with the process."""


def keep_freed_memory() -> None:
    """Let freed memory be used again instead of returned to the system, as far as the C library can do that.

    Each operation on a tensor allocates its result. By default glibc returns blocks of more than some hundred kilobytes at once,
    and the system fills each page with zeros again: a fifth of a verification's processor time under the interpreter.
    """
    # Other C libraries than glibc have no such function.
    with suppress(AttributeError, OSError):
        allocator = ctypes.CDLL(None)
        allocator.mallopt(MMAP_MAX, 0)
        allocator.mallopt(TRIM_THRESHOLD, KEPT_BYTES)
