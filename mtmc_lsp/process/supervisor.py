"""A supervisor: a small process that ends everything that a process of user code started, whatever session it is in.

User code can start processes that leave its process group. On Linux, their parent becomes the supervisor when the process that
started them ends, so the supervisor can find and end them. It runs no user code, and ends with the process that started it.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import signal
import sys
import time
from pathlib import Path

SET_PARENT_DEATH_SIGNAL, SET_CHILD_SUBREAPER = 1, 36
WATCH_SECONDS = 1.0
"""Interval for checking that the process that started the supervisor exists."""
END_SECONDS = 10.0
"""Time limit for ending all processes; the kernel may have to wait for a device first."""
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGCHLD)


def run_supervised(grace_seconds: float = 0.0) -> None:
    """Continue in a child process, while this process stays as its supervisor. Returns only in the child.

    The supervisor exits as the child does, after all processes that the child left. On SIGTERM it ends the child. Must be called
    before the process starts threads. Does nothing on systems other than Linux.

    Args:
        grace_seconds: time for the child to react to SIGTERM before it is killed; with 0 it is killed immediately.
    """
    if sys.platform != "linux":
        return
    parent = os.getppid()
    adopt_orphans()
    # Block the signals first, so that none is lost before the supervisor waits for them.
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    child = os.fork()
    if child == 0:
        os.setpgid(0, 0)
        ctypes.CDLL(None).prctl(SET_PARENT_DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        return
    with contextlib.suppress(OSError):
        os.setpgid(child, child)
    close_files()
    try:
        _exit_like(_supervise(child, parent, grace_seconds))
    finally:
        os._exit(1)


def adopt_orphans() -> None:
    """Become the parent of processes whose parent among our descendants ends."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def children() -> set[int]:
    """The ids of this process's children, also of those that ended and were not waited for."""
    with contextlib.suppress(OSError):
        return {int(number) for number in Path(f"/proc/self/task/{os.getpid()}/children").read_text("ascii").split()}
    return set()


def close_files(first: int = 0) -> None:
    """Close all files from a descriptor on: the ends of pipes must not stay open when the process that uses them ends."""
    null = os.open(os.devnull, os.O_RDWR)
    for file in range(first, 3):
        os.dup2(null, file)
    # Not by the limit of the number of files, which can be a billion.
    for name in os.listdir("/proc/self/fd" if sys.platform == "linux" else "/dev/fd"):
        if int(name) > 2:
            with contextlib.suppress(OSError):
                os.close(int(name))


def _supervise(child: int, parent: int, grace_seconds: float) -> int:
    """Wait for the end of the child, then end what it left. Returns the child's wait status."""
    deadline: float | None = None
    while (status := _reap().get(child)) is None:
        received = signal.sigtimedwait(SIGNALS, WATCH_SECONDS if deadline is None else 0.02)
        is_asked = received is not None and received.si_signo != signal.SIGCHLD
        if deadline is None and (is_asked or os.getppid() != parent):
            deadline = time.monotonic() + grace_seconds
            _kill_group(child, signal.SIGTERM if grace_seconds else signal.SIGKILL)
        elif deadline is not None and time.monotonic() > deadline:
            _kill_group(child, signal.SIGKILL)
    end = time.monotonic() + END_SECONDS
    while (left := children()) and time.monotonic() < end:
        # When a process ends, this process becomes the parent of its children.
        for process in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        signal.sigtimedwait((signal.SIGCHLD,), 0.02)
        _reap()
    return status


def _reap() -> dict[int, int]:
    """Wait status of each child that ended."""
    ended: dict[int, int] = {}
    with contextlib.suppress(ChildProcessError):
        while (result := os.waitpid(-1, os.WNOHANG))[0]:
            ended[result[0]] = result[1]
    return ended


def _kill_group(leader: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(leader, number)


def _exit_like(status: int) -> None:
    """End this process with the same exit code or signal."""
    code = os.waitstatus_to_exitcode(status)
    if code >= 0:
        os._exit(code)
    # The child wrote the core dump, if any.
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if -code not in (signal.SIGKILL, signal.SIGSTOP):
        signal.signal(-code, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [-code])
    os.kill(os.getpid(), -code)
