"""Optimises the kernels of a file by edits of its source: each is observed, compiled, verified, and timed on a GPU."""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from mtmc_lsp.core.action import ActionKind, Expected, MacroAction
from mtmc_lsp.core.device_model import DeviceModel
from mtmc_lsp.core.errors import FailureKind, MtmcError
from mtmc_lsp.core.results import CompileReport, KernelReport, Ratio, Timing, Verdict, VerdictStatus
from mtmc_lsp.core.run import ORIGINAL, Candidate, Step, StepStatus
from mtmc_lsp.kernels.actions.base import MOST_CONFIGS, Facts, Proposal
from mtmc_lsp.kernels.actions.catalogue import LAST, proposals
from mtmc_lsp.kernels.actions.tuning.autotune import alternatives
from mtmc_lsp.kernels.comparison import compared, worse
from mtmc_lsp.kernels.limits import ON_HOST, Start, decisive, hides_a_gain, is_slower, start_of
from mtmc_lsp.kernels.messages import CaseTrace, TraceCase
from mtmc_lsp.kernels.refusals import takes_the_launch
from mtmc_lsp.kernels.repairs.site import sites_of
from mtmc_lsp.source.files import unified_diff
from mtmc_lsp.source.syntax import first_error, parse, with_decorators

MOST_STEPS_TRIED = 24
COMPILE_SHARE, LEAST_CONFIGS = 0.6, 4
"""Share of the time for compiling configurations, several at a time, each for two kinds of inputs."""
LAUNCH_BOUND = "the launch takes most of it"
IN_ROWS = " in rows of calls, which the host bounds"
TUNING_SHARE = 0.4
"""Share of the time after which autotuners are tried before other edits."""
SHORT_SECONDS = 40.0
"""With less time on a GPU, they come first: a dozen configurations compile in about 10 s."""


class Tools(Protocol):
    """What the optimiser needs of the processes that run the user's code."""

    @property
    def has_gpu(self) -> bool:
        """Whether versions are timed."""

    @property
    def device(self) -> DeviceModel:
        """The GPU that versions are timed on, or planned for."""

    @property
    def triton(self) -> tuple[int, ...]:
        """Version of Triton, as (3, 4)."""

    @property
    def compile_seconds(self) -> float:
        """Time to compile the kernels as they stand once, where they ran on a GPU."""

    def observe(self, text: bytes, cases: Sequence[TraceCase]) -> Sequence[CaseTrace]:
        """Observe a text, and compare its results with those of the file as it stands; empty if it cannot be loaded.

        Of an autotuner, the first configuration runs.
        """

    def observe_configurations(self, text: bytes, cases: Sequence[TraceCase]) -> Sequence[CaseTrace]:
        """Compare the results of the other configurations of its autotuners, on a GPU."""

    def work(self, text: bytes) -> CaseTrace | None:
        """Observe a text on the workload, without comparing results; None if that is not possible."""

    def compiled(self, text: bytes, trace: CaseTrace) -> CompileReport:
        """Cross-compile the launches of a trace."""

    def verify(self, text: bytes) -> Verdict | None:
        """Compare a text with the reference by the verification engine; None if the file names no reference."""

    def time(self, text: bytes, previous: bytes | None, bound_us: float, least_us: float) -> Timing | None:
        """Time a text against the file as it stands and the version before; None without a GPU."""

    def baseline(self, bound_us: float) -> Timing | None:
        """Time the file as it stands shortly; None without a GPU."""


class Reporter(Protocol):
    """Is told about the steps of an optimisation."""

    def on_action(self, index: int, action: MacroAction) -> None:
        """A step begins."""

    def on_step(self, step: Step) -> None:
        """A step ended."""

    def on_stage(self, stage: str) -> None:
        """What is done now."""


