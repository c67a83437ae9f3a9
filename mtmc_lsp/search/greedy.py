"""The greedy search: propose an action, write it, compile, verify and time it; accept the step or keep the version before.

The separation of planner and coder follows "Macro Thinking, Micro Coding" (MTMC).
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Protocol

from mtmc_lsp.core.action import MacroAction
from mtmc_lsp.core.chat import ModelNotUsable
from mtmc_lsp.core.errors import FailureKind, MtmcError, RequestError, WorkerFailed
from mtmc_lsp.core.profile import KernelTime
from mtmc_lsp.core.protocols import (
    CannotCode,
    KernelProfiler,
    LargeTensorVerifier,
    Measurer,
    Repairer,
    Sampler,
    State,
)
from mtmc_lsp.core.results import CheckStatus, CompileReport, Speed, Timing, VerdictStatus, Work
from mtmc_lsp.core.run import (
    SCHEMA,
    Candidate,
    Final,
    RunResult,
    RunStatus,
    Speedup,
    Step,
    StepStatus,
)
from mtmc_lsp.core.workload import Capture
from mtmc_lsp.search.components import Events, Limits, SearchComponents
from mtmc_lsp.source.compose import unified_diff
from mtmc_lsp.tuning.schedule_cost import estimated_work

MAX_FAILURES = 4
"""The run ends after this many consecutive steps that were not accepted."""
PLANNING_SHARE = 0.5
"""The fraction of a run's remaining time that planning the next step may take; the rest is for trying it."""
BASE_RATIO, WHOLE_RATIO = 0.9, 0.75
"""A first kernel with at least this ratio of eager time to its time is accepted as a base to tune. The second ratio is for a
kernel that computes the whole target, since no other first step can be a better base."""


class Ranker(Protocol):
    """A measurer that can also compare many variants quickly."""

    def quick(self, candidates: Sequence[Candidate]) -> list[float | None]:
        """The median time of each candidate in microseconds; None for a candidate that fails."""


