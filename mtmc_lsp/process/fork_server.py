"""A process that has imported torch and waits; workers are copies of it, ready in milliseconds instead of seconds.

The copies share its memory as long as neither writes, run nothing of each other, and each has limits of its own. The
template itself never runs user code, and never starts CUDA, which a copy could not start again.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from mtmc_lsp.process.priority import has_low_priority, usable_cores

ENTRY = Path(__file__).resolve().parent / "worker" / "main.py"
START_SECONDS = 120.0
"""Most seconds for importing torch."""
INTERPRET = "TRITON_INTERPRET"
INTERPRETS = {INTERPRET: "1"}
"""The variable by which triton, when it is imported, becomes its interpreter."""
GPU_DEVICES = ("/dev/nvidiactl", "/dev/kfd", "/dev/dxg")
LENT = "MTMC_FORK_SERVER"
"""The variable that tells a process of a template which the one that started it lends."""
AT_START = ("PYTHON", "LD_", "TORCH", "PYTORCH", "TRITON", "OMP_", "KMP_", "MKL_", "OPENBLAS", "GOMP_")
"""Variables by whose beginnings an interpreter and its libraries look when they start, not later."""
NOT_AT_START = ("PYTHONUNBUFFERED", "PYTHONDONTWRITEBYTECODE")
LARGEST = 1 << 17
"""Most bytes of one message; environments and paths are all that is sent."""


class ForkServerGone(Exception):
    """The template ended, or never started; what was to be a copy is then started the usual way."""


@dataclass(frozen=True)
class Launch:
    """How a worker is started, by itself or as a copy of a template."""

    python: str
    cwd: str
    env: Mapping[str, str]
    """Variables to set beside the present ones."""
    options: Sequence[str]
    """For ``worker/main.py``: its limits."""


class ForkedWorker:
    """A copy of a template, with what is asked of a child process."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._ended = threading.Event()
        self._code: int | None = None

    def poll(self) -> int | None:
        """The exit code, negative for a signal; ``None`` while it runs."""
        return self._code

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end; gives its exit code.

        Raises:
            subprocess.TimeoutExpired: it did not end in time.
        """
        if not self._ended.wait(timeout):
            raise subprocess.TimeoutExpired(str(ENTRY), timeout or 0.0)
        assert self._code is not None
        return self._code

    def end(self, code: int) -> None:
        """Note that it ended."""
        self._code = code
        self._ended.set()


def sees_gpu() -> bool:
    """Whether this machine seems to have a GPU for its workers, as far as can be told without torch."""
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES") == ""
    return not hidden and any(os.path.exists(device) for device in GPU_DEVICES)


def likely_variables() -> dict[str, str]:
    """Variables that the workers of this machine will have, as far as can be told without torch."""
    return {} if sees_gpu() else dict(INTERPRETS)


def _pair() -> tuple[socket.socket, socket.socket]:
    """The two ends of a line."""
    ends = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    for end in ends:
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4 * LARGEST)
    return ends


def _at_start() -> dict[str, str]:
    """The variables that a process which is started now would begin with, and that decide what it becomes."""
    return {name: v for name, v in os.environ.items() if name.startswith(AT_START) and name not in NOT_AT_START}


class ForkServer:
    """The waiting process, started when first copied. May be shared by threads."""

    def __init__(self, python: str, env: Mapping[str, str] | None = None, *, preload: bool = False) -> None:
        """Describe it; nothing is started yet.

        Args:
            python: the user's interpreter.
            env: variables that its imports depend on, such as ``TRITON_INTERPRET``.
            preload: whether it also imports what capturing needs, and, while nothing is asked of it, what compiling needs.
        """
        self.python = python
        self._options = ("--preload",) if preload else ()
        self.env: Mapping[str, str] = dict(env or {})
        self._process: subprocess.Popen[bytes] | None = None
        self._borrowed = False
        self._seen: dict[str, str] = {}
        self._line: socket.socket | None = None
        self._gone = False
        self._asking = threading.Lock()
        self._answered = threading.Condition()
        self._answers: list[dict[str, Any]] = []
        self._copies: dict[int, ForkedWorker] = {}

    def __enter__(self) -> ForkServer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def start(self) -> None:
        """Begin importing, without waiting for it."""
        with self._asking:
            self._started()

    def can_fork(self, launch: Launch) -> bool:
        """Whether a copy would be what a process started for ``launch`` would be.

        One that compiles kernels is what it would be too: it imports triton anew, without the interpreter.
        """
        if launch.python != self.python:
            return False
        missing = {name: value for name, value in self.env.items() if launch.env.get(name) != value}
        return not missing or (missing == INTERPRETS and not {**os.environ, **launch.env}.get(INTERPRET))

    def fork(self, launch: Launch, files: Sequence[int]) -> ForkedWorker:
        """Start a copy.

        Args:
            launch: where it runs and what limits it has.
            files: descriptors that become its standard input, its output and its answers; the caller closes its own.

        Raises:
            TemplateGone: there is nothing to copy.
        """
        with self._asking:
            line = self._started()
            options = [*launch.options]
            if self._borrowed and has_low_priority():
                # Whoever lends it may not.
                options.append("--low-priority")
            environment = {**os.environ, **launch.env}
            message = {"cwd": launch.cwd, "env": environment, "options": options, "cores": usable_cores()}
            data = json.dumps(message).encode()
            if len(data) > LARGEST:
                raise ForkServerGone
            try:
                socket.send_fds(line, [data], list(files))
            except OSError:
                raise ForkServerGone from None
            pid = int(self._answer()["pid"])
            with self._answered:
                # It may have ended before its number came here.
                return self._copies.setdefault(pid, ForkedWorker(pid))

    @contextlib.contextmanager
    def lent(self) -> Iterator[tuple[dict[str, str], tuple[int, ...]]]:
        """Lend it to a process that is started while this lasts: its copies are as its own would be, and end with it.

        What is borrowed can be lent on.
        Gives variables and descriptors for that process; none where there is nothing to lend.
        """
        try:
            with self._asking:
                line = self._started()
                theirs, given = _pair()
                with given:
                    try:
                        socket.send_fds(line, [b'{"lend": true}'], [given.fileno()])
                    except OSError:
                        theirs.close()
                        raise ForkServerGone from None
        except ForkServerGone:
            yield {}, ()
            return
        with theirs:
            offer = {"line": theirs.fileno(), "python": self.python, "env": dict(self.env), "options": self._options}
            yield {LENT: json.dumps({**offer, "seen": self._seen})}, (theirs.fileno(),)

    def kill(self) -> None:
        """End it now, without waiting for anything, as a handler of signals must; who waits for a copy waits no longer."""
        if self._borrowed and self._line is not None:
            # Whoever lends it keeps it; it ends what it made for us.
            with contextlib.suppress(OSError):
                self._line.shutdown(socket.SHUT_RDWR)
        # One that was waited for has no number any more.
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)

    def close(self) -> None:
        """End it and all its copies."""
        # First: who waits for a copy, and keeps others out meanwhile, then waits for nothing.
        self.kill()
        with self._asking:
            self._gone = True
            self.kill()
            if self._process is not None:
                self._process.wait()
            if self._line is not None:
                # Its reader ends by itself at the end of the stream.
                with contextlib.suppress(OSError):
                    self._line.shutdown(socket.SHUT_RDWR)
        with self._answered:
            self._end_copies()

    def _end_copies(self) -> None:
        """Nobody can tell of their end any more."""
        for copy in self._copies.values():
            if copy.poll() is None:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(copy.pid, signal.SIGKILL)
                copy.end(-signal.SIGKILL)

    def _started(self) -> socket.socket:
        if self._gone:
            raise ForkServerGone
        if self._line is None:
            self._line = self._borrow() or self._start_process()
            threading.Thread(target=self._listen, args=(self._line,), daemon=True).start()
        return self._line

    def _borrow(self) -> socket.socket | None:
        """The line to a template that is lent to this process, where it is what this one would be; one alone can have it."""
        try:
            offer = json.loads(os.environ.get(LENT, ""))
            wanted = (self.python, dict(self.env), list(self._options), _at_start())
            if (offer["python"], offer["env"], offer["options"], offer["seen"]) != wanted:
                return None
            line = socket.socket(fileno=int(offer["line"]))
        except (ValueError, KeyError, OSError):
            return None
        del os.environ[LENT]
        line.set_inheritable(False)
        self._borrowed, self._seen = True, offer["seen"]
        return line

    def _start_process(self) -> socket.socket:
        ours, theirs = _pair()
        self._seen = _at_start()
        try:
            self._process = subprocess.Popen(
                [self.python, str(ENTRY), "--fork-server", str(theirs.fileno()), *self._options],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1", **self.env},
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
            )
        except OSError:
            ours.close()
            self._gone = True
            raise ForkServerGone from None
        finally:
            theirs.close()
        return ours

    def _answer(self) -> dict[str, Any]:
        deadline = time.monotonic() + START_SECONDS
        with self._answered:
            while not self._answers:
                if self._gone or not self._answered.wait(max(0.0, deadline - time.monotonic())):
                    self._gone = True
                    raise ForkServerGone
            return self._answers.pop(0)

    def _listen(self, line: socket.socket) -> None:
        """Take in what it says: answers to requests, and the ends of copies."""
        with line:
            while True:
                try:
                    data = line.recv(LARGEST)
                except OSError:
                    data = b""
                with self._answered:
                    if not data:
                        self._gone = True
                        self._answered.notify_all()
                        self._end_copies()
                        return
                    message = json.loads(data)
                    if "ended" in message:
                        pid = int(message["ended"])
                        self._copies.setdefault(pid, ForkedWorker(pid)).end(int(message["code"]))
                    else:
                        self._answers.append(message)
                        self._answered.notify_all()
