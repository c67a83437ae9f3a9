"""How long the next verification of a run is expected to take."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import pytest

from mtmc_lsp.core.results import Verdict
from mtmc_lsp.core.run import Candidate, Step, StepStatus
from mtmc_lsp.search import certification
from mtmc_lsp.search.certification import FIRST_SECONDS, Certification
from tests.search.fakes import FakeMeasurer, action

VERIFYING, WAITING = 8.0, 20.0
"""Seconds on the clock of the test: for the candidate, and for the results of the user's code."""


class Measurer(FakeMeasurer):
    """The first verification waits for the results of the user's code."""

    def __init__(self, clock: list[float]) -> None:
        super().__init__()
        self.waited_seconds = 0.0
        self.clock = clock

    def verify(self, candidate: Candidate, is_wanted: Callable[[], bool] = lambda: True) -> Verdict:
        if not self.waited_seconds:
            self.waited_seconds += WAITING
            self.clock[0] += WAITING
        self.clock[0] += VERIFYING
        return super().verify(candidate, is_wanted)


def test_the_next_verification_does_not_wait_for_the_users_code_again(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [100.0]
    monkeypatch.setattr(certification, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    queue = Certification(Measurer(clock))
    assert queue.expected_seconds == FIRST_SECONDS
    candidate = Candidate("version 1", None, None, "", None, {"us": 1.0, "outcome": "faster"})
    queue.add(Step(1, action(1, "faster"), StepStatus.ACCEPTED, "", candidate=candidate), candidate, 1)
    assert queue.next(wait=True) is not None
    # The thread ends, so that it has noted its time.
    queue.close()
    queue._thread.join()
    assert queue.expected_seconds == VERIFYING
