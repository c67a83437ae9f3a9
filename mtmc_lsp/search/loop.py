"""The loop that every search runs: choose an action and a version, try it, verify what is kept, until a limit or a STOP.

On a GPU a *trial* compiles a step, compares its results on the timed inputs and times it. A step that is fast enough becomes a
base of further trials at once; its verification runs beside them. A step is reported only after its verification. If that fails,
the search continues as if the version had never been a base.

The separation of planner and coder follows "Macro Thinking, Micro Coding" (MTMC).
"""

from __future__ import annotations

import itertools
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from mtmc_lsp.core.action import MacroAction, Stop
from mtmc_lsp.core.errors import FailureKind, MtmcError
from mtmc_lsp.core.profile import KernelTime
from mtmc_lsp.core.protocols import CannotCode, KernelProfiler, Measurer, ParallelMeasurer, State
from mtmc_lsp.core.run import Candidate, RunResult, Step, StepStatus
from mtmc_lsp.core.workload import Capture
from mtmc_lsp.search import outcome
from mtmc_lsp.search.acceptance import Judge
from mtmc_lsp.search.components import Events, SearchComponents
from mtmc_lsp.search.ending import Ending
from mtmc_lsp.search.failures import failure_reason
from mtmc_lsp.search.trial import AlreadyTried, BaseWithdrawn, Trial, version_key
from mtmc_lsp.search.verified_steps import shown

MAX_FAILURES = 4
"""A branch ends after this many consecutive steps that were not accepted."""
MAX_REFUSALS = 12
"""The same for steps that the built-in coder cannot write: these cost planning alone, and the planner then knows more."""
MOST_AHEAD = 16
"""Most steps that are assumed after the present one."""
PLANNING_SHARE = 0.5
"""The fraction of a run's remaining time that planning the next step may take; the rest is for trying it."""


@dataclass(frozen=True)
class Chosen:
    """The next trial."""

    base: Candidate
    """The version that the action changes."""
    action: MacroAction
    prior: float | None = None
    """The probability of the action by the policy, if the search has one."""
    unverified: Step | None = None
    """The step of ``base`` if it must be verified now, since a trial relies on it."""


