"""What a run keeps, what it drops, and what it says of it, over a fake planner, coder and measurer."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Sequence

import pytest
from fakes import BROKEN_TARGET, OUTCOMES, SOURCE, FakeMeasurer, FakePlanner, action, search, timing
from hypothesis import given, settings
from hypothesis import strategies as st

from mtmc_lsp.core.errors import FailureKind, TargetRaises, WorkerFailed
from mtmc_lsp.core.results import (
    BaselineTime,
    Check,
    CheckStatus,
    CompileReport,
    KernelReport,
    Ratio,
    Speed,
    Timing,
    Verdict,
    VerdictStatus,
)
from mtmc_lsp.core.run import Candidate, RunStatus, StepStatus
from mtmc_lsp.report.phrases import headline
from mtmc_lsp.search import ending
from mtmc_lsp.search.certification import FIRST_SECONDS
from mtmc_lsp.search.components import Limits
from mtmc_lsp.search.ending import FINAL_SECONDS, NOTHING_TO_LOSE
from mtmc_lsp.search.loop import MAX_FAILURES, MAX_REFUSALS

plans = st.lists(st.sampled_from(OUTCOMES), max_size=9)


@settings(max_examples=150, deadline=None)
@given(plans, st.booleans())
def test_whatever_happens_only_verified_steps_are_kept_and_the_end_is_the_last_of_them(names, has_gpu) -> None:
    result = search([action(i, name) for i, name in enumerate(names)], has_gpu=has_gpu)
    kept = [step for step in result.steps if step.status is StepStatus.ACCEPTED]
    for step in kept:
        assert step.verdict is not None
        assert step.verdict.is_correct
        assert step.report is not None
        assert step.report.ok
        assert (step.timing is not None) == has_gpu
    assert all(step.reason for step in result.steps)
    if result.status in (RunStatus.IMPROVED, RunStatus.UNMEASURED):
        assert kept
        assert result.final.source == kept[-1].candidate.source
        assert bool(result.final.diff)
    else:
        assert result.final.source == SOURCE
        assert not result.final.diff
    assert (result.final.speedup is None) or has_gpu


@settings(max_examples=100, deadline=None)
@given(plans, st.integers(0, 9), st.booleans())
def test_a_run_that_was_cut_and_goes_on_ends_as_an_uncut_one(names, cut, has_gpu) -> None:
    actions = [action(i, name) for i, name in enumerate(names)]
    whole = search(actions, has_gpu=has_gpu)
    rest = search(actions, has_gpu=has_gpu, done=whole.steps[:cut])
    assert rest.steps == whole.steps
    assert rest.final == whole.final
    assert rest.status == whole.status


def test_steps_of_an_earlier_run_are_not_measured_again() -> None:
    actions = [action(i, "better") for i in range(4)]
    whole = search(actions)
    measurer, told = FakeMeasurer(), []
    search(actions, done=whole.steps[:3], measurer=measurer, told=told)
    assert measurer.calls == {"verify": 1, "compile": 1, "time": 1, "quick": 0}
    assert told[:3] == ["replayed 1", "replayed 2", "replayed 3"]


def test_a_run_says_why_it_ended() -> None:
    better = [action(i, "better") for i in range(3)]
    assert search(better).end_reason == "no action is left"
    assert search(better, limits=Limits(steps=2)).end_reason == "the limit of 2 steps is reached"
    wrong = [action(i, "wrong") for i in range(6)]
    assert search(wrong).end_reason == "the last steps in a row were not accepted"


def test_a_workload_that_is_too_large_to_be_verified_ends_the_run_at_once() -> None:
    """Every other version would be refused for the same reason."""
    result = search([action(i, "too large") for i in range(6)], has_gpu=False)
    assert len(result.steps) == 1
    assert result.end_reason == "no version of a workload of this size can be verified without a GPU"


class FarSeeing(FakeMeasurer):
    """Says what becomes of versions beyond 2^31 elements, by the number of steps in them."""

    def __init__(self, far: dict[int, CheckStatus], *, has_gpu: bool = True) -> None:
        super().__init__(has_gpu=has_gpu)
        self.far, self.looked = far, []

    def verify_int32_offsets(self, candidate: Candidate) -> Check:
        steps = candidate.id.count("/")
        self.looked.append(steps)
        return Check("offsets beyond 2^31", self.far.get(steps, CheckStatus.PASSED), "s0=2^31", "values: all wrong")


def test_the_final_version_alone_is_tried_beyond_32_bits_once() -> None:
    measurer = FarSeeing({3: CheckStatus.SKIPPED})
    result = search(
        [action(i, name) for i, name in enumerate(("better", "same", "better", "better"))], measurer=measurer
    )
    assert measurer.looked == [3]
    assert result.status is RunStatus.IMPROVED
    assert [step.verdict.checks for step in result.steps[:3] if step.verdict is not None] == [(), ()]
    (check,) = result.steps[3].verdict.checks
    assert (check.status, check.detail) == (CheckStatus.SKIPPED, "values: all wrong")


def test_a_step_that_is_wrong_beyond_32_bits_is_withdrawn_and_the_version_before_it_stands() -> None:
    actions = [action(i, "better") for i in range(3)]
    before = search(actions[:1])
    measurer, told = FarSeeing({3: CheckStatus.FAILED, 2: CheckStatus.FAILED}), []
    result = search(actions, measurer=measurer, told=told)
    assert measurer.looked == [3, 2, 1]
    assert told[-4:] == [
        "withdrawn 3",
        "verifying beyond 2^31 elements",
        "withdrawn 2",
        "verifying beyond 2^31 elements",
    ]
    assert [step.status for step in result.steps] == [StepStatus.ACCEPTED, StepStatus.FAILED, StepStatus.FAILED]
    assert result.steps[2].reason == "offsets beyond 2^31: values: all wrong (on s0=2^31)"
    assert not result.steps[2].verdict.is_correct
    assert (result.final, result.status) == (before.final, RunStatus.IMPROVED)


def test_where_every_version_is_wrong_beyond_32_bits_the_users_own_code_stands() -> None:
    result = search([action(0, "better")], measurer=FarSeeing({1: CheckStatus.FAILED}))
    assert (result.final.source, result.final.speedup, result.status) == (SOURCE, None, RunStatus.INCORRECT)


def test_what_is_not_measured_is_not_tried_beyond_32_bits() -> None:
    measurer = FarSeeing({}, has_gpu=False)
    assert search([action(0, "better")], has_gpu=False, measurer=measurer).status is RunStatus.UNMEASURED
    assert not measurer.looked


def test_a_step_that_fails_falls_back_to_the_last_good_version_and_the_planner_is_told_why() -> None:
    planner = FakePlanner([action(0, "better"), action(1, "wrong"), action(2, "better")])
    result = search([], planner=planner)
    assert [step.status.value for step in result.steps] == ["accepted", "failed", "accepted"]
    assert "# n1" not in result.final.source
    assert planner.seen[2].candidate == result.steps[0].candidate
    assert planner.seen[2].history[-1].reason == "values: relative error 0.5"


@pytest.mark.parametrize(
    ("outcome", "reason"),
    [
        (
            "uncoded",
            "the built-in coder has no kernel for this action on line 2: there is no such thing. The run continues",
        ),
        ("uncompiled", "f_kernel does not compile for sm_90: too many registers"),
        ("wrong", "values: relative error 0.5"),
        ("crash", "the process ended with signal SIGSEGV"),
        ("hang", "timing.time took longer than 300 s"),
        ("slower", "not faster: 0.67x the speed of your code (0.66 to 0.67), 150.0 us"),
        ("no-op", "nothing changes"),
    ],
)
def test_a_step_that_is_not_kept_says_why(outcome: str, reason: str) -> None:
    step = search([action(0, outcome)]).steps[0]
    assert step.status is not StepStatus.ACCEPTED
    assert reason in step.reason


def test_a_first_kernel_as_fast_as_eager_is_a_base_to_tune_but_alone_is_no_gain() -> None:
    result = search([action(0, "same")])
    assert result.steps[0].status is StepStatus.ACCEPTED
    assert "kept as a base to tune" in result.steps[0].reason
    assert result.status is RunStatus.NO_GAIN
    assert result.final.source == SOURCE
    assert search([action(0, "same"), action(1, "better")]).status is RunStatus.IMPROVED


def test_a_kernel_of_the_whole_target_may_be_slower_still_before_it_is_tuned() -> None:
    """Of a part of the target another step may be the better base."""
    first, tuned = action(0, "nearly"), action(1, "better")
    result = search([first, tuned, action(2, "better")], operations=1)
    assert [step.status for step in result.steps] == [StepStatus.ACCEPTED] * 3
    assert result.status is RunStatus.IMPROVED
    alone = search([first], operations=1)
    assert alone.final.source == SOURCE
    assert alone.steps[0].status is StepStatus.REJECTED
    assert re.search(r"; 0\.\d\dx the speed of your code, and no later step made it faster$", alone.steps[0].reason)
    assert (alone.status, alone.final.speedup) == (RunStatus.NO_GAIN, None)
    part = search([first, tuned], operations=2)
    assert [step.status for step in part.steps] == [StepStatus.REJECTED, StepStatus.ACCEPTED]


def test_a_gain_within_the_noise_of_the_same_code_against_itself_is_not_kept() -> None:
    measurer = FakeMeasurer()
    honest = measurer.time

    def noisy(candidate, previous):
        from dataclasses import replace

        from mtmc_lsp.core.results import Ratio

        return replace(honest(candidate, previous), noise=Ratio(1.0, 0.7, 1.4))

    measurer.time = noisy  # type: ignore[method-assign]
    result = search([action(0, "better"), action(1, "better")], measurer=measurer)
    assert [step.status for step in result.steps] == [StepStatus.ACCEPTED, StepStatus.REJECTED]
    assert "kept as a base to tune" in result.steps[0].reason


def test_without_a_gpu_a_run_is_unmeasured_and_carries_no_time() -> None:
    measurer = FakeMeasurer(has_gpu=False)
    result = search([action(0, "better"), action(1, "slower")], has_gpu=False, measurer=measurer)
    assert result.status is RunStatus.UNMEASURED
    assert result.final.speedup is None
    assert result.final.roofline is None
    assert not result.baselines
    assert measurer.calls["time"] == 0
    assert all("not timed" in step.reason for step in result.steps)


@pytest.mark.parametrize(
    ("outcomes", "status"),
    [
        ([], RunStatus.NO_GAIN),
        (["uncoded", "no-op"], RunStatus.NO_GAIN),
        (["slower"], RunStatus.NO_GAIN),
        (["wrong", "uncompiled", "crash"], RunStatus.INCORRECT),
        (["uncompiled"], RunStatus.NO_GAIN),
        (["no memory"], RunStatus.NO_GAIN),
        (["no memory", "wrong"], RunStatus.INCORRECT),
        (["wrong", "slower"], RunStatus.NO_GAIN),
        (["wrong", "better"], RunStatus.IMPROVED),
    ],
)
def test_the_status_says_what_the_run_came_to(outcomes: list[str], status: RunStatus) -> None:
    assert search([action(i, name) for i, name in enumerate(outcomes)]).status is status


def test_a_run_ends_after_steps_that_come_to_nothing() -> None:
    assert len(search([action(i, "slower") for i in range(20)]).steps) == MAX_FAILURES


def test_steps_that_the_coder_refuses_leave_room_for_the_next_ones() -> None:
    refused = [action(number, "uncoded") for number in range(MAX_FAILURES + 1)]
    result = search([*refused, action(9, "better")])
    assert [step.status for step in result.steps][-1] is StepStatus.ACCEPTED
    assert result.status is RunStatus.IMPROVED
    assert len(search([action(number, "uncoded") for number in range(30)]).steps) == MAX_REFUSALS


def test_a_run_keeps_to_its_limits() -> None:
    actions = [action(i, "better") for i in range(20)]
    assert len(search(actions, limits=Limits(seconds=60.0, steps=3)).steps) == 3
    assert not search(actions, limits=Limits(seconds=0.0, steps=3)).steps


def test_a_first_step_is_tried_in_half_of_the_expected_time() -> None:
    """The run has nothing to lose while nothing is faster."""
    seconds = NOTHING_TO_LOSE * FIRST_SECONDS + FINAL_SECONDS + 1.0
    assert seconds < FIRST_SECONDS + FINAL_SECONDS
    assert search([action(0, "better")], limits=Limits(seconds=seconds, steps=50)).steps


def test_a_kernel_that_needs_too_much_shared_memory_is_tried_with_fewer_stages() -> None:
    class SmallMemory(FakeMeasurer):
        most = 2

        def compile(self, candidate: Candidate) -> CompileReport:
            assert candidate.action is not None
            stages = candidate.action.params["config"]["stages"]  # type: ignore[index]
            is_large = stages > self.most
            return CompileReport((KernelReport("k", "sm_90", error="too large" * is_large, exceeds_shared=is_large),))

    wanted = action(0, "better", config={"stages": 4})
    (step,) = search([wanted], measurer=SmallMemory()).steps
    assert step.status is StepStatus.ACCEPTED and step.candidate is not None and step.candidate.action is not None
    assert step.candidate.action.params["config"] == {"stages": 2}
    SmallMemory.most = 0
    (step,) = search([wanted], measurer=SmallMemory()).steps
    assert step.status is StepStatus.FAILED and step.reason.endswith("too large")


def test_a_planner_is_given_a_part_of_the_time_that_is_left() -> None:
    """A step that it finds is also to be written, verified and timed."""
    planner, before = FakePlanner([]), time.monotonic()
    search([], planner=planner, limits=Limits(seconds=60.0, steps=3))
    (state,) = planner.seen
    assert state.deadline is not None and before < state.deadline < before + 50.0


def test_tuning_measures_every_variant_at_once_and_goes_on_with_the_best() -> None:
    variants = [{"outcome": "slower"}, {"outcome": "better"}, {"outcome": "crash"}, {"outcome": "uncoded"}]
    measurer = FakeMeasurer()
    tuning = action(1, "tune", variants=variants)
    result = search([action(0, "better"), tuning], measurer=measurer)
    assert measurer.calls["quick"] == 1
    assert result.steps[1].status is StepStatus.ACCEPTED
    assert result.steps[1].candidate.source.endswith("# n1 better\n")
    assert result.steps[1].action == tuning, "the step carries what was proposed, so it is not proposed again"


def test_tuning_that_finds_nothing_better_keeps_the_present_version() -> None:
    tuning = action(1, "tune", variants=[{"outcome": "slower"}, {"outcome": "crash"}])
    result = search([action(0, "better"), tuning])
    assert result.steps[1].status is StepStatus.REJECTED
    assert result.final.source == result.steps[0].candidate.source


def test_an_error_of_the_users_own_code_ends_the_run_with_its_message() -> None:
    with pytest.raises(TargetRaises):
        search([action(0, "better")], measurer=FakeMeasurer(broken=BROKEN_TARGET))


def test_a_cancelled_worker_ends_the_run() -> None:
    with pytest.raises(WorkerFailed):
        search(
            [action(0, "better")], measurer=FakeMeasurer(broken=WorkerFailed("cancelled", kind=FailureKind.CANCELLED))
        )


def test_a_step_is_told_only_after_all_its_stages() -> None:
    told: list[str] = []
    search([action(0, "better")], told=told)
    stages = ["action 1", "writing the code", "compiling", "timing", "verifying", "step 1"]
    assert [text for text in told if text in stages][-1] == "step 1"
    assert told[:4] == stages[:4]


class SlowVerifier(FakeMeasurer):
    """A verification lasts until the next version is timed."""

    def __init__(self, steps: int) -> None:
        super().__init__()
        self._timed, self._left = threading.Semaphore(0), steps - 1

    def time(self, candidate: Candidate, previous: Candidate | None) -> Timing | None:
        self._timed.release()
        return super().time(candidate, previous)

    def verify(self, candidate: Candidate, is_wanted: Callable[[], bool] = lambda: True) -> Verdict:
        self._left -= 1
        for _ in range(2 if self._left >= 0 else 0):
            assert self._timed.acquire(timeout=60)
        return super().verify(candidate)


def test_the_next_step_is_tried_while_a_step_is_verified() -> None:
    told: list[str] = []
    result = search([action(i, "better") for i in range(2)], measurer=SlowVerifier(2), told=told)
    assert [step.status for step in result.steps] == [StepStatus.ACCEPTED] * 2
    order = ["action 1", "action 2", "step 1", "step 2"]
    assert [text for text in told if text.startswith(("action", "step"))] == order


class TuningBeside(FakeMeasurer):
    """The first verification lasts until configurations are compiled, and longer if they are not measured after that."""

    def __init__(self) -> None:
        super().__init__()
        self.order: list[str] = []
        self._compiled, self._measured = threading.Event(), threading.Event()

    def verify(self, candidate: Candidate, is_wanted: Callable[[], bool] = lambda: True) -> Verdict:
        if not self.order:
            assert self._compiled.wait(60)
            self._measured.wait(0.2)
        self.order.append("verified")
        return super().verify(candidate)

    def compile_variants(self, candidates: Sequence[Candidate]) -> list[CompileReport]:
        self._compiled.set()
        return super().compile_variants(candidates)

    def quick(self, candidates: Sequence[Candidate]) -> list[float | None]:
        self.order.append("measured")
        self._measured.set()
        return super().quick(candidates)


def test_a_run_measures_configurations_only_after_its_first_verdict() -> None:
    """They need the GPU, and the first verified step must not be late because of them."""
    measurer = TuningBeside()
    tuning = action(1, "tune", variants=[{"outcome": "better"}])
    result = search([action(0, "better"), tuning], measurer=measurer)
    assert measurer.order == ["verified", "measured", "verified"]
    assert [step.status.value for step in result.steps] == ["accepted", "accepted"]


def test_configurations_of_a_version_that_turns_out_wrong_are_not_measured() -> None:
    measurer = TuningBeside()
    tuning = action(1, "tune", variants=[{"outcome": "better"}])
    result = search([action(0, "wrong elsewhere"), tuning], measurer=measurer)
    assert measurer.order[0] == "verified"
    assert [step.status.value for step in result.steps] == ["failed", "accepted"]
    assert "# n0" not in result.final.source


class TimedAfterVerification(FakeMeasurer):
    """A timing lasts until the verification of the version ended."""

    def __init__(self) -> None:
        super().__init__()
        self._verified = threading.Semaphore(0)

    def time(self, candidate: Candidate, previous: Candidate | None) -> Timing | None:
        assert self._verified.acquire(timeout=60)
        return super().time(candidate, previous)

    def verify(self, candidate: Candidate, is_wanted: Callable[[], bool] = lambda: True) -> Verdict:
        try:
            return super().verify(candidate)
        finally:
            self._verified.release()


def test_a_step_is_verified_while_it_is_timed() -> None:
    measurer = TimedAfterVerification()
    result = search([action(0, "better")], measurer=measurer)
    assert [step.status.value for step in result.steps] == ["accepted"]
    # The verification that began early counts.
    assert measurer.calls["verify"] == 1


class AbandonedVerification(FakeMeasurer):
    """The verification of a version that is not faster lasts until it is no longer wanted."""

    def __init__(self) -> None:
        super().__init__()
        self.abandoned: list[str] = []

    def verify(self, candidate: Candidate, is_wanted: Callable[[], bool] = lambda: True) -> Verdict:
        for _ in range(1000 if candidate.schedule["outcome"] == "slower" else 0):
            if not is_wanted():
                self.abandoned.append(candidate.id)
                raise WorkerFailed("it was abandoned", kind=FailureKind.CANCELLED)
            time.sleep(0.01)
        return super().verify(candidate)


def test_the_verification_of_a_version_that_is_not_faster_ends() -> None:
    measurer = AbandonedVerification()
    result = search([action(0, "slower"), action(1, "better")], measurer=measurer)
    assert [step.status.value for step in result.steps] == ["rejected", "accepted"]
    assert measurer.abandoned == ["root/slower"]


def test_a_step_prepared_on_a_version_that_fails_its_verification_is_tried_again() -> None:
    """On the version before it."""
    actions = [action(0, "better"), action(1, "wrong elsewhere"), action(2, "better"), action(3, "better")]
    told: list[str] = []
    result = search(actions, told=told)
    assert [step.status.value for step in result.steps] == ["accepted", "failed", "accepted", "accepted"]
    assert [step.action for step in result.steps] == actions
    assert result.steps[1].reason == "values: relative error 0.5"
    assert "# n1" not in result.final.source
    assert result.final.source == result.steps[3].candidate.source
    assert [text for text in told if text.startswith("step")] == ["step 1", "step 2", "step 3", "step 4"]


def test_without_memory_for_two_processes_a_step_is_verified_before_the_next_is_tried() -> None:
    told: list[str] = []
    search([action(0, "better"), action(1, "better")], measurer=FakeMeasurer(verifies_beside=False), told=told)
    assert [text for text in told if text.startswith(("action", "step"))] == [
        "action 1",
        "step 1",
        "action 2",
        "step 2",
    ]


class NeverVerifies(FakeMeasurer):
    """Its verification is cut by the end of the budget."""

    def verify(self, candidate: Candidate, is_wanted: Callable[[], bool] = lambda: True) -> Verdict:
        raise WorkerFailed("the time limit of the whole run was reached", kind=FailureKind.DEADLINE)


def test_a_step_that_was_not_verified_within_the_budget_is_not_delivered() -> None:
    result = search([action(0, "better")], measurer=NeverVerifies())
    assert result.steps[0].status is StepStatus.FAILED
    assert result.steps[0].reason.startswith("it was not verified within the budget; 1.25x the speed of your code")
    assert (result.final.source, result.status) == (SOURCE, RunStatus.NO_GAIN)


class CutByTheBudget(FakeMeasurer):
    """Its verification ends with a verdict on what was reached."""

    def verify(self, candidate: Candidate, is_wanted: Callable[[], bool] = lambda: True) -> Verdict:
        reason = "the time limit of the whole run was reached during verify.candidate"
        return Verdict(VerdictStatus.TIMEOUT, (), "gpu", reason=reason, failure=FailureKind.DEADLINE)


def test_a_verification_that_the_budget_cuts_says_nothing_about_the_version() -> None:
    result = search([action(0, "better")], measurer=CutByTheBudget())
    assert result.steps[0].reason.startswith("it was not verified within the budget")
    assert result.status is RunStatus.NO_GAIN


# The baseline that decides ------------------------------------------------------------------------------------------


class WithCompiler(FakeMeasurer):
    """Knows the time of ``torch.compile`` only in the timing against all baselines."""

    def __init__(self, compile_us: float, *, again: float = 1.0) -> None:
        super().__init__()
        self._compile_us, self._again = compile_us, again

    def time_with_baselines(self, candidate: Candidate, previous: Candidate | None, wait: float) -> Timing | None:
        us = candidate.schedule["us"] * self._again
        return timing(us, eager=100.0, compile=self._compile_us)

    def untimed_baselines(self) -> tuple[BaselineTime, ...]:
        return (BaselineTime("compile", 0.0, None, note="torch.compile was still compiling after 9 s"),)

    def recompilations(self) -> tuple[int, float]:
        return 2, 1.5


@pytest.mark.parametrize(
    ("baseline", "status"),
    [
        ("eager", RunStatus.IMPROVED),
        ("compile", RunStatus.NO_GAIN),
        ("best", RunStatus.NO_GAIN),
    ],
)
def test_a_version_is_delivered_if_it_beats_the_baseline_that_decides(baseline: str, status: RunStatus) -> None:
    """It takes 80 us; the user's code takes 100 us, and 60 us under ``torch.compile``."""
    result = search([action(0, "better")], measurer=WithCompiler(60.0), baseline=baseline)
    assert result.status is status
    assert (result.final.source == SOURCE) is (status is RunStatus.NO_GAIN)
    assert result.baseline == baseline
    assert result.final.speedup.vs_compile.ratio == pytest.approx(0.75)


