"""Which outcome the results of workers lead to, and what happens to a batch when one version breaks the process."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from mtmc_lsp.core.errors import FailureKind, WorkerFailed
from mtmc_lsp.core.learning.transitions import Outcome
from mtmc_lsp.core.results import Check, CheckStatus, Verdict, VerdictStatus
from mtmc_lsp.core.run import Candidate, GeneratedCode
from mtmc_lsp.explore.measuring import GpuMeasurer, _judgement
from mtmc_lsp.timing.messages import SiblingTime

RAN = (Check("values", CheckStatus.PASSED, "normal, seed 1"),)
CODE = GeneratedCode((), "", "")


def version(text: str) -> Candidate:
    return Candidate(text, None, None, text, CODE, None)


@pytest.mark.parametrize(
    ("status", "outcome"),
    [
        (VerdictStatus.CORRECT, Outcome.CORRECT),
        (VerdictStatus.CORRECT_AT_REDUCED_SIZES, Outcome.CORRECT),
        (VerdictStatus.UNCERTIFIABLE, Outcome.CORRECT),
        (VerdictStatus.INCORRECT, Outcome.WRONG),
        (VerdictStatus.RUNTIME_ERROR, Outcome.WRONG),
        (VerdictStatus.CRASHED, Outcome.WRONG),
        (VerdictStatus.COMPILE_ERROR, Outcome.COMPILE_ERROR),
        (VerdictStatus.TIMEOUT, Outcome.OUT_OF_TIME),
    ],
)
def test_a_brief_verification_leads_to_an_outcome(status: VerdictStatus, outcome: Outcome) -> None:
    assert _judgement(Verdict(status, RAN, "interpreter")).outcome is outcome


def test_what_could_not_run_or_had_no_memory_is_not_called_wrong() -> None:
    too_large = Verdict(VerdictStatus.UNCERTIFIABLE, (), "interpreter", reason="too large")
    assert _judgement(too_large).outcome is Outcome.OUT_OF_TIME
    no_memory = Verdict(VerdictStatus.RUNTIME_ERROR, RAN, "interpreter", failure=FailureKind.OUT_OF_MEMORY)
    assert _judgement(no_memory).outcome is Outcome.OUT_OF_TIME


def test_a_verification_that_the_end_cut_off_is_no_outcome() -> None:
    cut = Verdict(VerdictStatus.TIMEOUT, RAN, "interpreter", failure=FailureKind.DEADLINE)
    with pytest.raises(WorkerFailed):
        _judgement(cut)


class FakeTimer:
    """Times versions, unless one of them breaks the process."""

    def __init__(self, failure: FailureKind) -> None:
        self._failure = failure
        self.requests: list[tuple[str | None, list[list[str]]]] = []

    def siblings(self, previous: str | None, groups: Sequence[Sequence[str]]) -> list[list[SiblingTime]]:
        self.requests.append((previous, [list(group) for group in groups]))
        if any("broken" in source for group in groups for source in group):
            raise WorkerFailed("an illegal memory access", kind=self._failure)
        return [[SiblingTime("", None, 100.0, 50.0, 2.0, 0.01) for _ in group] for group in groups]


def measurer_with(failure: FailureKind) -> tuple[GpuMeasurer, FakeTimer]:
    measurer, timer = GpuMeasurer.__new__(GpuMeasurer), FakeTimer(failure)
    measurer._timer = timer  # type: ignore[assignment]
    return measurer, timer


def test_all_versions_are_timed_in_one_request() -> None:
    measurer, timer = measurer_with(FailureKind.GPU_CONTEXT_LOST)
    judged = measurer.judge(version("before"), [[version("a")], [version("b"), version("c")]])
    assert [[item.outcome for item in group] for group in judged] == [[Outcome.FASTER], [Outcome.FASTER] * 2]
    assert timer.requests == [("before", [["a"], ["b", "c"]])]
    measurer.judge(replace(version("user"), code=None), [[version("a")]])
    assert timer.requests[-1][0] is None, "the user's code has no generated code"


@pytest.mark.parametrize(
    ("failure", "outcome"),
    [
        (FailureKind.GPU_CONTEXT_LOST, Outcome.WRONG),
        (FailureKind.GPU_OUT_OF_MEMORY, Outcome.OUT_OF_TIME),
        (FailureKind.TIMEOUT, Outcome.OUT_OF_TIME),
        (FailureKind.COMPILE_ERROR, Outcome.COMPILE_ERROR),
    ],
)
def test_only_the_version_that_breaks_the_process_fails(failure: FailureKind, outcome: Outcome) -> None:
    measurer, _ = measurer_with(failure)
    groups = [[version("a")], [version("b"), version("broken"), version("c")]]
    judged = measurer.judge(version("before"), groups)
    assert [[item.outcome for item in group] for group in judged] == [
        [Outcome.FASTER],
        [Outcome.FASTER, outcome, Outcome.FASTER],
    ]


def test_the_end_of_the_time_ends_a_batch() -> None:
    measurer, timer = measurer_with(FailureKind.DEADLINE)
    with pytest.raises(WorkerFailed):
        measurer.judge(version("before"), [[version("a")], [version("broken")]])
    assert len(timer.requests) == 1
