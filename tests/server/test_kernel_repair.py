"""*Check and repair this kernel* in an editor."""

from __future__ import annotations

import pytest
from editor import Editor

from benchmarks.kernel_faults.kernels import source

pytestmark = pytest.mark.asyncio

SOUND = source("add").replace(" reference=add_reference", "")
FAULTY = SOUND.replace("tl.load(y_ptr + offsets, mask=mask)", "tl.load(y_ptr + offsets)")


async def test_the_action_is_offered_on_a_kernel_and_on_its_launcher_alone(ide: Editor) -> None:
    uri = ide.open(FAULTY + "\n\ndef other(x):\n    return torch.relu(x)\n")
    for place in ("tl.load(y_ptr", "out = torch.empty_like(x)"):
        actions = await ide.actions(uri, place)
        assert actions["repair"].title == "Check and repair this kernel"
        assert actions["repair"].command.command == "mtmc.repair"
    assert "repair" not in await ide.actions(uri, "torch.relu")


async def test_a_repair_is_an_edit_of_the_buffer_and_its_fault_a_message(ide: Editor) -> None:
    uri = ide.open(FAULTY)
    job = await ide.command("repair", uri, "add_kernel")
    end = await ide.finished(job["job"])
    assert end == ("add_kernel: line 12, add_kernel: it reads element 1023 of y_ptr, which has 1. Repair: Add the mask")
    repaired = FAULTY.replace("tl.load(y_ptr + offsets)", "tl.load(y_ptr + offsets, mask=mask, other=0.0)")
    await ide.until(lambda: ide.texts[uri] == repaired)

    async def is_kept() -> bool:
        return any("1 step kept" in title for title in await ide.lenses(uri))

    await ide.until_async(is_kept)
    await ide.command("undo", uri, "add_kernel")
    await ide.until(lambda: ide.texts[uri] == FAULTY)


async def test_a_sound_kernel_is_not_edited(ide: Editor) -> None:
    uri = ide.open(SOUND)
    job = await ide.command("repair", uri, "add")
    assert await ide.finished(job["job"]) == "add: no fault"
    assert ide.texts[uri] == SOUND


async def test_a_repair_of_a_text_that_was_edited_meanwhile_is_not_shown(ide: Editor) -> None:
    uri = ide.open(FAULTY)
    job = await ide.command("repair", uri, "add_kernel")
    ide.replace(uri, "import torch\n", "import torch  # edited\n")
    await ide.finished(job["job"])
    await ide.until(
        lambda: [m for m in ide.client.messages if "was edited while its kernels were repaired" in m.message]
    )
    assert "tl.load(y_ptr + offsets)" in ide.texts[uri]
