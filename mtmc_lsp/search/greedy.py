"""The greedy search: propose an action, try it, keep it if it is faster, and verify what is kept.

On a GPU a *trial* compiles a step, compares its results on the timed inputs and times it. A step that is fast enough becomes the
base of the next trial at once; its verification runs beside the next trials. A step is reported only after its verification. If
that fails, the search continues from the version before it.

The separation of planner and coder follows "Macro Thinking, Micro Coding" (MTMC).
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from mtmc_lsp.core.action import MacroAction, Stop
from mtmc_lsp.core.errors import FailureKind, GpuInUse, MeasurementRejected, MtmcError
from mtmc_lsp.core.profile import KernelTime
from mtmc_lsp.core.protocols import (
    BaselineTimer,
    KernelProfiler,
    LargeTensorVerifier,
    Measurer,
    Repairer,
    Sampler,
    State,
)
from mtmc_lsp.core.results import BaselineTime, CheckStatus, Speed, Timing, VerdictStatus
from mtmc_lsp.core.run import Candidate, CompilerOffer, RunResult, Step, StepStatus
from mtmc_lsp.core.workload import Capture
from mtmc_lsp.search import outcome
from mtmc_lsp.search.acceptance import Judge, clearer_timing
from mtmc_lsp.search.certification import Certification, Certified
from mtmc_lsp.search.components import Events, Limits, SearchComponents
from mtmc_lsp.search.failures import failure_reason
from mtmc_lsp.search.trial import BaseWithdrawn, Trial

MAX_FAILURES = 4
"""The run ends after this many consecutive steps that were not accepted."""
MAX_REFUSALS = 12
"""The same for steps that the built-in coder cannot write: these cost planning alone, and the planner then knows more."""
PLANNING_SHARE = 0.5
"""The fraction of a run's remaining time that planning the next step may take; the rest is for trying it."""
FINAL_SECONDS = 3.0
"""Reserved for the last timing: two seconds of samples, and loading the version in the process of the baselines."""
FAR_SECONDS = 2.0
"""Time that the verification beyond 2^31 elements needs; without it, that check is left out."""
NOTHING_TO_LOSE = 0.5
"""While no version is faster than eager, a step is tried if this share of its expected time remains.

The expected time is too long: the first trial also starts the workers, and a verification beside a trial is slower. On an H100
with four runs at a time, DenseGCNConv ended after 22 of 40 s and never tried the CUDA graph that makes it faster.
"""
BASELINE_WAIT_SECONDS = 15.0
"""The longest wait for a baseline that does not decide, after the last step."""


