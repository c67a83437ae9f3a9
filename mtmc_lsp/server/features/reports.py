"""``mtmc/report`` and ``mtmc/history``: the report of a run as a page, and the earlier runs of each target.

The page is the same as from ``mtmc report --html``, but without drawn charts: the client draws them in its colour theme.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from mtmc_lsp.search.store import Store
from mtmc_lsp.search.stored_run import StoredRun, stored_run
from mtmc_lsp.server.features.steps.wording import outcome
from mtmc_lsp.server.reviews import ReviewState
from mtmc_lsp.server.server import Server
from mtmc_lsp.server.text import Document

if TYPE_CHECKING:
    from mtmc_lsp.report.page import Page

REPORT = "mtmc/report"
HISTORY = "mtmc/history"
MAX_RUNS = 20
"""Maximum number of runs per file; ``mtmc runs`` lists older ones."""


def register(server: Server) -> None:
    """Register both requests."""
    server.feature(REPORT)(report)
    server.feature(HISTORY)(history)


async def report(ls: Server, params: Any) -> dict[str, Any] | None:
    """The page of the run with id ``run``, by default of the target's newest run; None if there is none."""
    document = ls.document(str(getattr(params, "uri", "")))
    if document is None:
        return None
    review_state = ls.review_state(document, str(getattr(params, "target", "")))
    run = getattr(params, "run", None)
    if review_state is None or (run is not None and run != review_state.review.run):
        stored = await _stored(ls, document, str(run)) if run else None
        if stored is None:
            return None
        # Imported lazily here and below, because drawing modules import slowly.
        from mtmc_lsp.report.run_page import stored_page

        return _as_json(stored_page(stored))
    stored = await _stored(ls, document, review_state.review.run)
    return _as_json(await asyncio.to_thread(_newest, review_state, stored))


def _newest(review_state: ReviewState, stored: StoredRun | None) -> Page:
    from mtmc_lsp.report.run_page import RunPage

    review = review_state.review
    kept_steps = frozenset(step.index for step in review_state.kept_steps)
    identity = (review.run, review.path, review.qualname, review.started)
    exchanges = stored.exchanges if stored is not None else ()
    return RunPage(*identity, review.steps, review.environment, review.result, exchanges, kept_steps).page()


async def _stored(ls: Server, document: Document, run: str) -> StoredRun | None:
    return await ls.read_store(document.path, lambda store: stored_run(store, run))


def _as_json(page: Page) -> dict[str, Any]:
    from mtmc_lsp.report.page import style

    return {"title": page.title, "body": page.body, "style": style(), "charts": dict(page.charts)}


async def history(ls: Server, params: Any) -> list[dict[str, Any]]:
    """All runs except the newest one of each target, of the file ``uri`` or of all open files."""
    uri = getattr(params, "uri", None)
    documents = [ls.document(document_uri) for document_uri in ([uri] if isinstance(uri, str) else list(ls.documents))]
    runs: list[dict[str, Any]] = []
    for document in documents:
        if document is not None and document.path:
            runs += await _older_runs(ls, document)
    return runs


async def _older_runs(ls: Server, document: Document) -> list[dict[str, Any]]:
    def read(store: Store) -> list[dict[str, Any]]:
        newest_targets: set[str] = set()
        older_records = []
        for record in store.runs():
            if record.path == document.path and record.qualname in newest_targets:
                older_records.append(record)
            elif record.path == document.path:
                newest_targets.add(record.qualname)
        return [_run_json(document, stored_run(store, record.id)) for record in older_records[:MAX_RUNS]]

    return await ls.read_store(document.path, read) or []


def _run_json(document: Document, stored: StoredRun) -> dict[str, Any]:
    record = stored.record
    steps = [
        {
            "index": step.index,
            "text": step.action.text,
            "status": step.status.value,
            "reason": step.reason,
            "outcome": outcome(step) if step.verdict is not None else "",
        }
        for step in stored.steps
    ]
    header = {"run": record.id, "uri": document.uri, "target": record.qualname, "started": record.started}
    return {**header, "status": record.status.value, "device": record.environment.gpu, "steps": steps}
