"""The process that a candidate runs in: locked in, with limits, and a new one for each candidate."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from mtmc_lsp.core.errors import EnvironmentNotAble, MtmcError
from mtmc_lsp.core.workload import Environment
from mtmc_lsp.process.cache_files import cache_file
from mtmc_lsp.process.fork_server import ForkServer
from mtmc_lsp.process.messages import StartRequest
from mtmc_lsp.process.protocol import Answer, Request
from mtmc_lsp.process.sandbox import Isolation
from mtmc_lsp.process.worker_process import RESULTS, Sandbox, Worker

RUN_SECONDS = 120.0
"""Limit for one case of one candidate."""
INTERPRETER_MEMORY = 8 << 30
"""Bytes of data that a candidate under the interpreter may take: the cases are small."""
START_SECONDS = 120.0


class CandidateProcess:
    """Runs candidates, none in the process of another, and brings their results to where they cannot write."""

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
    ) -> None:
        """Prepare it; nothing is started yet.

        Args:
            python: the user's interpreter.
            cwd: the project's folder.
            environment: the machine, on which CUDA may not start in a process that is locked in.
            measured: whether it runs on the GPU, else by Triton's interpreter.
            hidden: a folder that it may not even read: that of the expected results.
            template: what the processes become copies of, where there is one.
            needs_sandbox: whether to refuse to run anything that is not locked in.
            memory_bytes: most memory that a candidate under the interpreter may take; 8 GiB by default.
            kernels: a folder of the caller's for compiled kernels; else the process has one of its own.
        """
        self._has_gpu, self._environment, self._needs_sandbox = has_gpu, environment, needs_sandbox
        # Compiled kernels are kept for the next candidate, which shares most of them.
        self._own_kernels = tempfile.mkdtemp(prefix="mtmc-kernels-") if has_gpu and not kernels else ""
        folder = kernels or self._own_kernels
        sandbox = Sandbox((folder,) if has_gpu else (), hidden, gpu=has_gpu)
        known = cache_file(environment, "unlocked") if has_gpu else None
        self._reason = known.read_text(encoding="utf-8") if known is not None and known.exists() else ""
        self._isolation: Isolation | None = None
        self.gpu = ""
        """The GPU's UUID, once it was started."""
        self.free_bytes = 0
        """The GPU's free memory then."""

        def worker(locked: Sandbox | None) -> Worker:
            # CUDA reserves far more data memory than it uses, so only the interpreter's can be limited this way.
            env = {"TRITON_CACHE_DIR": folder} if has_gpu else {"TRITON_INTERPRET": "1"}
            memory = None if has_gpu else memory_bytes or INTERPRETER_MEMORY
            return Worker(python, cwd=cwd, env=env, memory_bytes=memory, sandbox=locked, fork_server=fork_server)

        self._worker, self._unlocked = worker(None if self._reason else sandbox), worker(None)

    def start(self) -> Isolation:
        """Start the next candidate's process, as far locked in as can be; says how far that is.

        Raises:
            EnvironmentNotAble: it cannot be locked in, and that is asked for.
        """
        seen = self._worker.call(StartRequest(gpu=self._has_gpu, for_candidates=True), START_SECONDS)
        self.gpu, self.free_bytes = seen.gpu, seen.free_bytes
        if seen.error and not self._reason and self._has_gpu:
            # Better a run that is not locked in, and says so, than none.
            free = self._unlocked.call(StartRequest(gpu=True, for_candidates=True), START_SECONDS)
            if not free.error:
                self.gpu, self.free_bytes = free.gpu, free.free_bytes
                self._reason = seen.error
                with contextlib.suppress(OSError):
                    file = cache_file(self._environment, "unlocked")
                    file.parent.mkdir(parents=True, exist_ok=True)
                    file.write_text(self._reason, encoding="utf-8")
                self._worker.close()
                self._worker = self._unlocked
        found = seen.isolation
        self._isolation = replace(found, files=False, network=False, gpu=self._reason) if self._reason else found
        if self._needs_sandbox and not self._isolation.is_full:
            raise EnvironmentNotAble(
                f"the candidate's process cannot be locked in here; the level is {self._isolation.text}",
                remedy="Use Linux 5.13 or newer with Landlock and seccomp, or leave out --require-sandbox.",
            )
        return self._isolation

    @property
    def isolation(self) -> Isolation:
        """How far candidates are locked in."""
        return self._isolation or self.start()

    def call(self, request: Request[Answer], seconds: float) -> Answer:
        """Run a command in the candidate's process.

        Raises:
            WorkerFailed: the process did not answer; ``kind`` says why.
        """
        if self._isolation is None:
            self.start()
        return self._worker.call(request, seconds)

    def call_untyped(self, command: str, request: Mapping[str, object], seconds: float) -> dict[str, Any]:
        """As :meth:`call` for the commands of ``verify``, which have no request classes yet."""
        if self._isolation is None:
            self.start()
        return self._worker.call_untyped(command, request, seconds)

    def take_results(self, to: Path) -> None:
        """Copy what it left as results to where it cannot write.

        Raises:
            WorkerFailed: it left none.
        """
        self._worker.copy_file(RESULTS, to)

    def kill(self) -> None:
        """End the process now; a call that is under way raises ``WorkerFailed``."""
        for worker in (self._worker, self._unlocked):
            worker.kill()

    def next(self) -> None:
        """End the process: whatever the candidate changed in it goes with it. The next one starts by itself."""
        self._worker.close()

    def warm_up(self) -> None:
        """Start the next process now; what is wrong is said when it is used."""
        with contextlib.suppress(MtmcError):
            self.start()

    def close(self) -> None:
        """End whatever runs, and remove what it wrote."""
        self.kill()
        for worker in (self._worker, self._unlocked):
            worker.close()
        if self._own_kernels:
            shutil.rmtree(self._own_kernels, ignore_errors=True)
