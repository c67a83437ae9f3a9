"""Locks that let timing use a GPU alone, while everything else shares it, across all our processes on this machine."""

from __future__ import annotations

import contextlib
import fcntl
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path


def lock_folder(gpu: str) -> str:
    """The folder of a GPU's lock files, after creating them.

    A sandboxed worker cannot create files there and has another temporary folder, so it needs to be told.
    """
    folder = tempfile.gettempdir()
    for name in (gpu, f"{gpu}-door"):
        os.close(_open(_path(folder, name)))
    return folder


@contextlib.contextmanager
def alone(gpu: str) -> Iterator[None]:
    """Hold the GPU exclusively; ``gpu`` is its UUID, because its index depends on ``CUDA_VISIBLE_DEVICES``."""
    folder = tempfile.gettempdir()
    # The door lock keeps new sharers out while this waits for the present ones, so that it cannot wait forever.
    with _locked(folder, f"{gpu}-door", fcntl.LOCK_EX), _locked(folder, gpu, fcntl.LOCK_EX):
        yield


@contextlib.contextmanager
def shared(gpu: str, folder: str = "") -> Iterator[None]:
    """Share the GPU while nothing is timed. Hold this only while something computes on it, because others wait for it."""
    folder = folder or tempfile.gettempdir()
    with contextlib.ExitStack() as stack:
        with _locked(folder, f"{gpu}-door", fcntl.LOCK_SH):
            stack.enter_context(_locked(folder, gpu, fcntl.LOCK_SH))
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