def test_a_version_that_is_slower_in_the_last_timing_is_withdrawn() -> None:
    told: list[str] = []
    result = search([action(0, "better")], measurer=WithCompiler(60.0, again=1.5), told=told)
    assert (result.status, result.final.source) == (RunStatus.NO_GAIN, SOURCE)
    assert told[-1] == "withdrawn 1"


class Noisy(WithCompiler):
    """Its last timing, on a busy host, cannot compare the version with eager mode; that of the trial could."""

    def __init__(self, eager_ratio: float, speed: Speed) -> None:
        super().__init__(60.0)
        self._eager_ratio, self._speed = eager_ratio, speed

    def time_with_baselines(self, candidate: Candidate, previous: Candidate | None, wait: float) -> Timing | None:
        eager = BaselineTime("eager", 150.0 * self._eager_ratio, Ratio(self._eager_ratio, 0.9, 1.4), self._speed)
        compiled = BaselineTime("compile", 105.0, Ratio(0.7, 0.65, 0.75), Speed.SLOWER)
        return Timing(150.0, (eager, compiled), "compile", Ratio(1.0, 0.85, 1.2), 50, "a fake", 0.1)


@pytest.mark.parametrize("ratio", [0.95, 1.19])
def test_a_last_timing_that_is_too_noisy_leaves_the_verdict_to_the_trial(ratio: float) -> None:
    result = search([action(0, "better")], measurer=Noisy(ratio, Speed.AMBIGUOUS))
    assert result.status is RunStatus.IMPROVED
    assert result.final.speedup.vs_eager.ratio == pytest.approx(1.25)
    assert headline(result).startswith("torch.compile alone is 1.43x as fast as this version")
    timing = result.steps[0].timing
    assert (timing.median_us, timing.best) == (80.0, "compile")
    assert timing.baseline("compile").median_us == pytest.approx(56.0), "0.7 of the time of this version in its trial"


