"""Answers ``initialize`` before the server behind it is imported.

An editor waits for this answer before it sends anything else, and importing the protocol's library takes most of a start. What
the server can do depends on none of that, so it is told as plain data; a test compares it with what the features register. The
message is then handed on to the server as if nobody had answered, and only its answer is left out.
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
"""Of documents that ``workspace/textDocumentContent`` gives."""
CODE_ACTION_KIND = "refactor.rewrite.mtmc"
SOURCE = "mtmc"
"""Of diagnostics."""
PYTHON_FILES = {"filters": [{"pattern": {"glob": "**/*.py"}, "scheme": "file"}]}
ENCODINGS = ("utf-8", "utf-16", "utf-32")
COMMANDS = (
    "optimize plan measure verify addWorkload cancel jobs record "
    "keep keepAll preview undo undoAll diff tryAnother resume"
).split()

MessageId = Union[int, str]


@dataclass(frozen=True)
class Greeting:
    """What was read before the server was there."""

    taken: bytes
    """Every byte of it; the server reads it first."""
    answered: MessageId | None = None
    """Of the ``initialize`` request that has its answer; ``None`` where it was none, or is the server's to refuse."""
    encoding: str = "utf-16"
    """That of positions, as it was told."""


def greet(requests: int, answers: int) -> Greeting:
    """Read the first message from one descriptor, and where it is ``initialize``, write the answer to the other.

    Args:
        requests: read without a buffer, so that what follows is left there.
        answers: written to as a whole.
    """
    taken, body = _first_message(requests)
    try:
        message = json.loads(body)
    except ValueError:
        return Greeting(taken)
    number, client = _asked(message)
    if number is None:
        return Greeting(taken)
    told = capabilities(client)
    result = {"capabilities": told, "serverInfo": {"name": NAME, "version": __version__}}
    answer = json.dumps({"jsonrpc": "2.0", "id": number, "result": result}).encode()
    with open(answers, "wb", closefd=False) as out:
        out.write(b"Content-Length: %d\r\n\r\n" % len(answer) + answer)
    return Greeting(taken, number, told["positionEncoding"])


def _first_message(requests: int) -> tuple[bytes, bytes]:
    """All that was read, and the body in it."""
    taken, length = b"", 0
    with io.FileIO(requests, closefd=False) as stream:
        while line := stream.readline():
            taken += line
            name, _, value = line.partition(b":")
            if name.strip().lower() == b"content-length" and value.strip().isdigit():
                length = int(value)
            if not line.strip():
                break
    body = b""
    while len(body) < length and (part := os.read(requests, length - len(body))):
        body += part
    return taken + body, body


def _asked(message: Any) -> tuple[MessageId | None, dict[str, Any]]:
    """The number of an ``initialize`` request that can be answered, and the client's capabilities."""
    if not isinstance(message, dict) or (message.get("jsonrpc"), message.get("method")) != ("2.0", "initialize"):
        return None, {}
    number, params = message.get("id"), message.get("params")
    client = params.get("capabilities") if isinstance(params, dict) else None
    is_number = isinstance(number, (int, str)) and not isinstance(number, bool)
    return (number, client) if is_number and isinstance(client, dict) else (None, {})


def capabilities(client: dict[str, Any]) -> dict[str, Any]:
    """``ServerCapabilities`` for a client's ``ClientCapabilities``, both as JSON data."""
    workspace: dict[str, Any] = {
        "workspaceFolders": {"supported": True, "changeNotifications": True},
        "fileOperations": {"didRename": PYTHON_FILES}
        if _has(client, "workspace", "fileOperations", "didRename")
        else {},
    }
    if isinstance(_at(client, "workspace", "textDocumentContent"), dict):
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
    """The first of the client's that we have too."""
    offered = _at(client, "general", "positionEncodings")
    known = [item for item in offered if item in ENCODINGS] if isinstance(offered, list) else []
    return known[0] if known else "utf-16"


def _at(data: Any, *names: str) -> Any:
    for name in names:
        data = data.get(name) if isinstance(data, dict) else None
    return data


def _has(data: Any, *names: str) -> bool:
    return bool(_at(data, *names))
