"""The sandboxed process of a candidate, with limits. Each candidate gets a new one."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from dataclasses import replace
from pathlib import Path

from mtmc_lsp.core.errors import EnvironmentNotAble, MtmcError
from mtmc_lsp.core.workload import Environment
from mtmc_lsp.process.cache_files import cache_file
from mtmc_lsp.process.fork_server import ForkServer
from mtmc_lsp.process.messages import Libraries, StartRequest
from mtmc_lsp.process.protocol import Answer, GpuLock, Request
from mtmc_lsp.process.sandbox import Isolation
from mtmc_lsp.process.worker_process import RESULTS, Sandbox, Worker

RUN_SECONDS = 120.0
"""Time limit for one case of one candidate."""
INTERPRETER_MEMORY = 8 << 30
"""Limit for the data of a candidate under the interpreter, whose cases are small."""
START_SECONDS = 120.0
NO_LIBRARIES = Libraries()


def sandboxed_worker(python: str, cwd: str, kernels: str, hidden: str, fork_server: ForkServer | None) -> Worker:
    """A process on a GPU for candidates, which may write compiled kernels to a folder."""
    sandbox = Sandbox((kernels,), hidden, gpu=True)
    return Worker(python, cwd=cwd, env={"TRITON_CACHE_DIR": kernels}, sandbox=sandbox, fork_server=fork_server)


class CandidateProcess:
    """Runs candidates, each in a new process, and copies their results to a folder where they cannot write."""

    def __init__(
        self,
        python: str,
        cwd: str,
        environment: Environment,
        *,
        has_gpu: bool,
        hidden: str = "",
        fork_server: ForkServer | None = None,
        needs_sandbox: bool = False,
        memory_bytes: int | None = None,
        kernels: str = "",
        early: Worker | None = None,
        libraries: Libraries = NO_LIBRARIES,
    ) -> None:
        """Prepare the process without starting it.

        Args:
            environment: the machine. On some, CUDA does not start in a sandbox.
            has_gpu: whether candidates run on the GPU, or else by Triton's interpreter.
            hidden: the folder of the expected results, which candidates must not read.
            needs_sandbox: whether to refuse candidates without a complete sandbox.
            memory_bytes: memory limit of a candidate under the interpreter; by default 8 GiB.
            kernels: a folder for compiled kernels, which the caller removes; by default a temporary one.
            early: a process of :func:`sandboxed_worker` with these folders that starts already; this object owns it.
            libraries: what to load when it starts.
        """
        self._libraries = libraries
        self._has_gpu, self._environment, self._needs_sandbox = has_gpu, environment, needs_sandbox
        # Keep compiled kernels, because the next candidate shares most of them.
        self._temporary_kernels = tempfile.mkdtemp(prefix="mtmc-kernels-") if has_gpu and not kernels else ""
        folder = kernels or self._temporary_kernels
        known = cache_file(environment, "unlocked") if has_gpu else None
        self._reason = known.read_text(encoding="utf-8") if known is not None and known.exists() else ""
        self._isolation: Isolation | None = None
        self._is_used = False
        """Whether the process may have run a candidate. If it has not, the next candidate uses it, too."""
        self.gpu = ""
        """The GPU's UUID; known after the start."""
        self.free_bytes = 0
        """The GPU's free memory at the start."""

        # CUDA reserves far more memory than it uses, so this limit works only for the interpreter.
        env = {"TRITON_CACHE_DIR": folder} if has_gpu else {"TRITON_INTERPRET": "1"}
        memory = None if has_gpu else memory_bytes or INTERPRETER_MEMORY

        def worker(locked: Sandbox | None) -> Worker:
            return Worker(python, cwd=cwd, env=env, memory_bytes=memory, sandbox=locked, fork_server=fork_server)

        if self._reason:
            self._worker = worker(None)
        elif has_gpu:
            self._worker = early or sandboxed_worker(python, cwd, folder, hidden, fork_server)
        else:
            self._worker = worker(Sandbox((), hidden))
        self._unlocked = worker(None)
        self._early = early
        if self._reason and early is not None:
            early.kill()

    @property
    def _workers(self) -> list[Worker]:
        return [worker for worker in (self._worker, self._unlocked, self._early) if worker is not None]

    def start(self) -> Isolation:
        """Start the next candidate's process in a sandbox as complete as this machine allows; returns its level.

        Raises:
            EnvironmentNotAble: the sandbox is incomplete and a complete one is required.
        """
        request = StartRequest(gpu=self._has_gpu, for_candidates=True, libraries=self._libraries)
        started = self._worker.call(request, START_SECONDS)
        self.gpu, self.free_bytes = started.gpu, started.free_bytes
        if started.error and not self._reason and self._has_gpu:
            # CUDA does not start in the sandbox here, so candidates run without one, and the verdict notes it.
            free = self._unlocked.call(request, START_SECONDS)
            if not free.error:
                self.gpu, self.free_bytes = free.gpu, free.free_bytes
                self._reason = started.error
                with contextlib.suppress(OSError):
                    file = cache_file(self._environment, "unlocked")
                    file.parent.mkdir(parents=True, exist_ok=True)
                    file.write_text(self._reason, encoding="utf-8")
                self._worker.close()
                self._worker = self._unlocked
        level = started.isolation
        self._isolation = replace(level, files=False, network=False, gpu=self._reason) if self._reason else level
        if self._needs_sandbox and not self._isolation.is_full:
            raise EnvironmentNotAble(
                f"a complete sandbox for the candidate's process is not possible here; the level is: {self._isolation.text}",
                remedy="Use Linux 5.13 or newer with Landlock and seccomp, or leave out --require-sandbox.",
            )
        return self._isolation

    @property
    def isolation(self) -> Isolation:
        """The level of the sandbox; starts the process if it is not known yet."""
        return self._isolation or self.start()

    def call(
        self, request: Request[Answer], seconds: float, lock: GpuLock | None = None, end: float = float("inf")
    ) -> Answer:
        """Run a command in the candidate's process, as :meth:`~mtmc_lsp.process.worker_process.Worker.call`.

        Raises:
            WorkerFailed: the process did not answer; ``kind`` says why.
        """
        if self._isolation is None:
            self.start()
        self._is_used = True
        return self._worker.call(request, seconds, lock, end)

    def take_results(self, to: Path) -> None:
        """Copy the results to a path that candidates cannot write.

        Raises:
            WorkerFailed: there are no results.
        """
        self._worker.copy_file(RESULTS, to)

    def release_memory(self, seconds: float) -> None:
        """Let an idle process free GPU memory for others."""
        self._worker.release_memory(seconds)

    def kill(self) -> None:
        """End the process now; a call that is under way raises ``WorkerFailed``."""
        for worker in self._workers:
            worker.kill()

    def next(self) -> None:
        """End the process with all that the candidate changed in it, if one ran. The next call starts a new one."""
        if self._is_used:
            self._worker.close()
            self._is_used = False

    def warm_up(self) -> None:
        """Start the next process now; the next call reports an error."""
        with contextlib.suppress(MtmcError):
            self.start()

    def close(self) -> None:
        """End the processes and remove temporary kernels."""
        self.kill()
        for worker in self._workers:
            worker.close()
        if self._temporary_kernels:
            shutil.rmtree(self._temporary_kernels, ignore_errors=True)
