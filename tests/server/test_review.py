"""Review of steps: the file changes only on keep, and every step can be removed."""

from __future__ import annotations

import asyncio
import os
import stat
from pathlib import Path
from typing import Any

import pytest
from editor import Editor, capabilities, editor
from lsprotocol import types as lsp
from pygls.uris import to_fs_path

from mtmc_lsp.server.progress import LENS_REPEATS, LENS_SECONDS

pytestmark = pytest.mark.asyncio

MODEL = """\
# fake f: better wrong better better
# fake h: slower
import torch


def f(x):
    return torch.relu(x) + 1


def h(x):
    return x + 2
"""
HEAD = """\
# fake f: better wrong better better
# fake h: slower
import torch


def f(x):
    if x is None:  # mtmc: dispatch
        return f_kernel(x)
    return torch.relu(x) + 1


def h(x):
    return x + 2


# mtmc: begin f
import triton  # noqa: E402


@triton.jit
def f_kernel():
"""
TAIL = "# mtmc: end f\n"


def with_steps(*numbers: int) -> str:
    """The file with the lines of the given actions in its kernel."""
    return HEAD + "".join(f"    pass  # action {number}\n" for number in numbers) + TAIL


async def pending(ide: Editor, text: str = MODEL) -> str:
    """Open a file and optimise ``f``: steps 1, 3 and 4 are pending."""
    uri = ide.open(text)
    await ide.optimized(uri, "f")
    return uri


async def test_lenses_show_the_first_pending_step(ide: Editor) -> None:
    uri = await pending(ide)
    await ide.until(lambda: "lens" in ide.refreshed)
    assert await ide.lenses(uri) == [
        "1/3 Action 1 · 1.25x · verified",
        "Keep",
        "Discard",
        "Retry",
        "Diff",
        "Next",
        "Keep all 3",
    ]


async def test_lenses_are_refreshed_once_until_the_client_requests_them(ide: Editor) -> None:
    uri = ide.open(MODEL)
    began = asyncio.get_running_loop().time()
    await ide.optimized(uri, "f")
    waits = (asyncio.get_running_loop().time() - began) / LENS_SECONDS
    # Progress would otherwise postpone them again and again: VS Code waits for a time without refreshes.
    assert 1 <= ide.refreshed.count("lens") <= 1 + waits
    count = ide.refreshed.count("lens")

    async def is_refreshed_again() -> bool:
        await ide.lenses(uri)
        await ide.command("select", uri, "f", step=1)
        return ide.refreshed.count("lens") > count + 1

    await ide.until_async(is_refreshed_again)
    # VS Code forgets a refresh while the editor loses the focus, so it is repeated, but not for ever.
    await ide.lenses(uri)
    count = ide.refreshed.count("lens")
    await ide.command("select", uri, "f", step=3)
    await ide.until(lambda: ide.refreshed.count("lens") == count + 1 + LENS_REPEATS)


async def test_code_actions_offer_the_same_commands(ide: Editor) -> None:
    uri = await pending(ide)
    actions = await ide.actions(uri, "torch.relu", only="refactor.rewrite.mtmc.review")
    assert list(actions) == ["keep", "diff", "discard", "tryAnother", "markReviewed", "keepAll", "preview"]
    assert actions["keep"].title == "Keep 1/3: Action 1"
    resolved = await ide.client.code_action_resolve_async(actions["keep"])
    assert resolved.command.command == "mtmc.keep"


async def test_keep_writes_one_step_with_a_versioned_edit(ide: Editor) -> None:
    uri = await pending(ide)
    assert await ide.command("keep", uri, "f") is True
    assert ide.texts[uri] == with_steps(1)
    (change,) = ide.edits[-1].edit.document_changes
    assert change.text_document.version == 1
    assert ide.edits[-1].edit.change_annotations["mtmc"].needs_confirmation is False
    assert (await ide.lenses(uri))[0].startswith("2/3 Action 3 · 1.56x")
    assert Path(to_fs_path(uri)).read_text() == MODEL, "saving is the user's"


