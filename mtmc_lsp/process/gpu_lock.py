"""Locks that let timing use a GPU alone, while everything else shares it, across all our processes on this machine."""

from __future__ import annotations

import contextlib
import fcntl
import os
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

FOLDER = "mtmc-gpu-locks"
"""The folder of all lock files, below the temporary folder."""


lock_seconds: defaultdict[str, float] = defaultdict(float)
"""Seconds that threads of this process waited for the locks and held the GPU exclusively."""


def lock_folder(gpu: str = "") -> str:
    """The folder of the lock files, after creating it, and those of a GPU if one is given.

    A sandboxed worker cannot create files there and has another temporary folder, so it needs to be told. It can read only
    folders that existed when it started, so the folder is created before any worker starts.
    """
    folder = Path(tempfile.gettempdir()) / FOLDER
    with contextlib.suppress(FileExistsError):
        folder.mkdir()
        # For all users of this machine, as the temporary folder.
        folder.chmod(0o1777)
    for name in (gpu, f"{gpu}-door") if gpu else ():
        os.close(_open(_path(str(folder), name)))
    return str(folder)


@contextlib.contextmanager
def alone(gpu: str) -> Iterator[None]:
    """Hold the GPU exclusively; ``gpu`` is its UUID, because its index depends on ``CUDA_VISIBLE_DEVICES``."""
    folder = lock_folder()
    # The door lock keeps new sharers out while this waits for the present ones, so that it cannot wait forever.
    began = time.monotonic()
    with _locked(folder, f"{gpu}-door", fcntl.LOCK_EX), _locked(folder, gpu, fcntl.LOCK_EX):
        acquired = time.monotonic()
        lock_seconds["waiting to use the GPU alone"] += acquired - began
        try:
            yield
        finally:
            lock_seconds["using the GPU alone"] += time.monotonic() - acquired


@contextlib.contextmanager
def shared(gpu: str, folder: str = "") -> Iterator[None]:
    """Share the GPU while nothing is timed. Hold this only while something computes on it, because others wait for it."""
    folder = folder or lock_folder()
    began = time.monotonic()
    with contextlib.ExitStack() as stack:
        with _locked(folder, f"{gpu}-door", fcntl.LOCK_SH):
            stack.enter_context(_locked(folder, gpu, fcntl.LOCK_SH))
        lock_seconds["waiting to share the GPU"] += time.monotonic() - began
        yield


@contextlib.contextmanager
def _locked(folder: str, name: str, mode: int) -> Iterator[None]:
    handle = _open(_path(folder, name))
    try:
        fcntl.flock(handle, mode)
        yield
    finally:
        os.close(handle)


def _path(folder: str, name: str) -> Path:
    return Path(folder) / f"mtmc-gpu-{name}.lock"


def _open(path: Path) -> int:
    """The file, created if needed. Opened for reading, so that another user's file can be locked as well."""
    try:
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return os.open(path, os.O_RDONLY | os.O_CREAT | os.O_CLOEXEC, 0o644)
