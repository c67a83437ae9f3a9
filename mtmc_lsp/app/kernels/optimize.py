"""``mtmc optimize FILE::KERNEL``: optimises kernels that are already in a file, as a run that is stored, applied and undone."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from mtmc_lsp.app.kernels.opening import KernelTarget, open_kernel
from mtmc_lsp.app.kernels.session import KernelSession
from mtmc_lsp.app.kernels.tools import KernelTools
from mtmc_lsp.app.run_recorder import RunConfig
from mtmc_lsp.app.stored_runs import open_store
from mtmc_lsp.app.target_file import OpenTarget
from mtmc_lsp.core.action import MacroAction
from mtmc_lsp.core.errors import Location, RequestError
from mtmc_lsp.core.results import KernelReport, Timing, VerdictStatus
from mtmc_lsp.core.run import SCHEMA, Final, RunResult, RunStatus, Step, StepStatus
from mtmc_lsp.core.workload import WorkloadSource
from mtmc_lsp.kernels.actions.catalogue import WHEN_IT_PAYS, excluded_kinds
from mtmc_lsp.kernels.comparison import original_fault, runs_on_a_case
from mtmc_lsp.kernels.limits import ON_HOST, decisive
from mtmc_lsp.kernels.messages import CaseTrace
from mtmc_lsp.kernels.optimizer import SourceOptimizer
from mtmc_lsp.kernels.sizes import quick_cases
from mtmc_lsp.process.fork_server import ForkServer
from mtmc_lsp.search.components import Events
from mtmc_lsp.search.outcome import is_faster, speedup_of
from mtmc_lsp.search.store import Store
from mtmc_lsp.source.files import unified_diff
from mtmc_lsp.timing.messages import SAMPLING_SECONDS

SILENT = Events()
ON_GPU_ONLY = (
    "the interpreter takes too long, so the kernels were observed on the GPU alone, without checks of their accesses"
)
LAUNCH_SHARE = 0.4
"""Share of the time in which cheaper launches are tried on the test of a file whose larger inputs are timed."""
REPAIRED = "mtmc repair shows its case and repairs it"


@dataclass
class _Reporter:
    """Stores each step before it is reported."""

    events: Events
    store: Store | None
    run_id: str
    steps: list[Step] = field(default_factory=list)

    def on_action(self, index: int, action: MacroAction) -> None:
        self.events.on_action(index, action)

    def on_stage(self, stage: str) -> None:
        self.events.on_stage(stage)

    def on_step(self, step: Step) -> None:
        if self.store is not None:
            self.store.add_step(self.run_id, step)
        self.steps.append(step)
        self.events.on_step(step)


class KernelOptimization:
    """One run on the kernels of a file."""

    def __init__(
        self,
        opened: OpenTarget,
        events: Events = SILENT,
        *,
        fresh: bool = False,
        is_stored: bool = True,
        tries_all: bool = False,
        only: Sequence[str] = (),
        target: KernelTarget | None = None,
        fork_server: ForkServer | None = None,
        compiling_server: ForkServer | None = None,
        sampling: float = SAMPLING_SECONDS,
    ) -> None:
        """Open the target.

        Args:
            fresh: whether cached timings are measured again.
            is_stored: whether the run goes to the project's store.
            tries_all: whether edits that only a measurement can judge are tried without a GPU.
            only: kinds of edits; empty for all.
            target: the kernel with its workload; None to find it in the file.
            fork_server: one with Triton's interpreter, which several runs share; None for a new one.
            compiling_server: one without it, whose workers compile at once; None for none.
            sampling: seconds for the samples of one timing.

        Raises:
            RequestError: nothing launches the kernel.
            NoWorkload: nothing in the file calls it with example inputs.
        """
        self.target: KernelTarget = target or open_kernel(opened)
        self._events, self._fresh, self._tries_all = events, fresh, tries_all
        self._is_stored = is_stored
        settings = opened.settings
        self._excluded = excluded_kinds(settings.exclude_actions, only, is_strict=settings.precision == "strict")
        self._session = KernelSession(self.target, events.on_stage, fork_server, compiling_server)
        self._sampling = sampling
        self.times_test = False
        """Whether the observed workload is timed, because the kernels do not run on the other one."""
        self.gains_in_test = False
        """Whether a version is faster in the launches of the file's test alone, and no slower with the larger inputs."""
        self._is_interpreted = True
        self.limit = ""
        """What bounds the file as it stands, so that kinds of edits were not tried."""
        self.has_gpu, self.gpu_problem = False, ""
        """Whether the file as it stands ran on a GPU, and why it does not run there."""
        self.traces: tuple[CaseTrace, ...] = ()
        """Of the file as it stands."""
        self.reports: tuple[KernelReport, ...] = ()
        """Of the kernels as they stand."""

    def kill(self) -> None:
        """End every process without waiting. Safe in a signal handler."""
        self._session.kill()

    @property
    def seconds(self) -> Mapping[str, float]:
        """Seconds of the calls to its processes, by what they do."""
        return self._session.seconds

    def run(self, seconds: float) -> RunResult:
        """Observe the kernels, and try edits until none is left or the time is over. Nothing is written to the file.

        Raises:
            MtmcError: the file cannot be loaded, or its kernels run on no case.
        """
        began = time.monotonic()
        opened = self.target.opened
        with self._session as session:
            tools = KernelTools(session, fresh=self._fresh, sampling=self._sampling, seconds=seconds)
            self._events.on_stage("observing the kernels")
            self.traces = tuple(tools.observe(opened.text, session.cases()))
            self._is_interpreted = tools.is_interpreted
            self._check_runs()
            self.gpu_problem, self.has_gpu = tools.gpu_problem, tools.has_gpu
            if tools.gpu_problem:
                raise self._refused(f"does not run on this GPU: {tools.gpu_problem}")
            cases = quick_cases(self.traces) or [trace.case for trace in self.traces]
            kept = {id(case) for case in cases}
            names = session.kernel_names(self.traces)
            environment = tools.environment
            store = open_store(opened.path) if self._is_stored else None
            try:
                run_id = (
                    store.begin(str(opened.path), opened.qualname, opened.source_hash, environment) if store else "-"
                )
                if store is not None:
                    store.add_config(run_id, RunConfig("source", "edits", opened.settings, device=tools.device))
                reporter = _Reporter(self._events, store, run_id)

                def optimizer(seconds: float, excluded: Collection[str], **options: Any) -> SourceOptimizer:
                    return SourceOptimizer(
                        str(opened.path),
                        opened.text,
                        names,
                        tuple(cases),
                        [trace for trace in self.traces if id(trace.case) in kept],
                        tools,
                        reporter,
                        max(1.0, seconds),
                        tries_all=self._tries_all,
                        excluded=self._excluded.union(excluded),
                        keeps_launches=self.target.workload.launch is not None,
                        **options,
                    )

                end = began + seconds
                first: list[Step] = []
                begun = None
                if self._has_larger_inputs():
                    # Its launches are short, so cheaper ones show there first; they take seconds to try.
                    others = WHEN_IT_PAYS.keys() - ON_HOST
                    launches = optimizer(LAUNCH_SHARE * (end - time.monotonic()), others, steps=first)
                    with tools.timing_test():
                        text = launches.run()
                    begun = text if text != opened.text else None
                tried = len(first)
                whole = optimizer(end - time.monotonic(), (), steps=first, begun=begun)
                text = whole.run()
                self.gains_in_test = whole.begun is not None and not any(map(_is_accepted, whole.steps[tried:]))
                self.reports, self.times_test = whole.reports, tools.times_test or self.gains_in_test
                self.limit = whole.limit
                result = self._result(run_id, whole, tools, text, time.monotonic() - began)
                if store is not None:
                    store.finish(result)
            finally:
                if store is not None:
                    store.close()
        return result

    # Parts -----------------------------------------------------------------------------------------------------------

    def _has_larger_inputs(self) -> bool:
        """Whether calls with larger inputs than those of the file's test are timed, on a GPU."""
        observed = self.target.observed
        return self.has_gpu and observed is not None and observed.source is WorkloadSource.SCRIPT

    def _check_runs(self) -> None:
        if runs_on_a_case(self.traces):
            return
        first = next(iter(self.traces), None)
        fault = original_fault(self.traces)
        detail = fault[1].place_and_detail if fault is not None else first.refusal if first is not None else "no case"
        raise self._refused(f"runs on none of {len(self.traces)} cases: {detail}")

    def _refused(self, problem: str) -> RequestError:
        return RequestError(
            f"{self.target.launcher.qualname} {problem}",
            where=Location(str(self.target.opened.path), self.target.launcher.start_line),
            remedy="Correct the kernel first: mtmc repair FILE::NAME.",
        )

    def _result(
        self, run_id: str, optimizer: SourceOptimizer, tools: KernelTools, text: bytes, seconds: float
    ) -> RunResult:
        opened, steps = self.target.opened, optimizer.steps
        accepted = list(filter(_is_accepted, steps))
        timing = accepted[-1].timing if accepted else None
        # Single calls or rows of calls: the comparison that shows the gain over the file as it stands.
        timing = (decisive(timing, "eager") or timing) if timing is not None else None
        status = _status(accepted, steps, timing)
        kept = text if status in (RunStatus.IMPROVED, RunStatus.UNMEASURED) else opened.text
        before, after = opened.text.decode(), kept.decode()
        final = Final(
            after,
            unified_diff(before, after, opened.path.name),
            speedup_of(timing) if timing is not None else None,
            timing.roofline if timing is not None else None,
        )
        return RunResult(
            schema=SCHEMA,
            id=run_id,
            target=opened.definition,
            workload=self.target.workload,
            environment=tools.environment,
            baselines=tuple(b for b in timing.baselines if b.name != "previous") if timing is not None else (),
            steps=tuple(steps),
            final=final,
            status=status,
            seconds=seconds,
            source_hash=opened.source_hash,
            baseline="eager",
            device=tools.device,
            end_reason=optimizer.end_reason,
            notes=tuple(self._notes()),
        )

    def _notes(self) -> list[str]:
        """The faults of the kernels as they stand, each with its smallest case."""
        notes = [] if self._is_interpreted else [ON_GPU_ONLY]
        fault = original_fault(self.traces)
        if fault is not None:
            trace, first = fault
            case = trace.case.text or "the workload"
            notes.append(f"the kernel as it stands is wrong with {case}: {first.place_and_detail}; {REPAIRED}")
        return notes


def _is_accepted(step: Step) -> bool:
    return step.status is StepStatus.ACCEPTED


def _status(accepted: list[Step], steps: list[Step], timing: Timing | None) -> RunStatus:
    if accepted:
        if timing is None:
            return RunStatus.UNMEASURED
        return RunStatus.IMPROVED if is_faster(timing, "eager") else RunStatus.NO_GAIN
    verdicts = [step.verdict for step in steps if step.verdict is not None]
    is_compared = any(verdict.status is not VerdictStatus.UNCERTIFIABLE for verdict in verdicts)
    # Versions that are not faster are not verified.
    is_timed = any(step.timing is not None for step in steps)
    is_wrong = is_compared and not is_timed and not any(verdict.is_correct for verdict in verdicts)
    return RunStatus.INCORRECT if is_wrong else RunStatus.NO_GAIN
