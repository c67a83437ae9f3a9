"""How a process that does one job for the server begins and ends.

It reads one JSON line with the request from standard input and writes events as JSON lines to standard output. It ends, with what
it started, on SIGTERM, and when standard input ends: then the server is gone.
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


def begin(before_end: Callable[[], None] | None = None) -> tuple[dict[str, Any], TextIO]:
    """The request, and where events go; ``before_end`` is called on SIGTERM, in the middle of anything."""
    # Kernels are timed by processes that wait for nobody. Without a GPU nothing is timed, and checking takes every core.
    if not sees_gpu():
        lower_priority()
    # What libraries and the user's program print must not come between the events.
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    signal.signal(signal.SIGTERM, lambda number, _: _end(number, before_end))
    request: dict[str, Any] = json.loads(sys.stdin.readline())
    threading.Thread(target=_end_with_server, daemon=True).start()
    return request, out


def tell(out: TextIO, event: str, **values: Any) -> None:
    """Say one event."""
    out.write(json.dumps({"event": event, **values}) + "\n")
    out.flush()


def _end(number: int, before_end: Callable[[], None] | None) -> None:
    if before_end is not None:
        before_end()
    # An exception, so that workers are ended and scratch files removed on the way out.
    raise SystemExit(128 + number)


def _end_with_server() -> None:
    # Not through sys.stdin, whose lock the interpreter needs at its end.
    while os.read(0, 1):
        pass
    if os.getpgrp() == os.getpid():
        # A program that this process runs is in its group.
        os.killpg(0, signal.SIGTERM)
    else:
        os.kill(os.getpid(), signal.SIGTERM)
