"""``mtmc/reviews``: the review state for the extension."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from editor import Editor, editor
from lsprotocol import types as lsp

from mtmc_lsp.core.action import ActionKind, MacroAction
from mtmc_lsp.core.results import BaselineTime, Ratio, Timing, Verdict, VerdictStatus
from mtmc_lsp.core.run import Step, StepStatus
from mtmc_lsp.report.phrases import memory_text
from mtmc_lsp.server.features.steps.wording import numbers

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


async def test_the_reported_changes_of_a_pending_step_equal_the_edits_of_keep(tmp_path: Path) -> None:
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


async def test_a_changed_function_has_no_changes_to_highlight(tmp_path: Path) -> None:
    async with editor(tmp_path) as ide:
        uri = ide.open(MODEL)
        await ide.optimized(uri, "f")
        ide.replace(uri, "+ 1", "+ 2")
        (review,) = await reviews(ide)
        assert review.stale
        assert review.changes == []


async def test_a_client_with_run_state_is_notified_of_changed_reviews(tmp_path: Path) -> None:
    async with editor(tmp_path, options={"trusted": True, "runState": True}) as ide:
        told: list[str] = []
        ide.client.feature("mtmc/reviewsChanged")(lambda params: told.append(params.uri))
        uri = ide.open(MODEL)
        await ide.optimized(uri, "f")
        await ide.until(lambda: uri in told)


async def test_other_clients_get_no_notification(tmp_path: Path) -> None:
    async with editor(tmp_path) as ide:
        told: list[str] = []
        ide.client.feature("mtmc/reviewsChanged")(lambda params: told.append(params.uri))
        uri = ide.open(MODEL)
        await ide.optimized(uri, "f")
        await reviews(ide)
        assert told == []


def _timed_step(peak: int | None, eager_peak: int | None) -> Step:
    baselines = (
        BaselineTime("eager", 410.0, Ratio(1.9, 1.88, 1.92), peak_bytes=eager_peak),
        BaselineTime("compile", 670.0, Ratio(3.1, 3.0, 3.2)),
    )
    timing = Timing(216.0, baselines, "eager", Ratio(1.0, 1.0, 1.0), 50, "", 0.5, peak_bytes=peak)
    verdict = Verdict(VerdictStatus.CORRECT, (), "gpu", 3e-7, 3e-7)
    return Step(1, MacroAction(ActionKind.FUSE, (), (0, 0)), StepStatus.ACCEPTED, "", verdict=verdict, timing=timing)


async def test_the_line_of_numbers_names_the_memory_where_it_was_measured() -> None:
    line = "1.90x faster · 410 us -> 216 us · exact to 3e-07 (yours 3e-07) · 3.10x of torch.compile"
    assert numbers(_timed_step(4096, 4096)) == f"{line} · 0 bytes more memory"
    assert numbers(_timed_step(4096, None)) == numbers(_timed_step(None, 4096)) == line
    assert [memory_text(value) for value in (512, -12_600_000, 999_700, 3_000_000_000)] == [
        "512 bytes more memory",
        "12.6 MB less memory",
        "1 MB more memory",
        "3 GB more memory",
    ]