class GreedySearch:
    """One run for one capture."""

    judge: Judge = Judge()

    def __init__(
        self,
        capture: Capture,
        source: str,
        components: SearchComponents,
        events: Events,
    ) -> None:
        """Prepare a run.

        Args:
            capture: the target's graph and workload.
            source: the user's file without generated code.
            components: planner, coder, measurer and limits.
            events: callbacks for the progress.
        """
        self._capture = capture
        self._components = components
        self._planner = components.planner
        self._measurer = components.measurer
        self._has_gpu = components.has_gpu
        self._limits: Limits = components.limits
        self._events = events
        self._root = components.coder.start(capture, source)
        self._best = self._root
        self._steps: list[Step] = []
        self._reported = 0
        """The number of steps that were reported; the others wait for a verification."""
        self._timing: Timing | None = None
        self._complete = ""
        """The id of the version that was timed against all baselines."""
        self._times: dict[str, tuple[KernelTime, ...]] = {}
        """Kernel times of versions that were profiled, by the version's id."""
        # A model's code is verified first: it repairs its code by the reason of a failed verification.
        self._asks_model = isinstance(components.coder, (Repairer, Sampler))
        self._verifies_later = self._has_gpu and not self._asks_model
        self._certification = Certification(self._measurer)
        self._deadline = float("inf")
        self._end_reason = ""
        """Why no further step was tried."""
        self._trial_seconds = 0.0
        """How long the last trial took."""

    def run(self, run_id: str, source_hash: str, done: Sequence[Step] = ()) -> RunResult:
        """Try steps until no action is worth trying or a limit is reached.

        Args:
            run_id: the run's id in the store.
            source_hash: of the user's file.
            done: steps of an earlier run, which are taken over without measuring them again.
        """
        began = time.monotonic()
        self._deadline = began + self._limits.seconds
        for step in done:
            self._take(step)
            self._reported += 1
            self._events.on_replayed(step)
        try:
            self._explore()
            if self._has_gpu:
                self._drop_bases()
                if isinstance(self._measurer, LargeTensorVerifier):
                    self._verify_int32_offsets(self._measurer)
                # The timing against all baselines is the second one of this version, and must confirm the first.
                while self._complete_timing():
                    self._drop_bases()
            offer = self._compiler_offer()
        finally:
            self._certification.close()
        return outcome.run_result(
            self._capture,
            self._components,
            root=self._root,
            best=self._best,
            timing=self._timing,
            steps=self._steps,
            run_id=run_id,
            source_hash=source_hash,
            seconds=time.monotonic() - began,
            offer=offer,
            untimed=self._untimed_baselines(),
            end_reason=self._end_reason,
        )

    def _explore(self) -> None:
        """Try and verify steps until there is nothing left to try, or no time."""
        while True:
            self._settle(wait=False)
            action = self._next_action()
            if isinstance(action, MacroAction):
                self._try(action)
            elif self._certification.pending:
                # A failed verification makes room for other actions.
                self._settle(wait=True)
            elif not self._complete_timing():
                # With the times of all baselines, the planner may know a further action.
                self._end_reason = action.reason
                return

    def _next_action(self) -> MacroAction | Stop:
        remaining = self._deadline - time.monotonic()
        if len(self._steps) >= self._limits.steps:
            return Stop(f"the limit of {self._limits.steps} steps is reached")
        if remaining <= self._needed_seconds():
            return Stop("the rest of the budget is too short for another step")
        if self._has_failed_too_often():
            return Stop("the last steps in a row were not accepted")
        return self._planner.propose(self._state(remaining * PLANNING_SHARE))

    def _needed_seconds(self) -> float:
        """The time that one more step needs: as long as the last trial, its verification, and the last timing."""
        if not self._verifies_later:
            return 0.0
        verifications = (self._certification.pending + 1) * self._certification.expected_seconds
        is_faster = self._timing is not None and outcome.is_faster(self._timing, "eager")
        share = 1.0 if is_faster else NOTHING_TO_LOSE
        return share * (self._trial_seconds + verifications) + FINAL_SECONDS

    def _try(self, action: MacroAction) -> None:
        began = time.monotonic()
        index = len(self._steps) + 1
        action = replace(action, text=unique_title(action.text, self._steps))
        self._events.on_action(index, action)
        trial = Trial(
            *(self._capture, self._components, self._events, self.judge, self._best, self._verifies_later),
            confirm=self._confirm,
            begin_verification=self._begin_verification,
        )
        try:
            step = trial.of(index, action)
            self._confirm()
        except BaseWithdrawn:
            self._certification.abandon()
            return
        self._trial_seconds = time.monotonic() - began
        self._take(step)
        if step.status is StepStatus.ACCEPTED and step.verdict is None and step.candidate is not None:
            self._certification.add(step, step.candidate)
            if not self._measurer.verifies_beside:
                self._settle(wait=True)
        else:
            self._certification.abandon()
        self._report()

    def _begin_verification(self, candidate: Candidate) -> None:
        if self._measurer.verifies_beside:
            self._certification.begin(candidate)

    # Verified steps ----------------------------------------------------------------------------------------------

    def _confirm(self) -> None:
        """Take over the verifications that ended; a failed one makes the present trial pointless."""
        base = self._best
        self._settle(wait=False)
        if self._best is not base:
            raise BaseWithdrawn

    def _settle(self, *, wait: bool) -> None:
        """Take over the verifications that ended, and report the steps up to the next one that runs."""
        while True:
            if wait and self._certification.pending:
                self._events.on_stage("verifying")
            certified = self._certification.next(wait=wait)
            if certified is None:
                return
            self._take_verdict(certified)
            self._report()

    def _take_verdict(self, certified: Certified) -> None:
        step = certified.step
        try:
            verdict = certified.verdict.result()
            step = replace(step, verdict=verdict)
            if not verdict.is_correct:
                step = replace(step, status=StepStatus.FAILED, reason=verdict.reason, failure=verdict.failure)
        except MtmcError as error:
            step = replace(step, status=StepStatus.FAILED, reason=failure_reason(error), failure=error.kind)
        if step.failure is FailureKind.DEADLINE:
            step = replace(step, reason=f"it was not verified within the budget; {certified.step.reason}")
        if step.status is StepStatus.FAILED:
            # Later steps were tried on a version that cannot stay.
            self._certification.drop()
            self._steps = self._steps[: step.index]
        self._retake(step)

    def _report(self) -> None:
        """Report steps in their order, up to the first that waits for its verification."""
        while self._reported < len(self._steps):
            step = self._steps[self._reported]
            if step.status is StepStatus.ACCEPTED and step.verdict is None:
                return
            self._reported += 1
            self._events.on_step(step)

    # The end of a run --------------------------------------------------------------------------------------------

    def _complete_timing(self) -> bool:
        """Time the last accepted version against all baselines, if that was not done; returns whether it was timed."""
        last = self._last_accepted()
        if last is None or last.candidate is None or not isinstance(self._measurer, BaselineTimer):
            return False
        if self._complete == last.candidate.id or not self._has_gpu:
            return False
        self._complete = last.candidate.id
        wait = self._deadline - FINAL_SECONDS - time.monotonic()
        if self._components.baseline == "eager":
            wait = min(wait, BASELINE_WAIT_SECONDS)
        previous = next((s.candidate for s in reversed(self._steps) if self._is_before(s, last)), self._root)
        self._events.on_stage("timing against all baselines")
        try:
            timing = self._measurer.time_with_baselines(last.candidate, previous, max(0.0, wait))
        except GpuInUse:
            return False
        except MeasurementRejected as error:
            self._withdraw(replace(last, status=StepStatus.FAILED, reason=error.message))
            return True
        except MtmcError as error:
            # Without time or memory for all baselines, the timing of the trial stands.
            failure_reason(error)
            return False
        if timing is None:
            return False
        timing = clearer_timing(last.timing, timing)
        changed = replace(last, timing=timing)
        self._retake(changed)
        if timing.baselines != (last.timing.baselines if last.timing is not None else ()):
            self._events.on_retimed(changed)
        return True

    def _untimed_baselines(self) -> tuple[BaselineTime, ...]:
        """The baselines with the reason why they have no time; none if the run ended early and without a version."""
        if not isinstance(self._measurer, BaselineTimer):
            return ()
        ended_early = time.monotonic() < self._deadline - self._needed_seconds()
        return () if ended_early and self._last_accepted() is None else self._measurer.untimed_baselines()

    def _is_before(self, step: Step, last: Step) -> bool:
        return step.status is StepStatus.ACCEPTED and step.index < last.index and step.candidate is not None

    def _drop_bases(self) -> None:
        """Reject the last accepted steps while the target is slower than in eager mode: no later step made up for them."""
        while (last := self._last_accepted()) is not None:
            eager = last.timing.against("eager") if last.timing is not None else None
            if eager is None or eager.ratio >= 1.0:
                return
            self._withdraw(
                replace(last, status=StepStatus.REJECTED, reason=f"{last.reason}; no later step made it faster")
            )

    def _verify_int32_offsets(self, measurer: LargeTensorVerifier) -> None:
        """Verify the last accepted version beyond 2^31 elements; while it is incorrect there, its last step is withdrawn."""
        while (last := self._last_accepted()) is not None:
            if last.candidate is None or last.verdict is None or time.monotonic() >= self._deadline - FAR_SECONDS:
                return
            self._events.on_stage("verifying beyond 2^31 elements")
            try:
                check = measurer.verify_int32_offsets(last.candidate)
            except MtmcError as error:
                failure_reason(error)
                return
            verdict = replace(last.verdict, checks=(*last.verdict.checks, check))
            is_incorrect = check.status is CheckStatus.FAILED
            if is_incorrect:
                reason = f"{check.name}: {check.detail} (on {check.case})"
                verdict = replace(verdict, status=VerdictStatus.INCORRECT, reason=reason)
                last = replace(last, status=StepStatus.FAILED, reason=reason)
            last = replace(last, verdict=verdict)
            if not is_incorrect:
                self._retake(last)
                return
            self._withdraw(last)

    def _compiler_offer(self) -> CompilerOffer | None:
        """The offer to use ``torch.compile`` instead, if it is faster than the last version."""
        if self._timing is None or self._timing.speed_over("compile") is not Speed.SLOWER:
            return None
        offer = outcome.compiler_offer(self._capture, self._root.source, self._timing)
        if offer is None or not isinstance(self._measurer, BaselineTimer) or time.monotonic() >= self._deadline:
            return offer
        self._events.on_stage("counting recompilations of torch.compile")
        try:
            count, seconds = self._measurer.recompilations()
        except MtmcError as error:
            failure_reason(error)
            return offer
        return replace(offer, recompilations=count, recompile_seconds=seconds)

    def _withdraw(self, changed: Step) -> None:
        """Take an accepted step back that was reported."""
        self._retake(changed)
        self._events.on_withdrawn(changed)

    # State -------------------------------------------------------------------------------------------------------

    def _last_accepted(self) -> Step | None:
        return next((step for step in reversed(self._steps) if step.status is StepStatus.ACCEPTED), None)

    def _retake(self, changed: Step) -> None:
        """Apply all steps again with one of them changed."""
        steps = [changed if step.index == changed.index else step for step in self._steps]
        self._steps, self._best, self._timing = [], self._root, None
        for step in steps:
            self._take(step)

    def _take(self, step: Step) -> None:
        self._steps.append(step)
        if step.status is StepStatus.ACCEPTED and step.candidate is not None:
            self._best, self._timing = step.candidate, step.timing or self._timing

    def _state(self, seconds: float) -> State:
        times = partial(self._kernel_times, self._best)
        device = self._measurer.device()
        deadline = time.monotonic() + seconds
        return State(self._capture, self._best, tuple(self._steps), device, self._has_gpu, times, deadline)

    def _kernel_times(self, candidate: Candidate) -> tuple[KernelTime, ...]:
        """The kernels of a version and their times on the GPU; each version is profiled once."""
        if candidate.id not in self._times:
            self._events.on_stage("profiling the kernels")
            self._times[candidate.id] = watched(self._measurer, candidate)
        return self._times[candidate.id]

    def _has_failed_too_often(self) -> bool:
        failures = refusals = 0
        for step in reversed(self._steps):
            if step.status is StepStatus.ACCEPTED:
                break
            is_refusal = step.status is StepStatus.FAILED and step.candidate is None and not self._asks_model
            failures, refusals = failures + (not is_refusal), refusals + is_refusal
        return failures >= MAX_FAILURES or refusals >= MAX_REFUSALS


def unique_title(title: str, steps: Sequence[Step]) -> str:
    """The title, with a number if an earlier step has the same title: ``Fuse all of f, attempt 2``."""
    taken = {step.action.text for step in steps}
    numbered = (f"{title}, attempt {number}" for number in itertools.count(2))
    return title if title not in taken else next(text for text in numbered if text not in taken)


def watched(measurer: Measurer, candidate: Candidate) -> tuple[KernelTime, ...]:
    """The kernels of a version and their times on the GPU; none if they cannot be profiled, then planners use estimates."""
    if not isinstance(measurer, KernelProfiler):
        return ()
    try:
        return measurer.kernel_times(candidate)
    except MtmcError as error:
        failure_reason(error)
        return ()
