"""Code actions at the cursor, and reasons for disabled ones."""

from __future__ import annotations

from pathlib import Path

import pytest
from editor import Editor, editor
from lsprotocol import types as lsp

from mtmc_lsp.source.syntax import python_error

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


async def test_a_function_is_offered_all_applicable_actions(ide: Editor) -> None:
    uri = ide.open(MODEL)
    actions = await ide.actions(uri, "torch.relu")
    assert [a for a in actions if actions[a].disabled is None] == ["optimize", "plan", "measure", "record"]
    assert actions["optimize"].title == "Optimize to Triton kernel"
    assert actions["addWorkload"].disabled.reason == "It already has a workload directive."
    assert "no generated kernel" in actions["verify"].disabled.reason


async def test_an_action_has_its_command_before_it_is_resolved(ide: Editor) -> None:
    uri = ide.open(MODEL)
    action = (await ide.actions(uri, "return x * 2"))["optimize"]
    assert action.command.command == "mtmc.optimize"
    assert list(action.command.arguments) == [{"uri": uri, "target": "Block.forward"}]


async def test_an_action_gets_its_edit_when_it_is_resolved(ide: Editor) -> None:
    uri = ide.open(MODEL)
    assert (await ide.actions(uri, "return x + 1"))["addWorkload"].edit is None


async def test_a_directive_is_inserted_above_the_function(ide: Editor) -> None:
    uri = ide.open(MODEL)
    action = await ide.client.code_action_resolve_async((await ide.actions(uri, "return x + 1"))["addWorkload"])
    ide.apply(uri, list(action.edit.document_changes[0].edits))
    assert "\n\n# mtmc: x=f32[64,1024]\ndef g(x):" in ide.texts[uri]
    assert (await ide.actions(uri, "return x + 1"))["addWorkload"].disabled is not None


async def test_kernels_and_functions_with_syntax_errors_get_a_reason_and_a_remedy(ide: Editor) -> None:
    uri = ide.open(MODEL)
    assert "no graph of operations" in (await ide.actions(uri, "def kernel"))["plan"].disabled.reason
    broken = (await ide.actions(uri, "def broken"))["optimize"]
    reason = "Line 26 has a syntax error: invalid syntax. Fix it first."
    assert broken.disabled.reason == reason
    # Half a second later it is known for the other functions too: the file cannot be imported.
    await ide.until_async(lambda: _reason(ide, uri, "torch.relu"))
    assert await _reason(ide, uri, "torch.relu") == reason
    ide.replace(uri, "return x +\n", "return x + 1\n")
    assert (await ide.actions(uri, "torch.relu"))["optimize"].disabled is None


async def _reason(ide: Editor, uri: str, text: str) -> str:
    disabled = (await ide.actions(uri, text))["optimize"].disabled
    return disabled.reason if disabled is not None else ""


@pytest.mark.parametrize(
    ("statement", "line", "message"),
    [
        ("    y = (x + 1", 7, "'(' was never closed"),
        ("    y = x.", 7, "invalid syntax"),
        ("      y = 3", 7, "unexpected indent"),
        ("  y = 3", 7, "unexpected indent"),
        ("    if x", 7, "expected ':'"),
        ("    if x:", 8, "expected an indented block after 'if' statement on line 7"),
    ],
)
async def test_a_syntax_error_is_marked_at_its_line_and_optimize_names_it(
    ide: Editor, statement: str, line: int, message: str
) -> None:
    uri = ide.open(
        f"import torch\n\n\n# mtmc: x=f32[8]\ndef f(x):\n    x = x * 2\n{statement}\n    return torch.relu(x)\n"
    )
    mark = await ide.until_async(lambda: _syntax_mark(ide, uri))
    assert (mark.range.start.line, mark.message, mark.source) == (line - 1, f"Syntax error: {message}.", "mtmc")
    params = {"uri": uri, "line": 6}
    answer = await ide.client.protocol.send_request_async("mtmc/targetAt", params)
    assert (answer.target, answer.reason) == ("", f"Line {line} has a syntax error: {message}. Fix it first.")
    assert "Optimize to Triton kernel" not in await ide.lenses(uri)
    ide.replace(uri, f"{statement}\n", "")
    assert await _syntax_mark(ide, uri) is None
    assert (await ide.client.protocol.send_request_async("mtmc/targetAt", params)).target == "f"


