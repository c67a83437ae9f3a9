"""Worker processes: user code and generated code run only there, under the user's interpreter, with limits.

The child runs ``mtmc_lsp/process/worker/main.py`` by its path. Requests are JSON lines on its standard input
(:mod:`mtmc_lsp.process.protocol`). Answers come on a separate pipe, because user code prints to standard output. Both sides
need only the standard library.
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
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Union

from mtmc_lsp.core.errors import EnvironmentNotAble, FailureKind, MtmcError, WorkerFailed
from mtmc_lsp.core.json_codec import to_json
from mtmc_lsp.process import trace
from mtmc_lsp.process.fork_server import ENTRY, ForkedWorker, ForkServer, ForkServerGone, Launch, end_started
from mtmc_lsp.process.gpu_lock import lock_seconds
from mtmc_lsp.process.messages import ReleaseRequest
from mtmc_lsp.process.protocol import (
    Answer,
    GpuLock,
    Request,
    decode_answer,
    encode_request,
    encode_start,
    typed_answer,
)

SCRATCH = "MTMC_SCRATCH"
"""Environment variable with the child's scratch folder, which is removed together with the child."""
RESULTS = "results.pt"
"""The file in the scratch folder where a child writes results."""
CACHE_VARIABLES = ("TMPDIR", "TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "TORCH_EXTENSIONS_DIR", "CUDA_CACHE_PATH")
"""Environment variables that point a sandboxed child to the folders where it may write."""
OUTPUT_TAIL_BYTES = 4000
"""How much of the child's output is kept for error messages."""
MAX_ANSWER_BYTES = 1 << 28
"""Limit for one answer, because user code could write to the pipe forever."""
LOCK_SECONDS = 600.0
"""Limit for the wait until a child has the GPU lock: timings of other runs hold it for seconds."""
COPIED_BYTES = 1 << 18
"""How much of a file is copied at a time. The memory of a larger piece would be cleared by the system for each piece."""
POLL_SECONDS = 0.5
"""Interval for checking that the child is alive: a grandchild may hold the answer pipe open after the child's death."""

Process = Union[subprocess.Popen[bytes], ForkedWorker]

command_seconds: defaultdict[str, float] = defaultdict(float)
"""Total seconds of the calls to this process's workers, by command. Calls may overlap."""


@dataclass(frozen=True)
class Sandbox:
    """What a sandboxed child may access besides reading files and writing to its scratch folder."""

    writable: tuple[str, ...] = ()
    """Folders with write access."""
    hidden: str = ""
    """A folder without read access."""
    gpu: bool = False
    """Whether the child may open GPU devices."""
    programs: bool = False
    """Whether the child may start programs, as compilers of kernels do."""


class Worker:
    """One child process. The first call starts it, and so does the first call after a failure."""

    def __init__(
        self,
        python: str,
        *,
        cwd: str,
        env: Mapping[str, str] | None = None,
        memory_bytes: int | None = None,
        sandbox: Sandbox | None = None,
        fork_server: ForkServer | None = None,
        low_priority: bool = False,
    ) -> None:
        """Describe the child without starting it.

        Args:
            env: environment variables to add to those of this process.
            memory_bytes: limit for the child's data segment (RLIMIT_DATA); ``None`` for no limit.
            sandbox: the sandbox to enter, as far as this machine supports it; ``None`` for no sandbox.
            fork_server: starts the child by a fork, if it has the same interpreter and matching variables.
            low_priority: whether the child runs with low CPU priority. Children of a low-priority process always do.
        """
        self.python = python
        self._cwd = cwd
        self._env = dict(env or {})
        self._memory_bytes = memory_bytes
        self._sandbox = sandbox
        self._fork_server = fork_server
        self._low_priority = low_priority
        self._process: Process | None = None
        self._requests = -1
        self._answers = -1
        self._output: _OutputTail | None = None
        self._scratch = ""
        self._killed = False
        self._oom_kills = 0
        """How many processes the system had ended for lack of memory when the child started."""
        self._lock = threading.Lock()

    def __enter__(self) -> Worker:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def call(
        self, request: Request[Answer], seconds: float, lock: GpuLock | None = None, end: float = float("inf")
    ) -> Answer:
        """Run one command in the child.

        Args:
            seconds: time limit, after which the child is killed.
            lock: the GPU lock that the child shares. The time limit begins when it has the lock.
            end: time of the monotonic clock at which the child is killed in any case.

        Raises:
            MtmcError: the error that the command raised.
            WorkerFailed: the child did not answer; ``kind`` says why.
            EnvironmentNotAble: the interpreter cannot be started.
        """
        return typed_answer(request, self._exchange(request.command, to_json(request), seconds, lock, end))

    def _exchange(self, command: str, request: object, seconds: float, lock: GpuLock | None, end: float) -> Any:
        """Send one request and return the JSON data of its answer."""
        with self._lock:
            return self._exchange_locked(command, request, seconds, lock, end)

    def _exchange_locked(self, command: str, request: object, seconds: float, lock: GpuLock | None, end: float) -> Any:
        """As :meth:`_exchange`, for a caller that holds the lock of this object."""
        deadline = min(time.monotonic() + seconds, end)
        # Only the answer with this token counts: other code in the child may write to the pipe as well.
        token = secrets.token_hex(16)
        line = encode_request(command, request, token, lock)
        start = time.monotonic()
        process = self._start()
        try:
            self._send(line, deadline)
            received = b""
            if lock is not None:
                received = self._wait_for_lock(process, token, end)
                start = time.monotonic()
                deadline = min(start + seconds, end)
            answer = self._receive(process, deadline, received)
        except BrokenPipeError:
            answer = b""
        except TimeoutError:
            self._stop()
            raise WorkerFailed(
                f"{command} took longer than {seconds:.0f} s, so its process was ended",
                kind=FailureKind.TIMEOUT,
                remedy="Look for an endless loop, or make the sizes in the workload smaller.",
            ) from None
        finally:
            command_seconds[command] += time.monotonic() - start
            trace.note(trace.ASKED, process.pid, command=command, seconds=time.monotonic() - start)
        if not answer:
            raise self._death(process, command)
        try:
            return decode_answer(answer, token, command)
        except WorkerFailed as error:
            if error.kind is FailureKind.BAD_ANSWER:
                # The stream cannot be trusted any more.
                self._stop()
            raise

    def release_memory(self, seconds: float) -> None:
        """Let a running child that is idle free GPU memory for others; errors end it, or are left to the next call."""
        if not self._lock.acquire(blocking=False):
            # It runs a command, and may wait for the GPU lock of this caller.
            return
        try:
            if self._process is not None and self._process.poll() is None:
                request = ReleaseRequest()
                with contextlib.suppress(MtmcError):
                    self._exchange_locked(request.command, to_json(request), seconds, None, float("inf"))
        finally:
            self._lock.release()

    def kill(self) -> None:
        """End the child now. A running call raises ``WorkerFailed`` with kind ``CANCELLED``."""
        self._killed = True
        process = self._process
        if process is not None and process.poll() is None:
            _kill(process)

    def close(self) -> None:
        """End the child."""
        with self._lock:
            self._stop()

    def copy_file(self, name: str, to: Path) -> None:
        """Copy a file from the child's scratch folder to a path where the child cannot write, without following links.

        Raises:
            WorkerFailed: there is no regular file with this name.
        """
        with self._lock:
            try:
                source = os.open(os.path.join(self._scratch, name), os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
                with open(source, "rb") as reader, open(to, "wb") as writer:
                    if not stat.S_ISREG(os.fstat(source).st_mode):
                        raise OSError
                    shutil.copyfileobj(reader, writer, COPIED_BYTES)
            except OSError:
                raise WorkerFailed(f"the process did not write {name}", kind=FailureKind.CRASHED) from None

    def output(self) -> str:
        """The end of the child's output."""
        return self._output.text() if self._output is not None else ""

    def _start(self) -> Process:
        """The running child; starts one if needed."""
        if self._process is not None and self._process.poll() is None:
            return self._process
        self._stop()
        self._killed = False
        self._oom_kills = _oom_kills()
        options = ["--memory", str(self._memory_bytes)] if self._memory_bytes else []
        options += ["--low-priority"] * self._low_priority
        self._scratch = tempfile.mkdtemp()
        caches: dict[str, str] = {}
        if self._sandbox is not None:
            folders = (*self._sandbox.writable, self._scratch)
            options += ["--sandbox", json.dumps(asdict(replace(self._sandbox, writable=folders)))]
            caches = dict.fromkeys(CACHE_VARIABLES, self._scratch)
        env = {"PYTHONDONTWRITEBYTECODE": "1", SCRATCH: self._scratch, **caches, **self._env}
        launch = Launch(self.python, self._cwd, env, options)
        # Each pipe is (read end, write end).
        (requests, self._requests), (output_reader, output), (self._answers, answers) = (os.pipe() for _ in range(3))
        self._output = _OutputTail(output_reader)
        os.set_blocking(self._requests, False)
        try:
            self._process = self._launch(launch, (requests, output, answers))
        finally:
            for file in (requests, output, answers):
                os.close(file)
        is_forked = isinstance(self._process, ForkedWorker)
        trace.note(trace.STARTED, self._process.pid, how=trace.FORK if is_forked else trace.NEW)
        return self._process

    def _launch(self, launch: Launch, files: tuple[int, int, int]) -> Process:
        if not os.path.isdir(launch.cwd):
            raise EnvironmentNotAble(f"there is no folder {launch.cwd}", remedy="Check the path.")
        if self._fork_server is not None and self._fork_server.can_fork(launch):
            with contextlib.suppress(ForkServerGone):
                return self._fork_server.fork(launch, files)
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
        """Write the request. A child that does not read cannot block this beyond the deadline."""
        while data:
            if not select.select([], [self._requests], [], max(0.0, deadline - time.monotonic()))[1]:
                raise TimeoutError
            data = data[os.write(self._requests, data) :]

    def _receive(self, process: Process, deadline: float, received: bytes = b"") -> bytes:
        """One line, which begins with what was received before; empty if the child died."""
        chunks = [received]
        size = len(received)
        while not chunks[-1].endswith(b"\n"):
            remaining = deadline - time.monotonic()
            if remaining <= 0:
                raise TimeoutError
            # Check the process before the pipe: what the child wrote before its death can still be read then.
            dead = process.poll() is not None
            if not select.select([self._answers], [], [], 0 if dead else min(remaining, POLL_SECONDS))[0]:
                if dead:
                    return b""
                continue
            chunk = os.read(self._answers, 1 << 20)
            if not chunk:
                return b""
            chunks.append(chunk)
            size += len(chunk)
            if size > MAX_ANSWER_BYTES:
                return b"too long"
        return b"".join(chunks)

    def _wait_for_lock(self, process: Process, token: str, end: float) -> bytes:
        """Wait until the child has the GPU lock and starts; others time meanwhile. Returns what it wrote after that.

        Raises:
            TimeoutError: it did not start.
        """
        began = time.monotonic()
        received = self._receive(process, min(began + LOCK_SECONDS, end))
        lock_seconds["waiting to share the GPU"] += time.monotonic() - began
        return received.removeprefix(encode_start(token).encode())

    def _death(self, process: Process, command: str) -> WorkerFailed:
        try:
            code = process.wait(5)
        except subprocess.TimeoutExpired:
            code = 0
        output = self.output().strip()
        killed = self._killed
        self._stop()
        if killed:
            return WorkerFailed(f"{command} was cancelled", kind=FailureKind.CANCELLED)
        how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        last = f": {output.splitlines()[-1]}" if output else ""
        # A process that dies of a failed allocation has no other way to tell than the name of the exception in its output.
        is_killed = code == -signal.SIGKILL
        is_out_of_memory = "MemoryError" in output or "std::bad_alloc" in output
        if is_out_of_memory or (is_killed and _oom_kills() != self._oom_kills):
            return WorkerFailed(
                f"the process ran out of memory during {command} ({how}){last}",
                kind=FailureKind.OUT_OF_MEMORY,
                remedy="Make the sizes in the workload smaller.",
            )
        if is_killed:
            return WorkerFailed(
                f"the process was killed by {how} during {command}, and the system reports no lack of memory{last}",
                kind=FailureKind.KILLED,
                remedy="Look for a program that ends processes, such as a job scheduler.",
            )
        return WorkerFailed(f"the process ended with {how} during {command}{last}", kind=FailureKind.CRASHED)

    def _stop(self) -> None:
        if self._process is not None:
            _kill(self._process)
            self._process.wait()
            self._process = None
        if self._output is not None:
            self._output.close()
            self._output = None
        for file in (self._requests, self._answers):
            if file >= 0:
                os.close(file)
        self._requests = self._answers = -1
        if self._scratch:
            shutil.rmtree(self._scratch, ignore_errors=True)
            self._scratch = ""


class _OutputTail:
    """Reads a child's output in a thread and keeps the end."""

    def __init__(self, stream: int) -> None:
        self._stream = stream
        self._tail = b""
        self._thread = threading.Thread(target=self._drain, daemon=True)
        self._thread.start()

    def _drain(self) -> None:
        while chunk := os.read(self._stream, 1 << 16):
            self._tail = (self._tail + chunk)[-OUTPUT_TAIL_BYTES:]

    def text(self) -> str:
        """The end of the output; waits briefly for the last output of a child that just died."""
        self._thread.join(0.3)
        return self._tail.decode("utf-8", "replace")

    def close(self) -> None:
        # A grandchild outside the process group may hold the pipe open; the thread then ends with this process.
        self._thread.join(0.3)
        if not self._thread.is_alive():
            os.close(self._stream)


def _oom_kills() -> int:
    """How many processes the system has ended for lack of memory since it started; 0 if unknown."""
    with contextlib.suppress(OSError), open("/proc/vmstat", encoding="ascii") as lines:
        return next((int(line.split()[1]) for line in lines if line.startswith("oom_kill ")), 0)
    return 0


def _kill(process: Process) -> None:
    trace.note_end(process.pid)
    if not isinstance(process, ForkedWorker):
        end_started(process)
        return
    # Once the end is reported, another process group may have this id. On Linux the fork server ends what the worker left.
    if process.poll() is None or sys.platform != "linux":
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
