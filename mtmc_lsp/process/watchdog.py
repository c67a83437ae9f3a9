"""A watchdog: a small process that ends the language server if its client is gone and the server cannot end by itself.

A server that is stopped (SIGSTOP) or stuck in native code cannot run its own checks, so it would never end. The
watchdog is not a descendant of the server and has its own session, so that a signal to the server's processes does not stop it.
It has its own command line, so that lists of processes show one server. It ends with the server.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import time

STOPPED_SECONDS, STUCK_SECONDS = 0.5, 2.5
"""Time for a server that is stopped, and for any other, to end after its client is gone."""
CASCADE_SECONDS = 2.0
"""Time for the server's processes to end by themselves after the server was killed."""
POLL_SECONDS = 1.0
"""Interval for checking processes where the system cannot report their end."""


def start_watchdog(client: int | None) -> None:
    """Start the watchdog of this process. Must be called before the process starts threads.

    Args:
        client: the process of the client, if known. The client is also gone when it closes its end of our standard input.
    """
    server = os.getpid()
    try:
        child = os.fork()
    except OSError:
        # No process can be started: the server then relies on its own checks.
        return
    if child:
        os.waitpid(child, 0)
        return
    # The middle process ends immediately, so that the watchdog is not a child of the server.
    with contextlib.suppress(OSError):
        if os.fork() == 0:
            os.setsid()
            from mtmc_lsp.process.supervisor import close_files

            close_files(first=1)
            # Isolated and without site-packages: this file imports only the standard library, and starts in about 10 ms.
            os.execv(sys.executable, [sys.executable, "-I", "-S", __file__, str(server), str(client or 0)])
    os._exit(0)


def _watch(server: int, client: int | None) -> None:
    """Wait for the end of the server or of its client, then end the server."""
    watched = WatchedProcess(server)
    if _is_client_gone(watched, client):
        _end(watched)


class WatchedProcess:
    """A process. A later process with the same number is not mistaken for it."""

    def __init__(self, number: int) -> None:
        """Watch the process with this number."""
        self.number = number
        self.file: int | None = None
        """File descriptor that becomes readable when the process ends, where the system has such."""
        with contextlib.suppress(OSError, AttributeError, OverflowError):
            self.file = os.pidfd_open(number)
        self._began = _fields(number)[19:20]

    def is_alive(self) -> bool:
        """Whether the process runs or is stopped."""
        if self.file is not None:
            return not select.select([self.file], [], [], 0)[0]
        try:
            os.kill(self.number, 0)
        except ProcessLookupError:
            return False
        except (OSError, OverflowError):
            pass
        fields = _fields(self.number)
        return fields[19:20] == self._began and fields[:1] != ["Z"]

    def wait(self) -> None:
        """Wait for its end."""
        while self.is_alive():
            if self.file is None:
                time.sleep(POLL_SECONDS)
            else:
                select.select([self.file], [], [])

    def is_stopped(self) -> bool:
        """Whether a signal stopped the process."""
        return _fields(self.number)[:1] in (["T"], ["t"])

    def kill(self) -> None:
        """Kill the process if it still exists."""
        with contextlib.suppress(OSError):
            if self.file is not None:
                signal.pidfd_send_signal(self.file, signal.SIGKILL)
            elif self.is_alive():
                os.kill(self.number, signal.SIGKILL)


def _fields(process: int) -> list[str]:
    """State, parent and further fields of ``/proc/PID/stat``; empty where there is none."""
    with contextlib.suppress(OSError), open(f"/proc/{process}/stat", encoding="utf-8", errors="replace") as stream:
        return stream.read().rpartition(")")[2].split()
    return []


def watched_client(number: int | None) -> WatchedProcess | None:
    """The client's process; None if it is unknown here, because the client runs in another container or on another host."""
    if number is None or number <= 0:
        return None
    client = WatchedProcess(number)
    return client if client.is_alive() else None


def _is_client_gone(server: WatchedProcess, number: int | None) -> bool:
    """Wait for the end of the client; false if the server ended first."""
    client = watched_client(number)
    poller = select.poll()
    # Only the end of the connection is reported: the server reads what it carries.
    poller.register(0, 0)
    files = [process.file for process in (server, client) if process is not None]
    for file in files:
        if file is not None:
            poller.register(file, select.POLLIN)
    timeout = None if None not in files else POLL_SECONDS * 1000
    while server.is_alive():
        if any(file == 0 for file, _ in poller.poll(timeout)) or not (client is None or client.is_alive()):
            return True
    return False


def _end(server: WatchedProcess) -> None:
    """Give the server time to end, then kill it and what it started."""
    began = time.monotonic()
    while server.is_alive():
        elapsed = time.monotonic() - began
        if elapsed > (STOPPED_SECONDS if server.is_stopped() else STUCK_SECONDS):
            break
        time.sleep(0.05)
    # A list from before the end: afterwards nothing says what the server started.
    started = [WatchedProcess(number) for number in _descendants(server.number)] if server.is_alive() else []
    server.kill()
    end = time.monotonic() + CASCADE_SECONDS
    while any(process.is_alive() for process in started) and time.monotonic() < end:
        time.sleep(0.05)
    for process in started:
        for number in _descendants(process.number) if process.is_alive() else ():
            WatchedProcess(number).kill()
        process.kill()


def _descendants(ancestor: int) -> list[int]:
    """The processes that a process started, and those that they started."""
    parents: dict[int, int] = {}
    with contextlib.suppress(OSError):
        for name in os.listdir("/proc"):
            fields = _fields(int(name)) if name.isdigit() else []
            if fields:
                parents[int(name)] = int(fields[1])
    descendants = [ancestor]
    for process in descendants:
        descendants += [child for child, parent in parents.items() if parent == process]
    return descendants[1:]


if __name__ == "__main__":
    _watch(int(sys.argv[1]), int(sys.argv[2]) or None)
