"""Random edits over the protocol: after each one, the server has the text of an independent model."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from editor import capabilities, editor
from lsprotocol import types as lsp
from test_text import PIECES, client_position, splits, units

pytestmark = pytest.mark.asyncio

START = "import torch\n\n\ndef f(x):\n    return torch.relu(x)  # 漢字 😀\r\n\r\rdef é(x):\r    return x\n"
MAX_CHARACTERS = 400
"""The model starts again with a longer text."""


class Model:
    """The text as an editor holds it, and edits with positions in one encoding."""

    def __init__(self, encoding: str, seed: int) -> None:
        self.text = START
        self._encoding = encoding
        self._draw = random.Random(seed)

    def edit(self) -> lsp.TextDocumentContentChangeEvent:
        """Apply a random edit. Returns it as the client sends it."""
        if self._draw.random() < 0.02 or len(self.text) > MAX_CHARACTERS:
            self.text = START
            return lsp.TextDocumentContentChangeWholeDocument(text=START)
        places = splits(self.text)
        start, end = sorted(self._draw.choices(range(len(places)), k=2))
        end = min(end, start + 8)
        new = "".join(self._draw.choices(PIECES, k=self._draw.randrange(4)))
        range_ = lsp.Range(self._position(places[start]), self._position(places[end]))
        self.text = self.text[: places[start]] + new + self.text[places[end] :]
        if self._draw.random() < 0.1:
            # Editors accept an end before the start.
            range_ = lsp.Range(range_.end, range_.start)
        return lsp.TextDocumentContentChangePartial(range=range_, text=new)

    def _position(self, at: int) -> lsp.Position:
        """The position of a character, or another position that means the same."""
        position = client_position(self.text, at, self._encoding)
        rest = self.text[at : at + 1]
        choice = self._draw.random()
        if choice < 0.1 and at == len(self.text):
            return lsp.Position(position.line + self._draw.randrange(1, 9), self._draw.randrange(9))
        if choice < 0.2 and rest in ("", "\n", "\r"):
            return lsp.Position(position.line, position.character + self._draw.randrange(1, 99))
        if choice < 0.5 and units(rest, self._encoding) > 1:
            inside = self._draw.randrange(1, units(rest, self._encoding))
            return lsp.Position(position.line, position.character + inside)
        return position


@pytest.mark.parametrize("encoding", ["utf-8", "utf-16", "utf-32"])
@pytest.mark.parametrize(
    "count", [100, pytest.param(3400, marks=[pytest.mark.slow, pytest.mark.timeout(1200)])], ids=["some", "many"]
)
async def test_the_server_has_the_clients_text_after_each_edit(tmp_path: Path, encoding: str, count: int) -> None:
    general = lsp.GeneralClientCapabilities(position_encodings=[lsp.PositionEncodingKind(encoding)])
    async with editor(tmp_path, client_capabilities=capabilities(general=general)) as ide:
        model = Model(encoding, seed=count)
        uri = ide.open(model.text)
        document = lsp.TextDocumentIdentifier(uri)
        for version in range(2, count + 2):
            identifier = lsp.VersionedTextDocumentIdentifier(version, uri)
            ide.client.text_document_did_change(lsp.DidChangeTextDocumentParams(identifier, [model.edit()]))
            answer = await ide.client.protocol.send_request_async("mtmc/text", {"uri": uri})
            assert (answer.text, answer.version) == (model.text, version)
            if version % 10 == 0:
                await ide.client.text_document_document_symbol_async(lsp.DocumentSymbolParams(document))
                await ide.lenses(uri)
        assert [m.message for m in ide.client.log_messages if m.type == lsp.MessageType.Error] == []
