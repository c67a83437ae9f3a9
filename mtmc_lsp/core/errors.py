"""Errors that reach the user: what is wrong, where it is, and what to do about it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Location:
    """A place in a file; ``line`` is 1-based, 0 where only the file is known."""

    path: str
    line: int = 0

    def __str__(self) -> str:
        return f"{self.path}:{self.line}" if self.line else self.path


class MtmcError(Exception):
    """Base of every error meant for the user.

    Args:
        message: what is wrong, one sentence.
        where: the file and line it is about, if there is one.
        remedy: what the user can do about it, one sentence or a snippet to paste.
    """

    exit_code = 2
    code = "error"

    def __init__(self, message: str, *, where: Location | None = None, remedy: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.where = where
        self.remedy = remedy

    def __str__(self) -> str:
        place = f"{self.where}: " if self.where else ""
        return f"{place}{self.message}" + (f"\n  {self.remedy}" if self.remedy else "")

    def to_json(self) -> dict[str, object]:
        """The error as plain data, as it crosses from a worker and as ``--json`` prints it."""
        return {
            "code": self.code,
            "message": self.message,
            "path": self.where.path if self.where else None,
            "line": self.where.line if self.where else None,
            "remedy": self.remedy,
        }


class RequestError(MtmcError):
    """The request is wrong (exit code 2): the user can mend it in their file or on the command line."""

    exit_code = 2
    code = "request"


class TargetNotFound(RequestError):
    """No such function, method, module or kernel in the file."""

    code = "no-such-target"


class SourceSyntaxError(RequestError):
    """The target's own text does not parse."""

    code = "syntax-error"


class NoWorkload(RequestError):
    """No example inputs are known; the remedy is a directive to paste."""

    code = "no-workload"


class TargetRaises(RequestError):
    """The user's own code raises on the workload's inputs."""

    code = "target-raises"


class TargetUnsupported(RequestError):
    """The target does something that cannot be optimised correctly (the message says what)."""

    code = "unsupported"


class FileChanged(RequestError):
    """The file on disk is no longer the text that was read, so nothing is written."""

    code = "file-changed"


class MeasurementRejected(MtmcError):
    """A timing that cannot be true (exit code 1).

    The results differ while timed, the clocks disagree, or it is faster than the memory.
    """

    exit_code = 1
    code = "measurement-rejected"


class GpuInUse(MeasurementRejected):
    """Another program computed on the GPU while something was timed."""

    code = "gpu-in-use"


class EnvironmentNotAble(MtmcError):
    """Something is not installed or not there (exit code 3)."""

    exit_code = 3
    code = "environment"


class OutOfMemory(EnvironmentNotAble):
    """The workload does not fit this machine."""

    code = "out-of-memory"


class HandoverFailed(EnvironmentNotAble):
    """Processes cannot open each other's GPU memory here; files do instead."""

    code = "handover"


class WorkerFailed(MtmcError):
    """A worker process hung, crashed or ran out of memory.

    ``kind`` is ``timeout``, ``crashed`` or ``memory``; ``expired`` where the time of the whole run was up, and
    ``cancelled`` where somebody ended it.
    """

    exit_code = 3
    code = "worker"

    def __init__(self, message: str, *, kind: str, where: Location | None = None, remedy: str = "") -> None:
        super().__init__(message, where=where, remedy=remedy)
        self.kind = kind


def error_from_json(data: dict[str, object]) -> MtmcError:
    """The error whose ``to_json`` gave ``data``."""
    classes: dict[str, type[MtmcError]] = {}
    pending: list[type[MtmcError]] = [MtmcError]
    while pending:
        current = pending.pop()
        pending.extend(current.__subclasses__())
        if current is not WorkerFailed:
            classes[current.code] = current
    path, line = data.get("path"), data.get("line")
    where = Location(str(path), int(str(line or 0))) if path else None
    kind = classes.get(str(data.get("code")), MtmcError)
    return kind(str(data.get("message", "")), where=where, remedy=str(data.get("remedy", "")))
