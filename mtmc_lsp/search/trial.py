"""One step of a search: writes an action, compiles it, and tries it; the first stage that fails ends the step."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from mtmc_lsp.core.action import MacroAction
from mtmc_lsp.core.errors import MtmcError, ResultsDiffer
from mtmc_lsp.core.protocols import CannotCode, Repairer, Sampler
from mtmc_lsp.core.results import Check, CheckStatus, CompileReport, Verdict, VerdictStatus
from mtmc_lsp.core.run import Author, Candidate, Step, StepStatus
from mtmc_lsp.core.workload import Capture
from mtmc_lsp.search.acceptance import Judge, base_ratio
from mtmc_lsp.search.components import Events, SearchComponents
from mtmc_lsp.search.failures import failure_reason
from mtmc_lsp.source.compose import unified_diff
from mtmc_lsp.tuning.schedule_cost import estimated_work

TRIAL_CHECK = "results while timed"
"""The check of a step that failed before its verification: the timed results differ from those of the user's code."""


class BaseWithdrawn(Exception):
    """The version that a step changes failed its verification, so the step is not tried any further."""


class AlreadyTried(Exception):
    """The action leads to a version that another branch of the search has tried."""


class Ranker(Protocol):
    """A measurer that can also compare many variants quickly."""

    def compile_variants(self, candidates: Sequence[Candidate]) -> list[CompileReport]:
        """The reports of all candidates, which share the cores."""

    def quick(self, candidates: Sequence[Candidate]) -> list[float | None]:
        """The median time of each candidate in microseconds; None for a candidate that fails."""


@dataclass(frozen=True)
class Trial:
    """Tries actions on one version."""

    capture: Capture
    components: SearchComponents
    events: Events
    judge: Judge
    base: Candidate
    """The version that an action changes."""
    verifies_later: bool
    """Whether a step that is fast enough is verified afterwards, by the caller; otherwise before it is timed."""
    confirm: Callable[[], None] = lambda: None
    """Called before a step is timed. Raises :class:`BaseWithdrawn` if the verification of ``base`` failed meanwhile."""
    await_first_verdict: Callable[[], None] = lambda: None
    """Called before configurations are measured: waits until a step of the run is verified, if one is being verified.

    Raises :class:`BaseWithdrawn` as ``confirm`` does.
    """
    begin_verification: Callable[[Candidate], None] = lambda candidate: None
    """Called with a version that compiles, before it is timed, if it is verified afterwards."""
    begin: Callable[[Candidate], None] = lambda candidate: None
    """Called with a version that was written, before it is compiled."""
    known: Mapping[str, int] = field(default_factory=dict)
    """The keys of the versions that were tried, with the number of the step; none of them is tried again."""

    def of(self, index: int, action: MacroAction) -> Step:
        """The step numbered ``index`` with an action.

        Raises:
            BaseWithdrawn: the verification of ``base`` failed meanwhile.
            AlreadyTried: the version is known, which was noticed without measuring anything.
        """
        return replace(self._step(index, action), base=self.base.id)

    def _step(self, index: int, action: MacroAction) -> Step:
        self.events.on_stage("writing the code")
        coder = self.components.coder
        try:
            candidates = self._write(action)
        except CannotCode as reason:
            return Step(index, action, StepStatus.FAILED, self._coding_failure(action, reason))
        except MtmcError as error:
            return Step(index, action, StepStatus.FAILED, failure_reason(error), failure=error.kind)
        candidates = [candidate for candidate in candidates if candidate.source != self.base.source]
        if not candidates:
            return Step(index, action, StepStatus.REJECTED, "nothing changes: the present version is already the best")
        if number := self.known.get(version_key(candidates[0])):
            if "variants" not in action.params:
                raise AlreadyTried
            return Step(index, action, StepStatus.REJECTED, f"the fastest variant is the version of step {number}")
        step = self._best_of(index, action, candidates)
        while step.status is StepStatus.FAILED and isinstance(coder, Repairer) and step.candidate is not None:
            self.events.on_stage("repairing the code")
            try:
                candidate = coder.repair(self.capture, self.base, step.candidate, step.reason)
            except CannotCode as reason:
                return replace(step, reason=str(reason))
            candidate = replace(candidate, dependencies=self.capture.graph.dependencies)
            step = self._tried(index, action, candidate)
        return step

    # Writing -----------------------------------------------------------------------------------------------------

    def _write(self, action: MacroAction) -> list[Candidate]:
        dependencies = self.capture.graph.dependencies
        return [replace(candidate, dependencies=dependencies) for candidate in self._written(action)]

    def _written(self, action: MacroAction) -> list[Candidate]:
        variants, coder = action.params.get("variants"), self.components.coder
        if isinstance(variants, (list, tuple)):
            return [self._fastest(action, variants)]
        if isinstance(coder, Sampler):
            return coder.write_several(self.capture, self.base, action)
        return [coder.write(self.capture, self.base, action)]

    def _fastest(self, action: MacroAction, variants: Sequence[Mapping[str, object]]) -> Candidate:
        self.events.on_stage(f"compiling {len(variants)} configurations")
        # The present version is first, so that a tie keeps it.
        choices = [self.base]
        for params in variants:
            try:
                choices.append(self.components.coder.write(self.capture, self.base, replace(action, params=params)))
            except CannotCode:
                continue
        # Such actions are only planned if steps are timed.
        ranker: Ranker = self.components.measurer  # type: ignore[assignment]
        choices = [c for c, report in zip(choices, ranker.compile_variants(choices), strict=True) if report.ok]
        self.confirm()
        self.await_first_verdict()
        self.events.on_stage(f"measuring {len(choices)} configurations")
        ranked = [(median, i) for i, median in enumerate(ranker.quick(choices)) if median is not None]
        return choices[min(ranked)[1]] if ranked else self.base

    def _coding_failure(self, action: MacroAction, reason: CannotCode) -> str:
        """Why an action has no code: what happened, where, and what to do."""
        first, last = action.lines
        lines = f"line {first}" if first == last else f"lines {first} to {last}"
        if isinstance(self.components.coder, Repairer):
            return f"the model wrote no usable code for {lines}: {reason}. The run continues with other actions."
        remedy = "The run continues with other actions; with `--coder auto` a language model writes this one."
        return f"the built-in coder has no kernel for this action on {lines}: {reason}. {remedy}"

    # Judging -----------------------------------------------------------------------------------------------------

    def _best_of(self, index: int, action: MacroAction, candidates: Sequence[Candidate]) -> Step:
        """The step with the best of several versions; if all fail, the version that passed the most stages."""
        tried = []
        for number, candidate in enumerate(candidates, 1):
            if len(candidates) > 1:
                self.events.on_stage(f"version {number} of {len(candidates)}")
            tried.append(self._tried(index, action, candidate))
        best = min(tried, key=_merit)
        if len(tried) > 1 and best.status is not StepStatus.FAILED:
            correct = sum(step.verdict is not None and step.verdict.is_correct for step in tried)
            best = replace(best, reason=f"{best.reason}; the best of {len(tried)} versions, {correct} of them correct")
        return best

    def _tried(self, index: int, action: MacroAction, candidate: Candidate) -> Step:
        step, smaller = self._tried_as_written(index, action, candidate), with_fewer_stages(action)
        while smaller is not None and step.report is not None and step.report.exceeds_shared:
            try:
                (candidate,) = self._write(smaller)
            except CannotCode:
                break
            # The step has the proposed action, so the planner does not propose it again.
            step, smaller = self._tried_as_written(index, action, candidate), with_fewer_stages(smaller)
        return step

    def _tried_as_written(self, index: int, action: MacroAction, candidate: Candidate) -> Step:
        path = self.capture.workload.target.path.rpartition("/")[2]
        diff = unified_diff(self.base.source, candidate.source, path)
        work = estimated_work(self.capture.graph, candidate.schedule, self.components.measurer.device())
        step = Step(index, action, StepStatus.FAILED, "", diff, candidate, work=work)
        try:
            self.begin(candidate)
            return self._staged(step, candidate)
        except MtmcError as error:
            return replace(step, reason=failure_reason(error), failure=error.kind)

    def _staged(self, step: Step, candidate: Candidate) -> Step:
        """The step with the result of each stage."""
        measurer, on_stage = self.components.measurer, self.events.on_stage
        on_stage("compiling")
        report = measurer.compile(candidate)
        step = replace(step, report=report)
        if not report.ok:
            broken = next(kernel for kernel in report.kernels if kernel.error)
            return replace(step, reason=f"{broken.kernel} does not compile for {broken.arch}: {broken.error}")
        if not self.verifies_later:
            on_stage("verifying")
            verdict = measurer.verify(candidate)
            step = replace(step, verdict=verdict)
            if not verdict.is_correct:
                return replace(step, reason=verdict.reason, failure=verdict.failure)
        if not self.components.has_gpu:
            return self.judge.unmeasured(step, report)
        self.confirm()
        if self.verifies_later:
            self.begin_verification(candidate)
        on_stage("timing")
        try:
            timing = measurer.time(candidate, self.base)
        except ResultsDiffer as error:
            check = Check(TRIAL_CHECK, CheckStatus.FAILED, detail=error.message)
            verdict = Verdict(VerdictStatus.INCORRECT, (check,), "gpu", reason=error.message)
            return replace(step, reason=error.message, verdict=step.verdict or verdict)
        if timing is None:
            return replace(step, reason="no time was measured on the GPU; `mtmc doctor` checks that it is usable")
        base = base_ratio(self.capture.graph, step.action.region)
        return self.judge.timed(replace(step, timing=timing), timing, base=base)


