"""Notes what a candidate reads about its process in `/proc`: that shows the sandbox, and no computation needs it.

Python reports each file that it opens to a hook, which code in Python can neither see nor remove. Runs in workers.
"""

from __future__ import annotations

import os
import sys
import sysconfig
from pathlib import Path
from types import FrameType
from typing import Any

EVENTS = frozenset({"open", "os.listdir", "os.scandir"})
PROC = "/proc/"
OF_PROCESSES = ("self", "thread-self")
OF_PACKAGES = ("site-packages", "dist-packages")
_STANDARD = (sysconfig.get_path("stdlib"), "<frozen")
_OURS = str(Path(__file__).resolve().parents[3])
_read = set[str]()
_is_watching = False


def watch_reads() -> None:
    """Note reads from now on, for the rest of the process."""
    global _is_watching
    if not _is_watching:
        _is_watching = True
        sys.addaudithook(_note)


def reads_of_process() -> tuple[str, ...]:
    """The paths that the candidate opened."""
    return tuple(sorted(_read))


def _note(event: str, arguments: tuple[Any, ...]) -> None:
    if event not in EVENTS or not isinstance(arguments[0], (str, bytes, os.PathLike)):
        return
    try:
        path = os.path.abspath(os.fsdecode(arguments[0]))
    except (OSError, ValueError):  # no working folder, or no valid path
        return
    if not path.startswith(PROC):
        return
    first = path.removeprefix(PROC).partition("/")[0]
    if (first in OF_PROCESSES or first.isdigit()) and _is_of_candidate(sys._getframe(1)):
        _read.add(path.replace(f"{PROC}{os.getpid()}", f"{PROC}self"))


def _is_of_candidate(frame: FrameType | None) -> bool:
    """Whether the innermost frame outside of Python's library is neither of an installed package nor ours."""
    while frame is not None:
        file = frame.f_code.co_filename
        is_installed = any(folder in file for folder in OF_PACKAGES)
        if is_installed or file.startswith(_OURS):
            return False
        if not file.startswith(_STANDARD):
            return True
        frame = frame.f_back
    return False
