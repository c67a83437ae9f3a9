"""Locks that let timing use a GPU alone, while everything else shares it, across all our processes on this machine.

A worker shares the GPU during a whole request, which may take seconds. Between two pieces of its work it calls
:func:`let_timings_pass`, and during long work of the host :func:`unshared`, so a timing waits for one piece only, and not
everything else behind it. A worker that times uses the GPU alone only while it takes samples (:func:`exclusively`).
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path

WAITING_ALONE, USING_ALONE = "waiting to use the GPU alone", "using the GPU alone"
WAITING_MEMORY = "waiting for the GPU's memory"
"""Keys of :data:`lock_seconds`."""
FOLDER = "mtmc-gpu-locks"
"""The folder of all lock files, below the temporary folder."""
POLL_SECONDS = 0.05
"""Interval at which a wait with an end tries again to lock."""

lock_seconds: defaultdict[str, float] = defaultdict(float)
"""Seconds that threads of this process waited for the locks, and used the GPU alone."""


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
def alone(gpu: str, folder: str = "") -> Iterator[None]:
    """Hold the GPU exclusively; ``gpu`` is its UUID, because its index depends on ``CUDA_VISIBLE_DEVICES``."""
    folder = folder or lock_folder()
    # The door lock keeps new sharers out while this waits for the present ones, so that it cannot wait forever.
    began = time.monotonic()
    with _locked(folder, f"{gpu}-door", fcntl.LOCK_EX), _locked(folder, gpu, fcntl.LOCK_EX):
        acquired = time.monotonic()
        lock_seconds[WAITING_ALONE] += acquired - began
        try:
            yield
        finally:
            lock_seconds[USING_ALONE] += time.monotonic() - acquired


@contextlib.contextmanager
def filling(gpu: str, end: float = float("inf")) -> Iterator[bool]:
    """Let one run at a time fill the GPU's memory. Other runs continue. A run that gets too little memory waits for this lock.

    Whoever holds this may lock the GPU, never the other way round.

    Args:
        end: time of the monotonic clock at which the wait ends without the lock.

    Yields:
        Whether this holds the lock.
    """
    began = time.monotonic()
    handle = _open(_path(lock_folder(), f"{gpu}-memory"))
    try:
        is_held = _locks_until(handle, end)
        lock_seconds[WAITING_MEMORY] += time.monotonic() - began
        yield is_held
    finally:
        os.close(handle)


def _locks_until(handle: int, end: float) -> bool:
    while True:
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        if time.monotonic() >= end:
            return False
        time.sleep(POLL_SECONDS)


@contextlib.contextmanager
def shared(gpu: str, folder: str = "") -> Iterator[None]:
    """Share the GPU while nothing is timed. Hold this only while something computes on it, because others wait for it."""
    folder = folder or lock_folder()
    with contextlib.ExitStack() as stack:
        with _locked(folder, f"{gpu}-door", fcntl.LOCK_SH):
            stack.enter_context(_locked(folder, gpu, fcntl.LOCK_SH))
        yield


class GpuShare:
    """A shared lock that a worker holds during a request."""

    def __init__(self, gpu: str, folder: str, return_memory: Callable[[], None] = lambda: None) -> None:
        self._gpu, self._folder, self._return_memory = gpu, folder, return_memory
        self._stack = contextlib.ExitStack()
        self._is_held = False

    def acquire(self) -> None:
        """Wait until nothing is timed."""
        self._stack.enter_context(shared(self._gpu, self._folder))
        self._is_held = True

    def release(self) -> None:
        """Let others use the GPU alone."""
        self._stack.close()
        self._is_held = False

    @contextlib.contextmanager
    def released(self) -> Iterator[None]:
        """Release the lock meanwhile, after all work of this process has finished; nothing if it is released already."""
        if not self._is_held:
            yield
            return
        torch = sys.modules.get("torch")
        if torch is not None and torch.cuda.is_initialized():
            torch.cuda.synchronize()
        self.release()
        try:
            yield
        finally:
            self.acquire()

    def let_timings_pass(self) -> None:
        """Release the lock if a timing waits for it, and acquire it again. Memory that is not used goes back meanwhile."""
        if self._is_held and not _is_free(self._folder, f"{self._gpu}-door"):
            self._return_memory()
            with self.released():
                pass

    @contextlib.contextmanager
    def exclusively(self) -> Iterator[None]:
        """Hold the GPU exclusively meanwhile."""
        with self.released(), alone(self._gpu, self._folder):
            yield


_share: GpuShare | None = None


@contextlib.contextmanager
def sharing(gpu: str, folder: str, return_memory: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Share the GPU during a request of this worker.

    Args:
        return_memory: returns GPU memory that this process does not use, for a timing that it lets pass.
    """
    global _share
    _share = GpuShare(gpu, folder, return_memory)
    _share.acquire()
    try:
        yield
    finally:
        _share.release()
        _share = None


def let_timings_pass() -> None:
    """Let another run time alone, if it waits for that. For the thread that runs a request, between two pieces of its work."""
    share = _share_of_thread()
    if share is not None:
        share.let_timings_pass()


@contextlib.contextmanager
def unshared() -> Iterator[None]:
    """Let other runs time while the thread that runs a request computes on the host alone."""
    share = _share_of_thread()
    with share.released() if share is not None else contextlib.nullcontext():
        yield


@contextlib.contextmanager
def exclusively() -> Iterator[None]:
    """Use the GPU alone in a request that shares it. In any other request the caller has locked the GPU, if there is one."""
    share = _share_of_thread()
    with share.exclusively() if share is not None else contextlib.nullcontext():
        yield


def _share_of_thread() -> GpuShare | None:
    return _share if threading.current_thread() is threading.main_thread() else None


def _is_free(folder: str, name: str) -> bool:
    handle = _open(_path(folder, name))
    try:
        fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    finally:
        os.close(handle)
    return True


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