def version_key(candidate: Candidate) -> str:
    """Equal for versions that compute the same in the same way: names of kernels and their order in the schedule do not count."""
    schedule = candidate.schedule
    if candidate.author is not Author.BUILTIN or not isinstance(schedule, Mapping) or "kernels" not in schedule:
        return candidate.source
    kernels = sorted(json.dumps(kernel, sort_keys=True) for kernel in schedule["kernels"])
    return json.dumps({**schedule, "kernels": kernels, "kernel_names": []}, sort_keys=True)


def with_fewer_stages(action: MacroAction) -> MacroAction | None:
    """The action with one pipeline stage less, which needs less shared memory; None if it has no stage to spare.

    Planners estimate shared memory from the two operands of a product. Fused operations load further blocks in each stage.
    """
    config = action.params.get("config")
    stages = config.get("stages") if isinstance(config, Mapping) else None
    if not isinstance(config, Mapping) or not isinstance(stages, int) or stages < 2:
        return None
    return replace(action, params={**action.params, "config": {**config, "stages": stages - 1}})


def _merit(step: Step) -> tuple[float, ...]:
    """A sort key, the best first: accepted, rejected, failed late, failed early; then by time, else by the compiler's report."""
    status = [StepStatus.ACCEPTED, StepStatus.REJECTED, StepStatus.FAILED].index(step.status)
    stages = sum(result is not None for result in (step.report, step.verdict, step.timing))
    kernels = step.report.kernels if step.report is not None else ()
    spills = sum(kernel.spills or 0 for kernel in kernels)
    occupancy = min((kernel.occupancy for kernel in kernels if kernel.occupancy is not None), default=1.0)
    return (status, -stages, step.timing.median_us if step.timing is not None else 0.0, spills, -occupancy)
