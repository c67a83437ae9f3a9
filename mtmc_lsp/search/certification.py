"""Verifies accepted steps in order, in another thread, while the search prepares the next ones.

While nothing else is verified, the verification of a step begins before its timing: most steps that compile are accepted, and a
timing waits for other runs on the GPU.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial

from mtmc_lsp.core.protocols import Measurer, SharedReference
from mtmc_lsp.core.results import Verdict
from mtmc_lsp.core.run import Candidate, Step

FIRST_SECONDS = 5.0
"""Expected time of a run's first verification; that of ``rmsnorm_residual`` took 4.7 s alone on an H100 (commit 21e23fc)."""


@dataclass(frozen=True)
class Certified:
    """A step whose verification ended."""

    step: Step
    verdict: Future[Verdict]
    """Holds the verdict, or the error that the verification raised."""
    count: int
    """Number of steps of the run when the verification was wanted. Later steps relied on it."""

    @property
    def reportable(self) -> int:
        """The number of steps that do not depend on the verdict. An earlier step was reported as one of a slower branch."""
        return self.count - 1 if self.step.index == self.count else self.count


class _Task:
    """A candidate to verify."""

    def __init__(self, candidate: Candidate) -> None:
        self.candidate = candidate
        self.verdict: Future[Verdict] = Future()
        self.is_wanted = True
        """Whether the search still needs the verdict."""


class Certification:
    """A queue of steps to verify. A search closes it at its end."""

    def __init__(self, measurer: Measurer) -> None:
        self._measurer = measurer
        self._pending: deque[Certified] = deque()
        self._tasks: queue.SimpleQueue[_Task | None] = queue.SimpleQueue()
        self._early: _Task | None = None
        """The candidate whose verification began before its timing ended."""
        # A daemon: the end of a cancelled run must not wait for a verification.
        self._thread = threading.Thread(target=self._work, name="certification", daemon=True)
        self._last_seconds = 0.0
        self._began: float | None = None

    def begin(self, candidate: Candidate) -> None:
        """Begin to verify a candidate that is still timed, if nothing else is verified.

        :meth:`add` or :meth:`abandon` follows.
        """
        if not self._pending and self._early is None:
            self._early = self._started(candidate)

    def add(self, step: Step, candidate: Candidate, count: int) -> None:
        """Verify a step after those that were added before.

        Args:
            count: number of steps of the run until now.
        """
        if self._early is not None and self._early.candidate.id == candidate.id:
            task, self._early = self._early, None
        else:
            task = self._started(candidate)
        self._pending.append(Certified(step, task.verdict, count))

    def abandon(self) -> None:
        """End the verification of a candidate that was rejected."""
        if self._early is not None:
            self._early.is_wanted = False
            self._early.verdict.cancel()
            self._early = None

    def _started(self, candidate: Candidate) -> _Task:
        task = _Task(candidate)
        self._tasks.put(task)
        if not self._thread.is_alive():
            self._thread.start()
        return task

    @property
    def pending(self) -> int:
        """The number of steps whose verification has not been taken by :meth:`next`."""
        return len(self._pending)

    @property
    def reportable(self) -> int | None:
        """The number of steps that do not depend on a verification; None if none is pending."""
        return min((item.reportable for item in self._pending), default=None)

    def is_pending(self, step: Step) -> bool:
        """Whether the step waits for its verification."""
        return any(item.step.index == step.index for item in self._pending)

    @property
    def expected_seconds(self) -> float:
        """How long a verification takes: as long as the last one, and at least as long as the present one until now.

        The last one may have waited for the results of the user's code; the next one finds them.
        """
        began = self._began
        running = time.monotonic() - began if began is not None else 0.0
        return max(self._last_seconds or FIRST_SECONDS, running)

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
        self.abandon()
        self.drop()
        self._tasks.put(None)

    def _work(self) -> None:
        while (task := self._tasks.get()) is not None:
            if not task.verdict.set_running_or_notify_cancel():
                continue
            self._began = began = time.monotonic()
            waited = self._waited_seconds()
            try:
                result = self._measurer.verify(task.candidate, partial(getattr, task, "is_wanted"))
            except BaseException as error:  # the search raises it again
                task.verdict.set_exception(error)
            else:
                task.verdict.set_result(result)
            if task.is_wanted:
                self._last_seconds = time.monotonic() - began - (self._waited_seconds() - waited)
            self._began = None

    def _waited_seconds(self) -> float:
        return self._measurer.waited_seconds if isinstance(self._measurer, SharedReference) else 0.0
