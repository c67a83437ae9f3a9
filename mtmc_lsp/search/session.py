"""The one way in for every face of the tool: from FILE::NAME to a finished run."""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from mtmc_lsp.capture.client import find_workload, run_capture
from mtmc_lsp.capture.loading_paths import project_root
from mtmc_lsp.core.action import MacroAction
from mtmc_lsp.core.errors import EnvironmentNotAble, FileChanged, Location, RequestError
from mtmc_lsp.core.protocols import State
from mtmc_lsp.core.run import RunResult, RunStatus, Step
from mtmc_lsp.core.settings import Settings, read_settings
from mtmc_lsp.core.worker import Worker
from mtmc_lsp.core.workload import Capture, Target
from mtmc_lsp.macro.roofline import RooflinePlanner
from mtmc_lsp.measure.local import LocalMeasurer
from mtmc_lsp.micro.builtin.coder import BuiltinCoder
from mtmc_lsp.search.greedy import Events, GreedySearch, Limits
from mtmc_lsp.search.store import Store
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
class Opened:
    """A file as read, and the target in it."""

    request: Request
    text: bytes
    target: Target

    @property
    def source_hash(self) -> str:
        """SHA-256 of the file's bytes as read."""
        return hashlib.sha256(self.text).hexdigest()

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
    """
    file, separator, name = spec.partition("::")
    if not separator or not name:
        raise RequestError(f"cannot read {spec!r}", remedy="Write FILE::NAME, as in model.py::Block.forward.")
    path = Path(file).resolve()
    if not path.is_file():
        raise RequestError("no such file", where=Location(file), remedy="Check the path.")
    settings = settings or read_settings(path.parent)
    return Request(path, name, settings, python or find_python(path, settings))


def find_python(path: Path, settings: Settings) -> str:
    """The user's interpreter: the setting, the active environment, ``.venv`` of the project, else our own."""
    if settings.python:
        return settings.python
    folders = [Path(os.environ["VIRTUAL_ENV"])] if os.environ.get("VIRTUAL_ENV") else []
    folders += [project_root(path) / name for name in (".venv", "venv")]
    for folder in folders:
        candidate = folder / "bin" / "python"
        if candidate.exists():
            return str(candidate)
    return sys.executable


def open_target(request: Request) -> Opened:
    """Read the file and find the target.

    Raises:
        RequestError: the file is not UTF-8, or has no such target.
    """
    text = request.path.read_bytes()
    try:
        text.decode("utf-8")
    except UnicodeDecodeError as error:
        line = text[: error.start].count(b"\n") + 1
        raise RequestError(
            "is not UTF-8", where=Location(str(request.path), line), remedy="Save it as UTF-8."
        ) from None
    return Opened(request, text, find_target(text, str(request.path), request.name))


def capture_target(opened: Opened) -> Capture:
    """The target's graph for its workload; runs the user's file as it is without our own code in it."""
    path = str(opened.request.path)
    plain = opened.plain
    target = find_target(plain, path, opened.target.qualname)
    workload = find_workload(path, plain, target, opened.root / ".mtmc" / "records.jsonl")
    with Worker(opened.request.python, cwd=str(opened.root)) as worker:
        capture = run_capture(workload, plain, worker, CAPTURE_SECONDS)
    if not capture.environment.triton:
        raise EnvironmentNotAble(
            f"triton is not installed for {opened.request.python}", remedy="Run: python -m pip install triton"
        )
    return capture


def plan(opened: Opened, capture: Capture) -> list[MacroAction]:
    """The first step's choices, best first; nothing is written or measured but the device."""
    settings = opened.request.settings
    measurer = LocalMeasurer(capture, opened.request.python, archs=settings.archs)
    try:
        root = BuiltinCoder().start(capture, opened.plain.decode())
        state = State(capture, root, (), measurer.device(), measurer.measured)
        return RooflinePlanner(strict=settings.precision == "strict").ranked(state)
    finally:
        measurer.close()


def open_store(opened: Opened) -> Store:
    """The project's store."""
    return Store(opened.root / ".mtmc")


def optimize(opened: Opened, capture: Capture, store: Store, events: Events, *, resume: bool = False) -> RunResult:
    """One run, stored step by step.

    Raises:
        FileChanged: a run is to be resumed on a file that changed since.
    """
    settings = opened.request.settings
    path, qualname = str(opened.request.path), opened.target.qualname
    run_id, done = _resumed(opened, store) if resume else (store.begin(path, qualname, opened.source_hash), [])
    measurer = LocalMeasurer(capture, opened.request.python, archs=settings.archs)

    def on_step(step: Step) -> None:
        store.add_step(run_id, step)
        events.on_step(step)

    try:
        search = GreedySearch(
            capture,
            opened.plain.decode(),
            RooflinePlanner(strict=settings.precision == "strict"),
            BuiltinCoder(),
            measurer,
            measured=measurer.measured,
            limits=Limits(settings.budget_seconds, settings.max_steps),
            events=replace(events, on_step=on_step),
        )
        result = search.run(run_id, opened.source_hash, done)
    finally:
        measurer.close()
    store.finish(result)
    return result


def _resumed(opened: Opened, store: Store) -> tuple[str, Sequence[Step]]:
    record = store.unfinished(str(opened.request.path), opened.target.qualname)
    if record is None:
        raise RequestError(
            f"no unfinished run of {opened.target.qualname}",
            where=Location(str(opened.request.path)),
            remedy="Start one.",
        )
    if record.source_hash != opened.source_hash:
        raise FileChanged(
            f"the file changed since run {record.id} began",
            where=Location(str(opened.request.path)),
            remedy="Start a new run without --resume.",
        )
    return record.id, store.steps(record.id)


def apply(opened: Opened, result: RunResult) -> Path | None:
    """Write the accepted steps into the file; returns where the old text is kept, None where nothing is to be written."""
    if result.status not in (RunStatus.IMPROVED, RunStatus.UNMEASURED):
        return None
    backups = opened.root / ".mtmc" / "backups"
    return write_if_unchanged(opened.request.path, opened.source_hash, result.final.source.encode(), backups)
