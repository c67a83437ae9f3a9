"""A process that stays open and answers one request after the other, and the loop that it runs.

Requests are lines of JSON on its standard input; the first line opens it. Answers are lines on a separate pipe, because
libraries may print on standard output.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, suppress
from typing import Any

from mtmc_lsp.core.errors import FailureKind, MtmcError, WorkerFailed
from mtmc_lsp.process.parent_watch import end_with_parent

CHUNK = 1 << 16
OUTPUT_LINES = 3
"""How many of the last lines of a crashed process's output are reported."""

Answering = Callable[[str, Any], Any]
"""Answers a command with its JSON data by JSON data."""


class Conversation:
    """The process, as its parent sees it."""

    def __init__(
        self, command: Sequence[str], opening: object, environment: Mapping[str, str], descriptors: Sequence[int] = ()
    ) -> None:
        """Start the process.

        Args:
            command: the number of the pipe for answers is added as the last argument.
            opening: JSON data, what the process prepares.
            descriptors: files that it inherits.
        """
        self._output = tempfile.TemporaryFile()  # noqa: SIM115
        self._answers, writing = os.pipe()
        self._rest = b""
        try:
            self.process = subprocess.Popen(
                [*command, str(writing)],
                stdin=subprocess.PIPE,
                stdout=self._output,
                stderr=subprocess.STDOUT,
                env=dict(environment),
                pass_fds=(writing, *descriptors),
                start_new_session=True,
            )
        finally:
            os.close(writing)
        self._write(opening)

    @property
    def is_open(self) -> bool:
        """Whether the process runs."""
        return self.process.poll() is None

    def ask(self, command: str, data: object, seconds: float) -> dict[str, Any]:
        """The answer to a request: a dictionary with ``result`` or ``error``.

        Raises:
            WorkerFailed: the process ended, or took longer; afterwards it is ended.
        """
        self._write([command, data])
        line = self._read_line(time.monotonic() + seconds)
        if line is None:
            raise WorkerFailed(f"{command} took longer than {seconds:.0f} s", kind=FailureKind.TIMEOUT)
        if not line:
            code = self.process.wait()
            raise WorkerFailed(f"the process for {command} ended with code {code}: {self._last_output()}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def stop(self, seconds: float) -> None:
        """End the process: with SIGINT, so that it closes its workers, then with SIGKILL."""
        if self.is_open:
            self.process.send_signal(signal.SIGINT)
            try:
                self.process.wait(seconds)
            except subprocess.TimeoutExpired:
                with suppress(ProcessLookupError):
                    os.killpg(self.process.pid, signal.SIGKILL)
                self.process.wait()

    def close(self, seconds: float) -> None:
        """End the process and close its files. No request may be in progress."""
        self.stop(seconds)
        assert self.process.stdin is not None
        with suppress(OSError):
            self.process.stdin.close()
        os.close(self._answers)
        self._output.close()

    def _write(self, data: object) -> None:
        assert self.process.stdin is not None
        # A process that has ended is reported by the missing answer.
        with suppress(BrokenPipeError):
            self.process.stdin.write((json.dumps(data) + "\n").encode())
            self.process.stdin.flush()

    def _read_line(self, end: float) -> bytes | None:
        """The next line; empty at the end of the process, None after the time."""
        while b"\n" not in self._rest:
            ready, _, _ = select.select([self._answers], [], [], max(0.0, end - time.monotonic()))
            if not ready:
                return None
            chunk = os.read(self._answers, CHUNK)
            if not chunk:
                return b""
            self._rest += chunk
        line, _, self._rest = self._rest.partition(b"\n")
        return line

    def _last_output(self) -> str:
        self._output.seek(0)
        lines = self._output.read().decode("utf-8", "replace").strip().splitlines()[-OUTPUT_LINES:]
        return " / ".join(lines) or "it printed nothing"


def converse(prepare: Callable[[Any], AbstractContextManager[Answering]]) -> None:
    """Answer requests until the parent ends the process or closes its input.

    Args:
        prepare: returns the function that answers, from the JSON data of the opening.
    """
    end_with_parent()
    number = int(sys.argv[-1])
    # The worker processes that run user code must not write answers.
    os.set_inheritable(number, False)
    with suppress(KeyboardInterrupt), os.fdopen(number, "w", encoding="utf-8") as answers, ExitStack() as resources:
        try:
            answer = resources.enter_context(prepare(json.loads(sys.stdin.readline())))
        except MtmcError as error:
            answer = _refusing(error)
        for line in sys.stdin:
            command, data = json.loads(line)
            try:
                result = {"result": answer(command, data)}
            except MtmcError as error:
                result = {"error": error.to_json()}
            answers.write(json.dumps(result) + "\n")
            answers.flush()


def _refusing(error: MtmcError) -> Answering:
    """Answers all requests with an error."""

    def answer(command: str, data: Any) -> Any:
        raise error

    return answer
