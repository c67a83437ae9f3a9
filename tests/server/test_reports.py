"""``mtmc/report`` and ``mtmc/history``: what a client of ours shows of runs that are over."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from editor import Editor, editor

pytestmark = pytest.mark.asyncio

MODEL = "# fake f: better wrong better\nimport torch\n\n\ndef f(x):\n    return torch.relu(x) + 1\n"


async def ask(ide: Editor, method: str, **params: str) -> Any:
    return await ide.client.protocol.send_request_async(f"mtmc/{method}", params)


async def test_the_report_is_a_page_whose_charts_the_client_draws(tmp_path: Path) -> None:
    async with editor(tmp_path) as ide:
        uri = ide.open(MODEL)
        assert await ask(ide, "report", uri=uri, target="f") is None
        await ide.optimized(uri, "f")
        page = await ask(ide, "report", uri=uri, target="f")
        for name in page.charts._fields:
            assert f'<figure id="{name}">' in page.body
        assert "gains" in page.charts._fields
        assert page.body.count(">pending<") == 2
        assert "--chart-gain" in page.style
        await ide.command("keep", uri, "f", step=1)
        page = await ask(ide, "report", uri=uri, target="f")
        assert (page.body.count(">kept<"), page.body.count(">pending<")) == (1, 1)


async def test_earlier_runs_are_the_history_and_have_reports_too(tmp_path: Path) -> None:
    async with editor(tmp_path) as ide:
        uri = ide.open(MODEL)
        await ide.optimized(uri, "f")
        assert await ask(ide, "history") == []
        await ide.optimized(uri, "f")
        (found,) = await ask(ide, "history")
        older = json.loads(json.dumps(found), object_hook=lambda item: SimpleNamespace(**item))
        assert (older.uri, older.target, older.status) == (uri, "f", "improved")
        assert [(step.index, step.status) for step in older.steps] == [(1, "accepted"), (2, "failed"), (3, "accepted")]
        assert older.steps[0].outcome
        page = await ask(ide, "report", uri=uri, target="f", run=older.run)
        assert older.run in page.title
        assert page.body.count('class="step"') == 2
        assert ">kept<" not in page.body, "whether they were kept is known of the newest run alone"


async def test_there_is_no_report_of_what_is_not_there(tmp_path: Path) -> None:
    async with editor(tmp_path) as ide:
        uri = ide.open(MODEL)
        assert await ask(ide, "report", uri=uri, target="nope") is None
        assert await ask(ide, "report", uri=f"{uri}x", target="f") is None
        await ide.optimized(uri, "f")
        assert await ask(ide, "report", uri=uri, target="f", run="nope") is None
        assert not await ask(ide, "history", uri=f"{uri}x")