async def test_keep_all_then_undo_the_last_then_all(ide: Editor) -> None:
    uri = await pending(ide)
    await ide.command("keepAll", uri, "f")
    assert ide.texts[uri] == with_steps(1, 3, 4)
    assert (await ide.lenses(uri))[0] == "✓ 3 steps kept · 1.95x · verified"
    assert await ide.command("undo", uri, "f") is True
    assert ide.texts[uri] == with_steps(1, 3)
    assert (await ide.lenses(uri))[0].startswith("✓ 2 steps kept")
    await ide.command("undoAll", uri, "f")
    assert ide.texts[uri] == MODEL


async def lens(ide: Editor, uri: str, start: str) -> list[str]:
    """The lenses once the first one begins with ``start``."""
    while not (found := await ide.lenses(uri)) or not found[0].startswith(start):
        await asyncio.sleep(0.02)
    return found


async def test_undoing_one_kept_step_keeps_the_others(ide: Editor) -> None:
    uri = await pending(ide)
    await ide.command("keepAll", uri, "f")
    assert await ide.command("undo", uri, "f", step=1) is True
    assert ide.texts[uri] == with_steps(3, 4), "at once, before anything is verified again"
    assert (await lens(ide, uri, "✓ 2 steps kept · 1.56x"))[0].endswith("verified")
    assert "timing" in str(ide.stages(2)), "what is left was verified and timed again"
    assert ide.texts[uri] == with_steps(3, 4)


async def test_discarding_a_pending_step_removes_it_from_the_later_steps(ide: Editor) -> None:
    uri = await pending(ide)
    await ide.command("keep", uri, "f")
    assert await ide.command("discard", uri, "f", step=3) is True
    assert ide.texts[uri] == with_steps(1)
    await lens(ide, uri, "2/2 Action 4 · 1.56x · verified")
    await ide.command("keep", uri, "f")
    assert ide.texts[uri] == with_steps(1, 4)


async def test_a_function_whose_steps_are_all_discarded_can_be_optimised_again(ide: Editor) -> None:
    uri = await pending(
        ide, MODEL.replace("better wrong better better", "better").replace("def f", "# mtmc: x=f32[8]\ndef f")
    )
    await ide.command("discard", uri, "f")
    await ide.until_async(lambda: _shows(ide, uri, "Optimize to Triton kernel"))
    assert len(await ide.lenses(uri)) == 1


async def test_steps_can_be_discarded_while_the_others_are_verified(ide: Editor) -> None:
    uri = await pending(ide)
    assert await ide.command("discard", uri, "f", step=1) is True
    # The numbers are those of the new run: the discarded step 1, then actions 3 and 4.
    assert await ide.command("discard", uri, "f", step=2) is True
    assert (await lens(ide, uri, "1/1 Action 4 · 1.25x · verified"))[1:4] == ["Keep", "Discard", "Retry"]
    assert await ide.command("discard", uri, "f") is True
    assert await ide.lenses(uri) == []
    assert ide.texts[uri] == MODEL


async def test_a_kept_step_that_fails_without_the_undone_one_leaves_the_file(ide: Editor) -> None:
    uri = await pending(ide, MODEL.replace("better wrong better better", "better better needs-two"))
    await ide.command("keepAll", uri, "f")
    assert await ide.command("undo", uri, "f", step=1) is True
    assert ide.texts[uri].count("# action") == 2
    await ide.until(lambda: ide.texts[uri].count("# action") == 1)
    assert "pass  # action 2" in ide.texts[uri]
    assert "one more kept step of f did not work" in ide.client.messages[-1].message


async def test_a_pending_step_is_discarded_and_a_kept_one_undone(ide: Editor) -> None:
    uri = await pending(ide)
    assert await ide.command("undo", uri, "f", step=1) is False
    assert "nothing to undo" in ide.client.messages[-1].message
    await ide.command("keep", uri, "f")
    assert await ide.command("discard", uri, "f", step=1) is False
    assert "nothing to discard" in ide.client.messages[-1].message