@pytest.mark.parametrize("speed", [Speed.SLOWER, Speed.SAME])
def test_a_last_timing_that_is_clear_decides_however_noisy_it_is(speed: Speed) -> None:
    result = search([action(0, "better")], measurer=Noisy(0.95, speed))
    assert (result.status, result.final.source) == (RunStatus.NO_GAIN, SOURCE)


class Waiting(WithCompiler):
    """Notes how long it may wait for the baselines."""

    def __init__(self) -> None:
        super().__init__(90.0)
        self.waits: list[float] = []

    def time_with_baselines(self, candidate: Candidate, previous: Candidate | None, wait: float) -> Timing | None:
        self.waits.append(wait)
        return super().time_with_baselines(candidate, previous, wait)


@pytest.mark.parametrize(
    ("baseline", "is_long", "least", "most"), [("eager", False, 1, 15), ("eager", True, 0, 0), ("best", True, 20, 100)]
)
def test_no_run_waits_for_a_compiler_that_unrolls_a_long_loop_unless_it_decides(
    baseline: str, is_long: bool, least: float, most: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ending, "has_long_loop", lambda graph: is_long)
    measurer = Waiting()
    search([action(0, "better")], measurer=measurer, limits=Limits(seconds=100.0, steps=50), baseline=baseline)
    assert measurer.waits and all(least <= wait <= most for wait in measurer.waits)


