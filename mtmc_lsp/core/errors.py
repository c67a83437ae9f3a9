"""Errors shown to the user: what is wrong, where, and what to do about it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class FailureKind(str, Enum):
    """What went wrong in a worker process. Code branches on this value, never on the text of a message."""

    EXCEPTION = "exception"
    """An exception without a more specific kind."""
    EXITED = "exited"
    """The code called ``sys.exit``."""
    CRASHED = "crashed"
    """The process ended by a signal or an exit code."""
    KILLED = "killed"
    """The process was killed from outside, not for lack of memory."""
    BAD_ANSWER = "bad_answer"
    """The answer is not JSON, answers another request, or does not fit its type."""
    TIMEOUT = "timeout"
    """The call exceeded its time limit."""
    DEADLINE = "deadline"
    """The deadline of the whole run passed."""
    CANCELLED = "cancelled"
    """Another thread ended the process."""
    OUT_OF_MEMORY = "out_of_memory"
    """Host memory is exhausted, or the process reached its memory limit."""
    GPU_OUT_OF_MEMORY = "gpu_out_of_memory"
    COMPILE_ERROR = "compile_error"
    """Triton or its assembler rejected a kernel, or the kernel exceeds the resources of the GPU."""
    NO_TENSORS = "no_tensors"
    """The code computes nothing with tensors, so there is nothing to capture."""
    TOO_LARGE = "too_large"
    """The workload is too large for Triton's interpreter, whatever the candidate is."""
    NO_GPU = "no_gpu"
    """The code uses CUDA, and no CUDA GPU is available."""
    GPU_ERROR = "gpu_error"
    """A GPU call failed, and the context may still work."""
    GPU_CONTEXT_LOST = "gpu_context_lost"
    """A kernel failed in a way that makes every later GPU call of the process fail, for example an illegal address."""
    DEVICE_ASSERT = "device_assert"
    """An assertion in a kernel failed; the GPU context is lost."""

    @property
    def is_out_of_memory(self) -> bool:
        """Whether the host or the GPU has too little memory."""
        return self in (FailureKind.OUT_OF_MEMORY, FailureKind.GPU_OUT_OF_MEMORY)

    @property
    def is_death(self) -> bool:
        """Whether the process ended, or its GPU context is lost. A fresh process may succeed."""
        return self in (
            FailureKind.CRASHED,
            FailureKind.KILLED,
            FailureKind.GPU_ERROR,
            FailureKind.GPU_CONTEXT_LOST,
            FailureKind.DEVICE_ASSERT,
        )

    @property
    def is_gpu_failure(self) -> bool:
        """Whether the GPU context of the process is lost or in doubt, so that a new process has to take over."""
        return self in (
            FailureKind.GPU_ERROR,
            FailureKind.GPU_CONTEXT_LOST,
            FailureKind.DEVICE_ASSERT,
            FailureKind.GPU_OUT_OF_MEMORY,
        )


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
        kind: the kind of failure behind it; by default that of the class.
    """

    exit_code = 2
    code = "error"
    default_kind = FailureKind.EXCEPTION

    def __init__(
        self, message: str, *, where: Location | None = None, remedy: str = "", kind: FailureKind | None = None
    ) -> None:
        super().__init__(message)
        self.message = message
        self.where = where
        self.remedy = remedy
        self.kind = kind or self.default_kind

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
            "kind": self.kind.value,
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


class ResultsDiffer(MeasurementRejected):
    """The results of the timed code differ from those of the user's code."""

    code = "results-differ"


class CandidateRaised(MtmcError):
    """The timed code raised an exception; the code around it works (exit code 1)."""

    exit_code = 1
    code = "candidate-raised"


class GpuInUse(MeasurementRejected):
    """Another program used the GPU during a measurement."""

    code = "gpu-in-use"


class EnvironmentNotAble(MtmcError):
    """Something is not installed or not available (exit code 3)."""

    exit_code = 3
    code = "environment"


class OutOfMemory(EnvironmentNotAble):
    """The workload does not fit in the memory of the host or the GPU."""

    code = "out-of-memory"
    default_kind = FailureKind.OUT_OF_MEMORY


class TensorSharingFailed(EnvironmentNotAble):
    """A process cannot open another process's GPU memory; tensors go through files instead."""

    code = "tensor-sharing"


class WorkerFailed(MtmcError):
    """A worker process did not answer: it crashed, hung, was cancelled or ran out of memory."""

    exit_code = 3
    code = "worker"
    default_kind = FailureKind.CRASHED


def error_from_json(data: dict[str, object]) -> MtmcError:
    """The inverse of :meth:`MtmcError.to_json`.

    Raises:
        ValueError: ``kind`` is not a :class:`FailureKind`.
    """
    classes: dict[str, type[MtmcError]] = {}
    pending: list[type[MtmcError]] = [MtmcError]
    while pending:
        current = pending.pop()
        pending.extend(current.__subclasses__())
        classes[current.code] = current
    path, line = data.get("path"), data.get("line")
    where = Location(str(path), int(str(line or 0))) if path else None
    error = classes.get(str(data.get("code")), MtmcError)
    kind = FailureKind(data["kind"]) if "kind" in data else None
    return error(str(data.get("message", "")), where=where, remedy=str(data.get("remedy", "")), kind=kind)