async def test_the_selected_step_is_shown_and_kept_with_those_before_it(ide: Editor) -> None:
    uri = await pending(ide)
    assert await ide.command("select", uri, "f", step=3) is True
    assert await ide.lenses(uri) == [
        "2/3 Action 3 · 1.56x · verified",
        "Keep these 2",
        "Discard",
        "Retry",
        "Diff",
        "Previous",
        "Next",
        "Keep all 3",
    ]
    await ide.command("keep", uri, "f")
    assert ide.texts[uri] == with_steps(1, 3)
    assert (await ide.lenses(uri))[:2] == ["3/3 Action 4 · 1.95x · verified", "Keep"]
    assert await ide.command("select", uri, "f", step=1) is False


async def test_going_on_without_an_unfinished_run_starts_one(ide: Editor) -> None:
    uri = ide.open(MODEL)
    job = (await ide.command("resume", uri, "f"))["job"]
    assert "improved" in await ide.finished(job)


async def test_undo_in_the_editor_makes_a_kept_step_pending_again(ide: Editor) -> None:
    uri = await pending(ide)
    await ide.command("keep", uri, "f")
    ide.set(uri, MODEL)
    assert (await ide.lenses(uri))[0].startswith("1/3 ")
    ide.set(uri, with_steps(1, 3))
    assert (await ide.lenses(uri))[0].startswith("3/3 ")


async def test_undo_in_the_editor_after_an_undone_step_brings_back_its_run(tmp_path: Path) -> None:
    async with editor(tmp_path) as ide:
        uri = await pending(ide)
        await ide.command("keepAll", uri, "f")
        kept = ide.texts[uri]
        await ide.command("undo", uri, "f", step=1)
        undone = ide.texts[uri]
        await ide.until_async(lambda: _shows(ide, uri, "✓ 2 steps kept"))
        ide.set(uri, kept)
        await ide.until_async(lambda: _shows(ide, uri, "✓ 3 steps kept"))
        ide.set(uri, undone)
        await ide.until_async(lambda: _shows(ide, uri, "✓ 2 steps kept"))
        ide.set(uri, kept)
        # The steps of the run that the text is from can be taken out again, and the result is the same.
        await ide.command("undo", uri, "f", step=1)
        assert ide.texts[uri] == undone
        ide.set(uri, kept)
        await ide.until_async(lambda: _shows(ide, uri, "✓ 3 steps kept"))
    # The store follows too.
    async with editor(tmp_path) as ide:
        uri = ide.open(kept)
        await ide.until_async(lambda: _shows(ide, uri, "✓ 3 steps kept"))
        await ide.command("undoAll", uri, "f")
        await ide.until_async(lambda: _shows(ide, uri, "1/3 Action 1"))


async def _shows(ide: Editor, uri: str, words: str) -> bool:
    return any(words in title for title in await ide.lenses(uri))


async def test_try_another_continues_from_the_previous_version(ide: Editor) -> None:
    uri = await pending(ide)
    await ide.command("keep", uri, "f")
    job = await ide.command("tryAnother", uri, "f")
    await ide.finished(job["job"])
    assert (await ide.lenses(uri))[0].startswith("2/2 Action 4")
    assert ide.texts[uri] == with_steps(1)


async def test_edits_elsewhere_in_the_file_are_preserved(ide: Editor) -> None:
    uri = await pending(ide)
    ide.replace(uri, "return x + 2", "return x + 3  # ünïcødé 😀")
    ide.replace(uri, "import torch\n", "import torch\nimport math\n")
    await ide.command("keepAll", uri, "f")
    assert "return x + 3  # ünïcødé 😀" in ide.texts[uri]
    assert "    pass  # action 4\n# mtmc: end f" in ide.texts[uri]
    await ide.command("undoAll", uri, "f")
    assert ide.texts[uri] == MODEL.replace("x + 2", "x + 3  # ünïcødé 😀").replace("torch\n", "torch\nimport math\n", 1)


