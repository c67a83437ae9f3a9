"""Worker processes: user code and generated code run only there, under the user's own interpreter, with limits.

The child runs ``mtmc_lsp/process/worker/main.py`` by its path. Requests are JSON lines on its standard input; answers come
on a separate pipe, because user code prints to standard output. Only the standard library is needed on either side.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import select
import shutil
import signal
import stat
import subprocess
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Union

from mtmc_lsp.core.errors import EnvironmentNotAble, WorkerFailed, error_from_json
from mtmc_lsp.process.fork_server import ENTRY, Copy, ForkServer, ForkServerGone, Launch

SCRATCH = "MTMC_SCRATCH"
"""The variable that tells the child its scratch folder, which is removed with it."""
RESULTS = "results.pt"
"""The file in its scratch folder where a child leaves results."""
OWN_FOLDERS = ("TMPDIR", "TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "TORCH_EXTENSIONS_DIR", "CUDA_CACHE_PATH")
"""Variables that tell a child which is locked in where it may write."""
TAIL = 4000
"""Bytes of the child's output that are kept, for failures to quote."""
LONGEST_ANSWER = 1 << 28
"""Bytes of an answer: user code might write to the pipe without end."""
POLL_SECONDS = 0.5
"""How often a child that is waited for is looked at: a grandchild may hold the answer pipe open after its death."""

Process = Union[subprocess.Popen[bytes], Copy]

spent: defaultdict[str, float] = defaultdict(float)
"""Seconds that calls of this process's workers took, by command: where the time of a run goes. Several may run at once."""


@dataclass(frozen=True)
class Sandbox:
    """What a child that is locked in may reach, beside reading and its scratch folder."""

    writable: tuple[str, ...] = ()
    """Folders that it may write to."""
    hidden: str = ""
    """A folder that it may not even read."""
    gpu: bool = False
    """Whether it needs a GPU's devices."""
    programs: bool = False
    """Whether it may start other programs, as compilers of kernels do."""


