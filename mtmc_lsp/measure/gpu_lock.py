"""Who may use a GPU when: what is timed has it alone, all else shares it. Among all processes of ours on this machine."""

from __future__ import annotations

import contextlib
import fcntl
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def alone(gpu: str) -> Iterator[None]:
    """Hold the GPU alone; ``gpu`` is its UUID, since its index depends on ``CUDA_VISIBLE_DEVICES``."""
    # Whoever waits for the GPU stands in the door: nobody new comes in, so those inside come to an end.
    with _held(f"{gpu}-door", fcntl.LOCK_EX), _held(gpu, fcntl.LOCK_EX):
        yield


@contextlib.contextmanager
def shared(gpu: str) -> Iterator[None]:
    """Use the GPU beside others, while nothing is timed."""
    with contextlib.ExitStack() as stack:
        with _held(f"{gpu}-door", fcntl.LOCK_SH):
            stack.enter_context(_held(gpu, fcntl.LOCK_SH))
        yield


@contextlib.contextmanager
def _held(name: str, how: int) -> Iterator[None]:
    handle = _opened(Path(tempfile.gettempdir()) / f"mtmc-gpu-{name}.lock")
    try:
        fcntl.flock(handle, how)
        yield
    finally:
        os.close(handle)


def _opened(path: Path) -> int:
    """The file, made where it is not there; another user's can be locked too, which needs no right to write."""
    try:
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return os.open(path, os.O_RDONLY | os.O_CREAT | os.O_CLOEXEC, 0o644)