class CutBeforeTheLastTiming(WithCompiler):
    """The budget ends before the version is timed against all baselines."""

    def time_with_baselines(self, candidate: Candidate, previous: Candidate | None, wait: float) -> Timing | None:
        raise WorkerFailed("the time limit of the whole run was reached", kind=FailureKind.DEADLINE)


def test_a_run_that_the_budget_cuts_before_the_last_timing_delivers_by_the_trial() -> None:
    result = search([action(0, "better")], measurer=CutBeforeTheLastTiming(60.0))
    assert result.status is RunStatus.IMPROVED
    assert headline(result).startswith("improved: 1.25x (1.24 to 1.26) over your code in eager mode")
    assert headline(result).endswith("; torch.compile was still compiling after 9 s")


def test_where_the_compiler_decides_and_was_not_timed_the_gain_is_named_over_eager_mode() -> None:
    result = search([action(0, "better")], measurer=CutBeforeTheLastTiming(60.0), baseline="compile")
    assert headline(result).startswith("improved: 1.25x (1.24 to 1.26) over your code in eager mode")
    assert headline(result).endswith("; torch.compile was still compiling after 9 s")


def test_a_run_without_a_version_says_that_the_compiler_was_not_timed_if_the_budget_ended_it() -> None:
    ended = search([action(0, "better")], measurer=WithCompiler(60.0), limits=Limits(seconds=0.0, steps=50))
    assert headline(ended).endswith("the file is unchanged; torch.compile was still compiling after 9 s")
    early = search([action(0, "wrong")], measurer=WithCompiler(60.0))
    assert headline(early).endswith("the file is unchanged")


def test_the_planner_is_asked_again_when_the_baselines_are_known() -> None:
    planner = FakePlanner([action(0, "better")])
    search([], planner=planner, measurer=WithCompiler(60.0))
    assert planner.seen[-1].history[-1].timing.against("compile") is not None


def test_where_the_compiler_is_faster_it_is_offered_with_its_recompilations() -> None:
    result = search([action(0, "better")], measurer=WithCompiler(60.0))
    assert result.status is RunStatus.IMPROVED
    assert result.offer is not None
    assert (result.offer.recompilations, result.offer.recompile_seconds) == (2, 1.5)
    assert result.offer.source == f"import torch\n@torch.compile\n{SOURCE}"
    assert headline(result).startswith("torch.compile alone is 1.33x as fast as this version")
    assert "improved: 1.25x" in headline(result)


def test_where_the_kernels_are_faster_nothing_is_offered() -> None:
    result = search([action(0, "better")], measurer=WithCompiler(90.0))
    assert result.offer is None
    assert headline(result).startswith("improved: 1.25x")
    assert headline(result).endswith("1.12x (1.12 to 1.13) over torch.compile")