@dataclass
class SourceOptimizer:
    """Optimises the kernels of one file."""

    path: str
    text: bytes
    """The file as it stands."""
    names: tuple[str, ...]
    """The kernels to optimise."""
    cases: tuple[TraceCase, ...]
    traces: Sequence[CaseTrace]
    """Of the file as it stands, on the cases."""
    tools: Tools
    reporter: Reporter
    seconds: float
    tries_all: bool = False
    """Whether edits that only a measurement can judge are tried without a GPU."""
    excluded: frozenset[str] = frozenset()
    """Kinds of edits that are not proposed."""
    keeps_launches: bool = False
    """Whether only the kernels are edited: the workload launches them as recorded, so edits of launches would not be observed."""
    begun: bytes | None = None
    """A version that other inputs showed to be faster; None to begin with the file as it stands."""
    steps: list[Step] = field(default_factory=list)
    end_reason: str = ""
    reports: tuple[KernelReport, ...] = ()
    """Of the kernels as they stand."""
    _compile_seconds: float = field(default=0.0, init=False)
    """Time to compile the kernels once."""
    _deadline: float = field(default=math.inf, init=False)
    _start: Start | None = field(default=None, init=False)
    """What the time of the file as it stands tells; None if it was not timed."""

    def run(self) -> bytes:
        """Try the proposals one after the other; returns the text with the accepted ones."""
        began = time.monotonic()
        self._deadline = deadline = began + self.seconds
        current, tried, failed = self.begun or self.text, set[tuple[str, str, str]](), set[tuple[str, str, str]]()
        hidden, tuned = set[tuple[str, str, str]](), set[str]()
        timing: Timing | None = None
        begun = self.begun
        while len(self.steps) < MOST_STEPS_TRIED:
            if time.monotonic() >= deadline:
                self.end_reason = "the time limit was reached"
                break
            try:
                facts = self.facts(current)
                if self._start is None and self.tools.has_gpu:
                    self._start = self._timed_start(facts)
            except MtmcError as error:
                if not self.steps:
                    raise
                # What was accepted so far stays.
                self.end_reason = error.message
                break
            if begun is not None and self.begun is None:
                # It is slower with these inputs.
                begun, current = None, self.text
                continue
            has_previous = timing is not None or self.begun is not None
            possible = proposals(facts, has_gpu=self.tools.has_gpu, tries_all=self.tries_all)
            if self.keeps_launches:
                possible = [proposal for proposal in possible if within_kernels(proposal, facts)]
            possible = [p for p in possible if not p.fallback_for or (p.name, p.kernel, p.fallback_for) in failed]
            possible = [p for p in possible if not p.follows or self._may_follow(p, hidden)]
            excluded = self.excluded | (self._start.excluded if self._start is not None else frozenset())
            is_short = self.tools.has_gpu and self.seconds < SHORT_SECONDS
            left = [p for p in possible if p.key not in tried and p.name not in excluded]
            if is_short:
                # Configurations beside those that were just chosen rarely gain, and compile for long.
                left = [p for p in left if p.name != LAST or p.kernel not in tuned]
            if is_short or time.monotonic() - began > TUNING_SHARE * self.seconds:
                # Tuning gains most often, so it comes before the other edits where the time is short.
                # If there is no time to compile several configurations, edits that compile only one come first.
                left.sort(key=lambda p: (p.name == LAST) == self._compiles_slowly())
            if self._start is not None and self._start.is_launch_bound:
                # An autotuner makes each launch longer, unless compiled versions are launched directly.
                left.sort(key=lambda p: p.name not in ON_HOST)
            following = next(iter(left), None)
            if following is None:
                self.end_reason = "no further edit is legal and promises a gain"
                if self.limit:
                    self.end_reason += f": {self.limit}"
                break
            tried.add(following.key)
            step = self._step(following, current, facts, has_previous)
            self.steps.append(step)
            self.reporter.on_step(step)
            if step.status is StepStatus.FAILED:
                failed.add(following.key)
            rival = "previous" if has_previous else "eager"
            if step.status is StepStatus.REJECTED and step.timing is not None and hides_a_gain(step.timing, rival):
                hidden.add(following.key)
            if step.status is StepStatus.ACCEPTED and step.candidate is not None:
                current, timing = step.candidate.source.encode(), step.timing
                tuned |= {following.kernel} if following.name == LAST else set()
                if following.name in ON_HOST and timing is not None:
                    # The GPU may take a larger share of the calls now.
                    self._start = start_of(timing, _memory_us(facts))
        return current

    def _may_follow(self, proposal: Proposal, hidden: Collection[tuple[str, str, str]]) -> bool:
        """Whether a direct launch is added to an autotuner that hid a gain."""
        return (proposal.name, proposal.kernel, proposal.follows) in hidden and not ON_HOST & self.excluded

    def facts(self, text: bytes) -> list[Facts]:
        """What is known about each kernel of a text."""
        self.reporter.on_stage("observing the kernels")
        trace = self.tools.work(text)
        if trace is None:
            return []
        reports: tuple[KernelReport, ...] = ()
        if self.tools.has_gpu:
            # The kernels were compiled for the GPU when they ran there.
            self._compile_seconds = max(self._compile_seconds, self.tools.compile_seconds)
        else:
            self.reporter.on_stage("compiling")
            report = self.tools.compiled(text, trace)
            reports = report.kernels
        if text == self.text:
            self.reports = reports
        return [
            Facts(
                site,
                tuple(access for access in trace.accesses if access.kernel == site.kernel.name),
                tuple(work for work in trace.launches if work.launch.kernel == site.kernel.name),
                tuple(report for report in reports if report.kernel == site.kernel.name),
                self.tools.device,
                self.tools.has_gpu,
                self.tools.triton,
                self._most_configs(),
            )
            for site in sites_of(self.path, text, self.names)
        ]

    @property
    def limit(self) -> str:
        """What bounds the file as it stands, so that kinds of edits are not tried; empty if nothing is known to."""
        return self._start.limit.reason if self._start is not None and self._start.limit is not None else ""

    def _timed_start(self, facts: Sequence[Facts]) -> Start:
        """Time the file as it stands once, or the version to begin with, so that edits that gain nothing are not tried."""
        self.reporter.on_stage("timing")
        bound = sum(each.bound_us for each in facts)
        try:
            timing = self.tools.baseline(bound) if self.begun is None else self.tools.time(self.begun, None, bound, 0.0)
        except MtmcError as error:
            if error.kind is FailureKind.CANCELLED:
                raise
            # Each edit is timed all the same.
            timing = None
            if self.begun is not None:
                self._drop_begun(None, error.message)
        if self.begun is not None and timing is not None and is_slower(timing, "eager"):
            self._drop_begun(timing, _slower(timing, "eager"))
        return start_of(timing, _memory_us(facts)) if timing is not None else Start()

    def _drop_begun(self, timing: Timing | None, problem: str) -> None:
        """Begin with the file as it stands after all."""
        self.begun = None
        status = StepStatus.FAILED if timing is None else StepStatus.REJECTED
        reason = f"with the largest inputs: {problem}"
        self.steps[:] = [
            replace(step, status=status, timing=timing, reason=reason) if step.status is StepStatus.ACCEPTED else step
            for step in self.steps
        ]

    def _most_configs(self) -> int:
        """The configurations that can be compiled for the test and for the timed inputs in the time that is left."""
        return max(LEAST_CONFIGS, min(MOST_CONFIGS, self._affordable_configs()))

    def _affordable_configs(self) -> int:
        left = self._deadline - time.monotonic()
        if not self.tools.has_gpu or not self._compile_seconds:
            return MOST_CONFIGS
        return int(COMPILE_SHARE * left / self._compile_seconds)

    def _compiles_slowly(self) -> bool:
        """Whether an autotuner cannot be compiled in the time that is left."""
        return self._affordable_configs() < LEAST_CONFIGS

    # Parts -----------------------------------------------------------------------------------------------------------

    def _step(self, proposal: Proposal, current: bytes, facts: Sequence[Facts], has_previous: bool) -> Step:
        index = len(self.steps) + 1
        action = _action(proposal)
        self.reporter.on_action(index, action)
        text = proposal.applied(current)
        base = hashlib.sha256(current).hexdigest()[:12]
        source = text.decode()
        step = Step(index, action, StepStatus.FAILED, "", unified_diff(current.decode(), source, _name(self.path)))
        step = replace(step, base=base if current != self.text else "")
        if first_error(parse(text)) is not None:
            return replace(step, reason="the edited file has a syntax error", failure=FailureKind.COMPILE_ERROR)
        candidate = Candidate(
            hashlib.sha256(text).hexdigest()[:12], base, action, source, None, {ORIGINAL: self.text.decode()}
        )
        step = replace(step, candidate=candidate)
        try:
            # Most versions are not faster, and a timing needs one compilation, but the cases may need several.
            step = self._timed(step, text, current if has_previous else None, facts)
            if step.status is StepStatus.REJECTED:
                return step
            return self._judged(step, proposal, current, text, facts)
        except MtmcError as error:
            return replace(step, status=StepStatus.FAILED, timing=None, reason=error.message, failure=error.kind)

    def _judged(self, step: Step, proposal: Proposal, current: bytes, text: bytes, facts: Sequence[Facts]) -> Step:
        """A step that was timed, or cannot be, after its verification."""
        self.reporter.on_stage("observing the edited kernels")
        failed = replace(step, status=StepStatus.FAILED, timing=None)
        texts = [text]
        if proposal.name == LAST and not self.tools.has_gpu:
            # A GPU runs each configuration.
            texts += alternatives(proposal, current)
        verdict = None
        for version in texts:
            traces = self.tools.observe(version, self.cases)
            verdict = compared(self.traces, traces)
            if not verdict.is_correct:
                return replace(failed, verdict=verdict, reason=verdict.reason)
        # On a GPU the version has run already, and its time tells more than the compiler's statistics.
        work = None if self.tools.has_gpu else self.tools.work(text)
        if work is not None:
            self.reporter.on_stage("compiling")
            report = self.tools.compiled(text, work)
            step, failed = replace(step, report=report), replace(failed, report=report)
            problem = worse(report, _known(facts))
            if problem:
                return replace(step, verdict=verdict, status=StepStatus.REJECTED, reason=problem)
        self.reporter.on_stage("verifying")
        engine = self.tools.verify(text)
        if engine is not None and not engine.is_correct:
            return replace(failed, verdict=engine, reason=engine.reason)
        if step.timing is not None:
            others = compared(self.traces, self.tools.observe_configurations(text, self.cases))
            if others.status is VerdictStatus.INCORRECT:
                return replace(failed, verdict=others, reason=others.reason)
        return replace(step, verdict=engine or verdict)

    def _timed(self, step: Step, text: bytes, previous: bytes | None, facts: Sequence[Facts]) -> Step:
        """A step with its time: accepted, as far as the time decides, or rejected."""
        bound = sum(each.bound_us for each in facts)
        # Results may still be in the cache when the clock stops.
        # The work of a sample of programs is an estimate, so it says nothing certain.
        moved = sum(each.least_bytes for each in facts if all(work.ran == work.programs for work in each.launches))
        device = self.tools.device
        ceiling = max(1.15 * device.bandwidth, device.peak_bandwidth)
        least = 1e6 * max(0.0, moved - 2.0 * device.l2_bytes) / ceiling
        self.reporter.on_stage("timing")
        timing = self.tools.time(text, previous, bound, least)
        if timing is None:
            reason = "verified and compiled; not timed, because there is no GPU"
            return replace(step, status=StepStatus.ACCEPTED, reason=reason)
        rival = "previous" if previous is not None else "eager"
        judged = decisive(timing, rival)
        ratio = judged.against(rival) if judged is not None else None
        if judged is not None and ratio is not None:
            reason = f"{ratio.ratio:.2f}x as fast as before" + ("" if judged is timing else IN_ROWS)
            return replace(step, status=StepStatus.ACCEPTED, timing=judged, reason=reason)
        return replace(step, status=StepStatus.REJECTED, timing=timing, reason=_slower(timing, rival))


