"""Processes of a run on a GPU that start while the target is captured: nothing waits for their CUDA contexts after that.

Until the measurer takes them over, they run nothing but the start command, and those of the trials and the reference construct
the user's module, which is what they do first in any case. So each is what a new process would be. A sandboxed process can read
only folders that exist when it starts: the folders of the run are created here, too.
"""

from __future__ import annotations

import contextlib
import shutil
import tempfile
import threading

from mtmc_lsp.core.errors import MtmcError
from mtmc_lsp.process.fork_server import ForkServer
from mtmc_lsp.process.gpu_lock import lock_folder
from mtmc_lsp.process.messages import StartRequest
from mtmc_lsp.process.worker_process import Worker
from mtmc_lsp.verify.candidate_process import START_SECONDS, sandboxed_worker
from mtmc_lsp.verify.messages import ConstructRequest
from mtmc_lsp.verify.reference import ReferenceStart

CONSTRUCT_SECONDS = 60.0
"""Time limit for constructing the user's module; a process that takes longer ends, and the next request starts it again."""


class EarlyProcesses:
    """The processes of the trials, the reference and the first candidate. They start one after the other, beside the capture."""

    def __init__(
        self, python: str, cwd: str, fork_server: ForkServer, construct: ConstructRequest | None = None
    ) -> None:
        """Start them in the background.

        Args:
            construct: the user's module, if it is known how to construct it.
        """
        self._construct = construct
        lock_folder()
        self.kernels = tempfile.mkdtemp(prefix="mtmc-kernels-")
        """The folder for compiled kernels."""
        self.reference = ReferenceStart(Worker(python, cwd=cwd, fork_server=fork_server))
        hidden = str(self.reference.secret)
        self.trials, self.candidate = (
            sandboxed_worker(python, cwd, self.kernels, hidden, fork_server) for _ in range(2)
        )
        # The trials first: their process tells which GPU it is.
        self._workers = (self.trials, self.reference.worker, self.candidate)
        self._is_over = False
        self._thread = threading.Thread(target=self._start, name="early processes", daemon=True)
        self._thread.start()

    def _start(self) -> None:
        for worker in self._workers:
            if self._is_over:
                return
            with contextlib.suppress(MtmcError):
                # Whoever takes the process over asks again, and gets the error.
                worker.call(StartRequest(gpu=True, for_candidates=worker is not self.reference.worker), START_SECONDS)
        if self._construct is not None:
            # The reference is awaited first.
            both = (self.reference.worker, self.trials)
            arguments = [(worker, self._construct) for worker in both]
            threads = [threading.Thread(target=self._construct_in, args=each, daemon=True) for each in arguments]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()

    def _construct_in(self, worker: Worker, request: ConstructRequest) -> None:
        if not self._is_over:
            with contextlib.suppress(MtmcError):
                worker.call(request, CONSTRUCT_SECONDS)

    def take(self) -> None:
        """Let the measurer own the processes and folders from now on; it starts what has not started yet."""
        self._is_over = True

    def close(self) -> None:
        """End the processes and remove the folders, unless the measurer owns them."""
        if self._is_over:
            return
        self._is_over = True
        for worker in self._workers:
            worker.kill()
        self._thread.join(START_SECONDS)
        for worker in self._workers:
            worker.close()
        for folder in (self.kernels, self.reference.secret, self.reference.inputs):
            shutil.rmtree(folder, ignore_errors=True)
