"""kill -9 of the server at any point of a run: no user data is lost, and the run can be resumed after a restart."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from editor import Editor, editor
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from test_cancel import descendants, is_alive
from test_review import MODEL, with_steps

from mtmc_lsp.search.store import Store

OPTIONS = {"trusted": True, "runState": True}
KEPT = {0: MODEL, 1: with_steps(1), 2: with_steps(1, 3), 3: with_steps(1, 3, 4)}
"""The expected file by the number of kept steps."""


def kills(count: int) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Kill at ``count`` random points of a run."""

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        return settings(
            max_examples=count,
            # Do not shrink: each example is slow, and its arguments show where the server was killed.
            phases=(Phase.generate,),
            deadline=None,
            suppress_health_check=list(HealthCheck),
        )(given(reports=st.integers(1, 20), delay_ms=st.integers(0, 60), keeps=st.integers(0, 3))(test))

    return decorate


@pytest.mark.timeout(120)
@kills(4)
def test_after_a_kill_at_any_point_the_file_is_intact_and_the_run_can_be_resumed(
    reports: int, delay_ms: int, keeps: int
) -> None:
    _in_new_folder(reports, delay_ms, keeps)


@pytest.mark.slow
@pytest.mark.timeout(3000)
@kills(100)
def test_after_each_of_100_kills_the_file_is_intact_and_the_run_can_be_resumed(
    reports: int, delay_ms: int, keeps: int
) -> None:
    _in_new_folder(reports, delay_ms, keeps)


def _in_new_folder(reports: int, delay_ms: int, keeps: int) -> None:
    with tempfile.TemporaryDirectory(prefix="mtmc-kill-") as folder:
        root = Path(folder) / "user"
        root.mkdir()
        asyncio.run(_kill_and_resume(root, reports, delay_ms / 1000, keeps))


async def _kill_and_resume(root: Path, reports: int, delay: float, keeps: int) -> None:
    file = root / "model.py"
    async with editor(root, options=OPTIONS) as ide:
        uri = ide.open(MODEL)
        job = (await ide.command("optimize", uri, "f"))["job"]
        await ide.until(lambda: len(ide.reported(job)) >= reports or ide._end_of(job), 300)
        for _ in range(keeps):
            if "Keep" in await ide.lenses(uri):
                await ide.command("keep", uri, "f")
                file.write_text(ide.texts[uri])
        await asyncio.sleep(delay)
        processes = set(descendants(ide.client._server.pid))
        told = _accepted(ide.states)
        ide.client._server.kill()
        await ide.until(lambda: not any(map(is_alive, processes)), 60)
        ide.client.error = RuntimeError("the server was killed")
        saved = ide.texts[uri]
    assert file.read_text() == saved
    assert saved in KEPT.values(), "the last kept state, to the byte"
    kept = next(number for number, text in KEPT.items() if text == saved)
    async with editor(root, options=OPTIONS) as ide:
        uri = ide.open(saved)
        known = await _reviews(ide, uri, wanted=_has_run(root))
        steps = [*known[0]["kept"], *known[0]["pending"]] if known else []
        assert len(steps) >= told, "no step that the client was told of is lost"
        assert len(known[0]["kept"] if known else []) == kept
        lenses = await ide.lenses(uri)
        if "Go on with the run" in lenses:
            job = await ide.command("resume", uri, "f")
            assert "improved" in await ide.finished(job["job"])
        elif not known:
            assert "improved" in await ide.optimized(uri, "f")
        assert ide.texts[uri] == saved
        if kept < 3:
            assert await ide.command("keepAll", uri, "f") is True
        assert ide.texts[uri] == KEPT[3]
        await ide.command("undoAll", uri, "f")
        assert ide.texts[uri] == MODEL


def _accepted(states: list[Any]) -> int:
    runs = [state.run for state in states if state.run is not None]
    return sum(step.status == "accepted" for step in runs[-1].steps) if runs else 0


def _has_run(root: Path) -> bool:
    if not (root / ".mtmc" / "store.db").exists():
        return False
    with Store(root / ".mtmc") as store:
        return bool(store.runs())


async def _reviews(ide: Editor, uri: str, *, wanted: bool) -> list[Any]:
    """The runs of the file that the server reports. With ``wanted``, waits until the stored run is loaded."""
    while True:
        reviews: list[Any] = await ide.client.protocol.send_request_async("mtmc/reviews", {"uri": uri})
        if reviews or not wanted:
            return reviews
        await asyncio.sleep(0.02)
