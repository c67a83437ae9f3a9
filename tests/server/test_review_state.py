"""``mtmc/reviews``: what a client of ours draws."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from editor import Editor, editor
from lsprotocol import types as lsp

pytestmark = pytest.mark.asyncio

MODEL = "# fake f: better wrong better\nimport torch\n\n\ndef f(x):\n    return torch.relu(x) + 1\n"


async def reviews(ide: Editor, **params: str) -> list[Any]:
    answer = await ide.client.protocol.send_request_async("mtmc/reviews", params)
    return list(json.loads(json.dumps(answer), object_hook=lambda item: SimpleNamespace(**item)))


def edits(review: Any) -> list[lsp.TextEdit]:
    return [
        lsp.TextEdit(
            lsp.Range(
                lsp.Position(change.range.start.line, change.range.start.character),
                lsp.Position(change.range.end.line, change.range.end.character),
            ),
            change.newText,
        )
        for change in review.changes
    ]


async def test_the_changes_of_a_pending_step_are_what_keep_does(tmp_path: Path) -> None:
    async with editor(tmp_path) as ide:
        uri = ide.open(MODEL)
        await ide.optimized(uri, "f")
        (review,) = await reviews(ide, uri=uri)
        assert (review.target, review.line, review.kept, review.pending) == ("f", 4, [], [1, 3])
        assert (review.stale, review.edited, review.isActive) == (False, False, False)
        assert review.run.steps[0].outcome and review.run.steps[1].outcome == ""
        ide.apply(uri, edits(review))
        drawn = ide.texts[uri]
        ide.set(uri, MODEL)
        await ide.command("keep", uri, "f", step=1)
        assert ide.texts[uri] == drawn
        (review,) = await reviews(ide, uri=uri)
        assert (review.kept, review.pending) == ([1], [3])


async def test_a_changed_function_has_nothing_to_draw(tmp_path: Path) -> None:
    async with editor(tmp_path) as ide:
        uri = ide.open(MODEL)
        await ide.optimized(uri, "f")
        ide.replace(uri, "+ 1", "+ 2")
        (review,) = await reviews(ide)
        assert review.stale
        assert review.changes == []


async def test_a_client_that_wants_to_know_is_told_of_news(tmp_path: Path) -> None:
    async with editor(tmp_path, options={"trusted": True, "runState": True}) as ide:
        told: list[str] = []
        ide.client.feature("mtmc/reviewsChanged")(lambda params: told.append(params.uri))
        uri = ide.open(MODEL)
        await ide.optimized(uri, "f")
        await ide.until(lambda: uri in told)


async def test_other_clients_are_not_told(tmp_path: Path) -> None:
    async with editor(tmp_path) as ide:
        told: list[str] = []
        ide.client.feature("mtmc/reviewsChanged")(lambda params: told.append(params.uri))
        uri = ide.open(MODEL)
        await ide.optimized(uri, "f")
        await reviews(ide)
        assert told == []
