"""``mtmc/reviews``: where the runs of open files stand, for clients that draw the review themselves.

Code lenses are enough to decide by; a client of ours also draws the lines that the next step would change, shows runs as a tree
and sets contexts for its keys. It is told by ``mtmc/reviewsChanged`` when to ask again.
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
    """Register the request, and the notification that tells of news."""
    server.feature(REVIEWS)(reviews)
    server.refreshers.append(lambda uris: tell(server, uris))


def tell(ls: Server, uris: set[str]) -> None:
    """There is news; only to clients that asked to be told of runs."""
    for uri in uris if ls.options.run_state else ():
        ls.protocol.notify(CHANGED, ReviewsChanged(uri))


def reviews(ls: Server, params: Any) -> list[dict[str, Any]]:
    """The runs of a file, or where no ``uri`` is given, of every open one."""
    uri = getattr(params, "uri", None)
    documents = [ls.document(uri)] if isinstance(uri, str) else [ls.document(each) for each in ls.documents]
    found = [document for document in documents if document is not None]
    return [_as_json(ls, document, standing) for document in found for standing in ls.standings(document)]


def _as_json(ls: Server, document: Document, standing: Standing) -> dict[str, Any]:
    accepted = {step.index: step for step in standing.review.accepted}
    run = standing.review.to_json()
    for step in run["steps"]:
        ours = accepted.get(step["index"])
        step["outcome"] = outcome(ours) if ours is not None else ""
    return {
        "uri": document.uri,
        "version": document.version,
        "target": standing.review.qualname,
        "line": standing.place.first_line - 1,
        "kept": [step.index for step in standing.kept_steps],
        "pending": [step.index for step in standing.pending],
        "stale": standing.is_stale,
        "edited": standing.is_edited,
        "goingOn": ls.is_going_on(standing.review),
        "changes": _changes(document, standing),
        "run": run,
    }


def _changes(document: Document, standing: Standing) -> list[dict[str, Any]]:
    """What keeping the next pending step would change in the document; nothing where it cannot be kept."""
    if not standing.pending or standing.is_stale:
        return []
    try:
        new = composed(document, standing.review.qualname, standing.pending[0])
    except MtmcError:
        # The file has errors that keep would name; there is nothing to draw.
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
