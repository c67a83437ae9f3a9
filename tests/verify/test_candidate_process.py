"""The process of candidates: a new one for each candidate, but not one for each wait."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path

from mtmc_lsp.core.workload import Environment
from mtmc_lsp.process.messages import ReleaseRequest
from mtmc_lsp.verify.candidate_process import CandidateProcess


def test_a_process_that_was_only_started_serves_the_next_candidate(tmp_path: Path) -> None:
    process = CandidateProcess(sys.executable, str(tmp_path), Environment("3.12", "2.11", "3.6"), has_gpu=False)

    def number() -> int:
        process.start()
        assert process._worker._process is not None
        return process._worker._process.pid

    with contextlib.closing(process):
        started = number()
        process.next()
        assert number() == started
        # The next request may be of a candidate, which changes the process.
        process.call(ReleaseRequest(), 60)
        process.next()
        second = number()
        assert second != started
        process.next()
        assert number() == second


def test_a_process_that_ran_a_candidate_and_ended_is_replaced(tmp_path: Path) -> None:
    process = CandidateProcess(sys.executable, str(tmp_path), Environment("3.12", "2.11", "3.6"), has_gpu=False)
    with contextlib.closing(process):
        process.call(ReleaseRequest(), 60)
        process.kill()
        process.next()
        assert process.start()
