"""Evolutions in an editor: their versions, the file with a version, and a version as a run to review."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lsprotocol import types as lsp

from mtmc_lsp.core.errors import RequestError
from mtmc_lsp.search.store import RunRecord, Store
from mtmc_lsp.server.features.commands import resolve_target, start
from mtmc_lsp.server.server import KEEP_VERSION, Server
from mtmc_lsp.server.text import Document

if TYPE_CHECKING:
    from mtmc_lsp.evolve.stored import StoredEvolution

LINEAGE, VERSION = "mtmc/lineage", "mtmc/version"
MAX_EVOLUTIONS = 10
"""Maximum number of evolutions per file; ``mtmc runs`` lists older ones."""


def register(server: Server) -> None:
    """Register the requests and the command."""
    server.feature(LINEAGE)(lineage)
    server.feature(VERSION)(version)
    server.command("mtmc.keepVersion")(keep_version)


async def lineage(ls: Server, params: Any) -> list[dict[str, Any]]:
    """The evolutions of the file ``uri``, the newest first, each with its versions."""
    document = ls.document(str(getattr(params, "uri", "")))
    if document is None or not document.path:
        return []

    def read(store: Store) -> list[dict[str, Any]]:
        return [_evolution_json(document, read_evolution(store, record)) for record in _evolutions(store, document)]

    # Imported lazily here and below: few files have an evolution.
    from mtmc_lsp.evolve.stored import read_evolution

    return await ls.read_store(document.path, read) or []


async def version(ls: Server, params: Any) -> dict[str, str] | None:
    """The text of the file ``uri`` with the version numbered ``version`` of the evolution ``run``; None if there is none."""
    document = ls.document(str(getattr(params, "uri", "")))
    if document is None or not document.path:
        return None
    stored = await _stored(ls, document, str(getattr(params, "run", "")))
    number = int(getattr(params, "version", -1))
    if stored is None or not 0 <= number < len(stored.lineage.versions):
        return None
    candidate = stored.lineage.version(number).candidate
    return {"text": candidate.source} if candidate is not None else None


async def keep_version(ls: Server, *arguments: Any) -> dict[str, Any] | None:
    """Verify a version (``run``, ``version``) as a whole; its steps are then pending, like those of a run."""
    document, outlined, argument = resolve_target(ls, arguments)
    name, run, number = outlined.target.qualname, str(argument.get("run", "")), argument.get("version")
    stored = await _stored(ls, document, run)
    if stored is None or stored.record.qualname != name or not _is_written(stored, number):
        text = f"The evolution {run} of {name} has no version {number} with code."
        ls.window_show_message(lsp.ShowMessageParams(lsp.MessageType.Error, text))
        return None
    title = f"Verifying version {number} of {{}}"
    token = argument.get("workDoneToken")
    return await start(ls, document, name, KEEP_VERSION, title, token=token, run=run, version=number)


def _is_written(stored: StoredEvolution, number: object) -> bool:
    """Whether an evolution has a version with this number, and it has code."""
    versions = stored.lineage.versions
    return isinstance(number, int) and 0 < number < len(versions) and versions[number].candidate is not None


def _evolutions(store: Store, document: Document) -> list[RunRecord]:
    """The newest evolutions of a file."""
    ids = store.evolutions()
    return [record for record in store.runs() if record.id in ids and record.path == document.path][:MAX_EVOLUTIONS]


async def _stored(ls: Server, document: Document, run: str) -> StoredEvolution | None:
    """The evolution of a file with this id; None if there is none."""
    from mtmc_lsp.evolve.stored import read_evolution

    def read(store: Store) -> StoredEvolution:
        for record in _evolutions(store, document):
            if record.id == run:
                return read_evolution(store, record)
        raise RequestError(f"there is no evolution {run}")

    return await ls.read_store(document.path, read)


def _evolution_json(document: Document, stored: StoredEvolution) -> dict[str, Any]:
    record, versions = stored.record, stored.lineage.versions
    return {
        "run": record.id,
        "uri": document.uri,
        "target": record.qualname,
        "started": record.started,
        "best": stored.lineage.best().number,
        "estimated": not stored.setup.has_gpu,
        "workloads": [name for name, _ in stored.setup.workloads],
        "versions": [
            {
                "number": item.number,
                "parent": item.parent,
                "generation": item.generation,
                "operator": item.operator.value,
                "status": item.status.value,
                "title": item.title,
                "reason": item.reason,
                "speedup": item.gain,
                "written": item.candidate is not None,
            }
            for item in versions
        ],
    }
