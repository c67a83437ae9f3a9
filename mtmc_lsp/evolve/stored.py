"""Evolutions in the store: finds them, reads their lineage, and checks that one can be resumed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from mtmc_lsp.app.pipeline import Pipeline
from mtmc_lsp.app.target_file import OpenTarget
from mtmc_lsp.core.errors import FileChanged, Location, RequestError
from mtmc_lsp.core.run import RunStatus
from mtmc_lsp.core.workload import Capture
from mtmc_lsp.evolve.lineage import Generation, Lineage, Setup, Version
from mtmc_lsp.search.store import RunRecord, Store

NEW = "Start a new one: mtmc evolve FILE::NAME."


@dataclass(frozen=True)
class StoredEvolution:
    """An evolution as the store has it."""

    record: RunRecord
    setup: Setup
    lineage: Lineage


def stored_evolution(store: Store, name: str = "") -> StoredEvolution:
    """The evolution whose id is or begins with ``name``; by default the newest.

    Raises:
        RequestError: there is no such run, several ids begin with ``name``, or the run evolved nothing.
    """
    ids = store.evolutions()
    runs = [record for record in store.runs() if record.id.startswith(name)]
    matching = [record for record in runs if record.id in ids]
    where = Location(str(store.folder))
    if not matching and name and len(runs) == 1:
        raise RequestError(
            f"run {runs[0].id} has no lineage: it is no evolution",
            where=where,
            remedy=f"Show it with mtmc report {runs[0].id}, or start an evolution: mtmc evolve FILE::NAME.",
        )
    if not matching or (name and len(matching) > 1):
        which = f"evolution {name!r}" if name else "evolution"
        problem = f"there is no {which}" if not matching else f"several evolutions begin with {name!r}"
        raise RequestError(problem, where=where, remedy="See `mtmc runs`, or start one: mtmc evolve FILE::NAME.")
    return read_evolution(store, matching[0])


def read_evolution(store: Store, record: RunRecord) -> StoredEvolution:
    """The lineage of a run that evolves versions."""
    setup = store.evolution(record.id, Setup)
    assert setup is not None, "the run is an evolution"
    versions, generations = store.versions(record.id, Version), store.generations(record.id, Generation)
    return StoredEvolution(record, setup, Lineage(tuple(versions), tuple(generations)))


def find_unfinished_evolution(store: Store, *, run: str = "", target: OpenTarget | None = None) -> RunRecord:
    """The evolution to resume: by its id, of a target, or the newest.

    Raises:
        RequestError: there is none, or it is finished.
    """
    ids = store.evolutions()
    records = [record for record in store.runs() if record.id in ids and record.id.startswith(run)]
    if target is not None:
        names = (str(target.path), target.qualname)
        records = [record for record in records if (record.path, record.qualname) == names]
    unfinished = [record for record in records if record.status is RunStatus.RUNNING]
    where = Location(str(target.path) if target else str(store.folder))
    if run and records and not unfinished:
        status = records[0].status.value
        raise RequestError(f"evolution {records[0].id} is finished: {status}", where=where, remedy=NEW)
    if not unfinished or (run and len(unfinished) > 1):
        problem = "several evolutions begin" if unfinished else "there is no unfinished evolution that begins"
        name = f" with {run!r}" if run else ""
        problem = f"{problem}{name}" if run else "there is no unfinished evolution"
        raise RequestError(problem, where=where, remedy=f"See `mtmc runs`. {NEW}")
    return unfinished[0]


def resumable(store: Store, record: RunRecord, target: OpenTarget, capture: Capture) -> tuple[Setup, Lineage]:
    """The evolution to continue.

    Raises:
        FileChanged: the file, or something that the target reads, changed since it began.
        RequestError: it began on another machine or with other versions.
    """
    stored = read_evolution(store, record)
    where = Location(str(target.path), target.definition.start_line)
    root = stored.lineage.version(0).candidate
    assert root is not None
    if stored.setup.plain_hash != target.plain_hash or root.dependencies != capture.graph.dependencies:
        raise FileChanged(
            f"{target.path.name}, or something that {target.qualname} reads, changed since evolution {record.id} began",
            where=where,
            remedy=f"Put the file back as it was. {NEW}",
        )
    if record.environment != capture.environment:
        then, now = record.environment, capture.environment
        raise RequestError(
            f"evolution {record.id} began with torch {then.torch}, triton {then.triton} and {then.gpu or 'no GPU'}; "
            f"here are torch {now.torch}, triton {now.triton} and {now.gpu or 'no GPU'}",
            where=where,
            remedy=NEW,
        )
    return stored.setup, stored.lineage


def storing(store: Store, run: str) -> Callable[[Generation, Sequence[Version]], None]:
    """A function that stores a generation with its versions, in one transaction."""

    def add(generation: Generation, versions: Sequence[Version]) -> None:
        store.add_generation(run, generation.number, generation, {item.number: item for item in versions})

    return add


def whole_capture(pipeline: Pipeline, target: OpenTarget) -> Capture:
    """The graph of the whole target.

    Raises:
        MtmcError: it cannot be captured.
        RequestError: only parts of it can.
    """
    capture = pipeline.capture()
    if capture.workload.target.region is not None:
        raise RequestError(
            f"only parts of {target.qualname} can be captured ({capture.workload.target.region.lines}), and versions of parts "
            "do not evolve",
            where=Location(str(target.path), target.definition.start_line),
            remedy=f"Use mtmc optimize {target.path.name}::{target.qualname}, or make these lines a function.",
        )
    return capture
