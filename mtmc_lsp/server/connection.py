"""Connections of clients: standard input and output, or a TCP port."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import threading
from collections.abc import Callable

from pygls.io_ import StdoutWriter, run_async

from mtmc_lsp.core.errors import EnvironmentNotAble
from mtmc_lsp.server.handshake import Greeting
from mtmc_lsp.server.server import Server

MAX_HEADER_LINE = 1 << 16
"""Maximum length of a header line in bytes; message bodies are not read by lines."""
CHUNK = 1 << 16


def serve_stdio(server: Server, greeting: Greeting) -> None:
    """Serve the client on standard input and output until it disconnects. ``greeting`` is its first message, already read."""
    server.protocol.set_writer(StdoutWriter(sys.stdout.buffer))
    server.protocol.greeting = greeting
    # Writing fails after the client has disconnected.
    with contextlib.suppress(BrokenPipeError, KeyboardInterrupt):
        asyncio.run(_converse_on_stdio(server, greeting))


async def _converse_on_stdio(server: Server, greeting: Greeting) -> None:
    reader = asyncio.StreamReader(MAX_HEADER_LINE)
    reader.feed_data(greeting.data)
    arguments = (0, reader, asyncio.get_running_loop())
    # A daemon thread: it may still block in read() when this process ends.
    threading.Thread(target=_feed, args=arguments, daemon=True).start()
    await _converse(server, reader)


def _feed(source: int, reader: asyncio.StreamReader, loop: asyncio.AbstractEventLoop) -> None:
    """Forward input to the event loop in large chunks."""
    # The loop may already be closed.
    with contextlib.suppress(OSError, RuntimeError):
        while data := os.read(source, CHUNK):
            loop.call_soon_threadsafe(reader.feed_data, data)
    with contextlib.suppress(RuntimeError):
        loop.call_soon_threadsafe(reader.feed_eof)


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

    listening = await asyncio.start_server(converse, host, port, limit=1 << 26)
    address = listening.sockets[0].getsockname()
    print(f"mtmc-lsp listens on {address[0]}:{address[1]}", file=sys.stderr, flush=True)
    async with listening:
        await listening.serve_forever()


async def _converse(server: Server, reader: asyncio.StreamReader) -> None:
    """Process messages until the connection closes; then stop the client's jobs."""
    try:
        await run_async(
            reader=reader,
            stop_event=threading.Event(),
            protocol=server.protocol,
            error_handler=server.report_server_error,
        )
    except (asyncio.IncompleteReadError, ConnectionError):
        pass
    finally:
        await server.close()
        server.shutdown()  # type: ignore[no-untyped-call]