class Worker:
    """One child process, started when first called and again after a failure."""

    def __init__(
        self,
        python: str,
        *,
        cwd: str,
        env: Mapping[str, str] | None = None,
        memory_bytes: int | None = None,
        sandbox: Sandbox | None = None,
        fork_server: ForkServer | None = None,
        gives_way: bool = False,
    ) -> None:
        """Describe the child; nothing is started yet.

        Args:
            python: the user's interpreter.
            cwd: the project's folder.
            env: variables to set beside the present ones.
            memory_bytes: most memory its data may take (RLIMIT_DATA); ``None`` for no limit.
            sandbox: what it is locked in with, as far as this machine can; ``None`` leaves it free.
            template: what it becomes a copy of, where that is the same interpreter with the same variables.
            gives_way: whether it takes only what others leave of the cores; a child of a process that does, does too.
        """
        self.python = python
        self._cwd = cwd
        self._env = dict(env or {})
        self._memory_bytes = memory_bytes
        self._sandbox = sandbox
        self._fork_server = fork_server
        self._gives_way = gives_way
        self._process: Process | None = None
        self._requests = -1
        self._answers = -1
        self._tail: _Tail | None = None
        self._scratch = ""
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
            command: a name of the dispatch table in ``mtmc_lsp/process/worker/main.py``.
            request: JSON data.
            timeout_s: seconds after which the child is killed.

        Raises:
            MtmcError: what the command itself raised.
            WorkerFailed: the child hung, crashed or ran out of memory, or was killed from another thread.
            EnvironmentNotAble: the interpreter cannot be started.
        """
        deadline = time.monotonic() + timeout_s
        # What is written before it is asked for, or by something else in the child, is not taken for an answer.
        token = secrets.token_hex(16)
        line = json.dumps({"command": command, "request": request, "token": token}) + "\n"
        with self._lock:
            began = time.monotonic()
            process = self._started()
            try:
                self._send(line.encode(), deadline)
                answer = self._read(process, deadline)
            except BrokenPipeError:
                answer = b""
            except TimeoutError:
                self._stop()
                raise WorkerFailed(
                    f"{command} took longer than {timeout_s:.0f} s, so its process was ended",
                    kind="timeout",
                    remedy="Look for an endless loop, or make the sizes in the workload smaller.",
                ) from None
            finally:
                spent[command] += time.monotonic() - began
            if not answer:
                raise self._died(process, command)
            try:
                data = json.loads(answer)
            except ValueError:
                self._stop()
                raise WorkerFailed(f"{command} gave an answer that is no JSON", kind="crashed") from None
            if not isinstance(data, dict) or data.get("token") != token:
                self._stop()
                raise WorkerFailed(f"{command} was answered by something that it was not asked of", kind="crashed")
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

    def take(self, name: str, to: Path) -> None:
        """Copy a file that the child left in its scratch folder to where it cannot write; no link is followed.

        Raises:
            WorkerFailed: there is no such plain file.
        """
        with self._lock:
            try:
                source = os.open(os.path.join(self._scratch, name), os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
                with open(source, "rb") as left, open(to, "wb") as kept:
                    if not stat.S_ISREG(os.fstat(source).st_mode):
                        raise OSError
                    shutil.copyfileobj(left, kept, 1 << 24)
            except OSError:
                raise WorkerFailed(f"the process left no {name}", kind="crashed") from None

    def output(self) -> str:
        """The end of what the child printed."""
        return self._tail.text() if self._tail is not None else ""

    def _started(self) -> Process:
        if self._process is not None and self._process.poll() is None:
            return self._process
        self._stop()
        self._killed = False
        limit = ["--memory", str(self._memory_bytes)] if self._memory_bytes else []
        limit += ["--give-way"] * self._gives_way
        self._scratch = tempfile.mkdtemp(prefix="mtmc-")
        locked: dict[str, str] = {}
        if self._sandbox is not None:
            folders = (*self._sandbox.writable, self._scratch)
            limit += ["--sandbox", json.dumps(asdict(replace(self._sandbox, writable=folders)))]
            locked = dict.fromkeys(OWN_FOLDERS, self._scratch)
        env = {"PYTHONDONTWRITEBYTECODE": "1", SCRATCH: self._scratch, **locked, **self._env}
        launch = Launch(self.python, self._cwd, env, limit)
        # Each pipe as it is read from and written to: requests, output, answers.
        (requests, self._requests), (printed, output), (self._answers, answers) = (os.pipe() for _ in range(3))
        self._tail = _Tail(printed)
        os.set_blocking(self._requests, False)
        try:
            self._process = self._launched(launch, (requests, output, answers))
        finally:
            for file in (requests, output, answers):
                os.close(file)
        return self._process

    def _launched(self, launch: Launch, files: tuple[int, int, int]) -> Process:
        if not os.path.isdir(launch.cwd):
            raise EnvironmentNotAble(f"there is no folder {launch.cwd}", remedy="Check the path.")
        if self._fork_server is not None and self._fork_server.fits(launch):
            with contextlib.suppress(ForkServerGone):
                return self._fork_server.copy(launch, files)
        requests, output, answers = files
        try:
            return subprocess.Popen(
                [launch.python, str(ENTRY), "--answers", str(answers), *launch.options],
                stdin=requests,
                stdout=output,
                stderr=output,
                cwd=launch.cwd,
                env={**os.environ, **launch.env},
                pass_fds=(answers,),
                start_new_session=True,
            )
        except OSError as error:
            raise EnvironmentNotAble(
                f"cannot start the interpreter {self.python}: {error.strerror}",
                remedy="Name one with --python, or set python in [tool.mtmc].",
            ) from None

    def _send(self, data: bytes, deadline: float) -> None:
        """Write the request, without waiting longer than the deadline for a child that does not read."""
        while data:
            if not select.select([], [self._requests], [], max(0.0, deadline - time.monotonic()))[1]:
                raise TimeoutError
            data = data[os.write(self._requests, data) :]

    def _read(self, process: Process, deadline: float) -> bytes:
        """One line of answer; empty when the child is gone."""
        chunks: list[bytes] = []
        size = 0
        while True:
            rest = deadline - time.monotonic()
            if rest <= 0:
                raise TimeoutError
            # Looked at before the pipe: what a child wrote before its end is still there afterwards.
            ended = process.poll() is not None
            if not select.select([self._answers], [], [], 0 if ended else min(rest, POLL_SECONDS))[0]:
                if ended:
                    return b""
                continue
            chunk = os.read(self._answers, 1 << 20)
            if not chunk:
                return b""
            chunks.append(chunk)
            size += len(chunk)
            if size > LONGEST_ANSWER:
                return b"no answer is as long as this"
            if chunk.endswith(b"\n"):
                return b"".join(chunks)

    def _died(self, process: Process, command: str) -> WorkerFailed:
        try:
            code = process.wait(5)
        except subprocess.TimeoutExpired:
            code = 0
        tail = self.output().strip()
        killed = self._killed
        self._stop()
        if killed:
            return WorkerFailed(f"{command} was cancelled", kind="cancelled")
        how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        last = f": {tail.splitlines()[-1]}" if tail else ""
        # Nobody but the kernel, short of memory, sends SIGKILL to a child that was not cancelled.
        if "MemoryError" in tail or "std::bad_alloc" in tail or code == -signal.SIGKILL:
            return WorkerFailed(
                f"the process ran out of memory during {command} ({how}){last}",
                kind="memory",
                remedy="Make the sizes in the workload smaller.",
            )
        return WorkerFailed(f"the process ended with {how} during {command}{last}", kind="crashed")

    def _stop(self) -> None:
        if self._process is not None:
            _kill_group(self._process)
            self._process.wait()
            self._process = None
        if self._tail is not None:
            self._tail.close()
            self._tail = None
        for file in (self._requests, self._answers):
            if file >= 0:
                os.close(file)
        self._requests = self._answers = -1
        if self._scratch:
            shutil.rmtree(self._scratch, ignore_errors=True)
            self._scratch = ""


class _Tail:
    """Reads what a child prints, as it comes, and keeps the end."""

    def __init__(self, stream: int) -> None:
        self._stream = stream
        self._end = b""
        self._thread = threading.Thread(target=self._drain, daemon=True)
        self._thread.start()

    def _drain(self) -> None:
        while chunk := os.read(self._stream, 1 << 16):
            self._end = (self._end + chunk)[-TAIL:]

    def text(self) -> str:
        """The end of what was printed; waits a moment for the last of a child that just died."""
        self._thread.join(0.3)
        return self._end.decode("utf-8", "replace")

    def close(self) -> None:
        # A grandchild that left the group may still hold the pipe; its reader then ends with this process.
        self._thread.join(0.3)
        if not self._thread.is_alive():
            os.close(self._stream)


def _kill_group(process: Process) -> None:
    # After poll() has seen the leader's end its number may belong to another, unless members of its group remain.
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
