"""The first message is answered immediately, with the same capabilities as by the server."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from typing import Any

import pytest
from editor import FAKE
from hypothesis import given, settings
from hypothesis import strategies as st

from mtmc_lsp.server.app import make_server
from mtmc_lsp.server.handshake import capabilities

CLIENTS: list[dict[str, Any]] = [
    {},
    {"general": {"positionEncodings": ["utf-32", "utf-8"]}, "notebookDocument": {"synchronization": {}}},
    {"general": {"positionEncodings": ["latin-1", "utf-8"]}, "workspace": {"textDocumentContent": {}}},
    {"general": {"positionEncodings": []}, "workspace": {"fileOperations": {"didRename": True, "didCreate": True}}},
    {
        "textDocument": {"codeAction": {}, "rename": {"prepareSupport": True}},
        "workspace": {"fileOperations": {"didRename": False}, "textDocumentContent": {"dynamicRegistration": True}},
    },
]


class Written:
    """Stores the output of a protocol."""

    def __init__(self) -> None:
        self.data = b""

    def write(self, data: bytes) -> None:
        self.data += data

    def close(self) -> None:
        """Nothing to close."""


def initialize(client: Any, number: object = 1, **more: Any) -> bytes:
    params = {"processId": None, "rootUri": None, "capabilities": client, **more}
    return framed({"jsonrpc": "2.0", "id": number, "method": "initialize", "params": params})


def framed(message: Any) -> bytes:
    body = json.dumps(message).encode()
    return b"Content-Length: %d\r\n\r\n" % len(body) + body


def answered_by_the_server(client: dict[str, Any]) -> Any:
    """The server's own answer to ``initialize``, as on a TCP port."""
    server, written = make_server(), Written()
    server.protocol.set_writer(written)
    body = initialize(client).split(b"\r\n\r\n", 1)[1]
    server.protocol.handle_message(json.loads(body, object_hook=server.protocol.structure_message))
    return json.loads(written.data.split(b"\r\n\r\n", 1)[1])["result"]["capabilities"]


@pytest.mark.parametrize("client", CLIENTS)
def test_the_early_answer_equals_the_registered_capabilities(client: dict[str, Any]) -> None:
    assert capabilities(client) == answered_by_the_server(client)


@settings(max_examples=200, deadline=None)
@given(
    client=st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(max_size=3),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(
                st.sampled_from(["general", "positionEncodings", "workspace", "fileOperations", "didRename"]),
                inner,
                max_size=4,
            )
        ),
    )
)
def test_arbitrary_client_capabilities_get_an_answer(client: Any) -> None:
    told = capabilities(client)
    assert told["positionEncoding"] in ("utf-8", "utf-16", "utf-32")
    json.dumps(told)


def test_no_slow_module_is_imported_before_the_answer() -> None:
    code = (
        "import sys, mtmc_lsp.server.app; print({'pygls', 'lsprotocol', 'asyncio', 'tree_sitter'} & set(sys.modules))"
    )
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "set()"


async def _conversation(*messages: bytes, answers: int, last: bytes = b"") -> tuple[list[Any], int]:
    """Send messages, read the given number of answers, send ``last``, and close standard input. Also returns the exit code."""
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(*FAKE, stdin=pipe, stdout=pipe)
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(b"".join(messages))
    said: list[Any] = []
    while len([message for message in said if "id" in message]) < answers:
        header = await asyncio.wait_for(process.stdout.readuntil(b"\r\n\r\n"), 60)
        length = int(header.split(b"Content-Length: ")[1].split(b"\r\n")[0])
        said.append(json.loads(await process.stdout.readexactly(length)))
    process.stdin.write(last)
    process.stdin.close()
    rest = await process.stdout.read()
    assert rest == b"", "no request is answered twice"
    return [message for message in said if "id" in message], await asyncio.wait_for(process.wait(), 20)


LENSES = {"textDocument": {"uri": "file:///none.py"}}


def test_initialize_is_answered_once_and_later_requests_work() -> None:
    ask = framed({"jsonrpc": "2.0", "id": 2, "method": "textDocument/codeLens", "params": LENSES})
    shutdown = framed({"jsonrpc": "2.0", "id": 3, "method": "shutdown"})
    leave = framed({"jsonrpc": "2.0", "method": "exit"})
    said, code = asyncio.run(_conversation(initialize({}), ask, shutdown, answers=3, last=leave))
    assert [message["id"] for message in said] == [1, 2, 3]
    assert said[0]["result"]["serverInfo"]["name"] == "mtmc-lsp"
    assert said[1]["result"] == []
    assert code == 0


def test_exit_without_shutdown_gives_exit_code_1() -> None:
    leave = framed({"jsonrpc": "2.0", "method": "exit"})
    said, code = asyncio.run(_conversation(initialize({}, "one"), answers=1, last=leave))
    assert [message["id"] for message in said] == ["one"]
    assert code == 1


def test_invalid_capabilities_are_treated_as_minimal_capabilities() -> None:
    ask = framed({"jsonrpc": "2.0", "id": 2, "method": "textDocument/codeLens", "params": LENSES})
    strange = {"general": {"positionEncodings": ["utf-8"]}, "textDocument": 5, "window": ["x"]}
    said, _ = asyncio.run(_conversation(initialize(strange), ask, answers=2))
    assert [(message["id"], "result" in message) for message in said] == [(1, True), (2, True)]
    assert said[0]["result"]["capabilities"]["positionEncoding"] == "utf-8"


@pytest.mark.parametrize("params", [None, {}, {"capabilities": None}])
def test_an_initialize_without_capabilities_is_rejected(params: Any) -> None:
    asked = framed({"jsonrpc": "2.0", "id": 1, "method": "initialize", "params": params})
    said, _ = asyncio.run(_conversation(asked, answers=1))
    assert said[0]["error"]["code"] in (-32602, -32603)


def test_the_server_answers_a_message_before_initialize() -> None:
    asked = framed({"jsonrpc": "2.0", "id": 1, "method": "no/such/method", "params": {}})
    said, _ = asyncio.run(_conversation(asked, initialize({}, 2), answers=2))
    assert said[0]["error"]["code"] == -32002
    assert said[1]["result"]["serverInfo"]["name"] == "mtmc-lsp"
