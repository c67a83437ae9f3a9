"""Ends a process once the process that started it is gone: then nobody waits for its answer."""

from __future__ import annotations

import os
import threading
import time

POLL_SECONDS = 0.5
PARENT = "MTMC_PARENT"
"""Environment variable with the number of the process that starts another one."""


def with_parent() -> dict[str, str]:
    """The variable for a process that this one starts. Without it, a parent that ends at once would not be noticed."""
    return {PARENT: str(os.getpid())}


def end_with_parent() -> None:
    """End this process soon after the end of its parent."""
    parent = int(os.environ.pop(PARENT, os.getppid()))

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(POLL_SECONDS)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
