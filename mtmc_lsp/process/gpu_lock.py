"""Who may use a GPU when: what is timed has it alone, all else shares it. Among all processes of ours on this machine."""

from __future__ import annotations

import contextlib
import fcntl
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path


def lock_folder(gpu: str) -> str:
    """Where a GPU's locks lie, made if need be: a worker that is locked in can make none, and looks elsewhere by itself."""
    folder = tempfile.gettempdir()
    for name in (gpu, f"{gpu}-door"):
        os.close(_opened(_path(folder, name)))
    return folder


@contextlib.contextmanager
def alone(gpu: str) -> Iterator[None]:
    """Hold the GPU alone; ``gpu`` is its UUID, since its index depends on ``CUDA_VISIBLE_DEVICES``."""
    folder = tempfile.gettempdir()
    # Whoever waits for the GPU stands in the door: nobody new comes in, so those inside come to an end.
    with _held(folder, f"{gpu}-door", fcntl.LOCK_EX), _held(folder, gpu, fcntl.LOCK_EX):
        yield


@contextlib.contextmanager
def shared(gpu: str, folder: str = "") -> Iterator[None]:
    """Use the GPU beside others, while nothing is timed; not for longer than it computes, for all others wait as well."""
    folder = folder or tempfile.gettempdir()
    with contextlib.ExitStack() as stack:
        with _held(folder, f"{gpu}-door", fcntl.LOCK_SH):
            stack.enter_context(_held(folder, gpu, fcntl.LOCK_SH))
        yield


@contextlib.contextmanager
def _held(folder: str, name: str, how: int) -> Iterator[None]:
    handle = _opened(_path(folder, name))
    try:
        fcntl.flock(handle, how)
        yield
    finally:
        os.close(handle)


def _path(folder: str, name: str) -> Path:
    return Path(folder) / f"mtmc-gpu-{name}.lock"


def _opened(path: Path) -> int:
    """The file, made where it is not there; another user's can be locked too, which needs no right to write."""
    try:
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return os.open(path, os.O_RDONLY | os.O_CREAT | os.O_CLOEXEC, 0o644)
