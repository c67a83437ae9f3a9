"""Answers ``initialize`` before the server is imported.

An editor waits for this answer before it sends anything else, and importing the protocol library takes most of the startup
time. The capabilities are constant, so they are written here as plain data; a test compares them with what the features
register. The message is then passed to the server as usual, but the server's answer to it is suppressed.
"""

from __future__ import annotations

import io
import json
import os
from dataclasses import dataclass
from typing import Any, Union

from mtmc_lsp import __version__

NAME = "mtmc-lsp"
DIFF_SCHEME = "mtmc-diff"
"""URI scheme of documents served by ``workspace/textDocumentContent``."""
CODE_ACTION_KIND = "refactor.rewrite.mtmc"
SOURCE = "mtmc"
"""``source`` of diagnostics."""
PYTHON_FILES = {"filters": [{"pattern": {"glob": "**/*.py"}, "scheme": "file"}]}
ENCODINGS = ("utf-8", "utf-16", "utf-32")
COMMANDS = (
    "optimize tune plan measure verify addWorkload cancel jobs record repair "
    "keep keepAll preview select markReviewed diff tryAnother resume discard undo undoAll keepVersion"
).split()

MAX_BODY_BYTES = 1 << 28
"""Maximum size of a message. A header with a larger number is invalid: waiting for so much would swallow later messages."""

MessageId = Union[int, str]


@dataclass(frozen=True)
class Greeting:
    """The first message, read before the server was imported."""

    data: bytes
    """All bytes read so far; the server processes them first."""
    answered: MessageId | None = None
    """Id of the answered ``initialize`` request; ``None`` if the message was none, or if the server must reject it."""
    encoding: str = "utf-16"
    """The position encoding sent in the answer."""
    client: int | None = None
    """The number of the client's process, if it sent one."""


def greet(requests: int, answers: int) -> Greeting:
    """Read the first message from one file descriptor. If it is ``initialize``, write the answer to the other.

    Args:
        requests: file descriptor, read unbuffered so that later messages stay in the pipe.
        answers: file descriptor of the answer.
    """
    data, body = _first_message(requests)
    try:
        message = json.loads(body)
    except (ValueError, RecursionError):
        return Greeting(data)
    number, params = _parse_initialize(message)
    if number is None:
        return Greeting(data)
    server_capabilities = capabilities(params["capabilities"])
    result = {"capabilities": server_capabilities, "serverInfo": {"name": NAME, "version": __version__}}
    answer = json.dumps({"jsonrpc": "2.0", "id": number, "result": result}).encode()
    with open(answers, "wb", closefd=False) as out:
        out.write(b"Content-Length: %d\r\n\r\n" % len(answer) + answer)
    process = params.get("processId")
    client = process if isinstance(process, int) and not isinstance(process, bool) else None
    return Greeting(data, number, server_capabilities["positionEncoding"], client)


def _first_message(requests: int) -> tuple[bytes, bytes]:
    """All bytes read, and the message body."""
    data, length = b"", 0
    with io.FileIO(requests, closefd=False) as stream:
        while line := stream.readline():
            data += line
            name, _, value = line.partition(b":")
            if name.strip().lower() == b"content-length" and value.strip().isdigit():
                length = int(value) if len(value) < 20 and int(value) <= MAX_BODY_BYTES else 0
            if not line.strip():
                break
    body = b""
    while len(body) < length and (part := os.read(requests, length - len(body))):
        body += part
    return data + body, body


def _parse_initialize(message: Any) -> tuple[MessageId | None, dict[str, Any]]:
    """The id of a valid ``initialize`` request and its parameters; None and {} for any other message."""
    if not isinstance(message, dict) or (message.get("jsonrpc"), message.get("method")) != ("2.0", "initialize"):
        return None, {}
    number, params = message.get("id"), message.get("params")
    is_number = isinstance(number, (int, str)) and not isinstance(number, bool)
    if is_number and isinstance(params, dict) and isinstance(params.get("capabilities"), dict):
        return number, params
    return None, {}


def capabilities(client: dict[str, Any]) -> dict[str, Any]:
    """``ServerCapabilities`` for a client's ``ClientCapabilities``, both as JSON data."""
    reports_renames = _value_at(client, "workspace", "fileOperations", "didRename")
    workspace: dict[str, Any] = {
        "workspaceFolders": {"supported": True, "changeNotifications": True},
        "fileOperations": {"didRename": PYTHON_FILES} if reports_renames else {},
    }
    if isinstance(_value_at(client, "workspace", "textDocumentContent"), dict):
        workspace["textDocumentContent"] = {"schemes": [DIFF_SCHEME]}
    return {
        "positionEncoding": _encoding(client),
        "textDocumentSync": {"openClose": True, "change": 2, "save": True},
        "hoverProvider": True,
        "documentSymbolProvider": True,
        "codeActionProvider": {"codeActionKinds": ["quickfix", CODE_ACTION_KIND], "resolveProvider": True},
        "codeLensProvider": {"resolveProvider": False},
        "foldingRangeProvider": True,
        "executeCommandProvider": {"commands": [f"mtmc.{name}" for name in COMMANDS]},
        "inlayHintProvider": {"resolveProvider": False},
        "diagnosticProvider": {
            "interFileDependencies": False,
            "workspaceDiagnostics": False,
            "identifier": SOURCE,
        },
        "workspace": workspace,
    }


def _encoding(client: dict[str, Any]) -> str:
    """The first position encoding of the client that the server supports."""
    offered = _value_at(client, "general", "positionEncodings")
    known = [item for item in offered if item in ENCODINGS] if isinstance(offered, list) else []
    return known[0] if known else "utf-16"


def _value_at(data: Any, *names: str) -> Any:
    for name in names:
        data = data.get(name) if isinstance(data, dict) else None
    return data
