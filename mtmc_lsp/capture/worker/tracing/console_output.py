"""Refuses targets that print or log: their Triton versions would not."""

from __future__ import annotations

import builtins
import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from mtmc_lsp.capture.worker.dependency_recorder import is_user_file
from mtmc_lsp.core.errors import Location, TargetUnsupported
from mtmc_lsp.core.workload import Target

LOGGING = logging.__file__


@contextmanager
def refusing_output(target: Target) -> Iterator[None]:
    """Refuse calls of ``print``, and log records that are written, from the user's files.

    Raises:
        TargetUnsupported: names the line.
    """
    printing, log = builtins.print, logging.Logger._log

    def watched_print(*args: Any, **kwargs: Any) -> None:
        _refuse("prints", target)
        printing(*args, **kwargs)

    def watched_log(self: Any, *args: Any, **kwargs: Any) -> None:
        _refuse("writes to a log", target)
        log(self, *args, **kwargs)

    builtins.print, logging.Logger._log = watched_print, watched_log  # type: ignore[method-assign]
    try:
        yield
    finally:
        builtins.print, logging.Logger._log = printing, log  # type: ignore[method-assign]


def _refuse(problem: str, target: Target) -> None:
    frame: Any = sys._getframe(2)
    while frame is not None and frame.f_code.co_filename == LOGGING:
        frame = frame.f_back
    if frame is not None and is_user_file(frame.f_code.co_filename):
        raise TargetUnsupported(
            f"{target.qualname} {problem}, and its Triton version would not",
            where=Location(frame.f_code.co_filename, frame.f_lineno),
            remedy="Remove this line, or move it before or after the call.",
        )
