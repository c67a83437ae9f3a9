"""The steps of a run: verified in another thread while later ones are tried, and reported in their order after that."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from mtmc_lsp.core.errors import FailureKind, MtmcError
from mtmc_lsp.core.protocols import Repairer, Sampler
from mtmc_lsp.core.results import Timing
from mtmc_lsp.core.run import Step, StepStatus
from mtmc_lsp.core.workload import Capture
from mtmc_lsp.search.certification import Certification, Certified
from mtmc_lsp.search.components import Events, SearchComponents
from mtmc_lsp.search.failures import failure_reason


class VerifiedSteps:
    """The steps of one run. A step whose verification fails takes the steps that relied on it away."""

    def __init__(self, capture: Capture, source: str, components: SearchComponents, events: Events) -> None:
        """Prepare a run.

        Args:
            capture: the target's graph and workload.
            source: the user's file without generated code.
            components: planner, coder, measurer and limits.
            events: callbacks for the progress.
        """
        self._capture = capture
        self._components = components
        self._measurer = components.measurer
        self._has_gpu = components.has_gpu
        self._events = events
        self._root = components.coder.start(capture, source)
        self._best = self._root
        self._steps: list[Step] = []
        self._reported: list[tuple[StepStatus, bool, bool]] = []
        """What was reported of each step, see :func:`shown`; the other steps wait for a verification."""
        self._timing: Timing | None = None
        # A model's code is verified first: it repairs its code by the reason of a failed verification.
        self._asks_model = isinstance(components.coder, (Repairer, Sampler))
        self._verifies_later = self._has_gpu and not self._asks_model
        self._certification = Certification(self._measurer)
        self._withdrawals = 0
        """The number of verifications that failed."""

    # What searches with branches change ---------------------------------------------------------------------------

    def _arranged(self, steps: list[Step]) -> list[Step]:
        """The steps with the status that each has beside the others."""
        return steps

    def _wanted(self) -> list[Step]:
        """The steps that must be verified now, in order."""
        return [step for step in self._steps if step.status is StepStatus.ACCEPTED and step.verdict is None]

    def _forget(self, steps: Sequence[Step]) -> None:
        """These steps were tried on a version, or chosen because of one, whose verification failed."""

    # State -------------------------------------------------------------------------------------------------------

    def _set(self, steps: list[Step]) -> None:
        """Replace all steps."""
        self._steps = self._arranged(steps)
        self._best, self._timing = self._root, None
        for step in self._steps:
            if step.status is StepStatus.ACCEPTED and step.candidate is not None:
                self._best, self._timing = step.candidate, step.timing or self._timing

    def _retake(self, changed: Step) -> None:
        """Replace one step."""
        self._set([changed if step.index == changed.index else step for step in self._steps])

    def _last_accepted(self) -> Step | None:
        return next((step for step in reversed(self._steps) if step.status is StepStatus.ACCEPTED), None)

    def _last_verified(self) -> Step | None:
        """The last accepted step, after the end of all verifications."""
        self._queue(self._wanted())
        self._settle(wait=True)
        return self._last_accepted()

    # Verification ------------------------------------------------------------------------------------------------

    def _queue(self, steps: Sequence[Step]) -> None:
        """Verify the steps that are not verified yet."""
        new = [step for step in steps if step.verdict is None and not self._certification.is_pending(step)]
        for step in new:
            if step.candidate is not None:
                self._certification.add(step, step.candidate, len(self._steps))
        if new and not self._measurer.verifies_beside:
            self._settle(wait=True)

    def _settle(self, *, wait: bool) -> None:
        """Take over the verifications that ended, and report the steps up to the next one that runs."""
        while True:
            if wait and self._certification.pending:
                self._events.on_stage("verifying")
            certified = self._certification.next(wait=wait)
            if certified is None:
                return
            self._take_verdict(certified)
            self._queue(self._wanted())
            self._report()

    def _take_verdict(self, certified: Certified) -> None:
        step = self._steps[certified.step.index - 1]
        reason = certified.step.reason
        try:
            verdict = certified.verdict.result()
            step = replace(step, verdict=verdict)
            if not verdict.is_correct:
                step = replace(step, status=StepStatus.FAILED, reason=verdict.reason, failure=verdict.failure)
        except MtmcError as error:
            step = replace(step, status=StepStatus.FAILED, reason=failure_reason(error), failure=error.kind)
        if step.failure is FailureKind.DEADLINE:
            step = replace(step, reason=f"it was not verified within the budget; {reason}")
        if step.status is StepStatus.FAILED:
            # Later steps were tried on a version that cannot stay, or chosen because of its speed. The store of a run that is
            # killed now has all steps before, so that it is resumed as it would have continued.
            self._report_up_to(certified.reportable)
            self._withdrawals += 1
            self._certification.drop()
            self._forget(self._steps[certified.count :])
            self._steps = self._steps[: certified.count]
            step = replace(step, is_alternative=False)
        self._retake(step)

    # Reports -----------------------------------------------------------------------------------------------------

    def _report(self) -> None:
        """Report what changed, then further steps in their order, up to the first that waits for a verification."""
        for number, before in enumerate(self._reported):
            step = self._steps[number]
            self._reported[number] = shown(step)
            if shown(step) != before:
                self._events.on_switched(step)
        limit = self._certification.reportable
        self._report_up_to(len(self._steps) if limit is None else limit)

    def _report_up_to(self, count: int) -> None:
        while len(self._reported) < count:
            step = self._steps[len(self._reported)]
            self._reported.append(shown(step))
            self._events.on_step(step)

    def _withdraw(self, changed: Step) -> None:
        """Take an accepted step back that was reported."""
        self._retake(changed)
        self._reported[changed.index - 1] = shown(changed)
        self._events.on_withdrawn(changed)
        self._report()


def shown(step: Step) -> tuple[StepStatus, bool, bool]:
    """What a report of a step depends on."""
    return step.status, step.is_alternative, step.verdict is None
