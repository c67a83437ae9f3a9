"""Connections of clients: standard input and output, or a TCP port."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import sys
import threading
import time
from collections.abc import Callable

from pygls.io_ import StdoutWriter

from mtmc_lsp.core.errors import EnvironmentNotAble
from mtmc_lsp.process.watchdog import WatchedProcess, watched_client
from mtmc_lsp.server.handshake import MAX_BODY_BYTES, Greeting
from mtmc_lsp.server.server import Server

MAX_HEADER_BYTES = 1 << 16
"""Maximum length of a header line."""
MAX_NAME_BYTES = 256
"""How much of the start of a longer line is kept: more than the name of a header and a number have."""
CONTENT_LENGTH = re.compile(rb"content-length[ \t]*:[ \t]*(\d{1,18})[ \t]*\r?\n\Z", re.IGNORECASE)
"""At the end of a line: after an invalid header, the body before it, which does not end with a line ending, is skipped."""
END_SECONDS = 2.0
"""Time for the server to end after its client, before it is ended by force: less than the watchdog gives it."""
CHUNK = 1 << 16


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
        """The next line, or the end of it if it is too long."""
        start = b""
        while True:
            try:
                return start + await self._stream.readuntil(b"\n")
            except asyncio.LimitOverrunError as error:
                start = (start + await self._stream.readexactly(max(1, error.consumed)))[-MAX_NAME_BYTES:]
            except (asyncio.IncompleteReadError, ConnectionError):
                return None

    async def _body(self, size: int) -> bytes | None:
        try:
            return await self._stream.readexactly(size)
        except (asyncio.IncompleteReadError, ConnectionError):
            return None


def serve_stdio(server: Server, greeting: Greeting) -> None:
    """Serve the client on standard input and output until it disconnects. ``greeting`` is its first message, already read."""
    server.protocol.set_writer(StdoutWriter(sys.stdout.buffer))
    server.protocol.greeting = greeting
    # Writing fails after the client has disconnected.
    with contextlib.suppress(BrokenPipeError, KeyboardInterrupt):
        asyncio.run(_converse_on_stdio(server, greeting))


async def _converse_on_stdio(server: Server, greeting: Greeting) -> None:
    reader = asyncio.StreamReader(MAX_HEADER_BYTES)
    reader.feed_data(greeting.data)
    arguments = (0, reader, asyncio.get_running_loop())
    # A daemon thread: it may still block in read() when this process ends.
    threading.Thread(target=_feed, args=arguments, daemon=True).start()
    server.client_watcher = lambda process: _watch(process, reader, asyncio.get_running_loop())
    await _converse(server, reader)


def _watch(number: int, reader: asyncio.StreamReader, loop: asyncio.AbstractEventLoop) -> None:
    """End the server once the client's process is gone: another process may hold the other end of standard input open."""
    client = watched_client(number)

    def watch(client: WatchedProcess) -> None:
        client.wait()
        _end(reader, loop)

    if client is not None:
        threading.Thread(target=watch, args=(client,), daemon=True).start()


def _end(reader: asyncio.StreamReader, loop: asyncio.AbstractEventLoop) -> None:
    """Tell the event loop that the client is gone. If the loop does not react in time, end the process."""
    with contextlib.suppress(RuntimeError):
        loop.call_soon_threadsafe(reader.feed_eof)
    time.sleep(END_SECONDS)
    os._exit(1)


def _feed(source: int, reader: asyncio.StreamReader, loop: asyncio.AbstractEventLoop) -> None:
    """Forward input to the event loop in large chunks."""
    # The loop may already be closed.
    with contextlib.suppress(OSError, RuntimeError):
        while data := os.read(source, CHUNK):
            loop.call_soon_threadsafe(reader.feed_data, data)
    _end(reader, loop)


def serve_tcp(host: str, port: int, make_server: Callable[[], Server]) -> None:
    """Serve any number of clients until interrupted, with one server object for each, in one process.

    Raises:
        EnvironmentNotAble: the address is not available.
    """
    try:
        asyncio.run(_listen(host, port, make_server))
    except KeyboardInterrupt:
        pass
    except OSError as error:
        problem = f"cannot listen on {host}:{port}: {error.strerror}"
        raise EnvironmentNotAble(problem, remedy="Choose another port.") from None


async def _listen(host: str, port: int, make_server: Callable[[], Server]) -> None:
    async def converse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        server = make_server()
        server.is_alone = False
        server.protocol.set_writer(writer)
        try:
            await _converse(server, reader)
        finally:
            writer.close()

    listening = await asyncio.start_server(converse, host, port, limit=MAX_HEADER_BYTES)
    address = listening.sockets[0].getsockname()
    print(f"mtmc-lsp listens on {address[0]}:{address[1]}", file=sys.stderr, flush=True)
    async with listening:
        await listening.serve_forever()


async def _converse(server: Server, reader: asyncio.StreamReader) -> None:
    """Process messages until the connection closes; then stop the client's jobs."""
    messages = MessageReader(reader)
    try:
        while (body := await messages.next_body()) is not None:
            server.protocol.receive(body)
    finally:
        await server.close()
        server.shutdown()  # type: ignore[no-untyped-call]