class GreedySearch:
    """One run for one capture."""

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
        self._planner = components.planner
        self._coder = components.coder
        self._measurer = components.measurer
        self._has_gpu = components.has_gpu
        self._limits: Limits = components.limits
        self._events = events
        self._root = self._coder.start(capture, source)
        self._best = self._root
        self._steps: list[Step] = []
        self._timing: Timing | None = None
        self._times: dict[str, tuple[KernelTime, ...]] = {}
        """Kernel times of versions that were profiled, by the version's id."""

    def run(self, run_id: str, source_hash: str, done: Sequence[Step] = ()) -> RunResult:
        """Try steps until no action is worth trying or a limit is reached.

        Args:
            run_id: the run's id in the store.
            source_hash: of the user's file.
            done: steps of an earlier run, which are taken over without measuring them again.
        """
        began = time.monotonic()
        for step in done:
            self._take(step)
            self._events.on_replayed(step)
        while len(self._steps) < self._limits.steps and time.monotonic() - began < self._limits.seconds:
            if self._failures_in_a_row() >= MAX_FAILURES:
                break
            remaining = self._limits.seconds - (time.monotonic() - began)
            action = self._planner.propose(self._state(remaining * PLANNING_SHARE))
            if action is None:
                break
            self._events.on_action(len(self._steps) + 1, action)
            step = self._try(action)
            self._take(step)
            self._events.on_step(step)
        if self._has_gpu:
            self._drop_bases()
        if self._has_gpu and isinstance(self._measurer, LargeTensorVerifier):
            self._verify_int32_offsets(self._measurer)
        return self._result(run_id, source_hash, time.monotonic() - began)

    def _drop_bases(self) -> None:
        """Reject the last accepted steps while the target is slower than in eager mode: no later step made up for them."""
        while accepted := [step for step in self._steps if step.status is StepStatus.ACCEPTED]:
            last = accepted[-1]
            eager = last.timing.against("eager") if last.timing is not None else None
            if eager is None or eager.ratio >= 1.0:
                return
            last = replace(last, status=StepStatus.REJECTED, reason=f"{last.reason}; no later step made it faster")
            self._retake(last)
            self._events.on_withdrawn(last)

    def _retake(self, changed: Step) -> None:
        """Apply all steps again with one of them changed."""
        steps = [changed if step.index == changed.index else step for step in self._steps]
        self._steps, self._best, self._timing = [], self._root, None
        for step in steps:
            self._take(step)

    def _verify_int32_offsets(self, measurer: LargeTensorVerifier) -> None:
        """Verify the last accepted version beyond 2^31 elements; while it is incorrect there, its last step is withdrawn."""
        while accepted := [step for step in self._steps if step.status is StepStatus.ACCEPTED]:
            last = accepted[-1]
            if last.candidate is None or last.verdict is None:
                return
            self._events.on_stage("verifying beyond 2^31 elements")
            try:
                check = measurer.verify_int32_offsets(last.candidate)
            except MtmcError as error:
                _failure_reason(error)
                return
            verdict = replace(last.verdict, checks=(*last.verdict.checks, check))
            is_incorrect = check.status is CheckStatus.FAILED
            if is_incorrect:
                reason = f"{check.name}: {check.detail} (on {check.case})"
                verdict = replace(verdict, status=VerdictStatus.INCORRECT, reason=reason)
                last = replace(last, status=StepStatus.FAILED, reason=reason)
            last = replace(last, verdict=verdict)
            self._retake(last)
            if not is_incorrect:
                return
            self._events.on_withdrawn(last)

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

    def _take(self, step: Step) -> None:
        self._steps.append(step)
        if step.status is StepStatus.ACCEPTED and step.candidate is not None:
            self._best, self._timing = step.candidate, step.timing or self._timing

    def _failures_in_a_row(self) -> int:
        count = 0
        for step in reversed(self._steps):
            if step.status is StepStatus.ACCEPTED:
                break
            count += 1
        return count

    # One step ----------------------------------------------------------------------------------------------------

    def _try(self, action: MacroAction) -> Step:
        index = len(self._steps) + 1
        self._events.on_stage("writing the code")
        try:
            candidates = self._write(action)
        except CannotCode as reason:
            return Step(index, action, StepStatus.FAILED, self._coding_failure(action, reason))
        except MtmcError as error:
            return Step(index, action, StepStatus.FAILED, _failure_reason(error), failure=error.kind)
        candidates = [candidate for candidate in candidates if candidate.source != self._best.source]
        if not candidates:
            return Step(index, action, StepStatus.REJECTED, "nothing changes: the present version is already the best")
        step = self._best_of(index, action, candidates)
        while step.status is StepStatus.FAILED and isinstance(self._coder, Repairer) and step.candidate is not None:
            self._events.on_stage("repairing the code")
            try:
                candidate = self._coder.repair(self._capture, self._best, step.candidate, step.reason)
            except CannotCode as reason:
                return replace(step, reason=str(reason))
            candidate = replace(candidate, dependencies=self._capture.graph.dependencies)
            step = self._judged(index, action, candidate)
        return step

    def _best_of(self, index: int, action: MacroAction, candidates: Sequence[Candidate]) -> Step:
        """The step with the best of several versions; if all fail, the version that passed the most stages."""
        judged = []
        for number, candidate in enumerate(candidates, 1):
            if len(candidates) > 1:
                self._events.on_stage(f"version {number} of {len(candidates)}")
            judged.append(self._judged(index, action, candidate))
        best = min(judged, key=_merit)
        if len(judged) > 1 and best.status is not StepStatus.FAILED:
            correct = sum(step.verdict is not None and step.verdict.is_correct for step in judged)
            best = replace(best, reason=f"{best.reason}; the best of {len(judged)} versions, {correct} of them correct")
        return best

    def _judged(self, index: int, action: MacroAction, candidate: Candidate) -> Step:
        path = self._capture.workload.target.path.rpartition("/")[2]
        diff = unified_diff(self._best.source, candidate.source, path)
        step = Step(index, action, StepStatus.FAILED, "", diff, candidate, work=self._work(candidate))
        return self._judge(step, candidate)

    def _work(self, candidate: Candidate) -> Work | None:
        return estimated_work(self._capture.graph, candidate.schedule, self._measurer.device())

    def _write(self, action: MacroAction) -> list[Candidate]:
        dependencies = self._capture.graph.dependencies
        return [replace(candidate, dependencies=dependencies) for candidate in self._written(action)]

    def _written(self, action: MacroAction) -> list[Candidate]:
        variants = action.params.get("variants")
        if isinstance(variants, (list, tuple)):
            return [self._fastest(action, variants)]
        if isinstance(self._coder, Sampler):
            return self._coder.write_several(self._capture, self._best, action)
        return [self._coder.write(self._capture, self._best, action)]

    def _coding_failure(self, action: MacroAction, reason: CannotCode) -> str:
        """Why an action has no code: what happened, where, and what to do."""
        first, last = action.lines
        lines = f"line {first}" if first == last else f"lines {first} to {last}"
        if isinstance(self._coder, Repairer):
            return f"the model wrote no usable code for {lines}: {reason}. The run continues with other actions."
        remedy = "The run continues with other actions; with `--coder auto` a language model writes this one."
        return f"the built-in coder has no kernel for this action on {lines}: {reason}. {remedy}"

    def _fastest(self, action: MacroAction, variants: Sequence[Mapping[str, object]]) -> Candidate:
        self._events.on_stage(f"measuring {len(variants)} configurations")
        # The present version is first, so that a tie keeps it.
        choices = [self._best]
        for params in variants:
            try:
                choices.append(self._coder.write(self._capture, self._best, replace(action, params=params)))
            except CannotCode:
                continue
        ranker: Ranker = self._measurer  # type: ignore[assignment]  # such actions are only planned if steps are timed
        ranked = [(median, i) for i, median in enumerate(ranker.quick(choices)) if median is not None]
        return choices[min(ranked)[1]] if ranked else self._best

    def _judge(self, step: Step, candidate: Candidate) -> Step:
        """The step with the result of each stage; the first stage that fails ends it."""
        try:
            self._events.on_stage("compiling")
            report = self._measurer.compile(candidate)
            step = replace(step, report=report)
            if not report.ok:
                broken = next(kernel for kernel in report.kernels if kernel.error)
                return replace(step, reason=f"{broken.kernel} does not compile for {broken.arch}: {broken.error}")
            self._events.on_stage("verifying")
            verdict = self._measurer.verify(candidate)
            step = replace(step, verdict=verdict)
            if not verdict.is_correct:
                return replace(step, reason=verdict.reason, failure=verdict.failure)
            if not self._has_gpu:
                return self._judge_unmeasured(step, report)
            self._events.on_stage("timing")
            timing = self._measurer.time(candidate, self._best)
        except MtmcError as error:
            return replace(step, reason=_failure_reason(error), failure=error.kind)
        if timing is None:
            return replace(step, reason="no time was measured on the GPU; `mtmc doctor` checks that it is usable")
        whole = {node.name for node in self._capture.graph.nodes} <= set(step.action.region)
        return self._judge_timed(replace(step, timing=timing), timing, whole=whole)

    @staticmethod
    def _judge_unmeasured(step: Step, report: CompileReport) -> Step:
        archs = ", ".join(dict.fromkeys(kernel.arch for kernel in report.kernels))
        if step.action.expected.saved_us <= 0:
            return replace(step, status=StepStatus.REJECTED, reason="verified, but the cost model predicts no gain")
        reason = f"verified by Triton's interpreter, compiled for {archs}; not timed: no GPU"
        return replace(step, status=StepStatus.ACCEPTED, reason=reason)

    @staticmethod
    def _judge_timed(step: Step, timing: Timing, *, whole: bool = False) -> Step:
        against = "previous" if timing.against("previous") is not None else "eager"
        ratio = timing.against(against)
        if ratio is None:
            return replace(
                step,
                reason="your code could not be timed, so there is no time to compare with; `mtmc profile` shows why",
            )
        text = f"{ratio.ratio:.2f}x the {'previous version' if against == 'previous' else 'eager code'}"
        interval = f"{text} ({ratio.low:.2f} to {ratio.high:.2f}), {timing.median_us:.1f} us"
        if ratio.low > max(1.0, timing.noise.high):
            return replace(step, status=StepStatus.ACCEPTED, reason=interval)
        kernels_us = timing.graph_us
        if against == "eager" and kernels_us is not None and kernels_us < timing.median_us * ratio.ratio:
            reason = f"{interval}; its kernels alone take {kernels_us:.1f} us: kept as a base for a CUDA graph"
            return replace(step, status=StepStatus.ACCEPTED, reason=reason)
        if ratio.ratio >= (WHOLE_RATIO if whole else BASE_RATIO) and against == "eager":
            # A first kernel that is about as fast as eager is a base to tune; at its end the run must still be faster.
            return replace(step, status=StepStatus.ACCEPTED, reason=f"{interval}; kept as a base to tune")
        return replace(step, status=StepStatus.REJECTED, reason=f"not faster: {interval}")

    # The result --------------------------------------------------------------------------------------------------

    def _result(self, run_id: str, source_hash: str, seconds: float) -> RunResult:
        status = self._status()
        kept = self._best if status in (RunStatus.IMPROVED, RunStatus.UNMEASURED) else self._root
        timing = self._timing
        speedup = None
        if timing is not None:
            eager, compiled = timing.against("eager"), timing.against("compile")
            speedup = Speedup(eager, compiled, timing.against(timing.best))
        path = self._capture.workload.target.path.rpartition("/")[2]
        final = Final(
            kept.source,
            unified_diff(self._root.source, kept.source, path),
            speedup,
            timing.roofline if timing is not None else None,
        )
        baselines = tuple(b for b in (timing.baselines if timing else ()) if b.name != "previous")
        return RunResult(
            schema=SCHEMA,
            id=run_id,
            target=self._capture.workload.target,
            workload=self._capture.workload,
            environment=self._capture.environment,
            baselines=baselines,
            steps=tuple(self._steps),
            final=final,
            status=status,
            seconds=seconds,
            source_hash=source_hash,
            device=self._measurer.device(),
            work=self._work(self._root),
        )

    def _status(self) -> RunStatus:
        if any(step.status is StepStatus.ACCEPTED for step in self._steps):
            if not self._has_gpu:
                return RunStatus.UNMEASURED
            faster = self._timing is not None and self._timing.speed is Speed.FASTER
            return RunStatus.IMPROVED if faster else RunStatus.NO_GAIN
        verdicts = [step.verdict for step in self._steps if step.verdict is not None]
        # A version that is uncertifiable or ran out of memory is not known to be incorrect.
        judged = [
            verdict
            for verdict in verdicts
            if verdict.status is not VerdictStatus.UNCERTIFIABLE and not verdict.is_out_of_memory
        ]
        all_incorrect = bool(judged) and not any(verdict.is_correct for verdict in judged)
        return RunStatus.INCORRECT if all_incorrect else RunStatus.NO_GAIN


