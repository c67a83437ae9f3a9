"""Typed requests to worker processes and their answers.

Each room defines its requests and answers in ``<room>/messages.py``, which imports no torch::

    @dataclass(frozen=True)
    class CompileAnswer:
        kernels: tuple[KernelReport, ...]

    @dataclass(frozen=True)
    class CompileRequest(Request[CompileAnswer], command="compile.launches"):
        source: str

The handler, ``def compile_launches(request: CompileRequest) -> CompileAnswer``, runs in the worker;
``mtmc_lsp/process/worker/main.py`` lists it. ``Worker.call(CompileRequest(source), seconds)`` returns a ``CompileAnswer``.
On the pipe both are one line of JSON each, by :mod:`mtmc_lsp.core.json_codec`.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, TypeVar, get_args

from mtmc_lsp.core.errors import FailureKind, MtmcError, WorkerFailed, error_from_json
from mtmc_lsp.core.json_codec import from_json, to_json

Answer = TypeVar("Answer")


class Request(Generic[Answer]):
    """Base of all requests. Subclasses are frozen dataclasses."""

    command: ClassVar[str]
    """``room.verb``: the key of the handler in the worker's table, and the name in messages and timings."""
    answer: ClassVar[type]
    """The type of the answer, the argument of the base class."""

    def __init_subclass__(cls, *, command: str) -> None:
        cls.command = command
        cls.answer = get_args(cls.__orig_bases__[0])[0]  # type: ignore[attr-defined]


@dataclass(frozen=True)
class NoAnswer:
    """The answer of a command that has nothing to report."""


@dataclass(frozen=True)
class GpuLock:
    """The GPU lock that a worker shares during a request."""

    gpu: str
    """UUID of the GPU."""
    folder: str
    """The folder of the lock files."""


def encode_request(command: str, request: object, token: str = "", lock: GpuLock | None = None) -> bytes:
    """One line for the worker's standard input, from JSON data; the answer must repeat the token.

    With a lock, the worker first writes the line of :func:`encode_start`.
    """
    return _line({"command": command, "request": request, "token": token, "lock": lock and [lock.gpu, lock.folder]})


def encode_start(token: str) -> str:
    """The line that a worker writes when it has the GPU lock and starts with the request."""
    return _line({"started": token}).decode()


def encode_answer(answer: object, token: str) -> str:
    """The line for a command that succeeded."""
    return _line({"result": to_json(answer), "token": token}).decode()


def encode_error(error: MtmcError, token: str) -> str:
    """The line for a command that failed."""
    return _line({"error": error.to_json(), "token": token}).decode()


def decode_answer(line: bytes, token: str, command: str) -> Any:
    """The JSON data of a successful answer.

    Args:
        line: what the worker wrote. Code of a candidate runs in workers, so it may be anything.
        command: the command of the request, for messages.

    Raises:
        MtmcError: the error that the command reports.
        WorkerFailed: with kind ``BAD_ANSWER``; the line is not an answer to this request.
    """
    try:
        data = json.loads(line)
    except ValueError:
        raise _bad_answer(command, "is not JSON") from None
    if not isinstance(data, dict) or data.get("token") != token:
        raise _bad_answer(command, "does not carry the token of the request")
    if "error" in data:
        try:
            error = error_from_json(data["error"])
        except (AttributeError, TypeError, ValueError):
            raise _bad_answer(command, "has a malformed error") from None
        raise error
    if "result" not in data:
        raise _bad_answer(command, "has no result")
    return data["result"]


def typed_answer(request: Request[Answer], data: Any) -> Answer:
    """The answer to a request from its JSON data.

    Raises:
        WorkerFailed: with kind ``BAD_ANSWER``; the data does not fit the type of the answer.
    """
    try:
        answer: Answer = from_json(request.answer, data)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise _bad_answer(request.command, f"does not fit {request.answer.__name__} ({error})") from None
    return answer


def _line(data: dict[str, Any]) -> bytes:
    return (json.dumps(data) + "\n").encode()


def _bad_answer(command: str, what: str) -> WorkerFailed:
    return WorkerFailed(f"the answer to {command} {what}", kind=FailureKind.BAD_ANSWER)
