"""Existing kernels in an editor: optimise, tune, keep and undo their edits, hover."""

from __future__ import annotations

import pytest
from editor import Editor, position
from lsprotocol import types as lsp

from tests.kernels.scaled_sum import KERNEL, LAUNCHER

pytestmark = pytest.mark.asyncio
TEXT = KERNEL + LAUNCHER


async def test_the_actions_on_a_kernel_and_on_its_launcher(ide: Editor) -> None:
    uri = ide.open(TEXT + "\n\ndef other(x):\n    return torch.relu(x)\n")
    for place in ("tl.load(scale_ptr", "out = torch.empty_like(scale)"):
        actions = await ide.actions(uri, place)
        assert actions["optimize"].title == "Optimize this kernel"
        assert actions["tune"].title == "Tune this kernel for this GPU"
    others = await ide.actions(uri, "torch.relu")
    assert "tune" not in others
    assert others["optimize"].title == "Optimize to Triton kernel"


async def test_hover_shows_what_a_kernel_reads_and_writes(ide: Editor) -> None:
    uri = ide.open(TEXT)
    place = position(TEXT, TEXT.index("scaled_sum_kernel"))
    params = lsp.HoverParams(lsp.TextDocumentIdentifier(uri), place)
    found = await ide.client.text_document_hover_async(params)
    assert found is not None
    shown = str(found.contents.value)
    assert "| load | scale_ptr | no |" in shown
    assert "| store | out_ptr | no |" in shown
    assert "loops: 1" in shown
    assert "mtmc profile" in shown


async def test_an_edit_is_kept_and_undone_while_the_file_changes_elsewhere(ide: Editor) -> None:
    uri = ide.open(TEXT)
    job = await ide.command("tune", uri, "scaled_sum_kernel")
    assert "unmeasured" in await ide.finished(job["job"])
    assert any("Tune warps, stages" in title for title in await ide.lenses(uri))
    await ide.command("keepAll", uri, "scaled_sum_kernel")
    await ide.until(lambda: "@triton.autotune(" in ide.texts[uri])
    assert "EVEN_N" not in ide.texts[uri], "only configurations are tuned"
    ide.replace(uri, "import torch\n", "import torch  # edited\n")
    await ide.command("undo", uri, "scaled_sum_kernel")
    await ide.until(lambda: ide.texts[uri] == TEXT.replace("import torch\n", "import torch  # edited\n"))
