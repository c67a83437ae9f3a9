"""Finds stored runs to resume or to replay."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from mtmc_lsp.app.backends import Backends
from mtmc_lsp.app.run_recorder import Revision, RunConfig
from mtmc_lsp.app.target_file import OpenTarget, open_target, parse_request
from mtmc_lsp.capture.module_paths import project_root
from mtmc_lsp.core.errors import FileChanged, Location, RequestError
from mtmc_lsp.core.run import RunStatus, Step
from mtmc_lsp.core.workload import Capture
from mtmc_lsp.llm.endpoint.stored_answers import ReplayedModel
from mtmc_lsp.process.project_files import FOLDER
from mtmc_lsp.search.store import RunRecord, Store


def open_store(path: Path) -> Store:
    """The store of the project that ``path`` belongs to."""
    return Store(project_root(path) / FOLDER)


def open_project_store() -> Store:
    """The store of the project that the working folder belongs to."""
    # Any file name in the folder selects its project.
    return open_store(Path.cwd() / "any.py")


def find_unfinished(store: Store, *, run: str = "", target: OpenTarget | None = None) -> RunRecord:
    """The run to resume.

    Args:
        run: the run's id; by default the newest unfinished run.
        target: only runs of this target are considered.

    Raises:
        RequestError: there is no such run, or it is finished.
    """
    records = store.runs()
    if run:
        matching = [record for record in records if record.id == run]
    elif target is not None:
        names = (str(target.path), target.qualname)
        matching = [r for r in records if (r.path, r.qualname) == names and r.status is RunStatus.RUNNING]
    else:
        matching = [record for record in records if record.status is RunStatus.RUNNING]
    where = Location(str(target.path) if target else str(store.folder))
    if not matching:
        name = f"run {run}" if run else "unfinished run"
        raise RequestError(f"there is no {name}", where=where, remedy="See `mtmc runs`, or start one.")
    record = matching[0]
    if record.status is not RunStatus.RUNNING:
        raise RequestError(f"run {run} is finished: {record.status.value}", where=where, remedy="Start a new one.")
    return record


def check_resumable(target: OpenTarget, capture: Capture, record: RunRecord, steps: Sequence[Step]) -> None:
    """Refuse to resume a run whose earlier steps may not hold any more.

    Raises:
        FileChanged: the file, or something that the target reads, changed since the run began.
        RequestError: the run began on another machine or with other versions.
    """
    where = Location(str(target.path))
    remedy = "Start a new run without --resume."
    if record.source_hash != target.source_hash:
        raise FileChanged(f"the file changed since run {record.id} began", where=where, remedy=remedy)
    recorded = next((step.candidate.dependencies for step in steps if step.candidate is not None), None)
    if recorded is not None and recorded != capture.graph.dependencies:
        changed = sorted({item.name for item in {*recorded} ^ {*capture.graph.dependencies}})
        message = f"{', '.join(changed)} changed since run {record.id} began"
        raise FileChanged(message, where=where, remedy=remedy)
    if record.environment != capture.environment:
        then, now = record.environment, capture.environment
        raise RequestError(
            f"run {record.id} began with torch {then.torch}, triton {then.triton} and {then.gpu or 'no GPU'}; "
            f"here are torch {now.torch}, triton {now.triton} and {now.gpu or 'no GPU'}",
            where=where,
            remedy=remedy,
        )


@dataclass(frozen=True)
class Replay:
    """A stored run that can be repeated with the model's stored answers."""

    target: OpenTarget
    backends: Backends
    model: ReplayedModel
    revision: Revision | None
    """For a run that revises another run."""


def open_replay(store: Store, run: str, python: str = "") -> Replay:
    """A stored run to repeat with the model's stored answers; nothing is sent to a model.

    Args:
        python: the interpreter that runs the user's code; by default the project's.

    Raises:
        RequestError: there is no such run, it asked no model, or it revises a run that is not in the store.
        FileChanged: the target's file is not the one that was optimized.
    """
    where = Location(str(store.folder))
    records = {item.id: item for item in store.runs()}
    if run not in records:
        raise RequestError(f"there is no run {run!r}", where=where, remedy="See `mtmc runs`.")
    record, config, exchanges = records[run], store.config(run, RunConfig), store.exchanges(run)
    if config is None or not exchanges:
        raise RequestError(
            f"run {run} contains no answers of a model",
            where=where,
            remedy="Replay a run that used --planner llm, --coder llm or --coder auto and asked the model.",
        )
    if config.revision is not None and config.revision.run not in records:
        raise RequestError(
            f"run {run} changes a step of run {config.revision.run}, which is not in the store, so it cannot be replayed",
            where=where,
            remedy="Replay another run; see `mtmc runs`.",
        )
    target = open_target(parse_request(f"{record.path}::{record.qualname}", config.settings, python))
    if (config.plain_hash or record.source_hash) not in (target.source_hash, target.plain_hash):
        raise FileChanged(
            f"the file changed since run {run}",
            where=Location(record.path, target.definition.start_line),
            remedy="Put the file back as it was, or start a new run.",
        )
    return Replay(target, config.backends, ReplayedModel(run, exchanges, target.project), config.revision)
