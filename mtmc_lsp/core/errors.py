"""Errors shown to the user: what is wrong, where, and what to do about it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Location:
    """A position in a file. ``line`` is 1-based, or 0 when only the file is known."""

    path: str
    line: int = 0

    def __str__(self) -> str:
        return f"{self.path}:{self.line}" if self.line else self.path


class MtmcError(Exception):
    """Base class of all errors shown to the user.

    Args:
        message: what is wrong, one sentence.
        where: the file and line, if known.
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
        prefix = f"{self.where}: " if self.where else ""
        return f"{prefix}{self.message}" + (f"\n  {self.remedy}" if self.remedy else "")

    def to_json(self) -> dict[str, object]:
        """The error as plain data, as sent by a worker and printed with ``--json``."""
        return {
            "code": self.code,
            "message": self.message,
            "path": self.where.path if self.where else None,
            "line": self.where.line if self.where else None,
            "remedy": self.remedy,
        }


class RequestError(MtmcError):
    """The request is invalid (exit code 2). The user can correct it in the file or on the command line."""

    exit_code = 2
    code = "request"


class TargetNotFound(RequestError):
    """The file has no such function, method, module or kernel."""

    code = "no-such-target"


class SourceSyntaxError(RequestError):
    """The target's source does not parse."""

    code = "syntax-error"


class NoWorkload(RequestError):
    """No example inputs are known. The remedy contains a directive to paste."""

    code = "no-workload"


class TargetRaises(RequestError):
    """The user's code raises on the workload's inputs."""

    code = "target-raises"


class TargetUnsupported(RequestError):
    """The target does something that cannot be optimised correctly. The message says what."""

    code = "unsupported"


class FileChanged(RequestError):
    """The file on disk has changed since it was read, so nothing is written."""

    code = "file-changed"


class MeasurementRejected(MtmcError):
    """A timing that cannot be correct (exit code 1).

    The results differ while timed, the clocks disagree, or the time implies more than the memory bandwidth.
    """

    exit_code = 1
    code = "measurement-rejected"


class GpuInUse(MeasurementRejected):
    """Another program used the GPU during a measurement."""

    code = "gpu-in-use"


class EnvironmentNotAble(MtmcError):
    """Something is not installed or not available (exit code 3)."""

    exit_code = 3
    code = "environment"


class OutOfMemory(EnvironmentNotAble):
    """The workload does not fit into the memory of this machine."""

    code = "out-of-memory"


class HandoverFailed(EnvironmentNotAble):
    """Processes cannot open each other's GPU memory on this machine. Tensors are passed through files instead."""

    code = "handover"


class WorkerFailed(MtmcError):
    """A worker process hung, crashed or ran out of memory.

    ``kind`` is ``timeout``, ``crashed``, ``memory``, ``expired`` (the time limit of the whole run) or ``cancelled``.
    """

    exit_code = 3
    code = "worker"

    def __init__(self, message: str, *, kind: str, where: Location | None = None, remedy: str = "") -> None:
        super().__init__(message, where=where, remedy=remedy)
        self.kind = kind


def error_from_json(data: dict[str, object]) -> MtmcError:
    """Inverse of :meth:`MtmcError.to_json`."""
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