def within_kernels(proposal: Proposal, facts: Sequence[Facts]) -> bool:
    """Whether a proposal edits nothing but definitions of kernels."""
    nodes = [with_decorators(each.site.kernel.node) for each in facts]
    return all(any(n.start_byte <= edit.start and edit.end <= n.end_byte + 1 for n in nodes) for edit in proposal.edits)


def _memory_us(facts: Sequence[Facts]) -> float:
    """Time to move the bytes that kernels must move."""
    return sum(each.memory_us(each.least_bytes) for each in facts)


def _known(facts: Sequence[Facts]) -> dict[tuple[str, str], KernelReport]:
    return {(report.kernel, report.arch): report for each in facts for report in each.reports}


def _slower(timing: Timing, rival: str) -> str:
    """Why a version is rejected by its time, with the numbers."""
    ratio = timing.against(rival)
    if ratio is None:
        return "it is not faster than before"
    reason = f"it is not faster than before: {_times(timing, ratio)}"
    in_rows = timing.rows.against(rival) if timing.rows is not None else None
    if timing.rows is not None and in_rows is not None:
        reason += f"; {_times(timing.rows, in_rows)}{IN_ROWS}"
    return reason + (f", and {LAUNCH_BOUND}" if takes_the_launch(timing) else "")


def _times(timing: Timing, ratio: Ratio) -> str:
    return f"{timing.median_us:.1f} us, {ratio.ratio:.2f}x as fast ({ratio.low:.2f}x to {ratio.high:.2f}x)"


def _action(proposal: Proposal) -> MacroAction:
    expected = Expected(proposal.saved_us, proposal.bytes_before, proposal.bytes_after)
    params: dict[str, object] = {"change": proposal.name, "kernel": proposal.kernel}
    if proposal.condition:
        params["condition"] = proposal.condition
    return MacroAction(
        ActionKind.EDIT,
        (proposal.kernel,),
        (proposal.line, proposal.line),
        params,
        proposal.rationale,
        expected,
        f"{proposal.title} in {proposal.kernel}",
    )


def _name(path: str) -> str:
    return path.rpartition("/")[2]