class Search(Ending, ABC):
    """One run for one capture."""

    judge: Judge = Judge()

    def __init__(self, capture: Capture, source: str, components: SearchComponents, events: Events) -> None:
        super().__init__(capture, source, components, events)
        self._end_reason = ""
        """Why no further step was tried."""
        self._times: dict[str, tuple[KernelTime, ...]] = {}
        """Kernel times of versions that were profiled, by the version's id."""

    @abstractmethod
    def _choose(self, steps: Sequence[Step], seconds: float) -> Chosen | Stop:
        """The trial that follows ``steps``.

        Args:
            steps: those of the run, or with some that were not tried yet: then the answer is an assumption.
            seconds: how long planning may take.
        """

    def _known(self) -> Mapping[str, int]:
        """The keys of versions that need no further trial, see :func:`version_key`, with the numbers of their steps."""
        return {}

    def _remembered(self, index: int, chosen: Chosen) -> Step | None:
        """The step numbered ``index`` if this trial was done before."""
        return None

    def _ended(self, reason: str) -> str:
        """What the run says about its end."""
        return reason

    def _skip(self, chosen: Chosen) -> None:
        """The trial leads to a version of :meth:`_known`."""

    def run(self, run_id: str, source_hash: str, done: Sequence[Step] = ()) -> RunResult:
        """Try steps until no action is worth trying or a limit is reached.

        Args:
            run_id: the run's id in the store.
            source_hash: of the user's file.
            done: steps of an earlier run, which are taken over without measuring them again.
        """
        began = time.monotonic()
        self._deadline = began + self._components.limits.seconds
        self._resume(done)
        try:
            self._explore()
            if self._has_gpu:
                self._finish()
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
        self._queue(self._wanted())
        while True:
            self._settle(wait=False)
            chosen = self._next()
            if isinstance(chosen, Chosen):
                self._try(chosen)
            elif self._certification.pending:
                # A failed verification makes room for other actions.
                self._settle(wait=True)
            elif not self._complete_timing():
                # With the times of all baselines, the planner may know a further action.
                self._end_reason = self._ended(chosen.reason)
                return

    def _next(self) -> Chosen | Stop:
        remaining = self._deadline - time.monotonic()
        if len(self._steps) >= self._components.limits.steps:
            return Stop(f"the limit of {self._components.limits.steps} steps is reached")
        if remaining <= self._needed_seconds():
            return Stop("the rest of the budget is too short for another step")
        if any(step.verdict is not None and step.verdict.failure is FailureKind.TOO_LARGE for step in self._steps):
            return Stop("no version of a workload of this size can be verified without a GPU")
        return self._choose(self._steps, remaining * PLANNING_SHARE)

    def _try(self, chosen: Chosen) -> None:
        began = time.monotonic()
        index = len(self._steps) + 1
        chosen = replace(chosen, action=replace(chosen.action, text=unique_title(chosen.action.text, self._steps)))
        self._events.on_action(index, chosen.action)
        trial = Trial(
            *(self._capture, self._components, self._events, self.judge, chosen.base, self._verifies_later),
            confirm=self._confirm,
            await_first_verdict=self._await_first_verdict,
            begin_verification=self._begin_verification,
            begin=partial(self._begin_trials, chosen),
            known=self._known(),
        )
        try:
            self._verify_base(chosen)
            step = self._remembered(index, chosen)
            if step is None:
                step = trial.of(index, chosen.action)
                self._trial_seconds = time.monotonic() - began
            self._confirm()
        except BaseWithdrawn:
            self._certification.abandon()
            return
        except AlreadyTried:
            self._skip(chosen)
            return
        self._set([*self._steps, replace(step, prior=chosen.prior)])
        self._queue(self._wanted())
        self._certification.abandon()
        self._report()

    def _begin_trials(self, chosen: Chosen, candidate: Candidate) -> None:
        """Begin a trial and those that may follow, if the measurer tries several versions at the same time.

        Without a GPU, most versions are kept. With one, many are not faster, so both cases are prepared in turn.
        """
        measurer = self._measurer
        if not isinstance(measurer, ParallelMeasurer) or not self._components.plans_ahead:
            return
        verifies = not self._verifies_later
        measurer.try_ahead(candidate, chosen.base, verifies=verifies)
        following = [self._following(chosen, candidate, StepStatus.ACCEPTED)]
        if self._has_gpu:
            following.insert(0, self._following(chosen, candidate, StepStatus.REJECTED))
        while following and measurer.spare:
            trials = following.pop(0)
            further = next(trials, None)
            if further is not None:
                base, version = further
                measurer.try_ahead(version, base, verifies=verifies)
                following.append(trials)

    def _following(
        self, chosen: Chosen, candidate: Candidate, status: StepStatus
    ) -> Iterator[tuple[Candidate, Candidate]]:
        """The trials after a trial whose steps all get the same status: the version before, and the version."""
        steps, known = list(self._steps), {version_key(candidate), *self._known()}
        version: Candidate | None = candidate
        for _ in range(MOST_AHEAD):
            step = Step(len(steps) + 1, chosen.action, status, "", candidate=version, base=chosen.base.id)
            steps.append(step if version is not None else replace(step, status=StepStatus.REJECTED))
            following = self._choose(steps, (self._deadline - time.monotonic()) * PLANNING_SHARE)
            if isinstance(following, Stop):
                return
            action = replace(following.action, text=unique_title(following.action.text, steps))
            chosen, version = replace(following, action=action), None
            if "variants" in action.params:
                # The workers share these configurations.
                continue
            try:
                version = self._components.coder.write(self._capture, chosen.base, action)
            except (CannotCode, MtmcError):
                # Its step will say why.
                continue
            if version.source == chosen.base.source or version_key(version) in known:
                version = None
                continue
            known.add(version_key(version))
            yield chosen.base, version

    def _begin_verification(self, candidate: Candidate) -> None:
        if self._measurer.verifies_beside:
            self._certification.begin(candidate)

    def _verify_base(self, chosen: Chosen) -> None:
        before = self._withdrawals
        if chosen.unverified is not None:
            self._queue([chosen.unverified])
        if self._withdrawals != before:
            raise BaseWithdrawn

    def _confirm(self) -> None:
        """Take over the verifications that ended; a failed one makes the present trial pointless."""
        before = self._withdrawals
        self._settle(wait=False)
        if self._withdrawals != before:
            raise BaseWithdrawn

    def _await_first_verdict(self) -> None:
        """Wait for the verifications that run if no step is verified yet: what they need of the GPU goes before tuning."""
        before = self._withdrawals
        if not any(step.verdict is not None and step.verdict.is_correct for step in self._steps):
            self._settle(wait=True)
        if self._withdrawals != before:
            raise BaseWithdrawn

    def _resume(self, done: Sequence[Step]) -> None:
        """Take over the steps of an earlier run."""
        self._set(list(done))
        for step in self._steps:
            self._reported.append(shown(step))
            self._events.on_replayed(step)

    # Input of planners -------------------------------------------------------------------------------------------

    def _state(self, version: Candidate, history: Sequence[Step], seconds: float) -> State:
        times = partial(self._kernel_times, version)
        device = self._measurer.device()
        deadline = time.monotonic() + seconds
        return State(self._capture, version, tuple(history), device, self._has_gpu, times, deadline)

    def _kernel_times(self, candidate: Candidate) -> tuple[KernelTime, ...]:
        """The kernels of a version and their times on the GPU; each version is profiled once."""
        if candidate.id not in self._times:
            self._events.on_stage("profiling the kernels")
            self._times[candidate.id] = watched(self._measurer, candidate)
        return self._times[candidate.id]

    def _has_failed_too_often(self, steps: Sequence[Step]) -> bool:
        """Whether so many of the last steps were not accepted that no further one is tried."""
        failures = refusals = 0
        for step in reversed(steps):
            if step.status is StepStatus.ACCEPTED or step.is_alternative:
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
