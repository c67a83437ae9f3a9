"""The one way in for every face of the tool: from FILE::NAME to a finished run."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from mtmc_lsp.app.backends import BUILTIN, Backends, LedgerModel, Question
from mtmc_lsp.app.interpreter import checked_python, find_python
from mtmc_lsp.app.search_components import Revision, RunConfig, RunRecorder, SearchComponents
from mtmc_lsp.capture.client import find_workload, run_capture
from mtmc_lsp.capture.module_paths import project_root
from mtmc_lsp.capture.recorded_calls import RECORDS
from mtmc_lsp.codegen.coder import BuiltinCoder
from mtmc_lsp.core.action import MacroAction
from mtmc_lsp.core.errors import FileChanged, Location, RequestError
from mtmc_lsp.core.protocols import State
from mtmc_lsp.core.results import Device
from mtmc_lsp.core.run import KEPT, RunResult, RunStatus, Step
from mtmc_lsp.core.settings import Settings, read_settings
from mtmc_lsp.core.workload import Capture, Target
from mtmc_lsp.llm.endpoint.client import OpenAIModel
from mtmc_lsp.llm.endpoint.stored_answers import ReplayedModel
from mtmc_lsp.measure.local_measurer import LocalMeasurer, MeasureOptions
from mtmc_lsp.planners.roofline import RooflinePlanner
from mtmc_lsp.process.fork_server import ForkServer, likely_variables
from mtmc_lsp.process.worker_process import Worker
from mtmc_lsp.search.greedy import Events, GreedySearch, Limits, watched
from mtmc_lsp.search.store import RunRecord, Store
from mtmc_lsp.source.compose import strip_generated, write_if_unchanged
from mtmc_lsp.source.targets import find_target

CAPTURE_SECONDS = 180.0


@dataclass(frozen=True)
class Request:
    """What the user asked for."""

    path: Path
    name: str
    settings: Settings
    python: str


@dataclass(frozen=True)
class OpenTarget:
    """A file as read, and the target in it."""

    request: Request
    text: bytes
    target: Target

    @property
    def source_hash(self) -> str:
        """SHA-256 of the file's bytes as read."""
        return hashlib.sha256(self.text).hexdigest()

    @property
    def plain_hash(self) -> str:
        """SHA-256 of the file without what an earlier run put in for this target."""
        return hashlib.sha256(self.plain).hexdigest()

    @property
    def root(self) -> Path:
        """The project's folder."""
        return project_root(self.request.path)

    @property
    def plain(self) -> bytes:
        """The file without what an earlier run put in for this target."""
        return strip_generated(self.text, self.target.qualname)


def parse_request(spec: str, settings: Settings | None = None, python: str = "") -> Request:
    """Read ``FILE::NAME``.

    Raises:
        RequestError: it has another form, or there is no such file.
        EnvironmentNotAble: the interpreter lacks torch or triton.
    """
    file, separator, name = spec.partition("::")
    if not separator or not name:
        raise RequestError(f"cannot read {spec!r}", remedy="Write FILE::NAME, as in model.py::Block.forward.")
    path = Path(file).resolve()
    if not path.is_file():
        raise RequestError("no such file", where=Location(file), remedy="Check the path.")
    settings = settings or read_settings(path.parent)
    return Request(path, name, settings, checked_python(python or find_python(path, settings)))


def open_target(request: Request, text: bytes | None = None) -> OpenTarget:
    """Read the file and find the target; ``text`` stands in for the file where an editor holds it unsaved.

    Raises:
        RequestError: the file is not UTF-8, or has no such target.
    """
    text = request.path.read_bytes() if text is None else text
    try:
        text.decode("utf-8")
    except UnicodeDecodeError as error:
        line = text[: error.start].count(b"\n") + 1
        raise RequestError(
            "is not UTF-8", where=Location(str(request.path), line), remedy="Save it as UTF-8."
        ) from None
    return OpenTarget(request, text, find_target(text, str(request.path), request.name))


def warmed(opened: OpenTarget) -> ForkServer:
    """What the target's workers can become copies of; it imports what they need while other things are done."""
    fork_server = ForkServer(opened.request.python, likely_variables(), preload=True)
    fork_server.start()
    return fork_server


def capture_target(
    opened: OpenTarget, fork_server: ForkServer | None = None, *, seconds: float = CAPTURE_SECONDS
) -> Capture:
    """The target's graph for its workload; runs the user's file as it is without our own code in it.

    Args:
        opened: the file and the target.
        template: what the process that captures becomes a copy of, where there is one.
        seconds: most that it may take.
    """
    path = str(opened.request.path)
    plain = opened.plain
    target = find_target(plain, path, opened.target.qualname)
    workload = find_workload(path, plain, target, opened.root / ".mtmc" / RECORDS)
    env = fork_server.env if fork_server is not None else {}
    with Worker(opened.request.python, cwd=str(opened.root), env=env, fork_server=fork_server) as worker:
        return run_capture(workload, plain, worker, min(seconds, CAPTURE_SECONDS))


