"""A fork server that imports torch before the first run, so that a run starts in a second instead of several.

It runs no user code. Each job's host borrows it, and all workers of the job end with the host.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from pathlib import Path

from mtmc_lsp.app.interpreter import find_python
from mtmc_lsp.core.errors import MtmcError
from mtmc_lsp.core.settings import read_settings
from mtmc_lsp.process.fork_server import ForkServer, likely_variables


class WarmWorkers:
    """The fork server for the interpreter of the file that was prepared last. Threads may share it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._fork_server: ForkServer | None = None
        self._is_closed = False

    def prepare(self, path: str, python: str | None) -> None:
        """Start the fork server for a trusted file, unless it runs already. Returns before its imports are done.

        Args:
            python: the interpreter in the client's settings; by default the one that a run would use.
        """
        try:
            interpreter = python or find_python(Path(path), read_settings(Path(path).parent))
        except MtmcError:
            # A run reports what is wrong with the settings.
            return
        with self._lock:
            if self._is_closed or (self._fork_server is not None and self._fork_server.python == interpreter):
                return
            if self._fork_server is not None:
                self._fork_server.close()
            self._fork_server = ForkServer(interpreter, likely_variables(), preload=True)
            self._fork_server.start()

    @contextlib.contextmanager
    def lend(self) -> Iterator[tuple[dict[str, str], tuple[int, ...]]]:
        """Environment variables and descriptors for a process that borrows the fork server; empty if there is none."""
        fork_server = self._fork_server
        if fork_server is None:
            yield {}, ()
            return
        with fork_server.lend() as offer:
            yield offer

    def close(self) -> None:
        """End the fork server."""
        with self._lock:
            self._is_closed = True
            if self._fork_server is not None:
                self._fork_server.close()
