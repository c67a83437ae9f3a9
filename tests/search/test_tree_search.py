"""Beam search and Monte Carlo tree search over landscapes of versions."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from fakes import SOURCE, FakeMeasurer, timing
from hypothesis import given, settings
from hypothesis import strategies as st
from landscapes import Landscape, LandscapePlanner, Recorder, explore, random_landscape

from mtmc_lsp.core.errors import FailureKind, WorkerFailed
from mtmc_lsp.core.learning.policy import Choice
from mtmc_lsp.core.protocols import State
from mtmc_lsp.core.results import Check, CheckStatus, CompileReport, Timing, Verdict
from mtmc_lsp.core.run import Candidate, RunResult, RunStatus, Step, StepStatus, parents
from mtmc_lsp.core.settings import SEARCHES as NAMES
from mtmc_lsp.search.kinds import SEARCHES
from mtmc_lsp.search.loop import MAX_FAILURES
from mtmc_lsp.search.tree.search import PATIENCE

TREES = ("beam", "mcts")
TRAP = Landscape(
    # The planner prefers 0, which is faster at first; but only 1 leads on.
    {"0": 80.0, "1": 90.0, "0+1": 95.0, "1+2": 60.0, "1+2+3": 40.0},
    savings={0: 20.0, 1: 10.0, 2: 10.0, 3: 5.0},
)


def test_each_search_of_the_settings_exists() -> None:
    assert tuple(SEARCHES) == NAMES
    package = json.loads((Path(__file__).parents[2] / "vscode-extension" / "package.json").read_text())
    assert package["contributes"]["configuration"]["properties"]["mtmc.search"]["enum"] == ["", *NAMES]


def path_of(result: RunResult) -> list[Step]:
    return [step for step in result.steps if step.status is StepStatus.ACCEPTED]


def names(result: RunResult) -> list[str]:
    return [step.action.region[0] for step in path_of(result)]


@pytest.mark.parametrize("kind", TREES)
def test_a_tree_finds_the_path_behind_a_slower_first_step_with_no_more_trials(kind: str) -> None:
    steps = 6
    greedy, tree = (explore(name, TRAP, steps=steps) for name in ("greedy", kind))
    assert names(greedy) == ["n0"]
    assert names(tree) == ["n1", "n2", "n3"]
    assert len(tree.steps) <= steps
    assert greedy.final.speedup is not None and tree.final.speedup is not None
    assert greedy.final.speedup.vs_eager.ratio == pytest.approx(1.25)
    assert tree.final.speedup.vs_eager.ratio == pytest.approx(2.5)


@pytest.mark.parametrize("kind", TREES)
def test_steps_of_other_branches_are_rejected_and_say_why(kind: str) -> None:
    result = explore(kind, TRAP)
    first = next(step for step in result.steps if step.action.region == ("n0",))
    assert (first.status, first.is_alternative) == (StepStatus.REJECTED, True)
    assert first.reason.startswith("another branch is faster: 1.25x the speed of your code")
    assert all(step.prior is not None and 0.0 <= step.prior <= 1.0 for step in result.steps)


@pytest.mark.parametrize("kind", TREES)
def test_a_step_changes_the_version_of_its_parent(kind: str) -> None:
    result = explore(kind, TRAP)
    known = parents(result.steps)
    path = path_of(result)
    assert [known[step.index] for step in path] == [0, *(step.index for step in path[:-1])]


def check_delivery(result: RunResult) -> None:
    """Accepted steps are verified, follow each other, and the last one is delivered."""
    path, base = path_of(result), "root"
    for step in path:
        assert step.verdict is not None and step.verdict.is_correct
        assert step.base == base and step.candidate is not None and not step.is_alternative
        base = step.candidate.id
    assert all(step.reason for step in result.steps)
    assert [step.index for step in result.steps] == list(range(1, len(result.steps) + 1))
    if result.status in (RunStatus.IMPROVED, RunStatus.UNMEASURED):
        assert path[-1].candidate is not None
        assert result.final.source == path[-1].candidate.source
    else:
        assert result.final.source == SOURCE
    assert result.end_reason


landscapes = st.builds(random_landscape, st.integers(0, 10**6), st.integers(1, 5))


@settings(max_examples=120, deadline=None)
@given(landscapes, st.sampled_from(TREES), st.booleans(), st.integers(1, 24))
def test_the_delivered_version_is_verified_and_made_of_the_accepted_steps(landscape, kind, has_gpu, steps) -> None:
    recorder = Recorder()
    result = explore(kind, landscape, has_gpu=has_gpu, steps=steps, recorder=recorder)
    check_delivery(result)
    assert len(result.steps) <= steps
    # No version is measured twice, and what was stored is the result.
    versions = [step.candidate.id for step in result.steps if step.candidate is not None]
    assert len(versions) == len(set(versions))
    assert [(s.status, s.reason) for s in recorder.steps] == [(s.status, s.reason) for s in result.steps]


@settings(max_examples=60, deadline=None)
@given(landscapes, st.sampled_from(TREES), st.booleans())
def test_the_same_landscape_gives_the_same_run(landscape, kind, beside) -> None:
    """However long a verification takes."""
    first = explore(kind, landscape, measurer=FakeMeasurer(verifies_beside=beside))
    again = explore(kind, landscape, measurer=SlowVerifier())
    assert replace(again, seconds=0.0) == replace(first, seconds=0.0)


@settings(max_examples=60, deadline=None)
@given(landscapes, st.sampled_from(TREES), st.booleans())
def test_a_run_that_was_killed_at_any_time_ends_as_an_uncut_one(landscape, kind, has_gpu) -> None:
    cuts: list[list[Step]] = []
    recorder = Recorder(lambda: cuts.append(recorder.steps))
    whole = explore(kind, landscape, has_gpu=has_gpu, recorder=recorder)
    for cut, told in zip(cuts, recorder.told, strict=True):
        if told.startswith("withdrawn"):
            # The trials are over, and the last versions are taken back.
            break
        measurer = Counting(has_gpu=has_gpu)
        rest = explore(kind, landscape, has_gpu=has_gpu, done=cut, measurer=measurer)
        assert replace(rest, seconds=0.0) == replace(whole, seconds=0.0)
        assert measurer.compiled.isdisjoint(step.candidate.id for step in cut if step.candidate is not None)


class Counting(FakeMeasurer):
    """Remembers the versions that it compiled."""

    def __init__(self, *, has_gpu: bool) -> None:
        super().__init__(has_gpu=has_gpu)
        self.compiled: set[str] = set()

    def compile(self, candidate: Candidate) -> CompileReport:
        self.compiled.add(candidate.id)
        return super().compile(candidate)


class SlowVerifier(FakeMeasurer):
    """A verification takes a few milliseconds, so several trials are made meanwhile."""

    def verify(self, candidate: Candidate, is_wanted: Callable[[], bool] = lambda: True) -> Verdict:
        time.sleep(0.003)
        return super().verify(candidate)


@pytest.mark.parametrize("kind", TREES)
def test_a_failed_verification_deep_in_the_tree_removes_what_was_built_on_it(kind: str) -> None:
    times = {"0": 90.0, "0+1": 80.0, "0+1+2": 60.0, "0+1+2+3": 40.0, "0+1+4": 70.0}
    landscape = Landscape(times, {"0+1+2": "wrong elsewhere"}, {0: 20.0, 1: 18.0, 2: 16.0, 3: 14.0, 4: 10.0})
    result = explore(kind, landscape, measurer=SlowVerifier())
    assert names(result) == ["n0", "n1", "n4"]
    wrong = next(step for step in result.steps if step.candidate is not None and step.candidate.id == "v0+1+2")
    assert (wrong.status, wrong.reason) == (StepStatus.FAILED, "values: relative error 0.5")
    assert not any(step.base == "v0+1+2" for step in result.steps)


def test_trials_on_other_branches_are_not_made_again_after_a_failed_verification() -> None:
    class Held(FakeMeasurer):
        """The verification of version 0 fails after a trial on version 1 began."""

        def __init__(self) -> None:
            super().__init__()
            self.went_on = threading.Event()
            self.timed: list[str] = []

        def time(self, candidate: Candidate, previous: Candidate | None) -> Timing | None:
            self.timed.append(candidate.id)
            if candidate.id == "v1":
                self.went_on.set()
                time.sleep(0.05)
            return super().time(candidate, previous)

        def verify(self, candidate: Candidate, is_wanted: Callable[[], bool] = lambda: True) -> Verdict:
            if candidate.id == "v0":
                assert self.went_on.wait(60)
            return super().verify(candidate)

    landscape = Landscape({"0": 80.0, "1": 90.0, "1+2": 60.0}, {"0": "wrong elsewhere"}, {0: 20.0})
    measurer = Held()
    result = explore("beam", landscape, measurer=measurer)
    assert names(result) == ["n1", "n2"]
    assert [step.status.value for step in result.steps] == ["failed", "accepted", "accepted"]


def test_a_version_that_no_trial_relies_on_is_not_verified() -> None:
    """A verification takes longer than a trial."""
    landscape = Landscape({"0": 50.0, "1": 90.0, "0+2": 40.0}, savings={0: 20.0})
    measurer = FakeMeasurer()
    result = explore("beam", landscape, steps=3, measurer=measurer)
    slow = next(step for step in result.steps if step.action.region == ("n1",))
    assert slow.is_alternative and slow.verdict is None
    assert names(result) == ["n0", "n2"]


@pytest.mark.parametrize("kind", TREES)
def test_a_branch_ends_after_steps_that_come_to_nothing(kind: str) -> None:
    slower = Landscape({str(number): 150.0 for number in range(12)})
    result = explore(kind, slower)
    assert len(result.steps) == MAX_FAILURES
    assert result.end_reason == "the last steps in a row were not accepted"
    assert result.status is RunStatus.NO_GAIN


@pytest.mark.parametrize("kind", TREES)
def test_a_search_ends_if_no_faster_version_appears(kind: str) -> None:
    first = {"0": 50.0} | {str(number): 90.0 - number for number in range(1, 20)}
    result = explore(kind, Landscape(first, savings={0: 20.0}))
    assert names(result) == ["n0"]
    assert len(result.steps) == 1 + PATIENCE
    assert result.end_reason == f"the last {PATIENCE} steps led to no faster version"


class Stopping(LandscapePlanner):
    """A policy that prefers STOP to every action other than 0."""

    def choices(self, state: State) -> list[Choice]:
        actions = self.ranked(state)
        first = [Choice(a, 0.6, "it pays") for a in actions if a.region == ("n0",)]
        rest = [Choice(a, 0.1, "it may pay") for a in actions if a.region != ("n0",)]
        return [*first, Choice(None, 0.3, "two kernels are near the roofline"), *rest]


@pytest.mark.parametrize("kind", TREES)
def test_stop_ends_the_branches_and_the_run_gives_the_reason(kind: str) -> None:
    result = explore(kind, TRAP, planner=Stopping(TRAP))
    assert names(result) == ["n0"]
    assert len(result.steps) == 1
    assert result.end_reason == "every branch ended; on the fastest version, two kernels are near the roofline"
    nothing = explore(kind, Landscape({"1": 50.0}), planner=Stopping(Landscape({"1": 50.0})))
    assert (nothing.end_reason, nothing.steps) == ("two kernels are near the roofline", ())


@pytest.mark.parametrize("kind", TREES)
def test_without_a_gpu_versions_are_ranked_by_predicted_time(kind: str) -> None:
    measurer = FakeMeasurer(has_gpu=False)
    times = {name: us for name, us in TRAP.times.items() if name != "0+1"}
    result = explore(kind, replace(TRAP, times=times), has_gpu=False, measurer=measurer)
    check_delivery(result)
    assert result.status is RunStatus.UNMEASURED
    assert measurer.calls["time"] == 0
    # 1, 2 and 3 together are predicted to save 25 us, 0 alone 20 us.
    assert names(result) == ["n1", "n2", "n3"]
    assert result.end_reason.endswith("ranked by predicted time, since nothing is timed without a GPU")


class WithBaselines(FakeMeasurer):
    """The timing against all baselines finds version 0 slower than its trial did."""

    def __init__(self) -> None:
        super().__init__()
        self.complete: list[str] = []

    def time_with_baselines(self, candidate: Candidate, previous: Candidate | None, wait: float) -> Timing | None:
        self.complete.append(candidate.id)
        us = candidate.schedule["us"] * (1.5 if candidate.id == "v0" else 1.0)  # type: ignore[index]
        return timing(us, eager=100.0, compile=95.0)

    def untimed_baselines(self) -> tuple[()]:
        return ()

    def recompilations(self) -> tuple[int, float]:
        return 0, 0.0


@pytest.mark.parametrize("kind", TREES)
def test_another_branch_is_delivered_if_the_last_timing_does_not_confirm_the_first(kind: str) -> None:
    landscape = Landscape({"0": 70.0, "1": 80.0}, savings={0: 20.0})
    measurer, recorder = WithBaselines(), Recorder()
    result = explore(kind, landscape, measurer=measurer, recorder=recorder)
    assert names(result) == ["n1"]
    assert measurer.complete == ["v0", "v1"]
    assert result.final.speedup is not None and result.final.speedup.vs_compile is not None
    check_delivery(result)
    assert "switched 2 accepted" in recorder.told


class FarSeeing(FakeMeasurer):
    """Version 0 is wrong beyond 2^31 elements."""

    def verify_int32_offsets(self, candidate: Candidate) -> Check:
        status = CheckStatus.FAILED if candidate.id == "v0" else CheckStatus.PASSED
        return Check("offsets beyond 2^31", status, "s0=2^31", "values: all wrong")


@pytest.mark.parametrize("kind", TREES)
def test_another_branch_is_delivered_if_the_fastest_is_wrong_on_large_tensors(kind: str) -> None:
    recorder = Recorder()
    result = explore(kind, Landscape({"0": 70.0, "1": 80.0}), measurer=FarSeeing(), recorder=recorder)
    assert names(result) == ["n1"]
    check_delivery(result)
    assert result.steps[0].status is StepStatus.FAILED
    assert recorder.told[-2:] == ["withdrawn 1 failed", "switched 2 accepted"]


class NeverVerifies(FakeMeasurer):
    def verify(self, candidate: Candidate, is_wanted: Callable[[], bool] = lambda: True) -> Verdict:
        raise WorkerFailed("the time limit of the whole run was reached", kind=FailureKind.DEADLINE)


@pytest.mark.parametrize("kind", TREES)
def test_versions_that_were_not_verified_within_the_budget_are_not_delivered(kind: str) -> None:
    result = explore(kind, TRAP, measurer=NeverVerifies())
    assert (result.final.source, result.status) == (SOURCE, RunStatus.NO_GAIN)
    assert not path_of(result)


@pytest.mark.parametrize("kind", TREES)
def test_a_greedy_run_that_was_killed_may_go_on_as_a_tree(kind: str) -> None:
    greedy = explore("greedy", TRAP, steps=1)
    result = explore(kind, TRAP, done=greedy.steps)
    assert names(result) == ["n1", "n2", "n3"]
    check_delivery(result)


def test_a_planner_sees_the_path_and_what_was_tried_on_it_and_no_other_branch() -> None:
    planner = LandscapePlanner(TRAP)
    explore("beam", TRAP, planner=planner)
    seen = next(state for state in planner.seen if state.candidate.id == "v1+2")
    assert [(step.action.region[0], step.status.value) for step in seen.history] == [
        ("n1", "accepted"),
        ("n2", "accepted"),
    ]