async def test_line_endings_and_a_byte_order_mark_are_preserved(ide: Editor) -> None:
    text = "\ufeff" + MODEL.replace("\n", "\r\n")
    uri = await pending(ide, text)
    await ide.command("keepAll", uri, "f")
    assert ide.texts[uri] == "\ufeff" + with_steps(1, 3, 4).replace("\n", "\r\n")
    await ide.command("undoAll", uri, "f")
    assert ide.texts[uri] == text


async def test_a_changed_function_is_stale_and_accepts_no_step(ide: Editor) -> None:
    uri = await pending(ide)
    ide.replace(uri, "torch.relu(x) + 1", "torch.relu(x) + 10")
    assert await ide.lenses(uri) == ["Changed since it was measured · Optimize again"]
    assert "changed" in (await ide.actions(uri, "torch.relu"))["keep"].disabled.reason
    assert await ide.command("keep", uri, "f") is False
    assert "Optimise it again" in ide.client.messages[-1].message
    assert "f_kernel" not in ide.texts[uri]


async def test_a_manually_edited_kernel_is_replaced_only_after_confirmation(ide: Editor) -> None:
    uri = await pending(ide)
    await ide.command("keep", uri, "f")
    ide.replace(uri, "    pass  # action 1", "    pass  # mine")
    ide.answers = ["Cancel", "Replace"]
    assert await ide.command("keepAll", uri, "f") is False
    assert "# mine" in ide.texts[uri]
    assert await ide.command("keepAll", uri, "f") is True
    assert ide.texts[uri] == with_steps(1, 3, 4)
    assert "was edited" in ide.questions[0].message


async def test_a_reviewed_mark_is_shown_stored_and_taken_off_again(tmp_path: Path) -> None:
    async with editor(tmp_path) as ide:
        uri = await pending(ide)
        await ide.command("markReviewed", uri, "f")
        assert (await ide.lenses(uri))[0].endswith(" · reviewed")
        assert [step["reviewed"] for step in await _steps(ide, uri)] == [True, False, False, False]
        actions = await ide.actions(uri, "def f")
        assert "as not reviewed" in actions["markReviewed"].title
    # After a restart, and after another step was taken out.
    async with editor(tmp_path) as ide:
        uri = ide.open(MODEL)
        await ide.until_async(lambda: ide.lenses(uri))
        assert (await ide.lenses(uri))[0].endswith(" · reviewed")
        await ide.command("markReviewed", uri, "f")
        assert "reviewed" not in (await ide.lenses(uri))[0]
    async with editor(tmp_path) as ide:
        uri = ide.open(MODEL)
        await ide.until_async(lambda: ide.lenses(uri))
        assert "reviewed" not in (await ide.lenses(uri))[0]


async def _steps(ide: Editor, uri: str) -> list[Any]:
    (found,) = await ide.client.protocol.send_request_async("mtmc/reviews", {"uri": uri})
    return list(found["run"]["steps"])


async def test_a_run_without_gain_offers_no_steps(ide: Editor) -> None:
    uri = ide.open(MODEL)
    assert "no gain" in await ide.optimized(uri, "h")
    assert await ide.lenses(uri) == []
    assert await ide.command("keep", uri, "h") is False


