"""``mtmc/reviews``: the review state of open files, for clients with their own review user interface.

Code lenses are sufficient for a review. The VS Code extension also highlights the lines that the next step would change, shows
runs as a tree, and sets context keys. ``mtmc/reviewsChanged`` tells it when to request the state again.
"""

from __future__ import annotations

from typing import Any

import attrs

from mtmc_lsp.core.errors import MtmcError
from mtmc_lsp.server.edits import minimal_edits
from mtmc_lsp.server.features.steps.review import composed
from mtmc_lsp.server.features.steps.wording import numbers, outcome, position, step_title
from mtmc_lsp.server.reviews import ReviewState
from mtmc_lsp.server.server import Server
from mtmc_lsp.server.text import Document

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
    return [
        _as_json(ls, document, review_state)
        for document in open_documents
        for review_state in ls.review_states(document)
    ]


def _as_json(ls: Server, document: Document, review_state: ReviewState) -> dict[str, Any]:
    accepted = {step.index: step for step in review_state.review.accepted}
    run = review_state.review.to_json()
    for step in run["steps"]:
        accepted_step = accepted.get(step["index"])
        step["title"] = step_title(accepted_step) if accepted_step is not None else ""
        step["position"] = position(review_state, accepted_step) if accepted_step is not None else ""
        step["outcome"] = outcome(accepted_step) if accepted_step is not None else ""
        step["numbers"] = numbers(accepted_step) if accepted_step is not None else ""
        step["reviewed"] = accepted_step is not None and ls.reviews.is_reviewed(review_state.review, accepted_step)
    return {
        "uri": document.uri,
        "version": document.version,
        "target": review_state.review.qualname,
        "line": review_state.outlined.first_line - 1,
        "kept": [step.index for step in review_state.kept_steps],
        "pending": [step.index for step in review_state.pending],
        "selected": review_state.selected.index if review_state.selected is not None else None,
        "stale": review_state.is_stale,
        "edited": review_state.is_edited,
        "isActive": ls.is_active(review_state.review),
        "changes": _changes(ls, document, review_state),
        "run": run,
    }


def _changes(ls: Server, document: Document, review_state: ReviewState) -> list[dict[str, Any]]:
    """The edits of the file that keeping the next pending step would make; empty if it cannot be kept."""
    if not review_state.pending or review_state.is_stale:
        return []
    try:
        _, new = composed(ls, document, review_state.review.qualname, review_state.pending[0])
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
        for edit in minimal_edits(document.text, new.user)
    ]
