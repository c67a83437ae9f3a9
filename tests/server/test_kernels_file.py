"""``place = "sibling"`` in the editor: one command changes the file and the file of its kernels, and undo removes both."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from editor import Editor, capabilities, editor
from lsprotocol import types as lsp

pytestmark = pytest.mark.asyncio

MODEL = """\
# fake f: better better
# fake h: better
import torch


def f(x):
    return torch.relu(x) + 1


def h(x):
    return x + 2
"""
WITH_F = """\
# fake f: better better
# fake h: better
import torch
from model_kernels import f_kernel  # mtmc: kernels


def f(x):
    if x is None:  # mtmc: dispatch
        return f_kernel(x)
    return torch.relu(x) + 1


def h(x):
    return x + 2
"""
HEADER = "# mtmc: Triton kernels of model.py. Only the code between begin and end marks is replaced.\n"
WITHOUT_FILES = lsp.WorkspaceClientCapabilities(
    apply_edit=True, configuration=True, workspace_edit=lsp.WorkspaceEditClientCapabilities(document_changes=True)
)
"""A client that cannot create and delete files."""
SETTINGS = {"place": "sibling"}


def kernels(*numbers: int) -> str:
    """The file of kernels with the lines of the given actions."""
    lines = "".join(f"    pass  # action {number}\n" for number in numbers)
    block = f"# mtmc: begin f\n@triton.jit\ndef f_kernel():\n{lines}# mtmc: end f\n"
    return f"{HEADER}\nimport triton  # mtmc: import\n\n\n{block}"


@pytest_asyncio.fixture
async def ide(tmp_path: Path) -> AsyncIterator[Editor]:
    (tmp_path / "user").mkdir()
    async with editor(tmp_path / "user", settings=SETTINGS) as made:
        yield made


@pytest_asyncio.fixture
async def simple(tmp_path: Path) -> AsyncIterator[Editor]:
    """A client that cannot create and delete files."""
    (tmp_path / "user").mkdir()
    simple_client = capabilities(workspace=WITHOUT_FILES)
    async with editor(tmp_path / "user", settings=SETTINGS, client_capabilities=simple_client) as made:
        yield made


async def pending(ide: Editor) -> tuple[str, str]:
    """Open a file and optimise ``f``: two steps are pending. Returns the file and the file of kernels."""
    uri = ide.open(MODEL)
    await ide.optimized(uri, "f")
    return uri, ide.uri("model_kernels.py")


async def test_keep_creates_the_file_of_kernels_in_the_same_edit(ide: Editor) -> None:
    uri, beside = await pending(ide)
    assert await ide.command("keep", uri, "f") is True
    assert (ide.texts[uri], ide.texts[beside]) == (WITH_F, kernels(1))
    created, filled, changed = ide.edits[-1].edit.document_changes
    assert isinstance(created, lsp.CreateFile), "the kernels are there before their import"
    assert (filled.text_document.uri, changed.text_document.uri) == (beside, uri)
    assert ide.path(uri).read_text() == MODEL, "saving is the user's"
    assert (await ide.lenses(uri))[0].startswith("2/2 ")


async def test_keep_again_and_undo_change_both_files(ide: Editor) -> None:
    uri, beside = await pending(ide)
    await ide.command("keep", uri, "f")
    await ide.command("keepAll", uri, "f")
    assert (ide.texts[uri], ide.texts[beside]) == (WITH_F, kernels(1, 2))
    assert (await ide.lenses(uri))[0].startswith("✓ 2 steps kept")
    assert await ide.command("undo", uri, "f") is True
    assert (ide.texts[uri], ide.texts[beside]) == (WITH_F, kernels(1))
    assert (await ide.lenses(uri))[0].startswith("✓ 1 step kept")
    assert await ide.command("undoAll", uri, "f") is True
    assert ide.texts[uri] == MODEL
    assert beside not in ide.texts
    assert not ide.path(beside).exists()
    _, deleted = ide.edits[-1].edit.document_changes
    assert isinstance(deleted, lsp.DeleteFile), "the import is gone before the kernels are"


async def test_undo_of_one_target_leaves_the_other(ide: Editor) -> None:
    uri, beside = await pending(ide)
    await ide.command("keepAll", uri, "f")
    ide.save(uri)
    ide.save(beside)
    await ide.optimized(uri, "h")
    await ide.command("keepAll", uri, "h")
    assert "from model_kernels import f_kernel, h_kernel  # mtmc: kernels\n" in ide.texts[uri]
    assert "# mtmc: begin h" in ide.texts[beside]
    await ide.command("undoAll", uri, "h")
    assert (ide.texts[uri], ide.texts[beside]) == (WITH_F, kernels(1, 2))


async def test_an_edit_of_the_kernels_by_hand_is_noticed_and_not_replaced_without_a_question(ide: Editor) -> None:
    uri, beside = await pending(ide)
    await ide.command("keep", uri, "f")
    ide.replace(beside, "pass  # action 1", "return 3")
    (state,) = await ide.client.protocol.send_request_async("mtmc/reviews", {"uri": uri})
    assert (state["edited"], state["kept"]) == (True, [])
    ide.answers = ["Cancel", "Replace"]
    assert await ide.command("keep", uri, "f") is False
    assert "return 3" in ide.texts[beside]
    assert await ide.command("keep", uri, "f") is True
    assert ide.texts[beside] == kernels(1)


async def test_kernels_that_are_missing_are_noticed(ide: Editor) -> None:
    uri, beside = await pending(ide)
    await ide.command("keep", uri, "f")
    ide.delete(beside)
    (state,) = await ide.client.protocol.send_request_async("mtmc/reviews", {"uri": uri})
    assert (state["edited"], state["stale"]) == (True, False)
    ide.answers = ["Replace"]
    assert await ide.command("undoAll", uri, "f") is True
    assert ide.texts[uri] == MODEL


async def test_undo_in_the_editor_makes_a_kept_step_pending_again(ide: Editor) -> None:
    uri, beside = await pending(ide)
    await ide.command("keep", uri, "f")
    ide.set(uri, MODEL)
    assert (await ide.lenses(uri))[0].startswith("1/2 ")
    assert await ide.command("keep", uri, "f") is True
    assert (ide.texts[uri], ide.texts[beside]) == (WITH_F, kernels(1))


async def test_a_change_of_the_original_makes_the_kept_steps_stale(ide: Editor) -> None:
    uri, beside = await pending(ide)
    await ide.command("keep", uri, "f")
    ide.replace(uri, "+ 1", "+ 4")
    (state,) = await ide.client.protocol.send_request_async("mtmc/reviews", {"uri": uri})
    assert state["stale"] is True
    assert await ide.command("undoAll", uri, "f") is True
    assert ide.texts[uri] == MODEL.replace("+ 1", "+ 4")
    assert beside not in ide.texts


async def test_a_job_waits_for_kernels_that_are_not_saved(ide: Editor) -> None:
    uri, beside = await pending(ide)
    await ide.command("keep", uri, "f")
    assert await ide.command("optimize", uri, "h") is None
    assert "The kernels of model.py are not saved" in ide.client.messages[-1].message
    ide.save(beside)
    assert await ide.command("verify", uri, "f") is not None


async def test_a_stale_result_points_to_the_kernels_in_their_file(ide: Editor) -> None:
    uri, beside = await pending(ide)
    await ide.command("keepAll", uri, "f")
    ide.replace(uri, "torch.relu(x)", "torch.relu(x + 1)")
    items = await ide.until(lambda: [d for d in ide.client.diagnostics.get(uri, []) if d.code == "stale"])
    location = items[-1].related_information[0].location
    assert (location.uri, location.range.start.line) == (beside, kernels(1).splitlines().index("# mtmc: begin f"))


async def test_a_file_that_the_user_wrote_is_refused_with_the_remedy(ide: Editor) -> None:
    (ide.root / "model_kernels.py").write_text("MINE = 1\n")
    uri = ide.open(MODEL)
    message = await ide.optimized(uri, "f")
    assert "exists and was not written by mtmc" in message
    assert (ide.root / "model_kernels.py").read_text() == "MINE = 1\n"


async def test_a_client_that_cannot_create_files_gets_the_kernels_on_disk(simple: Editor) -> None:
    uri, beside = await pending(simple)
    assert await simple.command("keepAll", uri, "f") is True
    assert simple.texts[uri] == WITH_F
    assert simple.path(beside).read_text() == kernels(1, 2)
    assert (await simple.lenses(uri))[0].startswith("✓ 2 steps kept")
    assert await simple.command("undoAll", uri, "f") is True
    assert simple.texts[uri] == MODEL
    assert not simple.path(beside).exists()
