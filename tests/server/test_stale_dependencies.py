"""Changes of what a version was computed from: they are named, and no step goes into the file, nor is a kept one called verified."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from editor import Editor, editor
from lsprotocol import types as lsp

pytestmark = pytest.mark.asyncio

MODEL = """\
# fake f: better
# reads f: K=3 helper cfg.SCALE=2.0
import torch
import cfg

A = 1
K = 3


def helper(x):
    return x + A


def f(x):
    return helper(torch.relu(x)) * K * cfg.SCALE
"""


@pytest_asyncio.fixture
async def ide(tmp_path: Path) -> AsyncIterator[Editor]:
    (tmp_path / "cfg.py").write_text("SCALE = 2.0\n")
    async with editor(tmp_path) as made:
        yield made


async def optimized(ide: Editor) -> str:
    uri = ide.open(MODEL)
    await ide.optimized(uri, "f")
    return uri


async def stale(ide: Editor, uri: str) -> lsp.Diagnostic | None:
    document = lsp.TextDocumentIdentifier(uri)
    report = await ide.client.text_document_diagnostic_async(lsp.DocumentDiagnosticParams(document))
    return next((item for item in report.items if item.code == "stale"), None)


@pytest.mark.parametrize(
    ("old", "new", "what"),
    [
        ("K = 3", "K = 5", "K (line 7) was 3 when this was verified, is 5 now"),
        ("return x + A", "return x - A", "helper (line 10) changed since this was verified"),
        ("A = 1", "A = 2", "A (line 6) changed since this was verified"),
        ("K = 3\n", "\n", "K (line 7 when this was verified) is no longer defined"),
    ],
)
async def test_a_changed_dependency_makes_the_run_stale_before_keep(ide: Editor, old: str, new: str, what: str) -> None:
    uri = await optimized(ide)
    ide.replace(uri, old, new)
    assert await ide.lenses(uri) == [f"{what} · Optimize again"]
    for command in ("keep", "keepAll"):
        assert await ide.command(command, uri, "f") is False
        assert ide.client.messages[-1].message == f"{what}. The steps of f no longer apply. Optimise again."
    assert "f_kernel" not in ide.texts[uri]


async def test_a_changed_dependency_makes_a_kept_kernel_stale(ide: Editor) -> None:
    uri = await optimized(ide)
    await ide.command("keep", uri, "f")
    assert await stale(ide, uri) is None
    line = ide.texts[uri].split("K = 3")[0].count("\n") + 1
    ide.replace(uri, "K = 3", "K = 5")
    found = await stale(ide, uri)
    assert found is not None and found.severity == lsp.DiagnosticSeverity.Warning
    what = f"K (line {line}) was 3 when this was verified, is 5 now"
    assert found.message == f"{what}; the kernels of f are only valid for the old state. Optimise f again."
    action = (await ide.actions(uri, "torch.relu"))["optimize"]
    assert action.title == f"Optimize again: {what}" and action.disabled is None
    ide.replace(uri, "K = 5", "K = 3")
    assert await stale(ide, uri) is None


async def test_another_file_is_compared_as_it_is_on_disk_or_in_the_editor(ide: Editor, tmp_path: Path) -> None:
    uri = await optimized(ide)
    (tmp_path / "cfg.py").write_text("SCALE = 2.5\n")
    what = "cfg.SCALE (cfg.py, line 1) was 2.0 when this was verified, is 2.5 now"
    assert await ide.lenses(uri) == [f"{what} · Optimize again"]
    (tmp_path / "cfg.py").write_text("SCALE = 2.0\n")
    assert (await ide.lenses(uri))[0].startswith("1/1 ")
    other = ide.open("SCALE = 2.0\n", "cfg.py")
    ide.replace(other, "2.0", "4.0")
    assert "is 4.0 now" in (await ide.lenses(uri))[0]


async def test_comments_and_layout_of_a_helper_and_names_that_are_not_read_may_change(ide: Editor) -> None:
    uri = await optimized(ide)
    ide.replace(uri, "return x + A", "# moved up\n    return x+A  # the same")
    ide.replace(uri, "import torch\n", "import torch\nOTHER = 1\n")
    assert await stale(ide, uri) is None
    assert await ide.command("keepAll", uri, "f") is True


async def test_optimising_again_is_not_stale(ide: Editor) -> None:
    uri = await optimized(ide)
    ide.replace(uri, "K = 3", "K = 5")
    ide.replace(uri, "K=3", "K=5")
    await ide.optimized(uri, "f")
    assert await stale(ide, uri) is None
    assert await ide.command("keepAll", uri, "f") is True


async def test_a_restart_still_knows_what_a_version_depends_on(tmp_path: Path) -> None:
    (tmp_path / "cfg.py").write_text("SCALE = 2.0\n")
    async with editor(tmp_path) as ide:
        await optimized(ide)
    async with editor(tmp_path) as ide:
        uri = ide.open(MODEL.replace("K = 3", "K = 5"))
        assert await ide.command("keepAll", uri, "f") is False
        assert "K (line 7) was 3" in ide.client.messages[-1].message