def watched(measurer: Measurer, candidate: Candidate) -> tuple[KernelTime, ...]:
    """The kernels of a version and their times on the GPU; none if they cannot be profiled, then planners use estimates."""
    if not isinstance(measurer, KernelProfiler):
        return ()
    try:
        return measurer.kernel_times(candidate)
    except MtmcError as error:
        _failure_reason(error)
        return ()


def _merit(step: Step) -> tuple[float, ...]:
    """A sort key, the best first: accepted, rejected, failed late, failed early; then by time, else by the compiler's report."""
    status = [StepStatus.ACCEPTED, StepStatus.REJECTED, StepStatus.FAILED].index(step.status)
    stages = sum(result is not None for result in (step.report, step.verdict, step.timing))
    kernels = step.report.kernels if step.report is not None else ()
    spills = sum(kernel.spills or 0 for kernel in kernels)
    occupancy = min((kernel.occupancy for kernel in kernels if kernel.occupancy is not None), default=1.0)
    return (status, -stages, step.timing.median_us if step.timing is not None else 0.0, spills, -occupancy)


def _failure_reason(error: MtmcError) -> str:
    """Why a step failed: what happened, where, and what to do.

    Raises:
        MtmcError: ``error``, if it is not the fault of the step: the user's code is wrong, the run was cancelled, or no
            model can be asked. The steps so far are stored, and the run can be resumed.
    """
    if isinstance(error, (RequestError, ModelNotUsable)) or (
        isinstance(error, WorkerFailed) and error.kind is FailureKind.CANCELLED
    ):
        raise error
    where = f" ({error.where})" if error.where else ""
    remedy = f". {error.remedy}" if error.remedy else ""
    return f"{error.message}{where}{remedy}"
