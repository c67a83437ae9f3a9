"""The end of a run: the last version is timed against all baselines, and verified on very large tensors."""

from __future__ import annotations

import time
from dataclasses import replace

from mtmc_lsp.core.errors import GpuInUse, MeasurementRejected, MtmcError
from mtmc_lsp.core.protocols import BaselineTimer, LargeTensorVerifier
from mtmc_lsp.core.results import BaselineTime, CheckStatus, Speed, VerdictStatus
from mtmc_lsp.core.run import CompilerOffer, Step, StepStatus
from mtmc_lsp.core.workload import Capture
from mtmc_lsp.search import outcome
from mtmc_lsp.search.acceptance import clearer_timing
from mtmc_lsp.search.components import Events, SearchComponents
from mtmc_lsp.search.failures import failure_reason
from mtmc_lsp.search.verified_steps import VerifiedSteps
from mtmc_lsp.verify.sizes.case_sizes import has_long_loop

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


class Ending(VerifiedSteps):
    """The steps of a run, and what is done with the last version of them."""

    def __init__(self, capture: Capture, source: str, components: SearchComponents, events: Events) -> None:
        super().__init__(capture, source, components, events)
        self._deadline = float("inf")
        self._trial_seconds = 0.0
        """How long the last trial took."""
        self._complete: set[str] = set()
        """The ids of the versions that were timed against all baselines."""
        self._far_verified: set[str] = set()
        """The ids of the versions that were verified beyond 2^31 elements."""

    def _finish(self) -> None:
        """Take back versions that turn out to be slow or wrong, until the last one stands."""
        while True:
            self._drop_bases()
            if isinstance(self._measurer, LargeTensorVerifier):
                self._verify_int32_offsets(self._measurer)
            # The timing against all baselines is the second one of this version, and must confirm the first.
            if not self._complete_timing():
                return

    def _needed_seconds(self) -> float:
        """The time that one more step needs: as long as the last trial, its verification, and the last timing."""
        if not self._verifies_later:
            return 0.0
        verifications = (self._certification.pending + 1) * self._certification.expected_seconds
        is_faster = self._timing is not None and outcome.is_faster(self._timing, "eager")
        share = 1.0 if is_faster else NOTHING_TO_LOSE
        return share * (self._trial_seconds + verifications) + FINAL_SECONDS

    def _complete_timing(self) -> bool:
        """Time the last accepted version against all baselines, if that was not done; returns whether it was timed."""
        last = self._last_verified()
        if last is None or last.candidate is None or not isinstance(self._measurer, BaselineTimer):
            return False
        if last.candidate.id in self._complete or not self._has_gpu:
            return False
        self._complete.add(last.candidate.id)
        wait = self._deadline - FINAL_SECONDS - time.monotonic()
        if self._components.baseline == "eager":
            wait = min(wait, 0.0 if has_long_loop(self._capture.graph) else BASELINE_WAIT_SECONDS)
        previous = next((s.candidate for s in reversed(self._steps) if _is_before(s, last)), self._root)
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
        self._retake(replace(last, timing=timing))
        if timing.baselines != (last.timing.baselines if last.timing is not None else ()):
            self._events.on_retimed(self._steps[last.index - 1])
        self._queue(self._wanted())
        self._report()
        return True

    def _untimed_baselines(self) -> tuple[BaselineTime, ...]:
        """The baselines with the reason why they have no time; none if the run ended early and without a version."""
        if not isinstance(self._measurer, BaselineTimer):
            return ()
        ended_early = time.monotonic() < self._deadline - self._needed_seconds()
        return () if ended_early and self._last_accepted() is None else self._measurer.untimed_baselines()

    def _drop_bases(self) -> None:
        """Reject the last accepted steps while the target is slower than in eager mode: no later step made up for them."""
        while (last := self._last_verified()) is not None:
            eager = last.timing.against("eager") if last.timing is not None else None
            if eager is None or eager.ratio >= 1.0:
                return
            reason = f"{last.reason}; {eager.ratio:.2f}x the speed of your code, and no later step made it faster"
            self._withdraw(replace(last, status=StepStatus.REJECTED, reason=reason))

    def _verify_int32_offsets(self, measurer: LargeTensorVerifier) -> None:
        """Verify the last accepted version beyond 2^31 elements; while it is incorrect there, its last step is withdrawn."""
        while (last := self._last_verified()) is not None:
            if last.candidate is None or last.verdict is None or time.monotonic() >= self._deadline - FAR_SECONDS:
                return
            if last.candidate.id in self._far_verified:
                return
            self._far_verified.add(last.candidate.id)
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


def _is_before(step: Step, last: Step) -> bool:
    return step.status is StepStatus.ACCEPTED and step.index < last.index and step.candidate is not None
