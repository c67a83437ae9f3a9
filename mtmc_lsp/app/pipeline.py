"""The pipeline of the tool. The command line, the server and ``mtmc bench`` all run it:

    with Pipeline(target, options, events) as pipeline:
        pipeline.capture()     # the user's file  -> graph, workload, environment
        pipeline.plan()        # capture          -> actions, the best first
        pipeline.optimize()    # capture          -> run: steps that were written, compiled, verified and timed

A stage calls the stages before it, and a stage's result is computed once.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import TracebackType

from mtmc_lsp.app.backends import BUILTIN, Backends, Question
from mtmc_lsp.app.profile import profile_calls
from mtmc_lsp.app.regions.capture import capture_regions, capture_whole, workload_of
from mtmc_lsp.app.regions.runs import (
    RegionCoder,
    Written,
    accepted_code,
    continued,
    merged,
    merged_verdict,
    steps_of,
)
from mtmc_lsp.app.remote.measurer import RemoteMeasurer
from mtmc_lsp.app.remote.target import RemoteTarget
from mtmc_lsp.app.revisions.recompose import first_unverified
from mtmc_lsp.app.revisions.revise import certify, revise
from mtmc_lsp.app.run_recorder import Revision, RunConfig, RunRecorder
from mtmc_lsp.app.stored_runs import fingerprint, in_current_text, open_store, steps_to_resume
from mtmc_lsp.app.target_file import OpenTarget, check_place
from mtmc_lsp.app.verify_pair import PairOptions, prepare_pair, verify_pair
from mtmc_lsp.app.why import refuse_calls_without_kernels
from mtmc_lsp.capture.module_paths import module_name, project_root
from mtmc_lsp.capture.recorded_calls import RECORDS, find_record
from mtmc_lsp.capture.regions.runs import has_dispatch
from mtmc_lsp.codegen.coder import BuiltinCoder
from mtmc_lsp.core.action import MacroAction
from mtmc_lsp.core.device_model import DeviceModel
from mtmc_lsp.core.errors import FailureKind, Location, MtmcError, RequestError, TargetUnsupported, WorkerFailed
from mtmc_lsp.core.profile import Profile
from mtmc_lsp.core.protocols import Coder, Planner, State
from mtmc_lsp.core.results import Timing, Verdict
from mtmc_lsp.core.run import Candidate, RunResult, Step
from mtmc_lsp.core.workload import Capture, CodeRegion, TargetKind
from mtmc_lsp.llm.endpoint.client import OpenAIModel
from mtmc_lsp.llm.endpoint.recording_model import RecordingModel
from mtmc_lsp.measure.early_processes import EarlyProcesses
from mtmc_lsp.measure.foreign_candidate import ForeignVerdict
from mtmc_lsp.measure.local_measurer import LocalMeasurer, MeasureOptions
from mtmc_lsp.planners.roofline import RooflinePlanner
from mtmc_lsp.process.fork_server import ForkServer, likely_variables, sees_gpu
from mtmc_lsp.process.priority import MIN_CORES, usable_cores
from mtmc_lsp.process.project_files import FOLDER
from mtmc_lsp.search.components import Events, Limits, SearchComponents
from mtmc_lsp.search.kinds import SEARCHES
from mtmc_lsp.search.loop import watched
from mtmc_lsp.search.store import RunRecord, Store
from mtmc_lsp.source.torch_compile.use import is_compiled_in_file
from mtmc_lsp.verify.messages import ConstructRequest

PipelineMeasurer = LocalMeasurer | RemoteMeasurer
CAPTURING = "capturing the target"
"""The name of the first stage in events."""
CAPTURE_SECONDS = 180.0
LEAST_CAPTURE_SECONDS = 1.0


@dataclass(frozen=True)
class RunOptions:
    """How a pipeline runs."""

    backends: Backends = BUILTIN
    """The planner and the coder. Choosing one that asks a model is the user's consent to send it the target's code."""
    model: RecordingModel | None = None
    """Asked instead of the model that the settings and the environment name."""
    resumed: RunRecord | None = None
    """An unfinished run to continue."""
    revision: Revision | None = None
    """A decision about a step of an earlier run, which this run carries out."""
    deadline: float | None = None
    """Time of the monotonic clock at which everything ends; a run ends earlier if its budget does."""
    fresh: bool = False
    """Whether cached timings are measured again."""
    needs_sandbox: bool = False
    """Whether to refuse if candidates cannot run in a sandbox."""
    store: Path | None = None
    """The folder of the store; by default that of the target's project."""
    fork_server: ForkServer | None = None
    """Starts the workers; the caller closes it. By default the pipeline starts one."""
    captures: tuple[Capture, ...] = ()
    """The graphs of the target that are known; by default it is captured."""
    remote: RemoteTarget | None = None
    """The workers of a cluster that capture and measure instead of this machine."""


