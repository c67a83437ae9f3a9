"""``mtmc evolve``: from a target to an evolution that is stored generation by generation, and at its end verified as a run."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field, replace

from mtmc_lsp.app.backends import Backends
from mtmc_lsp.app.pipeline import Pipeline, RunOptions
from mtmc_lsp.app.remote.target import RemoteTarget
from mtmc_lsp.app.stored_runs import open_store
from mtmc_lsp.app.target_file import OpenTarget
from mtmc_lsp.app.why import refuse_calls_without_kernels
from mtmc_lsp.capture.recorded_calls import RECORDS, find_record
from mtmc_lsp.codegen.coder import BuiltinCoder
from mtmc_lsp.core.device_model import DeviceModel
from mtmc_lsp.core.protocols import State
from mtmc_lsp.core.run import KEPT, Candidate, Placement, RunResult
from mtmc_lsp.core.workload import Capture
from mtmc_lsp.device.choice import planning_model
from mtmc_lsp.evolve.evolution import Evolution, Limits, Parts, Progress
from mtmc_lsp.evolve.keeping import keep_best, seconds_for, steps_of
from mtmc_lsp.evolve.knowledge.base import KnowledgeBase, notes
from mtmc_lsp.evolve.knowledge.lessons import LessonFile, lessons_of_lineage, preferred_kinds
from mtmc_lsp.evolve.knowledge.past_runs import all_lessons
from mtmc_lsp.evolve.lineage import Generation, Lineage, Operator, Setup, Spent, Version
from mtmc_lsp.evolve.local_runner import Here, LocalRunner
from mtmc_lsp.evolve.operators.agent import AgentOperator
from mtmc_lsp.evolve.operators.base import VaryingOperator
from mtmc_lsp.evolve.operators.catalogue import PLANNING_SECONDS, CatalogueOperator
from mtmc_lsp.evolve.operators.tools import Workshop
from mtmc_lsp.evolve.remote_runner import RemoteRunner
from mtmc_lsp.evolve.start import accepted_steps, best_stored, start_versions
from mtmc_lsp.evolve.stored import resumable, storing, whole_capture
from mtmc_lsp.evolve.supervisor import Supervisor
from mtmc_lsp.evolve.trials import TrialRunner
from mtmc_lsp.evolve.workloads import Workloads, workloads_of
from mtmc_lsp.explore.choices import RooflineActions
from mtmc_lsp.llm.endpoint.client import OpenAIModel, model_name
from mtmc_lsp.planners.roofline import RooflinePlanner
from mtmc_lsp.process.fork_server import ForkServer, likely_variables
from mtmc_lsp.process.project_files import FOLDER
from mtmc_lsp.search.components import Events
from mtmc_lsp.search.store import RunRecord

DEFAULT_ISLANDS, MOST_ISLANDS = 2, 16
MARGIN_SECONDS = 120.0
"""Time that the last generation may take after the time is over."""


@dataclass(frozen=True)
class Plan:
    """How an evolution is started, or resumed."""

    limits: Limits
    operator: str = "catalogue"
    islands: int = 0
    """0 for the default: :data:`DEFAULT_ISLANDS`, or one for each worker of a cluster if that is more."""
    seed: int = 0
    model: str = ""
    """The language model of the command line; empty for that of the environment and the settings."""
    needs_sandbox: bool = False
    """Whether to refuse if versions cannot run in a complete sandbox."""


@dataclass(frozen=True)
class Evolved:
    """What an evolution delivers."""

    run: str
    setup: Setup
    lineage: Lineage
    result: RunResult
    learned: int
    """Lessons that were written back; 0 if the file cannot be written."""


@dataclass(frozen=True)
class Callbacks:
    """What is reported while an evolution goes on."""

    events: Events = field(default_factory=Events)
    """Of the runs at the start and at the end."""
    progress: Progress = field(default_factory=Progress)
    on_begin: Callable[[str, Setup, Lineage], None] = lambda run, setup, lineage: None
    """Called with the id of the run and what it starts from."""


@dataclass(frozen=True)
class _Ended:
    """An evolution after its last generation."""

    run: str
    setup: Setup
    lineage: Lineage
    capture: Capture
    device: DeviceModel


MakeRunner = Callable[[Here, Pipeline], TrialRunner]
"""Makes what tries versions."""


def run_here(here: Here, pipeline: Pipeline) -> TrialRunner:
    """What tries versions on this machine."""
    return LocalRunner(here, pipeline.measurer())


def run_on(remote: RemoteTarget) -> MakeRunner:
    """A function that creates the runner of trials on the workers of a cluster."""

    def make(here: Here, pipeline: Pipeline) -> TrialRunner:
        return RemoteRunner(remote, here, pipeline.measurer())

    return make


class EvolutionRun:
    """One evolution of a target: a new one, or one to resume."""

    def __init__(
        self,
        target: OpenTarget,
        plan: Plan,
        callbacks: Callbacks,
        *,
        resumed: RunRecord | None = None,
        remote: RemoteTarget | None = None,
        make_runner: MakeRunner | None = None,
    ) -> None:
        """Prepare.

        Args:
            resumed: the unfinished run to continue.
            remote: the workers of a cluster that capture and measure; by default this machine does.
            make_runner: makes what tries versions, instead of those.
        """
        self._remote = remote
        workers = remote.count if remote is not None else 1
        islands = plan.islands or min(MOST_ISLANDS, max(DEFAULT_ISLANDS, workers))
        self.target, self._plan, self._callbacks = target, replace(plan, islands=islands), callbacks
        self._resumed = resumed
        self._make_runner = make_runner or (run_here if remote is None else run_on(remote))
        self._resources = ExitStack()
        self._fork_server: ForkServer | None = None

    def run(self) -> Evolved:
        """Evolve, verify the best version as a whole, store it as the run's result, and write back what was learned.

        Raises:
            TargetUnsupported: the target cannot be captured.
            RequestError: only parts of the target can be captured, or the resumed run began elsewhere.
            FileChanged: the file changed since the resumed run began.
            ModelNotUsable: a model must be asked and none can be reached; the run can be resumed.
        """
        with self._resources:
            self._fork_server = self._start_fork_server()
            if self._fork_server is not None:
                self._resources.callback(self._fork_server.close)
            ended = self._evolve()
            lineage, result = self._keep_best(ended)
            run, setup = ended.run, ended.setup
            project, gpu = str(self.target.project), setup.device if setup.has_gpu else ""
            lessons = lessons_of_lineage(lineage, ended.capture.graph, run=run, project=project, gpu=gpu)
            is_written = LessonFile().write_back(run, lessons)
            return Evolved(run, setup, lineage, result, len(lessons) if is_written else 0)

    # Parts ------------------------------------------------------------------------------------------------------

    def _start_fork_server(self) -> ForkServer | None:
        if self._remote is not None:
            return None
        fork_server = ForkServer(self.target.python, likely_variables(), preload=True)
        fork_server.start()
        return fork_server

    def _pipeline(self, budget: float = 0.0, deadline: float | None = None) -> Pipeline:
        """A pipeline with the common fork server.

        Args:
            budget: seconds for a run, instead of those of the settings.
        """
        request = self.target.request
        if budget:
            request = replace(request, settings=replace(request.settings, budget_seconds=budget))
        options = RunOptions(
            fork_server=self._fork_server,
            deadline=deadline,
            needs_sandbox=self._plan.needs_sandbox,
            remote=self._remote,
        )
        return Pipeline(replace(self.target, request=request), options, self._callbacks.events)

    def _start(self) -> RunResult | None:
        """The run with the best stored version, or else a new one; ``None`` if that kept nothing."""
        with self._pipeline() as pipeline:
            capture = whole_capture(pipeline, self.target)
            refuse_calls_without_kernels(self.target, capture)
            stored = best_stored(pipeline.store(), self.target, capture)
            if stored is not None:
                return stored
            result = pipeline.optimize()
            return result if result.status in KEPT else None

    def _evolve(self) -> _Ended:
        """Make generations until a limit is reached."""
        start = self._start() if self._resumed is None else None
        deadline = time.monotonic() + self._plan.limits.seconds + MARGIN_SECONDS
        with self._pipeline(deadline=deadline) as pipeline:
            capture, store = whole_capture(pipeline, self.target), pipeline.store()
            if self._plan.needs_sandbox:
                # Before the first generation: later, the error would only fail its versions.
                pipeline.measurer().isolation()
            source, settings = self.target.plain.decode(), self.target.settings
            stored = resumable(store, self._resumed, self.target, capture) if self._resumed is not None else None
            record = find_record(self.target.definition, self.target.project / FOLDER / RECORDS)
            workloads = workloads_of(capture, record) if stored is None else Workloads(stored[0].workloads)
            arch = planning_model(settings.archs).arch
            here = Here(
                capture,
                source,
                self.target.python,
                (arch,),
                workloads,
                deadline,
                self._fork_server,
                self._plan.needs_sandbox,
            )
            with closing(self._make_runner(here, pipeline)) as runner:
                run, setup, lineage = (
                    (self._resumed.id, *stored)
                    if stored is not None and self._resumed is not None
                    else self._begin(pipeline, runner, workloads, start)
                )
                self._callbacks.on_begin(run, setup, lineage)
                parts = Parts(
                    setup,
                    self._operators(setup, pipeline, runner, run),
                    runner,
                    Supervisor(setup.kinds),
                    storing(store, run),
                    self._plan.limits,
                    self._callbacks.progress,
                )
                return _Ended(run, setup, Evolution(parts, lineage).run(), capture, runner.device())

    def _begin(
        self, pipeline: Pipeline, runner: TrialRunner, workloads: Workloads, start: RunResult | None
    ) -> tuple[str, Setup, Lineage]:
        """Store a new evolution with its first versions."""
        store, capture = pipeline.store(), pipeline.capture()
        gpu = runner.device().name if runner.has_gpu else ""
        place = Placement(self.target.settings.place)
        root = BuiltinCoder(runner.device(), place).start(capture, self.target.plain.decode())
        root = replace(root, dependencies=capture.graph.dependencies)
        steps = accepted_steps(start, self.target, capture) if start is not None else []
        versions = [root, *(step.candidate for step in steps[-1:] if step.candidate is not None)]
        paid = preferred_kinds(LessonFile().load(), gpu)
        legal = self._legal_kinds(capture, versions, runner.device())
        kinds = tuple(sorted(legal, key=lambda kind: (paid.index(kind) if kind in paid else len(paid), kind)))
        setup = self._setup(workloads, runner, start, kinds)
        began = time.monotonic()
        first_versions = start_versions(root, steps, runner, setup)
        first = Generation(0, (), Spent(time.monotonic() - began))
        run = pipeline.begin_run()
        store.add_evolution(run, setup)
        storing(store, run)(first, first_versions)
        return run, setup, Lineage(tuple(first_versions), (first,))

    def _setup(
        self, workloads: Workloads, runner: TrialRunner, start: RunResult | None, kinds: tuple[str, ...]
    ) -> Setup:
        plan, llm = self._plan, self.target.settings.llm
        model = (plan.model or model_name(llm, os.environ)) if plan.operator != "catalogue" else ""
        return Setup(
            plan.operator,
            plan.islands,
            plan.seed,
            workloads.points,
            runner.has_gpu,
            runner.device().name,
            model,
            plain_hash=self.target.plain_hash,
            started_from=start.id if start is not None else "",
            kinds=kinds,
            notes=workloads.notes,
        )

    def _legal_kinds(self, capture: Capture, versions: Sequence[Candidate], device: DeviceModel) -> set[str]:
        """The kinds of actions that are legal on some versions, as on a machine with a GPU."""
        planner, deadline = RooflinePlanner.of(self.target.settings), time.monotonic() + PLANNING_SECONDS
        states = [State(capture, version, (), device, True, deadline=deadline) for version in versions]
        return {action.kind.value for state in states for action in planner.ranked(state)}

    def _operators(
        self, setup: Setup, pipeline: Pipeline, runner: TrialRunner, run: str
    ) -> dict[Operator, VaryingOperator]:
        settings, capture, device = self.target.settings, pipeline.capture(), runner.device()
        place = Placement(settings.place)
        coder, ranking = BuiltinCoder(device, place), RooflinePlanner.of(settings)
        operators: dict[Operator, VaryingOperator] = {}
        if setup.operator in ("catalogue", "both"):
            planner, _ = Backends(settings.planner).without_model.open(settings, None, device=device)
            actions = RooflineActions(ranking, has_gpu=runner.has_gpu)
            operators[Operator.CATALOGUE] = CatalogueOperator(
                capture, actions=actions, planner=planner, coder=coder, device=device
            )
        if setup.operator in ("agent", "both"):
            store = pipeline.store()
            exchanges = store.exchanges(run)
            environ = {**os.environ, "MTMC_LLM_MODEL": setup.model}
            llm = replace(settings.llm, budget_seconds=max(settings.llm.budget_seconds, self._plan.limits.seconds))
            model = OpenAIModel(llm, self.target.project, environ)
            model.listen(lambda exchange: store.add_exchange(run, 0, exchange))
            model.resume(exchanges)
            entries = [*notes(), *all_lessons(self.target.project)]
            knowledge = KnowledgeBase(entries, arch=device.arch, gpu=device.name if runner.has_gpu else "")
            workshop = Workshop(capture, coder, ranking, runner, knowledge, device, place)
            operators[Operator.AGENT] = AgentOperator(
                workshop, model, llm, project=self.target.project, answered=exchanges
            )
        return operators

    def _keep_best(self, ended: _Ended) -> tuple[Lineage, RunResult]:
        """The whole verification of the best version, with its steps and its result as those of the run."""
        settings = self.target.settings
        coder = BuiltinCoder(ended.device, Placement(settings.place))

        def keep(version: Version) -> RunResult:
            steps = steps_of(ended.lineage, version.number, ended.capture, coder)
            with self._pipeline(seconds_for(steps, settings.budget_seconds)) as pipeline:
                return pipeline.keep(steps, ended.run)

        with open_store(self.target.path) as store:
            return keep_best(ended.lineage, keep, storing(store, ended.run))
