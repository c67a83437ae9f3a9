"""``mtmc/report`` and ``mtmc/history``: a run as a page, and the runs before a target's newest.

The page is the one that ``mtmc report --html`` writes, with its charts not yet drawn: the client does that in its own colours.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from mtmc_lsp.core.errors import MtmcError
from mtmc_lsp.search.store import Store
from mtmc_lsp.search.stored_run import StoredRun, stored_run
from mtmc_lsp.server.features.lenses import outcome
from mtmc_lsp.server.reviews import Standing
from mtmc_lsp.server.server import Document, Server

if TYPE_CHECKING:
    from mtmc_lsp.report.page import Page

REPORT = "mtmc/report"
HISTORY = "mtmc/history"
MOST_RUNS = 20
"""Of a file; who wants to see older ones has ``mtmc runs``."""


def register(server: Server) -> None:
    """Register both requests."""
    server.feature(REPORT)(report)
    server.feature(HISTORY)(history)


async def report(ls: Server, params: Any) -> dict[str, Any] | None:
    """The page of a target's newest run, or of the one that ``run`` names; nothing where there is none."""
    document = ls.document(str(getattr(params, "uri", "")))
    if document is None:
        return None
    standing = ls.standing(document, str(getattr(params, "target", "")))
    run = getattr(params, "run", None)
    if standing is None or (run is not None and run != standing.review.run):
        found = await asyncio.to_thread(_stored, ls, document, str(run or ""))
        if not run or found is None:
            return None
        # Here, as below: who never looks at a page does not wait for what draws it.
        from mtmc_lsp.report.run_page import stored_page

        return _as_json(stored_page(found))
    return _as_json(await asyncio.to_thread(_newest, ls, document, standing))


def _newest(ls: Server, document: Document, standing: Standing) -> Page:
    from mtmc_lsp.report.run_page import RunPage

    review = standing.review
    found = _stored(ls, document, review.run)
    kept = frozenset(step.index for step in standing.kept_steps)
    about = (review.run, review.path, review.qualname, review.started)
    asked = found.exchanges if found is not None else ()
    return RunPage(*about, review.steps, review.environment, review.result, asked, kept).page()


def _stored(ls: Server, document: Document, run: str) -> StoredRun | None:
    folder = ls.store_folder(document.path)
    if folder is None:
        return None
    try:
        with Store(folder) as store:
            return stored_run(store, run)
    except (MtmcError, TypeError, ValueError):
        # A run that goes on has no name yet, and a store of another version is not ours to read.
        return None


def _as_json(page: Page) -> dict[str, Any]:
    from mtmc_lsp.report.page import style

    return {"title": page.title, "body": page.body, "style": style(), "charts": dict(page.charts)}


async def history(ls: Server, params: Any) -> list[dict[str, Any]]:
    """The runs of a file, or where no ``uri`` is given of every open one, that are older than their target's newest."""
    uri = getattr(params, "uri", None)
    documents = [ls.document(each) for each in ([uri] if isinstance(uri, str) else list(ls.documents))]
    found: list[dict[str, Any]] = []
    for document in documents:
        if document is not None and document.path:
            found += await asyncio.to_thread(_older, ls, document)
    return found


def _older(ls: Server, document: Document) -> list[dict[str, Any]]:
    folder = ls.store_folder(document.path)
    if folder is None:
        return []
    try:
        with Store(folder) as store:
            seen: set[str] = set()
            older = []
            for record in store.runs():
                if record.path == document.path and record.qualname in seen:
                    older.append(record)
                elif record.path == document.path:
                    seen.add(record.qualname)
            return [_run_json(document, stored_run(store, record.id)) for record in older[:MOST_RUNS]]
    except (MtmcError, TypeError, ValueError):
        return []


def _run_json(document: Document, found: StoredRun) -> dict[str, Any]:
    record = found.record
    steps = [
        {
            "index": step.index,
            "text": step.action.text,
            "status": step.status.value,
            "reason": step.reason,
            "outcome": outcome(step) if step.verdict is not None else "",
        }
        for step in found.steps
    ]
    about = {"run": record.id, "uri": document.uri, "target": record.qualname, "started": record.started}
    return {**about, "status": record.status.value, "device": record.environment.gpu, "steps": steps}
