"""What is offered at the cursor, and why not."""

from __future__ import annotations

import pytest
from editor import Editor
from lsprotocol import types as lsp

pytestmark = pytest.mark.asyncio

MODEL = """\
import torch
import triton
from torch import nn


# mtmc: x=f32[8,48]
def f(x):
    return torch.relu(x) + 1


def g(x):
    return x + 1


class Block(nn.Module):
    def forward(self, x):
        return x * 2


@triton.jit
def kernel(x):
    pass


def broken(x):
    return x +
"""


async def test_a_function_is_offered_everything_that_makes_sense(ide: Editor) -> None:
    uri = ide.open(MODEL)
    actions = await ide.actions(uri, "torch.relu")
    assert [a for a in actions if actions[a].disabled is None] == ["optimize", "plan", "measure", "record"]
    assert actions["optimize"].title == "Optimize to Triton kernel"
    assert actions["addWorkload"].disabled.reason == "It already has a workload directive."
    assert "no generated kernel" in actions["verify"].disabled.reason


async def test_an_action_gets_its_command_when_it_is_resolved(ide: Editor) -> None:
    uri = ide.open(MODEL)
    action = (await ide.actions(uri, "return x * 2"))["optimize"]
    assert action.command is None
    resolved = await ide.client.code_action_resolve_async(action)
    assert resolved.command.command == "mtmc.optimize"
    assert list(resolved.command.arguments) == [{"uri": uri, "target": "Block.forward"}]


async def test_a_directive_is_put_above_the_function(ide: Editor) -> None:
    uri = ide.open(MODEL)
    action = await ide.client.code_action_resolve_async((await ide.actions(uri, "return x + 1"))["addWorkload"])
    ide.apply(uri, list(action.edit.document_changes[0].edits))
    assert "\n\n# mtmc: x=f32[64,1024]\ndef g(x):" in ide.texts[uri]
    assert (await ide.actions(uri, "return x + 1"))["addWorkload"].disabled is not None


async def test_a_kernel_and_a_broken_function_say_what_to_do(ide: Editor) -> None:
    uri = ide.open(MODEL)
    assert "launches it" in (await ide.actions(uri, "def kernel"))["optimize"].disabled.reason
    broken = (await ide.actions(uri, "def broken"))["optimize"]
    assert broken.disabled.reason == "broken has a syntax error. Fix it first."
    # The rest of a broken file is as usable as ever.
    assert (await ide.actions(uri, "torch.relu"))["optimize"].disabled is None


async def test_a_file_that_is_not_on_disk_is_to_be_saved_first(ide: Editor) -> None:
    uri = ide.open(MODEL, "new.py", on_disk=False)
    assert "save it first" in (await ide.actions(uri, "torch.relu"))["optimize"].disabled.reason


async def test_nothing_is_offered_on_code_that_is_not_ours_to_touch(ide: Editor) -> None:
    assert await ide.actions(ide.open(MODEL), "from torch import nn") == {}
    assert await ide.actions(ide.open("def f(x):\n    return x\n", "plain.py"), "return") == {}
    (ide.root / "site-packages").mkdir()
    assert await ide.actions(ide.open(MODEL, "site-packages/library.py"), "torch.relu") == {}


async def test_only_the_kinds_asked_for_come_back(ide: Editor) -> None:
    uri = ide.open(MODEL)
    assert await ide.actions(uri, "torch.relu", only="source.organizeImports") == {}
    assert list(await ide.actions(uri, "torch.relu", only="refactor.rewrite.mtmc.plan")) == ["plan"]
    assert "optimize" in await ide.actions(uri, "torch.relu", only="refactor")


async def test_inputs_are_proposed_and_those_that_are_given_are_written(ide: Editor) -> None:
    uri = ide.open("import torch\n\n\ndef f(x, n: int):\n    return torch.relu(x) * n\n")
    proposed = await ide.client.protocol.send_request_async("mtmc/proposedWorkload", {"uri": uri, "target": "f"})
    action = await ide.client.code_action_resolve_async((await ide.actions(uri, "torch.relu"))["addWorkload"])
    assert action.edit.document_changes[0].edits[0].new_text == f"# mtmc: {proposed.inputs}\n"
    await ide.command("addWorkload", uri, "f", inputs="x=f32[8,48]\n n=3")
    assert "\n# mtmc: x=f32[8,48] n=3\ndef f(x" in ide.texts[uri]
    assert await ide.client.protocol.send_request_async("mtmc/proposedWorkload", {"uri": uri, "target": "g"}) is None


async def test_a_client_that_resolves_nothing_gets_whole_actions(tmp_path) -> None:
    from editor import capabilities, editor

    action = lsp.CodeActionClientCapabilities()
    limited = capabilities(text_document=lsp.TextDocumentClientCapabilities(code_action=action))
    async with editor(tmp_path, client_capabilities=limited) as ide:
        uri = ide.open(MODEL)
        actions = await ide.actions(uri, "return x + 1")
        assert actions["optimize"].command.command == "mtmc.optimize"
        assert actions["addWorkload"].edit is not None
        assert "verify" not in actions, "this client shows no reason for what cannot be done"