def open_measurer(
    opened: OpenTarget,
    capture: Capture,
    *,
    deadline: float | None = None,
    fresh: bool = False,
    needs_sandbox: bool = False,
    fork_server: ForkServer | None = None,
) -> LocalMeasurer:
    """What checks and times candidates of the target; to be closed.

    Args:
        opened: the file and the target.
        capture: what is measured.
        deadline: of the monotonic clock, after which nothing goes on.
        fresh: whether what was timed before is timed again.
        needs_sandbox: whether to refuse where candidates cannot be locked in.
        template: what the workers become copies of; to be closed after the measurer.
    """
    settings = opened.request.settings
    options = MeasureOptions(
        archs=settings.archs,
        precision=settings.precision,
        baselines=settings.compiled_baselines,
        fresh=fresh,
        needs_sandbox=needs_sandbox,
        deadline=deadline,
    )
    return LocalMeasurer(capture, opened.request.python, options, source=opened.plain.decode(), fork_server=fork_server)


def plan(
    opened: OpenTarget, capture: Capture, fork_server: ForkServer | None = None
) -> tuple[list[MacroAction], Device]:
    """The first step's choices, best first, and the device they are estimated for; nothing is written.

    Args:
        opened: the file and the target.
        capture: what is optimised.
        template: what the workers become copies of, where there is one.
    """
    settings = opened.request.settings
    measurer = open_measurer(opened, capture, fork_server=fork_server)
    try:
        root = BuiltinCoder().start(capture, opened.plain.decode())
        state = State(capture, root, (), measurer.device(), measurer.has_gpu)
        return RooflinePlanner(strict=settings.precision == "strict").ranked(state), state.device
    finally:
        measurer.close()


def open_model(opened: OpenTarget) -> OpenAIModel:
    """The model that the settings and the environment name; nothing is sent yet."""
    return OpenAIModel(opened.request.settings.llm, opened.root)


def open_tools(
    opened: OpenTarget,
    capture: Capture,
    makers: Backends,
    *,
    model: LedgerModel | None = None,
    steps: Sequence[Step] = (),
    measurer: LocalMeasurer | None = None,
) -> SearchComponents:
    """What a search of the target works with; its measurer is to be closed.

    Args:
        opened: the file and the target.
        capture: what is optimised.
        makers: who plans and who writes. One that asks a model is the user's consent to send it the target's code.
        model: is asked instead of the one that the environment names.
        steps: of the run that is gone on with or revised, whose edits need not be asked for again.
        measurer: takes the measurements instead of a new one.
    """
    settings = opened.request.settings
    if model is None and makers.ask_a_model:
        model = open_model(opened)
    planner, coder = makers.after(steps).open(settings, model, capture, steps)
    measurer = measurer or open_measurer(opened, capture)
    limits = Limits(settings.budget_seconds, settings.max_steps)
    setup = RunConfig(makers.planner, makers.coder, settings, opened.plain_hash)
    return SearchComponents(planner, coder, measurer, measurer.has_gpu, limits, model, setup)


def first_messages(opened: OpenTarget, capture: Capture, makers: Backends) -> list[Question]:
    """What a model would be asked first, exactly as it would be sent; nothing is sent.

    The coder's question is that of the action which ranks highest, since a model's choice is not known before it is asked.
    """
    measurer = open_measurer(opened, capture)
    try:
        root = BuiltinCoder().start(capture, opened.plain.decode())
        state = State(capture, root, (), measurer.device(), measurer.has_gpu, partial(watched, measurer, root))
        return makers.first_questions(opened.request.settings, state, opened.root)
    finally:
        measurer.close()


def open_store(path: Path) -> Store:
    """The store of the project that ``path`` belongs to."""
    return Store(project_root(path) / ".mtmc")


def unfinished(store: Store, *, run: str = "", opened: OpenTarget | None = None) -> RunRecord:
    """The run to be resumed: the one called ``run``, else the newest unfinished one (of the target, if given).

    Raises:
        RequestError: there is none, or it is finished.
    """
    records = store.runs()
    if run:
        found = [record for record in records if record.id == run]
    elif opened is not None:
        place = (str(opened.request.path), opened.target.qualname)
        found = [r for r in records if (r.path, r.qualname) == place and r.status is RunStatus.RUNNING]
    else:
        found = [record for record in records if record.status is RunStatus.RUNNING]
    where = Location(str(opened.request.path) if opened else str(store.folder))
    if not found:
        name = f"run {run}" if run else "unfinished run"
        raise RequestError(f"there is no {name}", where=where, remedy="See `mtmc runs`, or start one.")
    if found[0].status is not RunStatus.RUNNING:
        raise RequestError(f"run {run} is finished: {found[0].status.value}", where=where, remedy="Start a new one.")
    return found[0]