async def test_a_step_can_be_kept_during_the_search(ide: Editor) -> None:
    uri = ide.open(MODEL.replace("better wrong better better", "better sleep"))
    job = (await ide.command("optimize", uri, "f"))["job"]
    await ide.until(lambda: "step 2: action 2: verifying" in ide.stages(job))
    assert await ide.lenses(uri) == [
        "⟳ step 2: action 2: verifying · 1 of 1 step accepted · best 1.25x",
        "Cancel",
        "1/1 Action 1 · 1.25x · verified",
        "Keep",
        "Diff",
    ]
    await ide.command("keep", uri, "f")
    assert "pass  # action 1" in ide.texts[uri]
    await ide.command("cancel", uri, "f")
    await ide.finished(job)

    async def lenses() -> list[str]:
        return await ide.lenses(uri)

    assert (await lenses())[0].startswith("✓ 1 step kept")
    while "Go on with the run" not in (found := await lenses()):
        assert "Cancel" not in found


async def test_after_a_restart_steps_are_pending_and_the_run_can_be_resumed(tmp_path: Path) -> None:
    text = MODEL.replace("better wrong better better", "better sleep")
    async with editor(tmp_path) as ide:
        uri = ide.open(text)
        job = (await ide.command("optimize", uri, "f"))["job"]
        await ide.until(lambda: "step 2: action 2: verifying" in ide.stages(job))
        ide.client._server.kill()
        ide.client.error = RuntimeError("the server was killed")
    assert (tmp_path / "model.py").read_text() == text
    async with editor(tmp_path) as ide:
        uri = ide.open(text)
        lenses = await ide.until_async(lambda: ide.lenses(uri))
        assert lenses[0].startswith("1/1 Action 1 · 1.25x")
        assert lenses[-1] == "Go on with the run"
        await ide.command("keep", uri, "f")
        kept = ide.texts[uri]
        job = (await ide.command("resume", uri, "f"))["job"]
        await ide.until(lambda: "step 2: action 2: verifying" in ide.stages(job))
        await ide.command("cancel")
        assert ide.texts[uri] == kept


async def test_a_stopped_run_goes_on_after_edits_elsewhere_in_the_file(tmp_path: Path) -> None:
    text = MODEL.replace("better wrong better better", "better sleep")
    async with editor(tmp_path) as ide:
        uri = ide.open(text)
        job = (await ide.command("optimize", uri, "f"))["job"]
        await ide.until(lambda: "step 2: action 2: verifying" in ide.stages(job))
        await ide.command("cancel")
        await ide.finished(job)
        above, below = "# a comment\nNUMBER = 1\n", "\n\ndef other(y):\n    return NUMBER * y\n"
        ide.set(uri, f"{above}{text.replace('better sleep', 'better better')}{below}")
        edited = ide.texts[uri]
        # Without waiting for the lens: the run is found as soon as its stored part is loaded.
        job = (await ide.command("resume", uri, "f"))["job"]
        assert "improved" in await ide.finished(job)
        assert await ide.command("keepAll", uri, "f") is True
        assert "# action 1" in ide.texts[uri]
        assert "# action 2" in ide.texts[uri]
        assert await ide.command("undoAll", uri, "f") is True
        assert ide.texts[uri] == edited


async def test_commands_after_a_restart_wait_until_stored_runs_are_loaded(tmp_path: Path) -> None:
    async with editor(tmp_path) as ide:
        await pending(ide)
        ide.client._server.kill()
        ide.client.error = RuntimeError("the server was killed")
    async with editor(tmp_path) as ide:
        uri = ide.open(MODEL)
        assert await ide.command("keep", uri, "f") is True
        assert "# action 1" in ide.texts[uri]


async def test_a_diff_is_shown_as_a_read_only_file(ide: Editor) -> None:
    uri = await pending(ide)
    answer = await ide.command("diff", uri, "f", step=3)
    path = Path(to_fs_path(ide.client.shown_documents[-1].uri))
    assert path.read_text() == answer["diff"]
    assert "+    pass  # action 3\n" in answer["diff"]
    assert not os.stat(path).st_mode & stat.S_IWUSR
    assert (answer["before"], answer["after"]) == (with_steps(1), with_steps(1, 3))
    await ide.client.shutdown_async(None)
    assert not path.parent.exists()
    ide.client.error = RuntimeError("already shut down")


