"""Finds stored runs to resume or to replay."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from mtmc_lsp.app.backends import Backends
from mtmc_lsp.app.revisions.rebase import rebase
from mtmc_lsp.app.run_recorder import Revision, RunConfig
from mtmc_lsp.app.target_file import OpenTarget, open_target, parse_request
from mtmc_lsp.capture.module_paths import project_root
from mtmc_lsp.core.errors import FileChanged, Location, RequestError
from mtmc_lsp.core.json_codec import to_json
from mtmc_lsp.core.run import Candidate, RunResult, RunStatus, Step, StepStatus, original_text
from mtmc_lsp.core.workload import Capture
from mtmc_lsp.llm.endpoint.stored_answers import ReplayedModel
from mtmc_lsp.process.project_files import FOLDER
from mtmc_lsp.search.store import RunRecord, Store
from mtmc_lsp.source.compose import compose, strip_generated, unified_diff
from mtmc_lsp.source.target_text import target_source
from mtmc_lsp.source.targets import find_target


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
    evolutions = store.evolutions()
    if run in evolutions:
        raise RequestError(
            f"run {run} is an evolution", where=Location(str(store.folder)), remedy=f"mtmc evolve --resume {run}"
        )
    records = [record for record in store.runs() if record.id not in evolutions]
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


def keep_search(target: OpenTarget, record: RunRecord, search: str | None = None) -> OpenTarget:
    """The target with the search that a run to resume began with.

    Args:
        search: what the command line names.

    Raises:
        RequestError: the command line names another search.
    """
    with open_store(target.path) as store:
        config = store.config(record.id, RunConfig)
    began = config.settings.search if config is not None else target.settings.search
    if search not in (None, began):
        raise RequestError(
            f"run {record.id} began with --search {began}",
            where=Location(str(target.path), target.definition.start_line),
            remedy=f"Resume it without --search, or start a new run with --search {search}.",
        )
    request = replace(target.request, settings=replace(target.settings, search=began))
    return replace(target, request=request)


POSITIONS = ("line", "start_line", "end_line", "assumed")
"""Fields of a capture that depend on where the target is in its file."""


def fingerprint(target: OpenTarget, captures: Sequence[Capture]) -> str:
    """Identifies the target's text and everything that its capture found. Code elsewhere in the file does not change it."""
    source = target_source(target.plain, target.qualname) or b""
    document = json.dumps([_without_positions(to_json(capture)) for capture in captures], sort_keys=True)
    return hashlib.sha256(source + b"\0" + document.encode()).hexdigest()


def _without_positions(value: object) -> object:
    if isinstance(value, Mapping):
        return {key: _without_positions(item) for key, item in value.items() if key not in POSITIONS}
    return [_without_positions(item) for item in value] if isinstance(value, (list, tuple)) else value


def steps_to_resume(store: Store, record: RunRecord, target: OpenTarget, captures: Sequence[Capture]) -> list[Step]:
    """The steps of a run to resume, in the current text of the file.

    Raises:
        FileChanged: the target, or something that it reads, changed since the run began.
        RequestError: the run began on another machine or with other versions.
    """
    capture, steps, config = captures[0], store.steps(record.id), store.config(record.id, RunConfig)
    where = Location(str(target.path), target.definition.start_line)
    remedy = "Start a new run without --resume."
    recorded = next((step.candidate.dependencies for step in steps if step.candidate is not None), None)
    if recorded is not None:
        old, new = ({replace(item, line=0) for item in items} for items in (recorded, capture.graph.dependencies))
        changed = sorted({item.name for item in old ^ new})
        if changed:
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
    if record.source_hash == target.source_hash:
        return steps
    if config is None or config.fingerprint != fingerprint(target, captures):
        message = f"{target.qualname}, or its example inputs, changed since run {record.id} began"
        raise FileChanged(message, where=where, remedy=remedy)
    if len(captures) > 1:
        message = (
            f"the file changed since run {record.id} began, and its steps are in {len(captures)} parts of the target"
        )
        raise FileChanged(message, where=where, remedy=remedy)
    return in_current_text(steps, target, capture)


def in_current_text(steps: Sequence[Step], target: OpenTarget, capture: Capture) -> list[Step]:
    """Insert the code of each step into the current text of the file, which may have changed around the target."""
    previous = target.plain.decode()
    sources: dict[str, str] = {}
    result = []
    for step in steps:
        if step.base:
            previous = sources.get(step.base, target.plain.decode())
        if step.candidate is not None:
            old = strip_generated(step.candidate.source.encode(), target.qualname)
            if old != target.plain:
                step = _moved(step, step.candidate, old, previous, target, capture)
            if step.candidate is not None:
                sources[step.candidate.id] = step.candidate.source
                if step.status is StepStatus.ACCEPTED:
                    previous = step.candidate.source
        result.append(step)
    return result


def _moved(step: Step, candidate: Candidate, old: bytes, previous: str, target: OpenTarget, capture: Capture) -> Step:
    code = candidate.code
    source = (
        compose(target.plain, capture.workload.target, code).decode() if code is not None else target.plain.decode()
    )
    definition = find_target(target.plain, str(target.path), target.qualname)
    distance = definition.start_line - find_target(old, str(target.path), target.qualname).start_line
    first, last = step.action.lines
    lines = (first + distance, last + distance) if first else (first, last)
    return replace(
        step,
        action=replace(step.action, lines=lines),
        candidate=replace(candidate, source=source),
        diff=unified_diff(previous, source, target.path.name),
    )


def result_in_current_text(result: RunResult, target: OpenTarget) -> RunResult:
    """The result of a run with its code in the current text of the file, which may have changed around the target.

    Raises:
        FileChanged: the target changed since the run, or the run optimised regions and the file changed.
    """
    edited = next((text for step in result.steps if (text := original_text(step)) is not None), None)
    if edited is not None:
        return _edits_in_current_text(result, target, edited)
    old = strip_generated(result.final.source.encode(), target.qualname)
    if old == target.plain:
        return result
    candidates = [step.candidate for step in result.steps if step.status is StepStatus.ACCEPTED]
    code = next((item.code for item in reversed(candidates) if item is not None), None)
    texts = [target_source(text, target.qualname) for text in (old, target.plain)]
    if code is None or texts[0] != texts[1] or any(step.region for step in result.steps):
        raise FileChanged(
            f"{target.qualname} changed since run {result.id}",
            where=Location(str(target.path), target.definition.start_line),
            remedy=f"Run it again: mtmc optimize {target.path.name}::{target.qualname}.",
        )
    definition = find_target(target.plain, str(target.path), target.qualname)
    source = compose(target.plain, definition, code).decode()
    return replace(result, final=replace(result.final, source=source))


def _edits_in_current_text(result: RunResult, target: OpenTarget, original: str) -> RunResult:
    source = rebase(original, result.final.source, target.text.decode())
    if source is None:
        raise FileChanged(
            f"the lines that run {result.id} edits changed since the run, or contain its edits already",
            where=Location(str(target.path), target.definition.start_line),
            remedy=f"Run it again: mtmc optimize {target.path.name}::{target.qualname}.",
        )
    return replace(result, final=replace(result.final, source=source))


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
    if run in store.evolutions():
        raise RequestError(
            f"run {run} is an evolution, which cannot be replayed", where=where, remedy=f"Show it: mtmc lineage {run}."
        )
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
