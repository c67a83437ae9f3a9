"""Greedy Macro Thinking, Micro Coding: propose, write, compile, verify, time; keep the step or fall back."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from mtmc_lsp.core.action import ActionKind, MacroAction
from mtmc_lsp.core.errors import MtmcError, WorkerFailed
from mtmc_lsp.core.protocols import CannotCode, Coder, Measurer, Planner, State
from mtmc_lsp.core.results import CompileReport, Speed, Timing, Verdict
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
from mtmc_lsp.source.compose import unified_diff

ENOUGH_FAILURES = 4
"""Steps in a row that may come to nothing before the run ends."""


class Ranker(Protocol):
    """A measurer that can also rank many variants quickly."""

    def quick(self, candidates: Sequence[Candidate]) -> list[float | None]:
        """Median microseconds of each, None for those that fail."""


@dataclass(frozen=True)
class Limits:
    """When a run ends, whatever is still worth trying."""

    seconds: float = 300.0
    steps: int = 24


@dataclass(frozen=True)
class Events:
    """Where a run tells what it does; each step is stored before it is shown."""

    on_action: Callable[[int, MacroAction], None]
    on_stage: Callable[[str], None]
    on_step: Callable[[Step], None]


class GreedySearch:
    """One run over one capture."""

    def __init__(
        self,
        capture: Capture,
        source: str,
        planner: Planner,
        coder: Coder,
        measurer: Measurer,
        *,
        measured: bool,
        limits: Limits,
        events: Events,
    ) -> None:
        self._capture = capture
        self._planner = planner
        self._coder = coder
        self._measurer = measurer
        self._measured = measured
        self._limits = limits
        self._events = events
        self._root = coder.start(capture, source)
        self._best = self._root
        self._steps: list[Step] = []
        self._timing: Timing | None = None

    def run(self, run_id: str, source_hash: str, done: Sequence[Step] = ()) -> RunResult:
        """Try steps until nothing is worth trying or a limit is reached.

        Args:
            run_id: the run's name in the store.
            source_hash: of the user's file.
            done: steps of an earlier, unfinished run, which are taken over without measuring them again.
        """
        began = time.monotonic()
        for step in done:
            self._take(step)
        while len(self._steps) < self._limits.steps and time.monotonic() - began < self._limits.seconds:
            if self._fruitless() >= ENOUGH_FAILURES:
                break
            action = self._planner.propose(self._state())
            if action is None:
                break
            self._events.on_action(len(self._steps) + 1, action)
            step = self._try(action)
            self._take(step)
            self._events.on_step(step)
        return self._result(run_id, source_hash, time.monotonic() - began)

    def _state(self) -> State:
        return State(self._capture, self._best, tuple(self._steps), self._measurer.device(), self._measured)

    def _take(self, step: Step) -> None:
        self._steps.append(step)
        if step.status is StepStatus.ACCEPTED and step.candidate is not None:
            self._best, self._timing = step.candidate, step.timing or self._timing

    def _fruitless(self) -> int:
        count = 0
        for step in reversed(self._steps):
            if step.status is StepStatus.ACCEPTED:
                break
            count += 1
        return count

    # One step ----------------------------------------------------------------------------------------------------

    def _try(self, action: MacroAction) -> Step:
        index = len(self._steps) + 1
        try:
            self._events.on_stage("writing the code")
            action, candidate = self._write(action)
        except CannotCode as reason:
            return Step(index, action, StepStatus.FAILED, f"cannot be written: {reason}")
        except WorkerFailed as failure:
            return Step(index, action, StepStatus.FAILED, failure.message)
        if candidate.source == self._best.source:
            return Step(index, action, StepStatus.REJECTED, "nothing changes: the present version is the fastest")
        path = self._capture.workload.target.path.rpartition("/")[2]
        step = Step(
            index, action, StepStatus.FAILED, "", unified_diff(self._best.source, candidate.source, path), candidate
        )
        try:
            return self._judge(step, candidate)
        except WorkerFailed as failure:
            return replace(step, reason=failure.message)
        except MtmcError as error:
            return replace(step, reason=error.message)

    def _write(self, action: MacroAction) -> tuple[MacroAction, Candidate]:
        variants = action.params.get("variants")
        if action.kind is not ActionKind.AUTOTUNE or not isinstance(variants, (list, tuple)):
            return action, self._coder.write(self._capture, self._best, action)
        self._events.on_stage(f"measuring {len(variants)} configurations")
        choices: list[tuple[MacroAction, Candidate]] = [(action, self._best)]
        for params in variants:
            choice = replace(action, params={**params, "variants": variants})
            try:
                choices.append((choice, self._coder.write(self._capture, self._best, choice)))
            except CannotCode:
                continue
        ranker: Ranker = self._measurer  # type: ignore[assignment]  # only planned for where steps are timed
        medians = ranker.quick([candidate for _, candidate in choices])
        ranked = [(median, i) for i, median in enumerate(medians) if median is not None]
        return choices[min(ranked)[1]] if ranked else choices[0]

    def _judge(self, step: Step, candidate: Candidate) -> Step:
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
            return replace(step, reason=verdict.reason)
        if not self._measured:
            return self._judge_unmeasured(step, verdict, report)
        self._events.on_stage("timing")
        timing = self._measurer.time(candidate, self._best)
        assert timing is not None
        return self._judge_timed(replace(step, timing=timing), timing)

    @staticmethod
    def _judge_unmeasured(step: Step, verdict: Verdict, report: CompileReport) -> Step:
        archs = ", ".join(dict.fromkeys(kernel.arch for kernel in report.kernels))
        if step.action.expected.saved_us <= 0:
            return replace(step, status=StepStatus.REJECTED, reason="verified, but the model predicts no gain")
        reason = f"verified by Triton's interpreter, compiled for {archs}; not timed: no GPU"
        return replace(step, status=StepStatus.ACCEPTED, reason=reason)

    def _judge_timed(self, step: Step, timing: Timing) -> Step:
        against = "previous" if timing.against("previous") is not None else "eager"
        ratio = timing.against(against)
        assert ratio is not None
        text = f"{ratio.ratio:.2f}x the {'previous version' if against == 'previous' else 'eager code'}"
        interval = f"{text} ({ratio.low:.2f} to {ratio.high:.2f}), {timing.median_us:.1f} us"
        if timing.roofline > 1.05:
            reason = f"faster than the memory allows ({timing.roofline:.2f} of the roofline): the measurement cannot be right"
            return replace(step, status=StepStatus.REJECTED, reason=reason)
        if ratio.low > 1.0:
            return replace(step, status=StepStatus.ACCEPTED, reason=interval)
        if ratio.ratio >= 0.9 and against == "eager" and step.action.kind is not ActionKind.AUTOTUNE:
            # A first kernel that is about as fast is a base to tune; the whole run must still be faster in the end.
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
        )

    def _status(self) -> RunStatus:
        accepted = [step for step in self._steps if step.status is StepStatus.ACCEPTED]
        if self._steps and not any(step.verdict and step.verdict.is_correct for step in self._steps):
            return RunStatus.INCORRECT
        if not accepted:
            return RunStatus.NO_GAIN
        if not self._measured:
            return RunStatus.UNMEASURED
        return RunStatus.IMPROVED if self._timing and self._timing.speed is Speed.FASTER else RunStatus.NO_GAIN
