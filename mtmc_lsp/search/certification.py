"""Verifies accepted steps in order, in another thread, while the search tries the next ones."""

from __future__ import annotations

import time
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from mtmc_lsp.core.protocols import Measurer
from mtmc_lsp.core.results import Verdict
from mtmc_lsp.core.run import Candidate, Step


@dataclass(frozen=True)
class Certified:
    """A step whose verification ended."""

    step: Step
    verdict: Future[Verdict]
    """Holds the verdict, or the error that the verification raised."""


class Certification:
    """A queue of steps to verify. A search closes it at its end."""

    def __init__(self, measurer: Measurer) -> None:
        self._measurer = measurer
        self._thread = ThreadPoolExecutor(1)
        self._pending: deque[Certified] = deque()
        self.last_seconds = 0.0
        """How long the last verification took."""

    def add(self, step: Step, candidate: Candidate) -> None:
        """Verify a step after those that were added before."""
        self._pending.append(Certified(step, self._thread.submit(self._verify, candidate)))

    @property
    def pending(self) -> int:
        """The number of steps whose verification has not been taken by :meth:`next`."""
        return len(self._pending)

    def next(self, *, wait: bool) -> Certified | None:
        """The next step whose verification ended, in the order of the steps; None if there is none.

        Args:
            wait: whether to wait for the end of the verification of the next step.
        """
        if not self._pending or not (wait or self._pending[0].verdict.done()):
            return None
        self._pending[0].verdict.exception()
        return self._pending.popleft()

    def drop(self) -> None:
        """Forget the remaining steps; a verification that runs ends by itself."""
        for item in self._pending:
            item.verdict.cancel()
        self._pending.clear()

    def close(self) -> None:
        """Forget the remaining steps and end the thread."""
        self.drop()
        self._thread.shutdown(wait=False)

    def _verify(self, candidate: Candidate) -> Verdict:
        began = time.monotonic()
        try:
            return self._measurer.verify(candidate)
        finally:
            self.last_seconds = time.monotonic() - began
