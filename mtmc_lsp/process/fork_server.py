"""A fork server: a process that has imported torch and waits, and forks workers in milliseconds instead of seconds.

Forked workers share its memory until they write to it, and are otherwise independent: each has its own limits and runs only
its own requests. The fork server itself never runs user code and never starts CUDA, which a forked process could not start
again.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from mtmc_lsp.process import trace
from mtmc_lsp.process.priority import has_low_priority, usable_cores

ENTRY = Path(__file__).resolve().parent / "worker" / "main.py"
START_SECONDS = 120.0
"""Time limit for importing torch."""
INTERPRET = "TRITON_INTERPRET"
INTERPRETER_ENV = {INTERPRET: "1"}
"""Triton reads this variable at import, and then interprets kernels instead of compiling them."""
HIDDEN_GPU = {"CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": ""}
"""Existing kernels are interpreted with what launches them, on the CPU: files that ask for a GPU must not get one."""
GPU_DEVICES = ("/dev/nvidiactl", "/dev/kfd", "/dev/dxg")
LENT = "MTMC_FORK_SERVER"
"""Environment variable that describes the fork server that a parent process lends to this one."""
STARTUP_PREFIXES = ("PYTHON", "LD_", "TORCH", "PYTORCH", "TRITON", "OMP_", "KMP_", "MKL_", "OPENBLAS", "GOMP_")
"""Prefixes of the variables that an interpreter and its libraries read only at startup."""
NOT_AT_STARTUP = ("PYTHONUNBUFFERED", "PYTHONDONTWRITEBYTECODE")
MAX_MESSAGE_BYTES = 1 << 17
"""Limit for one message; the largest contain an environment."""


class ForkServerGone(Exception):
    """The fork server ended or never started; the caller starts the worker as a new process instead."""


@dataclass(frozen=True)
class Launch:
    """How to start a worker, as a new process or by a fork."""

    python: str
    cwd: str
    env: Mapping[str, str]
    """Variables to add to those of this process."""
    options: Sequence[str]
    """Command line options of ``worker/main.py``."""


class ForkedWorker:
    """A process forked by the fork server, with the part of the ``Popen`` interface that :class:`Worker` uses."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._exited = threading.Event()
        self._code: int | None = None

    def poll(self) -> int | None:
        """The exit code, negative for a signal; ``None`` while the process runs."""
        return self._code

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end of the process and return its exit code.

        Raises:
            subprocess.TimeoutExpired: it did not end in time.
        """
        if not self._exited.wait(timeout):
            raise subprocess.TimeoutExpired(str(ENTRY), timeout or 0.0)
        assert self._code is not None
        return self._code

    def set_exit_code(self, code: int) -> None:
        """Record that the process ended."""
        self._code = code
        self._exited.set()


def sees_gpu() -> bool:
    """Whether this machine seems to have a GPU that workers may use, judged without torch."""
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES") == ""
    return not hidden and any(os.path.exists(device) for device in GPU_DEVICES)


def likely_variables() -> dict[str, str]:
    """The variables that workers on this machine will probably have, judged without torch."""
    return {} if sees_gpu() else dict(INTERPRETER_ENV)


def _socket_pair() -> tuple[socket.socket, socket.socket]:
    ends = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    for end in ends:
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4 * MAX_MESSAGE_BYTES)
    return ends


def _startup_variables() -> dict[str, str]:
    """The variables of this process that a new interpreter reads only at startup."""
    return {
        name: value
        for name, value in os.environ.items()
        if name.startswith(STARTUP_PREFIXES) and name not in NOT_AT_STARTUP
    }


def end_started(process: subprocess.Popen[bytes]) -> None:
    """End a process that runs ``worker/main.py``, with everything that it started; does not wait.

    The process is the supervisor, see :mod:`mtmc_lsp.process.supervisor`, or the worker itself on systems without one.
    """
    with contextlib.suppress(ProcessLookupError, PermissionError):
        if sys.platform == "linux":
            process.send_signal(signal.SIGTERM)
        else:
            os.killpg(process.pid, signal.SIGKILL)


class ForkServer:
    """The client of a fork server, which the first fork starts. Threads may share it."""

    def __init__(
        self,
        python: str,
        env: Mapping[str, str] | None = None,
        *,
        preload: bool = False,
        base: ForkServer | None = None,
    ) -> None:
        """Describe the fork server without starting it.

        Args:
            env: variables that its imports depend on, such as ``TRITON_INTERPRET``.
            preload: whether it also imports what capture needs and, while it is idle, the compilers.
            base: of a branch, see :meth:`branch`.
        """
        self.python = python
        self._base = base
        self._options = ("--preload",) if preload else ()
        self.env: Mapping[str, str] = dict(env or {})
        self._process: subprocess.Popen[bytes] | None = None
        self._startup_variables: dict[str, str] = {}
        self._socket: socket.socket | None = None
        self._gone = False
        self._request_lock = threading.Lock()
        self._changed = threading.Condition()
        self._answers: list[dict[str, Any]] = []
        self._workers: dict[int, ForkedWorker] = {}

    def __enter__(self) -> ForkServer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def start(self) -> None:
        """Start the process, without waiting for its imports."""
        with self._request_lock:
            self._connect()

    def can_fork(self, launch: Launch) -> bool:
        """Whether a forked worker behaves as a new process for ``launch`` would.

        A fork server with Triton's interpreter can also fork workers that compile: these import triton again.
        """
        if launch.python != self.python:
            return False
        missing = {name: value for name, value in self.env.items() if launch.env.get(name) != value}
        interprets = {**os.environ, **launch.env}.get(INTERPRET)
        if interprets and INTERPRET not in {**os.environ, **self.env}:
            return False
        return not missing or (missing == INTERPRETER_ENV and not interprets)

    def branch(self, path: str, cwd: str) -> ForkServer:
        """A fork server that imports what a user's file imports, so that workers need not; returns without waiting.

        It is forked from this one, which forks the workers instead if the imports start threads, need the GPU, fail or change
        what a fork does not keep, and workers with other variables. The caller closes it before this one.

        Args:
            path: the user's file, which itself is not run.
            cwd: the folder that its modules are imported in.
        """
        branch = ForkServer(self.python, self.env, base=self)
        try:
            branch._socket = self._open_branch(path, cwd)
        except ForkServerGone:
            branch._gone = True
        else:
            threading.Thread(target=branch._listen, args=(branch._socket,), daemon=True).start()
        return branch

    def _open_branch(self, path: str, cwd: str) -> socket.socket:
        environment = {**os.environ, **self.env, "PYTHONDONTWRITEBYTECODE": "1"}
        # Guards in imported modules must not warn, as in workers.
        environment.pop("MTMC_GUARD", None)
        message = {"branch": path, "cwd": cwd, "env": environment, "cores": usable_cores()}
        return self._open_connection(message)

    def fork(self, launch: Launch, files: Sequence[int]) -> ForkedWorker:
        """Fork a worker.

        Args:
            launch: its folder, variables and limits.
            files: descriptors for its standard input, its output and its answers; the caller closes its own copies.

        Raises:
            ForkServerGone: there is no fork server.
        """
        if self._base is None:
            return self._fork(launch, files)
        # Modules of the user that use triton would keep the interpreter in a worker that compiles.
        if all({**os.environ, **launch.env}.get(name) == value for name, value in self.env.items()):
            with contextlib.suppress(ForkServerGone):
                return self._fork(launch, files)
        return self._base.fork(launch, files)

    def _fork(self, launch: Launch, files: Sequence[int]) -> ForkedWorker:
        with self._request_lock:
            server = self._connect()
            options = [*launch.options]
            if self._process is None and has_low_priority():
                # The owner of the fork server may have normal priority.
                options.append("--low-priority")
            environment = {**os.environ, **launch.env}
            message = {"cwd": launch.cwd, "env": environment, "options": options, "cores": usable_cores()}
            data = json.dumps(message).encode()
            if len(data) > MAX_MESSAGE_BYTES:
                raise ForkServerGone
            try:
                socket.send_fds(server, [data], list(files))
            except OSError:
                raise ForkServerGone from None
            pid = int(self._wait_for_answer()["pid"])
            with self._changed:
                # The message about its end may have come before this one.
                return self._workers.setdefault(pid, ForkedWorker(pid))

    @contextlib.contextmanager
    def lend(self) -> Iterator[tuple[dict[str, str], tuple[int, ...]]]:
        """Lend the fork server to a process that the caller starts within this context.

        The workers that the borrower forks end with the borrower. A borrower can lend in turn.

        Yields:
            Environment variables and descriptors to pass to the process; empty if there is no fork server.
        """
        try:
            borrowers_end = self._open_connection({"lend": True})
        except ForkServerGone:
            yield {}, ()
            return
        with borrowers_end:
            offer = {
                "socket": borrowers_end.fileno(),
                "python": self.python,
                "env": dict(self.env),
                "options": self._options,
                "startup_variables": self._startup_variables,
            }
            yield {LENT: json.dumps(offer)}, (borrowers_end.fileno(),)

    def _open_connection(self, message: Mapping[str, object]) -> socket.socket:
        """A connection to the fork server, or to a branch, for another client. Does not wait for an answer."""
        with self._request_lock:
            server = self._connect()
            clients_end, servers_end = _socket_pair()
            with servers_end:
                try:
                    socket.send_fds(server, [json.dumps(message).encode()], [servers_end.fileno()])
                except OSError:
                    clients_end.close()
                    raise ForkServerGone from None
            return clients_end

    def kill(self) -> None:
        """End the fork server now, without waiting, so that signal handlers may call this. Waiting forks fail."""
        if self._process is None and self._socket is not None:
            # A fork server that is borrowed, or a branch, ends the workers of this client.
            with contextlib.suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)
        # A process that was waited for has no valid id any more.
        if self._process is not None and self._process.returncode is None:
            end_started(self._process)

    def close(self) -> None:
        """End the fork server and all workers that this process forked."""
        if self._process is not None:
            trace.note_end(self._process.pid)
        # First, so that a thread that holds the lock and waits for an answer stops waiting.
        self.kill()
        with self._request_lock:
            self._gone = True
            self.kill()
            if self._process is not None:
                self._process.wait()
            if self._socket is not None:
                # The listening thread ends at the end of the stream.
                with contextlib.suppress(OSError):
                    self._socket.shutdown(socket.SHUT_RDWR)
        with self._changed:
            self._end_workers()

    def _end_workers(self) -> None:
        """Kill all workers; without the fork server nobody reports their end."""
        for worker in self._workers.values():
            if worker.poll() is None:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(worker.pid, signal.SIGKILL)
                worker.set_exit_code(-signal.SIGKILL)

    def _connect(self) -> socket.socket:
        if self._gone:
            raise ForkServerGone
        if self._socket is None:
            self._socket = self._borrow() or self._start_process()
            threading.Thread(target=self._listen, args=(self._socket,), daemon=True).start()
        return self._socket

    def _borrow(self) -> socket.socket | None:
        """The socket to a fork server that the parent lends, if it equals the one described here. Only one can borrow it."""
        try:
            offer = json.loads(os.environ.get(LENT, ""))
            required = (self.python, dict(self.env), list(self._options), _startup_variables())
            if (offer["python"], offer["env"], offer["options"], offer["startup_variables"]) != required:
                return None
            server = socket.socket(fileno=int(offer["socket"]))
        except (ValueError, KeyError, OSError):
            return None
        del os.environ[LENT]
        server.set_inheritable(False)
        self._startup_variables = offer["startup_variables"]
        return server

    def _start_process(self) -> socket.socket:
        clients_end, servers_end = _socket_pair()
        self._startup_variables = _startup_variables()
        try:
            self._process = subprocess.Popen(
                [self.python, str(ENTRY), "--fork-server", str(servers_end.fileno()), *self._options],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1", **self.env},
                pass_fds=(servers_end.fileno(),),
                start_new_session=True,
            )
        except OSError:
            clients_end.close()
            self._gone = True
            raise ForkServerGone from None
        finally:
            servers_end.close()
        trace.note(trace.STARTED, self._process.pid, how=trace.SERVER)
        return clients_end

    def _wait_for_answer(self) -> dict[str, Any]:
        deadline = time.monotonic() + START_SECONDS
        with self._changed:
            while not self._answers:
                if self._gone or not self._changed.wait(max(0.0, deadline - time.monotonic())):
                    self._gone = True
                    raise ForkServerGone
            return self._answers.pop(0)

    def _listen(self, server: socket.socket) -> None:
        """Receive messages: answers to requests, and the exit codes of workers."""
        with server:
            while True:
                try:
                    data = server.recv(MAX_MESSAGE_BYTES)
                except OSError:
                    data = b""
                with self._changed:
                    if not data:
                        self._gone = True
                        self._changed.notify_all()
                        self._end_workers()
                        return
                    message = json.loads(data)
                    if "exited" in message:
                        pid = int(message["exited"])
                        self._workers.setdefault(pid, ForkedWorker(pid)).set_exit_code(int(message["code"]))
                    else:
                        self._answers.append(message)
                        self._changed.notify_all()
