"""How a process that does one job for the server begins and ends.

It reads the request as one JSON line from standard input and writes events as JSON lines to standard output. It ends, with all
processes that it started, on SIGTERM and when standard input is closed, since then the server is gone.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from collections.abc import Callable
from typing import Any, TextIO

from mtmc_lsp.process.fork_server import sees_gpu
from mtmc_lsp.process.priority import lower_priority
from mtmc_lsp.process.supervisor import run_supervised

GRACE_SECONDS = 1.0
"""Time for a stopped job to remove its scratch files, before it is killed with everything that it started."""


def begin(before_end: Callable[[], None] | None = None) -> tuple[dict[str, Any], TextIO]:
    """Read the request.

    Args:
        before_end: called on SIGTERM, at any point of the job.

    Returns:
        The request, and the stream for events.
    """
    # Without a GPU nothing is timed, and verification uses every core; the editor goes first.
    if not sees_gpu():
        lower_priority()
    run_supervised(GRACE_SECONDS)
    # Standard output is for events only; what libraries and the user's code print goes to standard error.
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    signal.signal(signal.SIGTERM, lambda number, _: _end(number, before_end))
    request: dict[str, Any] = json.loads(sys.stdin.readline())
    threading.Thread(target=_end_with_server, daemon=True).start()
    return request, out


def report(out: TextIO, event: str, **values: Any) -> None:
    """Write one event."""
    out.write(json.dumps({"event": event, **values}) + "\n")
    out.flush()


def _end(number: int, before_end: Callable[[], None] | None) -> None:
    if before_end is not None:
        before_end()
    # An exception, so that workers are ended and temporary files are removed.
    raise SystemExit(128 + number)


def _end_with_server() -> None:
    # Not through sys.stdin: the interpreter needs its lock when it exits.
    while os.read(0, 1):
        pass
    if os.getpgrp() == os.getpid():
        # The group also contains the program that this process runs.
        os.killpg(0, signal.SIGTERM)
    else:
        os.kill(os.getpid(), signal.SIGTERM)
