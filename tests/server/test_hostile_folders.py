"""The real server in folders with malicious contents."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from editor import REAL, Editor, editor
from lsprotocol import types as lsp

from mtmc_lsp.process.isolation import isolated_command
from mtmc_lsp.search.store import Store
from tests.hostile import OTHERS, STORES, imported, plant_modules, project, snapshot

MODEL = "import torch\n\n\n# mtmc: x=f32[4,6]\ndef f(x):\n    return torch.relu(x) + 1\n"
UNTRUSTED: dict[str, Any] = {}


async def looked_at(ide: Editor) -> list[Any]:
    """Open and save a file, and request everything that a store can contain. Returns the reported contents."""
    uri = ide.open(MODEL, on_disk=False)
    await ide.lenses(uri)
    await ide.actions(uri, "torch.relu")
    ide.client.text_document_did_save(lsp.DidSaveTextDocumentParams(lsp.TextDocumentIdentifier(uri)))
    store = lsp.FileEvent(ide.uri(".mtmc/store.db"), lsp.FileChangeType.Changed)
    ide.client.workspace_did_change_watched_files(lsp.DidChangeWatchedFilesParams([store]))
    ask = ide.client.protocol.send_request_async
    reviews, history = await ask("mtmc/reviews", {"uri": uri}), await ask("mtmc/history", {"uri": uri})
    await ask("mtmc/report", {"uri": uri, "target": "f", "run": "0"})
    await ask("mtmc/device", {"uri": uri})
    return [*reviews, *history]


@pytest.mark.asyncio
@pytest.mark.parametrize("kind", [*STORES, *OTHERS])
async def test_opening_a_file_of_an_untrusted_folder_writes_nothing_anywhere(tmp_path: Path, kind: str) -> None:
    root = tmp_path / "user"
    elsewhere = project(root, kind)
    (root / "model.py").write_text(MODEL)
    async with editor(root, REAL, options=UNTRUSTED, cwd=root) as ide:
        before = snapshot(root), snapshot(elsewhere)
        assert await looked_at(ide) == []
        assert await ide.command("optimize", ide.uri(), "f") is None, "the question whether to trust it got no answer"
    assert (snapshot(root), snapshot(elsewhere)) == before


@pytest.mark.asyncio
async def test_an_untrusted_folders_store_is_not_opened_until_the_user_trusts_it(tmp_path: Path) -> None:
    root = tmp_path / "user"
    root.mkdir()
    async with editor(root) as ide:
        assert "improved" in await ide.optimized(ide.open(MODEL), "f")
    with Store(root / ".mtmc") as store:
        run = store.runs()[0].id
    async with editor(root, options=UNTRUSTED) as ide:
        before = snapshot(root)
        uri = ide.open(MODEL, on_disk=False)
        ask = ide.client.protocol.send_request_async
        assert await ask("mtmc/report", {"uri": uri, "target": "f", "run": run}) is None
        # Wait long enough for a store to be read in the background.
        for _ in range(20):
            assert await ask("mtmc/reviews", {"uri": uri}) == []
            await asyncio.sleep(0.05)
        assert snapshot(root) == before
        ide.answers = ["Trust this folder"]
        await ide.finished((await ide.command("measure", uri, "f"))["job"])
        assert [review["target"] for review in await ask("mtmc/reviews", {"uri": uri})] == ["f"]


@pytest.mark.asyncio
async def test_in_an_untrusted_folder_no_store_is_created(tmp_path: Path) -> None:
    root = tmp_path / "user"
    root.mkdir()
    (root / "model.py").write_text(MODEL)
    async with editor(root, REAL, options=UNTRUSTED, cwd=root) as ide:
        before = snapshot(root)
        assert await looked_at(ide) == []
    assert snapshot(root) == before
    assert not (root / ".mtmc").exists()


@pytest.mark.asyncio
@pytest.mark.parametrize("kind", STORES)
async def test_a_run_in_a_trusted_folder_names_the_link_that_it_rejects(tmp_path: Path, kind: str) -> None:
    root = tmp_path / "user"
    elsewhere = project(root, kind)
    before = snapshot(elsewhere)
    async with editor(root) as ide:
        said = await ide.optimized(ide.open(MODEL), "f")
    assert ".mtmc" in said
    assert "so it is neither read nor written" in said
    assert snapshot(elsewhere) == before


@pytest.mark.asyncio
async def test_a_link_in_a_trusted_workspace_does_not_make_its_target_project_trusted(tmp_path: Path) -> None:
    root, other = tmp_path / "user", tmp_path / "other"
    root.mkdir()
    other.mkdir()
    (other / "pyproject.toml").touch()
    (other / "model.py").write_text(MODEL)
    (root / "model.py").symlink_to(other / "model.py")
    (root / "inside.py").symlink_to(root / "real.py")
    before = snapshot(other)
    async with editor(root) as ide:
        assert await ide.command("optimize", ide.open(MODEL, on_disk=False), "f") is None
        assert str(other) in ide.questions[0].message
        (root / "real.py").write_text(MODEL)
        inside = ide.open(MODEL, "inside.py", on_disk=False)
        assert "improved" in await ide.optimized(inside, "f"), "a link that stays inside needs no further answer"
        assert len(ide.questions) == 1
    assert snapshot(other) == before


# Modules ------------------------------------------------------------------------------------------------------------


@pytest.mark.asyncio
@pytest.mark.parametrize("path", ["", ".", os.pathsep, "{root}", f"{os.pathsep}.{os.pathsep}{{root}}"])
async def test_the_server_imports_nothing_from_its_working_directory(tmp_path: Path, path: str) -> None:
    root = tmp_path / "user"
    root.mkdir()
    plant_modules(root)
    variables = {"PYTHONPATH": path.format(root=root)}
    async with editor(root, REAL, options=UNTRUSTED, cwd=root, variables=variables) as ide:
        assert await looked_at(ide) == []
    assert imported(root) == []


def job(module: str, request: dict[str, Any], cwd: Path, **variables: str) -> list[dict[str, Any]]:
    """The events of a job process."""
    process = subprocess.Popen(
        isolated_command(module),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=cwd,
        env={**os.environ, **variables},
    )
    with process:
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write(json.dumps(request) + "\n")
        process.stdin.flush()
        events = [json.loads(line) for line in process.stdout]
        process.stdin.close()
    return events


def test_job_processes_import_nothing_from_their_working_directory(tmp_path: Path) -> None:
    hostile, user = tmp_path / "hostile", tmp_path / "user"
    for folder in (hostile, user):
        folder.mkdir()
    plant_modules(hostile)
    (user / "pyproject.toml").touch()
    (user / "model.py").write_text(MODEL)
    own = {"path": str(user / "model.py"), "target": "nothing", "text": MODEL, "settings": {"python": sys.executable}}
    record = {**own, "target": "f", "command": "true", "folder": str(user)}
    [*_, recorded] = job("mtmc_lsp.server.recorder", record, hostile, PYTHONPATH=str(hostile))
    assert (recorded["event"], recorded["exit_code"]) == ("recorded", 0)
    assert imported(hostile) == []
    # The host also runs the user's interpreter, with the user's PYTHONPATH, to query versions.
    [*_, answer] = job("mtmc_lsp.server.host", {**own, "kind": "plan"}, hostile)
    assert answer["error"]["code"] == "no-such-target"
    assert imported(hostile) == []


@pytest.mark.asyncio
async def test_a_job_imports_nothing_from_the_working_directory_of_the_server(tmp_path: Path) -> None:
    hostile, root = tmp_path / "hostile", tmp_path / "user"
    for folder in (hostile, root):
        folder.mkdir()
    plant_modules(hostile)
    settings = {"python": sys.executable}
    async with editor(root, REAL, settings=settings, cwd=hostile, variables={"PYTHONPATH": f".{os.pathsep}"}) as ide:
        uri = ide.open(MODEL)
        assert "f: the plan for" in await ide.finished((await ide.command("plan", uri, "f"))["job"])
    assert imported(hostile) == []