DEFAULTS, SILENT = RunOptions(), Events()


class Pipeline:
    """One target, from its file to a run's result. Owns the fork server, the capture, the measurer and the store."""

    def __init__(self, target: OpenTarget, options: RunOptions = DEFAULTS, events: Events = SILENT) -> None:
        self.target = target
        self._options, self._events = options, events
        self._deadline = options.deadline
        self._resources = ExitStack()
        self._fork_server: ForkServer | None = None
        self._branch: ForkServer | None = None
        """Starts the workers of the run: they need what the user's file imports."""
        self._early: EarlyProcesses | None = None
        """Processes that start while the target is captured."""
        self._store: Store | None = None
        self._captures: tuple[Capture, ...] = ()
        self._current = 0
        self._written: list[Written] = []
        """The accepted code of the regions that were optimised so far."""
        self._measurer: PipelineMeasurer | None = None
        self._notes: list[str] = []

    def __enter__(self) -> Pipeline:
        self._fork_server = self._options.fork_server or self._start_fork_server()
        if self._fork_server is not None and self._options.fork_server is None:
            self._resources.callback(self._fork_server.close)
        self._options.backends.prepare(self.target.settings)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # The measurer's workers are copies of the fork server: the stack closes the measurer first.
        self._resources.close()

    def kill(self) -> None:
        """End the fork servers and with them every worker, without waiting. Safe in a signal handler."""
        for fork_server in (self._branch, self._fork_server):
            if fork_server is not None:
                fork_server.kill()

    # Stages ------------------------------------------------------------------------------------------------------

    def captures(self) -> tuple[Capture, ...]:
        """The user's file -> the target's graph for its workload, from a call of the target without generated code.

        If the whole target cannot be captured, one graph for each of its regions, the largest first.

        Raises:
            MtmcError: the target has no workload, raises, or has no part that can be exported as a graph.
        """
        if not self._captures:
            self._events.on_stage(CAPTURING)
            self._captures = self._run_captures()
            self._events.on_captured(self._captures[0])
        return self._captures

    def capture(self) -> Capture:
        """The graph of the target, or of the region that is worked on.

        Raises:
            MtmcError: as for :meth:`captures`.
        """
        return self.captures()[self._current]

    def device(self) -> DeviceModel:
        """Capture -> the limits of the device that is measured on; without a GPU, that of a data sheet."""
        return self.measurer().device()

    def plan(self) -> tuple[list[MacroAction], DeviceModel]:
        """Capture -> the possible first actions, the best first, and the device they are estimated for.

        Nothing is written.
        """
        planner, actions = RooflinePlanner.of(self.target.settings), []
        for index in range(len(self.captures())):
            self.select(index)
            state = self._first_state()
            actions += planner.ranked(state)
        return sorted(actions, key=lambda action: action.expected.saved_us, reverse=True), state.device

    def first_questions(self) -> list[Question]:
        """Capture -> the messages that a model would get in the first step; nothing is sent.

        The coder's messages are those for the action that ranks highest: a model's choice is only known after it is asked.
        """
        state = self._first_state()
        return self._backends(()).first_questions(self.target.settings, state, self.target.project)

    def optimize(self) -> RunResult:
        """Capture -> a run, stored step by step: a new one, the resumed one, or the revision of an earlier one.

        Raises:
            EnvironmentNotAble: candidates cannot run in a sandbox, and ``needs_sandbox`` is set.
            FileChanged: the target of the resumed run, or what it reads, changed since the run began.
            RequestError: the resumed run began on another machine, or the revised run has no such step.
            ModelNotUsable: a model must be asked and none can be reached; the run can be resumed.
            TargetUnsupported: no kernel would run for the workload: it is on the CPU, or always records gradients.
        """
        began = self._begin()
        store, resumed = self.store(), self._options.resumed
        if self._options.revision is not None:
            return self._revise(self._options.revision)
        if resumed is not None:
            run_id, steps = resumed.id, steps_to_resume(store, resumed, self.target, self.captures())
        else:
            run_id, steps = self.begin_run(), []
        if self._options.needs_sandbox:
            # Before the first step: later, the error would only fail that step.
            self.measurer().isolation()
        model = self._open_model()
        config, known = self._run_config(), store.config(run_id, RunConfig)
        config = replace(config, based_on=known.based_on if known is not None else "")
        recorder = RunRecorder(store, run_id, config, model, first_step=len(steps) + 1)
        events = recorder.events(self._events)
        result = self._certify(run_id, steps, model, events) or self._search(run_id, steps, model, events)
        return recorder.finish(replace(result, seconds=time.monotonic() - began, notes=tuple(self._notes)))

    def keep(self, steps: Sequence[Step], run_id: str = "") -> RunResult:
        """Steps that were written elsewhere -> a run in which each was written again, verified, and timed on a GPU.

        Args:
            steps: accepted and without a verdict; the edits of a model in them are not asked for again.
            run_id: the run that they belong to; by default a new one.

        Raises:
            MtmcError: as for :meth:`optimize`.
        """
        began = self._begin()
        store, run_id = self.store(), run_id or self.begin_run()
        store.replace_steps(run_id, steps)
        recorder = RunRecorder(store, run_id, self._run_config(), None)
        search = certify(steps, self._open_components(None, steps))
        run = search.kind(self.capture(), self._source, search.components, recorder.events(self._events))
        result = run.run(run_id, self.target.source_hash, search.steps)
        return recorder.finish(replace(result, seconds=time.monotonic() - began, notes=tuple(self._notes)))

    def verify_file(self) -> Verdict:
        """Capture -> whether the file as it is, generated code included, computes what the user's code computes."""
        verdicts = []
        for index in self._with_dispatch():
            self.select(index)
            measurer = self.measurer()
            self._events.on_stage("verifying")
            verdicts.append(measurer.verify(self._file_as_candidate()))
        return merged_verdict(verdicts)

    def time_file(self) -> Timing | None:
        """Capture -> the time of the file as it is, generated code included; None without a GPU.

        Of a target with regions, the time of the largest region that has generated code.
        """
        self.select(self._with_dispatch()[0])
        measurer = self.measurer()
        self._events.on_stage("timing")
        return measurer.time_with_baselines(self._file_as_candidate(), None, None)

    def profile(self, ncu: str = "") -> tuple[Profile, DeviceModel]:
        """Capture -> where the time of a call of the file as it is goes, and the device's limits.

        Args:
            ncu: path of Nsight Compute, which then counts each kernel's bytes; empty for torch's profiler alone.
        """
        capture, device = self.capture(), self.device()
        self._events.on_stage("profiling")
        return profile_calls(self.target, capture, device, ncu=ncu), device

    def verify_candidate(self, candidate: OpenTarget, options: PairOptions) -> ForeignVerdict:
        """Capture -> whether any other ``candidate`` computes what the target computes.

        Raises:
            EnvironmentNotAble: ``compute-sanitizer`` is asked for, and there is no GPU or no such program.
            TargetUnsupported: the target keeps state between calls.
        """
        prepared = prepare_pair(self.target, candidate, options)
        return verify_pair(
            prepared,
            self.capture(),
            self._fork_server,
            needs_sandbox=self._options.needs_sandbox,
            fresh=self._options.fresh,
            on_case=lambda case: self._events.on_stage(case.label),
        )

    @property
    def baseline(self) -> str:
        """The baseline that a version must beat to be delivered."""
        setting = self.target.settings.baseline
        if setting != "current":
            return setting
        record = find_record(self.target.definition, self.target.project / FOLDER / RECORDS)
        in_calls = record is not None and record.is_compiled
        return "compile" if in_calls or is_compiled_in_file(self._source, self.target.qualname) else "eager"

    # Resources ---------------------------------------------------------------------------------------------------

    def store(self) -> Store:
        """The store of runs, opened at the first use."""
        if self._store is None:
            folder = self._options.store
            store = Store(folder) if folder is not None else open_store(self.target.path)
            self._store = self._resources.enter_context(store)
        return self._store

    def measurer(self) -> PipelineMeasurer:
        """What compiles, verifies and times candidates of the target, opened at the first use."""
        if self._measurer is None:
            self._measurer = self._open_measurer(self.capture())
            self._resources.callback(self._close_measurer)
        return self._measurer

    # Tests replace the next four.

    def _start_fork_server(self) -> ForkServer | None:
        if self._options.remote is not None:
            return None
        # It imports what workers need while the file is read and the workload is built.
        fork_server = ForkServer(self.target.python, likely_variables(), preload=True)
        fork_server.start()
        return fork_server

    def _run_capture(self) -> Capture:
        # A branch has the imports of the file, which take seconds of each process that makes them itself.
        return capture_whole(self.target, self._branch or self._fork_server, self._capture_seconds())

    def _open_measurer(self, capture: Capture) -> PipelineMeasurer:
        if self._options.remote is not None:
            return RemoteMeasurer(self._options.remote, self.captures(), self._current, self._deadline)
        settings = self.target.settings
        options = MeasureOptions(
            archs=settings.archs,
            precision=settings.precision,
            baselines=settings.compiled_baselines,
            compile_decides=self.baseline != "eager",
            deadline=self._deadline,
            fresh=self._options.fresh,
            needs_sandbox=self._options.needs_sandbox,
        )
        whole = workload_of(self.target) if capture.workload.target.region is not None else None
        # The measurer of the first region takes them, unless the target is on the CPU.
        early, self._early = self._early, None
        measurer = LocalMeasurer(
            capture,
            self.target.python,
            options,
            source=self._source,
            fork_server=self._branch or self._fork_server,
            whole=whole,
            early=early,
        )
        if early is not None:
            early.close()
        return measurer

    def _open_backends(self, model: RecordingModel | None, steps: Sequence[Step]) -> tuple[Planner, Coder]:
        backends, settings = self._backends(steps), self.target.settings
        planner, coder = backends.open(settings, model, self.capture(), steps, self.device(), self._note)
        return planner, RegionCoder(coder, self._written) if self._written else coder

    def _note(self, note: str) -> None:
        """Tell the user something about the run, once."""
        if note not in self._notes:
            self._notes.append(note)
            self._events.on_note(note)

    def _begin(self) -> float:
        """Prepare a run: its end, the workers, the store and the capture. Returns the time of the clock before."""
        began = time.monotonic()
        end = began + self.target.settings.budget_seconds
        self._deadline = end if self._deadline is None else min(end, self._deadline)
        if self._fork_server is not None:
            # It imports what the file imports while the target is captured.
            self._branch = self._fork_server.branch(str(self.target.path), str(self.target.project))
            self._resources.callback(self._branch.close)
            self._start_early(self._branch)
        check_place(self.target)
        # Before the capture, so that a store that cannot be written is reported at once.
        self.store()
        refuse_calls_without_kernels(self.target, self.capture())
        return began

    def _start_early(self, fork_server: ForkServer) -> None:
        """Start the processes that need a GPU beside the capture, if this machine seems to have one."""
        if self._options.captures or self._captures or fork_server.env or not sees_gpu():
            return
        root = str(project_root(self.target.path))
        self._early = EarlyProcesses(self.target.python, root, fork_server, self._early_module())
        self._resources.callback(self._early.close)

    def _early_module(self) -> ConstructRequest | None:
        """How to construct the target's module on the GPU; None without a workload, which the capture reports.

        Also None on few cores: the run waits for the capture, which needs them.
        """
        if len(usable_cores()) < MIN_CORES:
            return None
        try:
            workload = workload_of(self.target)
        except MtmcError:
            return None
        if workload.device != "cuda":
            return None
        return ConstructRequest(workload, self._source, module_name(Path(workload.target.path)))

    # Parts of stages ---------------------------------------------------------------------------------------------

    def _backends(self, steps: Sequence[Step]) -> Backends:
        """The planner and the coder after ``steps``. Regions are written by the built-in coder."""
        backends, is_region = self._options.backends.after(steps), self.capture().workload.target.region is not None
        return replace(backends, coder=BUILTIN.coder) if is_region else backends

    def _run_captures(self) -> tuple[Capture, ...]:
        if self._options.captures:
            return self._options.captures
        if self._options.remote is not None:
            return self._options.remote.captures(self._capture_seconds())
        try:
            return self._whole_or_regions()
        except WorkerFailed as error:
            is_late = self._deadline is not None and time.monotonic() >= self._deadline
            if error.kind is not FailureKind.TIMEOUT or not is_late:
                raise
            definition = self.target.definition
            raise WorkerFailed(
                f"the budget of {self.target.settings.budget_seconds:g} s ended before {definition.qualname} was captured",
                where=Location(str(self.target.path), definition.start_line),
                remedy="Give more time with --budget, or make the sizes in the workload smaller.",
                kind=FailureKind.DEADLINE,
            ) from error

    def _whole_or_regions(self) -> tuple[Capture, ...]:
        try:
            return (self._run_capture(),)
        except TargetUnsupported as error:
            if self.target.definition.kind is TargetKind.KERNEL or error.kind is FailureKind.NO_TENSORS:
                raise
            self._events.on_stage("capturing parts of the target")
            return capture_regions(self.target, self._branch or self._fork_server, self._capture_seconds(), error)

    def _capture_seconds(self) -> float:
        if self._deadline is None:
            return CAPTURE_SECONDS
        return max(LEAST_CAPTURE_SECONDS, min(CAPTURE_SECONDS, self._deadline - time.monotonic()))

    def select(self, index: int) -> None:
        """Work on another region."""
        if index != self._current:
            self._close_measurer()
            self._current = index
            self._events.on_captured(self.capture())

    def _close_measurer(self) -> None:
        if self._measurer is not None:
            self._measurer.close()
            self._measurer = None

    def _with_dispatch(self) -> list[int]:
        """The captures whose code is in the file; all if none is, or if the whole target was captured."""
        targets = [capture.workload.target for capture in self.captures()]
        text = self.target.text.decode()
        definition = self.target.definition
        chosen = [i for i, item in enumerate(targets) if item.region and has_dispatch(definition, item.region, text)]
        return chosen or list(range(len(targets)))

    def _search(self, run_id: str, steps: Sequence[Step], model: RecordingModel | None, events: Events) -> RunResult:
        """Optimise the target, or its regions one after the other.

        Args:
            steps: those of a resumed run.
        """
        captures, count = self.captures(), 0
        results: list[tuple[CodeRegion | None, RunResult]] = []
        for index in range(len(captures)):
            self.select(index)
            region = self.capture().workload.target.region
            done, further = list(steps), events
            if len(captures) > 1 and region is not None:
                done, further = steps_of(steps, region.number), continued(events, region.number, count)
            components = self._open_components(model, done)
            limits = replace(components.limits, seconds=components.limits.seconds / (len(captures) - index))
            if len(steps) > count + len(done):
                # The resumed run had finished this region.
                limits = replace(limits, steps=len(done))
            kind = SEARCHES[self.target.settings.search]
            search = kind(self.capture(), self._source, replace(components, limits=limits), further)
            result = search.run(run_id, self.target.source_hash, done)
            results.append((region, result))
            self._written += accepted_code(result, region)
            count += len(result.steps)
        return merged(results, self._source)

    @property
    def _source(self) -> str:
        return self.target.plain.decode()

    def _first_state(self) -> State:
        capture, measurer = self.capture(), self.measurer()
        root = BuiltinCoder().start(capture, self._source)
        return State(capture, root, (), measurer.device(), measurer.has_gpu, partial(watched, measurer, root))

    def _file_as_candidate(self) -> Candidate:
        return Candidate("current", None, None, self.target.whole.decode(), None, None)

    def _open_model(self) -> RecordingModel | None:
        """The model to ask; None if neither the planner nor the coder asks one. Nothing is sent yet."""
        if self._options.model is not None or not self._options.backends.ask_a_model:
            return self._options.model
        deadline = self._deadline if self._deadline is not None else float("inf")
        return OpenAIModel(self.target.settings.llm, self.target.project, deadline=deadline)

    def _open_components(self, model: RecordingModel | None, steps: Sequence[Step]) -> SearchComponents:
        """The parts of a search; the edits of ``steps`` by a model are known to the coder."""
        settings, measurer = self.target.settings, self.measurer()
        if isinstance(measurer, LocalMeasurer):
            measurer.prepare_first_step()
        planner, coder = self._open_backends(model, steps)
        seconds = settings.budget_seconds if self._deadline is None else self._deadline - time.monotonic()
        limits = Limits(max(0.0, seconds), settings.max_steps)
        plans_ahead = not self._backends(steps).ask_a_model
        return SearchComponents(planner, coder, measurer, measurer.has_gpu, limits, self.baseline, plans_ahead)

    def _run_config(self) -> RunConfig:
        backends, revision = self._options.backends, self._options.revision
        return RunConfig(
            backends.planner,
            backends.coder,
            self.target.settings,
            self.target.plain_hash,
            revision,
            fingerprint(self.target, self.captures()),
            self.captures(),
            self.device(),
        )

    def begin_run(self) -> str:
        """Store a new run, with how it was started; returns its id."""
        environment = self.capture().environment
        run = self.store().begin(str(self.target.path), self.target.qualname, self.target.source_hash, environment)
        self.store().add_config(run, self._run_config())
        return run

    def _certify(
        self, run_id: str, steps: Sequence[Step], model: RecordingModel | None, events: Events
    ) -> RunResult | None:
        """Verify the steps that were written again after a step was removed; None if there are none."""
        if first_unverified(steps) == len(steps):
            return None
        search = certify(steps, self._open_components(model, steps))
        run = search.kind(self.capture(), self._source, search.components, events)
        return run.run(run_id, self.target.source_hash, search.steps)

    def _revise(self, revision: Revision) -> RunResult:
        """Repeat a run with one step undone or replaced, as a new run.

        Raises:
            RequestError: the run optimised several regions.
        """
        if len(self.captures()) > 1:
            raise RequestError(
                f"run {revision.run} optimised several regions, so a step in it cannot be changed",
                where=Location(str(self.target.path), self.target.definition.start_line),
                remedy="Discard the last step, or start a new run.",
            )
        steps = in_current_text(self.store().steps(revision.run), self.target, self.capture())
        model = self._open_model()
        kind = SEARCHES[self.target.settings.search]
        search = revise(steps, revision, self._open_components(model, steps), kind)
        run_id = self.begin_run()
        recorder = RunRecorder(self.store(), run_id, self._run_config(), model)
        events = recorder.events(self._events, store_replayed=True)
        run = search.kind(self.capture(), self._source, search.components, events)
        result = run.run(run_id, self.target.source_hash, search.steps)
        return recorder.finish(replace(result, notes=tuple(self._notes)))
