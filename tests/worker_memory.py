"""Returns the memory of workers that many tests share: what the C library keeps after large tensors is never returned otherwise."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from mtmc_lsp.process.worker_process import Worker

MOST_BYTES = 1 << 30
"""A worker of tests has 0.4 to 0.7 GB after it imported torch and captured a few targets."""


def close_large(*workers: Worker) -> None:
    """Close the workers that hold more memory than that. Their next call starts a new process."""
    for worker in workers:
        process = worker._process
        if process is not None and resident_bytes(process.pid) > MOST_BYTES:
            worker.close()


def resident_bytes(process: int) -> int:
    """Memory of a process and of those that it started; 0 on systems without ``/proc``."""
    total = 0
    with contextlib.suppress(OSError):
        total = int(Path(f"/proc/{process}/statm").read_text("ascii").split()[1]) * os.sysconf("SC_PAGE_SIZE")
        for child in Path(f"/proc/{process}/task/{process}/children").read_text("ascii").split():
            total += resident_bytes(int(child))
    return total
