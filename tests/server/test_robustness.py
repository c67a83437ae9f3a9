"""Invalid messages, and several clients at once."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from editor import FAKE, Editor, capabilities, editor
from lsprotocol import types as lsp
from pytest_lsp import make_test_lsp_client

from mtmc_lsp.process.isolation import isolated_command

pytestmark = pytest.mark.asyncio

LENSES = {"textDocument": {"uri": "file:///m.py"}}
MODEL = "import torch\n\n\ndef f(x):\n    return torch.relu(x) + 1\n"


def send(ide: Editor, body: bytes) -> None:
    """Send raw bytes."""
    ide.client._server.stdin.write(b"Content-Length: %d\r\n\r\n" % len(body) + body)


async def test_invalid_messages_do_not_affect_the_server(ide: Editor) -> None:
    uri = ide.open(MODEL)
    send(ide, b"{this is no JSON")
    send(ide, b"[1, 2]")
    send(ide, b'{"jsonrpc": "2.0", "method": "textDocument/didChange", "params": {"nothing": 1}}')
    send(ide, b'{"jsonrpc": "2.0", "method": "textDocument/didOpen"}')
    send(ide, b'{"jsonrpc": "2.0", "id": "x", "method": "no/such/method"}')
    assert "optimize" in await ide.actions(uri, "torch.relu")
    assert ide.client.messages == [], "no message is shown"


async def test_an_invalid_request_gets_an_error_response(tmp_path: Path) -> None:
    process = await asyncio.create_subprocess_exec(*FAKE, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE)
    message = {"jsonrpc": "2.0", "id": 7, "method": "textDocument/hover", "params": {"position": "here"}}
    body = json.dumps(message).encode()
    process.stdin.write(b"Content-Length: %d\r\n\r\n" % len(body) + body)
    header = await asyncio.wait_for(process.stdout.readuntil(b"\r\n\r\n"), 60)
    length = int(header.split(b"Content-Length: ")[1].split(b"\r\n")[0])
    answer = json.loads(await process.stdout.readexactly(length))
    assert answer["id"] == 7
    assert answer["error"]["code"] == -32602
    process.kill()
    await process.wait()


HEADERS = {
    "no length": b"Content-Type: nonsense\r\n\r\n{}",
    "words": b"Content-Length: many\r\n\r\n{}",
    "a negative number": b"Content-Length: -5\r\n\r\n{}",
    "a huge number": b"Content-Length: 99999999999\r\n\r\n{}",
    "too many digits": b"Content-Length: " + b"9" * 5000 + b"\r\n\r\n{}",
    "zero": b"Content-Length: 0\r\n\r\n",
    "a long line": b"x" * 300_000 + b"\r\n\r\n",
    "a long line without an end": b"x" * 300_000,
    "binary data": bytes(range(256)) * 40,
    "empty lines": b"\r\n" * 50,
}


@pytest.mark.parametrize("name", ["Content-Length: %d\r\n", "CONTENT-LENGTH:%d\r\n", "X: y\r\ncontent-length : %d\n"])
async def test_after_a_malformed_header_the_next_message_is_read(ide: Editor, name: str) -> None:
    uri = ide.open(MODEL)
    stdin = ide.client._server.stdin
    for version, (kind, header) in enumerate(HEADERS.items(), 2):
        stdin.write(header)
        params = change(uri, version, f"# after {kind}\n")
        body = json.dumps({"jsonrpc": "2.0", "method": "textDocument/didChange", "params": params})
        stdin.write(name.encode() % len(body) + b"\r\n" + body.encode())
        answer = await ide.client.protocol.send_request_async("mtmc/text", {"uri": uri})
        assert answer.text == f"# after {kind}\n"
    assert ide.client.messages == [], "no message is shown"


def change(uri: str, version: int, text: str) -> object:
    return {"textDocument": {"uri": uri, "version": version}, "contentChanges": [{"text": text}]}


INITIALIZE = {"method": "initialize", "params": {"processId": None, "rootUri": None, "capabilities": {}}}
ORDERS: dict[str, tuple[list[Any], list[Any]]] = {
    "a request before initialize": ([{"id": 1, "method": "textDocument/codeLens", "params": LENSES}], [-32002]),
    "a notification before initialize": ([{"method": "textDocument/didSave", "params": LENSES}], []),
    "initialize twice": ([{"id": 1, **INITIALIZE}, {"id": 2, **INITIALIZE}], [-32600]),
    "a request after shutdown": (
        [{"id": 1, **INITIALIZE}, {"id": 2, "method": "shutdown"}, {"id": 3, "method": "mtmc/text", "params": {}}],
        [-32600],
    ),
    "no JSON": (["{"], [-32700]),
    "no UTF-8": ([b"\xff\xfe\xff"], [-32700]),
    "deep JSON": (["[" * 100_000 + "]" * 100_000], [-32700]),
    "a huge number": (["1" * 10_000], [-32700]),
    "a batch": (["[]"], [-32600]),
    "a text": (['"initialize"'], [-32600]),
    "no version": (['{"id": 1, "method": "shutdown"}'], [-32600]),
}


@pytest.mark.parametrize("kind", ORDERS)
async def test_invalid_messages_and_orders_get_the_protocols_answers(kind: str) -> None:
    messages, codes = ORDERS[kind]
    process = await asyncio.create_subprocess_exec(*FAKE, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE)
    assert process.stdin is not None
    assert process.stdout is not None
    for message in messages:
        text = json.dumps({"jsonrpc": "2.0", **message}) if isinstance(message, dict) else message
        body = text if isinstance(text, bytes) else text.encode()
        process.stdin.write(b"Content-Length: %d\r\n\r\n" % len(body) + body)
    exits = b'{"jsonrpc": "2.0", "method": "exit"}'
    process.stdin.write(b"Content-Length: %d\r\n\r\n" % len(exits) + exits)
    output = (await asyncio.wait_for(process.communicate(), 60))[0]
    answers = [json.loads(part.split(b"\r\n\r\n")[1]) for part in output.split(b"Content-Length: ")[1:]]
    assert [answer["error"]["code"] for answer in answers if "error" in answer] == codes


@pytest.mark.slow
async def test_a_server_whose_event_loop_is_stuck_ends_with_its_client(tmp_path: Path) -> None:
    stuck = "import time\nfrom mtmc_lsp.server import app, server\nfrom mtmc_lsp.process.isolation import isolated_command\n"
    stuck += "server.Server.document = lambda *_: time.sleep(3600)\napp.serve()\n"
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", stuck, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
    )
    assert process.stdin is not None
    assert process.stdout is not None
    lenses = {"id": 2, "method": "textDocument/codeLens", "params": LENSES}
    for message in ({"id": 1, **INITIALIZE}, {"method": "initialized", "params": {}}, lenses):
        body = json.dumps({"jsonrpc": "2.0", **message}).encode()
        process.stdin.write(b"Content-Length: %d\r\n\r\n" % len(body) + body)
    await process.stdout.readuntil(b"\r\n\r\n")
    process.stdin.close()
    # A thread of the server ends it; on a busy machine, its watchdog may be first.
    assert await asyncio.wait_for(process.wait(), 60) in (1, -signal.SIGKILL)


async def test_a_server_ends_with_the_process_of_its_client_even_if_its_input_stays_open() -> None:
    reader, writer = os.pipe()
    client = subprocess.Popen(["sleep", "600"])
    process = await asyncio.create_subprocess_exec(*FAKE, stdin=reader, stdout=asyncio.subprocess.PIPE)
    assert process.stdout is not None
    params = {**INITIALIZE["params"], "processId": client.pid}
    for message in (
        {"id": 1, "method": "initialize", "params": params},
        {"id": 2, "method": "mtmc/text", "params": {}},
    ):
        body = json.dumps({"jsonrpc": "2.0", **message}).encode()
        os.write(writer, b"Content-Length: %d\r\n\r\n" % len(body) + body)
    await process.stdout.readuntil(b'"id": 2')
    client.kill()
    client.wait()
    assert await asyncio.wait_for(process.wait(), 60) in (0, 1)
    os.close(reader)
    os.close(writer)


async def test_changes_and_requests_for_files_that_are_not_open_are_ignored(ide: Editor) -> None:
    uri = ide.uri("other.py")
    identifier = lsp.VersionedTextDocumentIdentifier(3, uri)
    change = lsp.TextDocumentContentChangeWholeDocument(text="x")
    ide.client.text_document_did_change(lsp.DidChangeTextDocumentParams(identifier, [change]))
    ide.client.text_document_did_close(lsp.DidCloseTextDocumentParams(lsp.TextDocumentIdentifier(uri)))
    assert await ide.lenses(uri) == []
    with pytest.raises(Exception, match="of an open Python file"):
        await ide.command("optimize", uri, "f")
    open_uri = ide.open(MODEL)
    with pytest.raises(Exception, match=r"no target 'g' in .*; targets: f"):
        await ide.command("optimize", open_uri, "g")


async def test_a_file_that_is_renamed_keeps_its_run(ide: Editor) -> None:
    uri = ide.open(MODEL)
    await ide.optimized(uri, "f")
    new = ide.uri("renamed.py")
    ide.client.workspace_did_rename_files(lsp.RenameFilesParams([lsp.FileRename(uri, new)]))
    ide.client.text_document_did_close(lsp.DidCloseTextDocumentParams(lsp.TextDocumentIdentifier(uri)))
    (ide.root / "model.py").rename(ide.root / "renamed.py")
    ide.open(MODEL, "renamed.py")
    assert (await ide.lenses(new))[0].startswith("1/3 ")


async def test_utf_8_positions_are_used_where_the_client_offers_them(tmp_path: Path) -> None:
    general = lsp.GeneralClientCapabilities(position_encodings=[lsp.PositionEncodingKind.Utf8])
    client = make_test_lsp_client()
    await client.start_io(*FAKE)
    try:
        answer = await client.initialize_session(lsp.InitializeParams(capabilities=capabilities(general=general)))
        assert answer.capabilities.position_encoding == "utf-8"
        path = tmp_path / "m.py"
        text = "import triton\nimport triton.language as tl\n\n\n@triton.jit\ndef k():\n    'é漢😀'; x = tl.arange(0, 48)\n"
        path.write_text(text)
        client.text_document_did_open(
            lsp.DidOpenTextDocumentParams(lsp.TextDocumentItem(path.as_uri(), "python", 1, text))
        )
        while not client.diagnostics.get(path.as_uri()):
            await asyncio.sleep(0.02)
        (found,) = client.diagnostics[path.as_uri()]
        assert found.range.start.character == len("    'é漢😀'; x = ".encode())
        await client.shutdown_session()
    finally:
        await client.stop()


async def test_two_clients_over_tcp_have_separate_servers(tmp_path: Path) -> None:
    process = await asyncio.create_subprocess_exec(
        sys.executable, FAKE[1], "--tcp", "127.0.0.1:0", stderr=asyncio.subprocess.PIPE
    )
    try:
        line = (await asyncio.wait_for(process.stderr.readline(), 20)).decode()
        host, _, port = line.strip().rpartition(" ")[2].rpartition(":")
        clients = []
        for name in ("one", "two"):
            (tmp_path / name).mkdir()
            (tmp_path / name / "pyproject.toml").touch()
            client = make_test_lsp_client()
            await client.start_tcp(host, int(port))
            ide = Editor(client, tmp_path / name)
            params = lsp.InitializeParams(capabilities=capabilities(), initialization_options={"trusted": True})
            await client.initialize_session(params)
            clients.append(ide)
        uris = [ide.open(MODEL) for ide in clients]
        jobs = [await ide.command("optimize", uri, "f") for ide, uri in zip(clients, uris, strict=True)]
        for ide, job in zip(clients, jobs, strict=True):
            assert "improved" in await ide.finished(job["job"])
        await clients[0].client.shutdown_async(None)
        clients[0].client.exit(None)
        # The other goes on.
        assert (await clients[1].lenses(uris[1]))[0].startswith("1/3 ")
    finally:
        process.kill()
        await process.wait()


async def test_quick_fixes_fix_or_suppress_a_finding(ide: Editor) -> None:
    text = "import triton\nimport triton.language as tl\n\n\n@triton.jit\ndef k(x_ptr, stride, N: tl.constexpr):\n"
    text += "    row = tl.program_id(0)\n    x = tl.load(x_ptr + row * stride + tl.arange(0, N))\n"
    uri = ide.open(text)

    async def fixes(only: lsp.CodeActionKind | None) -> list[lsp.CodeAction]:
        whole = lsp.Range(lsp.Position(7, 0), lsp.Position(7, 50))
        context = lsp.CodeActionContext(diagnostics=[], only=[only] if only else None)
        params = lsp.CodeActionParams(lsp.TextDocumentIdentifier(uri), whole, context)
        return list(await ide.client.text_document_code_action_async(params) or [])

    mend, silence = await fixes(lsp.CodeActionKind.QuickFix)
    assert (mend.title, silence.title) == ("Convert to 64 bits", "Ignore int32-offset here")
    ide.apply(uri, list(silence.edit.document_changes[0].edits))
    assert "    # mtmc: ignore[int32-offset]\n    x = tl.load" in ide.texts[uri]
    assert await fixes(lsp.CodeActionKind.QuickFix) == []
    ide.set(uri, text)
    (mend, _) = await fixes(lsp.CodeActionKind.QuickFix)
    ide.apply(uri, list(mend.edit.document_changes[0].edits))
    assert "row = tl.program_id(0).to(tl.int64)\n" in ide.texts[uri]
    assert await fixes(lsp.CodeActionKind.QuickFix) == []


async def test_static_checks_update_after_each_edit_and_can_be_disabled(tmp_path: Path) -> None:
    async with editor(tmp_path, settings={"ignoredChecks": ["low-precision-accumulator"]}) as ide:
        uri = ide.open(
            "import triton\nimport triton.language as tl\n\n\n@triton.jit\ndef k():\n    x = tl.arange(0, 64)\n"
        )
        ide.replace(uri, "64", "48")
        await ide.until(lambda: [d.code for d in ide.client.diagnostics.get(uri, [])] == ["arange-bound"])
        ide.client.set_configuration({"ignoredChecks": ["arange-bound"]}, section="mtmc")
        ide.client.workspace_did_change_configuration(lsp.DidChangeConfigurationParams(settings=None))
        await ide.until(lambda: ide.client.diagnostics.get(uri) == [] or not ide.client.diagnostics.get(uri))


async def test_code_that_becomes_part_of_a_string_in_two_edits_has_no_findings(ide: Editor) -> None:
    """Opening quotes above a kernel, then closing quotes far below it: neither edit alone shows that the text between is a string."""
    kernel = "@triton.jit\ndef k():\n    x = tl.arange(0, 48)\n\n\n"
    others = "".join(f"def f{number}(x):\n    return x\n\n\n" for number in range(8))
    uri = ide.open(f"import triton\nimport triton.language as tl\n\n\n{others}{kernel}{others}y = 1\n")

    def codes() -> list[object]:
        return [d.code for d in ide.client.diagnostics.get(uri, [])]

    await ide.until(lambda: codes() == ["arange-bound"])
    ide.replace(uri, "@triton.jit", '"""\n@triton.jit')
    await asyncio.sleep(0.7)
    ide.replace(uri, "y = 1", '"""\ny = 1')
    await ide.until(lambda: codes() == [])
    ide.replace(uri, '"""\n@triton.jit', "@triton.jit")
    ide.replace(uri, '"""\ny = 1', "y = 1")
    await ide.until(lambda: codes() == ["arange-bound"])


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["--tcp", "nonsense"], 2, "invalid address 'nonsense'"),
        (["--tcp", "192.0.2.1:1"], 3, "cannot listen on 192.0.2.1:1"),
        (["--log", "/no/such/folder/x.log"], 3, "cannot write /no/such/folder/x.log"),
    ],
)
async def test_an_invalid_command_line_gives_one_clear_error(arguments: list[str], code: int, said: str) -> None:
    # readline exports COLUMNS when pytest imports it.
    environment = {name: value for name, value in os.environ.items() if name != "COLUMNS"}
    for command in ([*isolated_command("mtmc_lsp.server.app")], [sys.executable, "-m", "mtmc_lsp", "lsp"]):
        process = await asyncio.create_subprocess_exec(
            *command,
            *arguments,
            stderr=asyncio.subprocess.PIPE,
            stdin=asyncio.subprocess.DEVNULL,
            env=environment,
        )
        _, error = await asyncio.wait_for(process.communicate(), 30)
        assert (process.returncode, error.decode().count("\n")) == (code, 2)
        assert said in error.decode()