def optimize(
    opened: OpenTarget,
    capture: Capture,
    store: Store,
    events: Events,
    *,
    resumed: RunRecord | None = None,
    makers: Backends = BUILTIN,
    model: LedgerModel | None = None,
    deadline: float | None = None,
    fresh: bool = False,
    needs_sandbox: bool = False,
    fork_server: ForkServer | None = None,
) -> RunResult:
    """One run, stored step by step; ``resumed`` is one to go on with.

    Args:
        opened: the file and the target.
        capture: what is optimised.
        store: where the run is kept.
        events: is told what happens.
        resumed: a run that was not finished.
        makers: who plans and who writes. One that asks a model is the user's consent to send it the target's code.
        model: is asked instead of the one that the environment names.
        deadline: of the monotonic clock, when even a step that is under way is ended; by default it is finished.
        fresh: whether what was timed before is timed again.
        needs_sandbox: whether to refuse where candidates cannot be locked in.
        template: what the workers become copies of; to be closed afterwards.

    Raises:
        EnvironmentNotAble: candidates cannot be locked in, and that is asked for.
        FileChanged: the file of the resumed run changed since it began.
        RequestError: the resumed run began on another machine.
        ModelNotUsable: a model is to be asked, and there is none; the run can be resumed.
    """
    if resumed is not None:
        _check_resumed(opened, capture, resumed)
        run_id, done = resumed.id, store.steps(resumed.id)
    else:
        path, qualname = str(opened.request.path), opened.target.qualname
        run_id, done = store.begin(path, qualname, opened.source_hash, capture.environment), []
    measurer = open_measurer(
        opened, capture, deadline=deadline, fresh=fresh, needs_sandbox=needs_sandbox, fork_server=fork_server
    )
    tools = open_tools(opened, capture, makers, model=model, steps=done, measurer=measurer)
    try:
        if needs_sandbox:
            # Said before the first step: as a step's failure it would be lost.
            measurer.isolation()
        keeper = RunRecorder(store, run_id, tools, number=len(done) + 1)
        search = GreedySearch(
            capture,
            opened.plain.decode(),
            tools.planner,
            tools.coder,
            tools.measurer,
            has_gpu=tools.has_gpu,
            limits=tools.limits,
            events=keeper.events(events),
        )
        return keeper.finish(search.run(run_id, opened.source_hash, done))
    finally:
        tools.measurer.close()


@dataclass(frozen=True)
class Replay:
    """A stored run that is to be done again with the answers that a model gave then."""

    opened: OpenTarget
    makers: Backends
    model: ReplayedModel
    revision: Revision | None
    """What it changed of another run, where it came of one."""


def open_replay(store: Store, run: str, python: str = "") -> Replay:
    """A stored run, to be done again with the answers that a model gave then: nothing is sent.

    Raises:
        RequestError: there is no such run, no model took part in it, or the run that it came of is gone.
        FileChanged: the target's file is no longer the one that was optimised.
    """
    where = Location(str(store.folder))
    records = {item.id: item for item in store.runs()}
    if run not in records:
        raise RequestError(f"there is no run {run!r}", where=where, remedy="See `mtmc runs`.")
    record, setup, exchanges = records[run], store.setup(run, RunConfig), store.exchanges(run)
    if setup is None or not exchanges:
        remedy = (
            "Runs with --planner llm, --coder llm or --coder auto can be replayed, where a model was asked in them."
        )
        raise RequestError(f"run {run} holds no answers of a model", where=where, remedy=remedy)
    if setup.revision is not None and setup.revision.run not in records:
        missing = f"run {run} changes a step of run {setup.revision.run}, which is not there"
        raise RequestError(
            f"{missing}, so it cannot be replayed", where=where, remedy="Replay another; see `mtmc runs`."
        )
    opened = open_target(parse_request(f"{record.path}::{record.qualname}", setup.settings, python))
    if (setup.plain_hash or record.source_hash) not in (opened.source_hash, opened.plain_hash):
        remedy = "Put the file back as it was, or start a new run."
        place = Location(record.path, opened.target.start_line)
        raise FileChanged(f"the file changed since run {run}", where=place, remedy=remedy)
    return Replay(opened, setup.makers, ReplayedModel(run, exchanges, opened.root), setup.revision)


def _check_resumed(opened: OpenTarget, capture: Capture, record: RunRecord) -> None:
    where = Location(str(opened.request.path))
    remedy = "Start a new run without --resume."
    if record.source_hash != opened.source_hash:
        raise FileChanged(f"the file changed since run {record.id} began", where=where, remedy=remedy)
    if record.environment != capture.environment:
        then, now = record.environment, capture.environment
        raise RequestError(
            f"run {record.id} began with torch {then.torch}, triton {then.triton} and {then.gpu or 'no GPU'}; "
            f"here are torch {now.torch}, triton {now.triton} and {now.gpu or 'no GPU'}",
            where=where,
            remedy=remedy,
        )


def apply(opened: OpenTarget, result: RunResult) -> Path | None:
    """Write the accepted steps into the file; returns where the old text is kept, None where nothing is written."""
    if result.status not in KEPT:
        return None
    backups = opened.root / ".mtmc" / "backups"
    return write_if_unchanged(opened.request.path, opened.source_hash, result.final.source.encode(), backups)