async def test_syntax_of_later_pythons_is_no_error() -> None:
    for text in (b"type X = int\n", b"def f[T](x): pass\n", b'y = f"{d["a"]}"\n'):
        assert python_error(text) is None


async def test_files_without_torch_and_clients_that_mark_syntax_errors_get_no_mark(tmp_path: Path) -> None:
    async with editor(tmp_path, options={"trusted": True, "marksSyntaxErrors": True}) as ide:
        uri = ide.open("import torch\n\n\ndef f(x):\n    return torch.relu(x\n")
        await ide.until_async(lambda: _is_checked(ide, uri))
        assert await _syntax_mark(ide, uri) is None
    async with editor(tmp_path) as ide:
        uri = ide.open("def f(x):\n    return (x\n", "plain.py")
        other = ide.open("import torch\n\n\ndef f(x):\n    return torch.relu(x\n")
        await ide.until_async(lambda: _syntax_mark(ide, other))
        assert await _syntax_mark(ide, uri) is None


async def _is_checked(ide: Editor, uri: str) -> bool:
    """Whether the pause after which syntax errors are marked is over: the function is no longer offered."""
    return "Optimize to Triton kernel" not in await ide.lenses(uri)


async def _syntax_mark(ide: Editor, uri: str) -> lsp.Diagnostic | None:
    params = lsp.DocumentDiagnosticParams(lsp.TextDocumentIdentifier(uri))
    report = await ide.client.text_document_diagnostic_async(params)
    return next((item for item in report.items if item.code == "syntax-error"), None)


async def test_a_file_that_is_not_on_disk_must_be_saved_first(ide: Editor) -> None:
    uri = ide.open(MODEL, "new.py", on_disk=False)
    assert "Save it first" in (await ide.actions(uri, "torch.relu"))["optimize"].disabled.reason


async def test_no_actions_for_code_without_torch_and_for_installed_packages(ide: Editor) -> None:
    assert await ide.actions(ide.open(MODEL), "from torch import nn") == {}
    assert await ide.actions(ide.open("def f(x):\n    return x\n", "plain.py"), "return") == {}
    (ide.root / "site-packages").mkdir()
    assert await ide.actions(ide.open(MODEL, "site-packages/library.py"), "torch.relu") == {}


async def test_only_requested_kinds_are_returned(ide: Editor) -> None:
    uri = ide.open(MODEL)
    assert await ide.actions(uri, "torch.relu", only="source.organizeImports") == {}
    assert list(await ide.actions(uri, "torch.relu", only="refactor.rewrite.mtmc.plan")) == ["plan"]
    assert "optimize" in await ide.actions(uri, "torch.relu", only="refactor")


async def test_inputs_are_suggested_and_given_inputs_are_written(ide: Editor) -> None:
    uri = ide.open("import torch\n\n\ndef f(x, n: int):\n    return torch.relu(x) * n\n")
    proposed = await ide.client.protocol.send_request_async("mtmc/proposedWorkload", {"uri": uri, "target": "f"})
    action = await ide.client.code_action_resolve_async((await ide.actions(uri, "torch.relu"))["addWorkload"])
    assert action.edit.document_changes[0].edits[0].new_text == f"# mtmc: {proposed.inputs}\n"
    await ide.command("addWorkload", uri, "f", inputs="x=f32[8,48]\n n=3")
    assert "\n# mtmc: x=f32[8,48] n=3\ndef f(x" in ide.texts[uri]
    assert await ide.client.protocol.send_request_async("mtmc/proposedWorkload", {"uri": uri, "target": "g"}) is None


async def test_a_client_without_resolve_gets_complete_actions(tmp_path) -> None:
    from editor import capabilities, editor

    action = lsp.CodeActionClientCapabilities()
    limited = capabilities(text_document=lsp.TextDocumentClientCapabilities(code_action=action))
    async with editor(tmp_path, client_capabilities=limited) as ide:
        uri = ide.open(MODEL)
        actions = await ide.actions(uri, "return x + 1")
        assert actions["optimize"].command.command == "mtmc.optimize"
        assert actions["addWorkload"].edit is not None
        assert "verify" not in actions, "this client shows no reason for what cannot be done"