async def test_a_diff_is_a_virtual_document_if_the_client_supports_it(tmp_path: Path) -> None:
    known = capabilities()
    known.workspace.text_document_content = lsp.TextDocumentContentClientCapabilities()
    async with editor(tmp_path, client_capabilities=known) as ide:
        uri = await pending(ide)
        answer = await ide.command("diff", uri, "f")
        shown = ide.client.shown_documents[-1].uri
        assert shown == "mtmc-diff:/f-step-1.diff"
        params = lsp.TextDocumentContentParams(shown)
        assert (await ide.client.workspace_text_document_content_async(params)).text == answer["diff"]
        asked: list[str] = []
        ide.client.feature(lsp.WORKSPACE_TEXT_DOCUMENT_CONTENT_REFRESH)(lambda params: asked.append(params.uri))
        await ide.command("diff", uri, "f")
        assert asked == [], "it is as it was"
        ide.replace(uri, "torch.relu(x) + 1", "torch.relu(x) + 2")
        await ide.optimized(uri, "f")
        again = await ide.command("diff", uri, "f")
        assert again["diff"] != answer["diff"]
        await ide.until(lambda: asked == [shown])


async def test_a_complete_run_is_previewed_with_a_confirmed_edit(ide: Editor) -> None:
    uri = await pending(ide)
    await ide.command("preview", uri, "f")
    assert ide.edits[-1].edit.change_annotations["mtmc"].needs_confirmation is True
    assert ide.texts[uri] == with_steps(1, 3, 4)


async def test_a_client_without_versions_gets_plain_edits(tmp_path: Path) -> None:
    workspace = lsp.WorkspaceClientCapabilities(apply_edit=True)
    async with editor(tmp_path, client_capabilities=capabilities(workspace=workspace)) as ide:
        uri = await pending(ide)
        await ide.command("keep", uri, "f")
        assert ide.edits[-1].edit.document_changes is None
        assert ide.texts[uri] == with_steps(1)


async def test_a_rejected_edit_changes_nothing_and_is_reported(ide: Editor) -> None:
    uri = await pending(ide)
    ide.versions[uri] += 1
    assert await ide.command("keep", uri, "f") is False
    assert "wrong document version" in ide.client.messages[-1].message
    assert ide.texts[uri] == MODEL


async def test_code_that_could_not_be_removed_is_not_inserted(ide: Editor) -> None:
    uri = await pending(ide)
    ide.replace(uri, "# fake f", '("""é # fake f')
    broken = ide.texts[uri]
    await ide.command("keepAll", uri, "f")
    if ide.texts[uri] != broken:
        await ide.command("undoAll", uri, "f")
    assert ide.texts[uri] == broken


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (MODEL, "There is nothing to undo"),
        (with_steps(1).replace(TAIL, ""), "`# mtmc: begin f` in line 16 has no matching line `# mtmc: end f`. Put"),
        (
            with_steps(1).replace("# mtmc: begin f\n", ""),
            "`# mtmc: end f` in line 22 has no matching line `# mtmc: begin",
        ),
    ],
)
async def test_undo_all_says_why_it_removes_nothing(ide: Editor, text: str, words: str) -> None:
    uri = ide.open(text)
    ide.answers = ["Replace"]
    assert await ide.command("undoAll", uri, "f") is False
    assert words in ide.client.messages[-1].message
    assert ide.texts[uri] == text


async def test_a_discard_that_cannot_be_stored_says_so(tmp_path: Path) -> None:
    async with editor(tmp_path) as ide:
        uri = await pending(ide)
        # Like a full disk, this keeps the result from being stored.
        (tmp_path / ".mtmc" / "store.db").rename(tmp_path / ".mtmc" / "moved.db")
        (tmp_path / ".mtmc" / "store.db").mkdir()
        assert await ide.command("discard", uri, "f", step=4) is False
        assert "is not a regular file" in ide.client.messages[-1].message
        assert ide.texts[uri] == MODEL
