"""``mtmc/reviews``: the review state of open files, for clients with their own review user interface.

Code lenses are sufficient for a review. The VS Code extension also highlights the lines that the next step would change, shows
runs as a tree, and sets context keys. ``mtmc/reviewsChanged`` tells it when to request the state again.
"""

from __future__ import annotations

from typing import Any

import attrs

from mtmc_lsp.core.errors import MtmcError
from mtmc_lsp.server.edits import minimal_edits
from mtmc_lsp.server.features.lenses import outcome
from mtmc_lsp.server.features.review import composed
from mtmc_lsp.server.reviews import Standing
from mtmc_lsp.server.server import Document, Server

REVIEWS = "mtmc/reviews"
CHANGED = "mtmc/reviewsChanged"


@attrs.define
class ReviewsChanged:
    """Parameters of ``mtmc/reviewsChanged``."""

    uri: str


def register(server: Server) -> None:
    """Register the request and the change notification."""
    server.feature(REVIEWS)(reviews)
    server.refresh_listeners.append(lambda uris: notify_changes(server, uris))


def notify_changes(ls: Server, uris: set[str]) -> None:
    """Notify clients that enabled ``runState`` that reviews changed."""
    for uri in uris if ls.options.run_state else ():
        ls.protocol.notify(CHANGED, ReviewsChanged(uri))


def reviews(ls: Server, params: Any) -> list[dict[str, Any]]:
    """The review state of the file ``uri``, or of all open files."""
    uri = getattr(params, "uri", None)
    documents = (
        [ls.document(uri)] if isinstance(uri, str) else [ls.document(document_uri) for document_uri in ls.documents]
    )
    open_documents = [document for document in documents if document is not None]
    return [_as_json(ls, document, standing) for document in open_documents for standing in ls.standings(document)]


def _as_json(ls: Server, document: Document, standing: Standing) -> dict[str, Any]:
    accepted = {step.index: step for step in standing.review.accepted}
    run = standing.review.to_json()
    for step in run["steps"]:
        accepted_step = accepted.get(step["index"])
        step["outcome"] = outcome(accepted_step) if accepted_step is not None else ""
    return {
        "uri": document.uri,
        "version": document.version,
        "target": standing.review.qualname,
        "line": standing.place.first_line - 1,
        "kept": [step.index for step in standing.kept_steps],
        "pending": [step.index for step in standing.pending],
        "stale": standing.is_stale,
        "edited": standing.is_edited,
        "isActive": ls.is_active(standing.review),
        "changes": _changes(document, standing),
        "run": run,
    }


def _changes(document: Document, standing: Standing) -> list[dict[str, Any]]:
    """The edits that keeping the next pending step would make; empty if it cannot be kept."""
    if not standing.pending or standing.is_stale:
        return []
    try:
        new = composed(document, standing.review.qualname, standing.pending[0])
    except MtmcError:
        # The file has errors, which the keep command reports; there is nothing to highlight.
        return []
    return [
        {
            "range": {
                "start": {"line": edit.range.start.line, "character": edit.range.start.character},
                "end": {"line": edit.range.end.line, "character": edit.range.end.character},
            },
            "newText": edit.new_text,
        }
        for edit in minimal_edits(document.text, new)
    ]
