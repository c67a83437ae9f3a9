"""The second process of a candidate, which runs some of its cases beside the first one."""

from __future__ import annotations

import contextlib
import threading

from mtmc_lsp.core.errors import MtmcError
from mtmc_lsp.verify.adapters import Adapter
from mtmc_lsp.verify.candidate_process import CandidateProcess
from mtmc_lsp.verify.case_runner import CaseRunner
from mtmc_lsp.verify.delivery import delivery_check
from mtmc_lsp.verify.reference import Reference
from mtmc_lsp.verify.trials import Trial


class SecondProcess:
    """Runs one candidate at a time, each in a new process, as the first process does."""

    def __init__(self, reference: Reference, process: CandidateProcess) -> None:
        """Prepare without starting a process.

        Args:
            process: runs the candidates. The caller closes it.
        """
        self._reference, self._process = reference, process
        self._preparing: threading.Thread | None = None

    def prepare(self, candidate: Adapter) -> None:
        """Call the guard in the background, as the first process does before the cases.

        This constructs the user's module. Errors are ignored here, because the first process reports them.
        """
        self._preparing = threading.Thread(target=self._call, args=(candidate,), daemon=True)
        self._preparing.start()

    def _call(self, candidate: Adapter) -> None:
        reference = self._reference
        with contextlib.suppress(MtmcError):
            delivery_check(candidate, reference.capture, self._process, reference.pool, reference.run_seconds)

    def runner(self, candidate: Adapter, trial: Trial) -> CaseRunner:
        """Runs cases in this process."""
        return CaseRunner(self._reference, self._process, candidate, trial)

    def next(self) -> None:
        """End the process, if a candidate ran in it. The next call starts a new one."""
        if self._preparing is not None:
            # Its call would otherwise begin in the process of the next candidate.
            self._preparing.join()
            self._preparing = None
        self._process.next()
