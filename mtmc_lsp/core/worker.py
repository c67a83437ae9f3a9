"""Worker processes: user code and generated code run only there, under the user's own interpreter, with limits.

The child runs ``mtmc_lsp/worker.py`` by its path. Requests are JSON lines on its standard input; answers come on a pipe of
their own, because user code prints to standard output. Only the standard library is needed on either side.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import IO, Any

from mtmc_lsp.core.errors import EnvironmentNotAble, WorkerFailed, error_from_json

ENTRY = Path(__file__).resolve().parent.parent / "worker.py"
TAIL = 4000
"""Characters of the child's error output that a failure quotes."""


class Worker:
    """One child process, started when first called and again after a failure."""

    def __init__(
        self,
        python: str,
        *,
        cwd: str,
        env: Mapping[str, str] | None = None,
        memory_bytes: int | None = None,
    ) -> None:
        """Describe the child; nothing is started yet.

        Args:
            python: the user's interpreter.
            cwd: the project's folder.
            env: variables to set beside the present ones.
            memory_bytes: most memory its data may take (RLIMIT_DATA); ``None`` for no limit.
        """
        self.python = python
        self._cwd = cwd
        self._env = dict(env or {})
        self._memory_bytes = memory_bytes
        self._process: subprocess.Popen[bytes] | None = None
        self._answers = -1
        self._log: IO[bytes] | None = None
        self._killed = False
        self._lock = threading.Lock()

    def __enter__(self) -> Worker:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def call(self, command: str, request: Mapping[str, object], timeout_s: float) -> dict[str, Any]:
        """Run one command in the child.

        Args:
            command: a name of the dispatch table in ``mtmc_lsp/worker.py``.
            request: JSON data.
            timeout_s: seconds after which the child is killed.

        Raises:
            MtmcError: what the command itself raised.
            WorkerFailed: the child hung, crashed or ran out of memory.
            EnvironmentNotAble: the interpreter cannot be started.
        """
        with self._lock:
            process = self._started()
            line = json.dumps({"command": command, "request": request}) + "\n"
            try:
                assert process.stdin is not None
                process.stdin.write(line.encode())
                process.stdin.flush()
                answer = self._read(time.monotonic() + timeout_s)
            except BrokenPipeError:
                answer = b""
            except TimeoutError:
                self._stop()
                raise WorkerFailed(f"{command} took longer than {timeout_s:.0f} s", kind="timeout") from None
            if not answer:
                raise self._died(command)
        data = json.loads(answer)
        if "error" in data:
            raise error_from_json(data["error"])
        result: dict[str, Any] = data["result"]
        return result

    def kill(self) -> None:
        """End the child now; a call that is under way raises ``WorkerFailed`` with kind ``cancelled``."""
        self._killed = True
        process = self._process
        if process is not None and process.poll() is None:
            _kill_group(process)

    def close(self) -> None:
        """End the child."""
        with self._lock:
            self._stop()

    def output(self) -> str:
        """The end of what the child printed."""
        if self._log is None:
            return ""
        self._log.seek(0, os.SEEK_END)
        self._log.seek(max(0, self._log.tell() - TAIL))
        return self._log.read().decode("utf-8", "replace")

    def _started(self) -> subprocess.Popen[bytes]:
        if self._process is not None and self._process.poll() is None:
            return self._process
        self._stop()
        self._killed = False
        read_end, write_end = os.pipe()
        self._log = tempfile.TemporaryFile()  # noqa: SIM115  (it lives as long as the child)
        limit = ["--memory", str(self._memory_bytes)] if self._memory_bytes else []
        try:
            self._process = subprocess.Popen(
                [self.python, str(ENTRY), "--answers", str(write_end), *limit],
                stdin=subprocess.PIPE,
                stdout=self._log,
                stderr=self._log,
                cwd=self._cwd,
                env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1", **self._env},
                pass_fds=(write_end,),
                start_new_session=True,
            )
        except OSError as error:
            os.close(read_end)
            raise EnvironmentNotAble(
                f"cannot start the interpreter {self.python}: {error.strerror}",
                remedy="Name one with --python, or set python in [tool.mtmc].",
            ) from None
        finally:
            os.close(write_end)
        self._answers = read_end
        return self._process

    def _read(self, deadline: float) -> bytes:
        """One line of answer; empty when the child closed the pipe."""
        chunks: list[bytes] = []
        while True:
            rest = deadline - time.monotonic()
            if rest <= 0 or not select.select([self._answers], [], [], rest)[0]:
                raise TimeoutError
            chunk = os.read(self._answers, 1 << 20)
            if not chunk:
                return b""
            chunks.append(chunk)
            if chunk.endswith(b"\n"):
                return b"".join(chunks)

    def _died(self, command: str) -> WorkerFailed:
        process = self._process
        assert process is not None
        try:
            code = process.wait(5)
        except subprocess.TimeoutExpired:
            code = 0
        tail = self.output().strip()
        self._stop()
        if self._killed:
            return WorkerFailed(f"{command} was cancelled", kind="cancelled")
        how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        kind = "memory" if "MemoryError" in tail or code == -signal.SIGKILL else "crashed"
        last = f": {tail.splitlines()[-1]}" if tail else ""
        return WorkerFailed(f"the process ended with {how} during {command}{last}", kind=kind)

    def _stop(self) -> None:
        if self._process is not None:
            _kill_group(self._process)
            self._process.wait()
            if self._process.stdin is not None:
                try:
                    self._process.stdin.close()
                except BrokenPipeError:
                    pass
            self._process = None
        if self._answers >= 0:
            os.close(self._answers)
            self._answers = -1
        if self._log is not None:
            self._log.close()
            self._log = None


def _kill_group(process: subprocess.Popen[bytes]) -> None:
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
