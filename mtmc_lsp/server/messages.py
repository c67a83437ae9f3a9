"""Reads the messages of a client: headers and JSON bodies. Invalid input never ends the connection."""

from __future__ import annotations

import asyncio
import re

from mtmc_lsp.server.handshake import MAX_BODY_BYTES

MAX_HEADER_BYTES = 1 << 16
"""Maximum length of a header line."""
CONTENT_LENGTH = re.compile(rb"content-length[ \t]*:[ \t]*(\d{1,18})[ \t]*\r?\n\Z", re.IGNORECASE)
"""At the end of a line: after an invalid header, the body before it, which does not end with a line ending, is skipped."""


class MessageReader:
    """Reads the bodies of messages from a stream."""

    def __init__(self, stream: asyncio.StreamReader) -> None:
        self._stream = stream

    async def next_body(self) -> bytes | None:
        """The body of the next message; ``None`` if the connection closed."""
        size = 0
        while (line := await self._line()) is not None:
            length = CONTENT_LENGTH.search(line)
            if length is not None:
                size = int(length[1])
            elif not line.strip() and 0 < size <= MAX_BODY_BYTES:
                return await self._body(size)
            elif not line.strip():
                size = 0
        return None

    async def _line(self) -> bytes | None:
        """The next line, or the part of it that has been received if it is too long."""
        try:
            return await self._stream.readuntil(b"\n")
        except asyncio.LimitOverrunError as error:
            return await self._stream.readexactly(max(1, error.consumed))
        except (asyncio.IncompleteReadError, ConnectionError):
            return None

    async def _body(self, size: int) -> bytes | None:
        try:
            return await self._stream.readexactly(size)
        except (asyncio.IncompleteReadError, ConnectionError):
            return None
