"""``mtmc-lsp``: the language server on standard input and output, or on a TCP port."""

from __future__ import annotations

import argparse
import asyncio
import logging
import sys
import threading
from collections.abc import Sequence

from pygls.io_ import run_async

from mtmc_lsp.core.errors import EnvironmentNotAble, MtmcError, RequestError
from mtmc_lsp.server import features
from mtmc_lsp.server.server import Server

HOST_COMMAND = (sys.executable, "-m", "mtmc_lsp.server.host")


def make_server(host_command: Sequence[str] = HOST_COMMAND) -> Server:
    """A server for one client.

    Args:
        host_command: the process that does a job. Tests of the server alone bring one that searches with fakes.
    """
    server = Server(host_command)
    features.register_all(server)
    return server


def main() -> None:
    """Entry point of ``mtmc-lsp``."""
    parser = argparse.ArgumentParser(
        prog="mtmc-lsp", description="The mtmc language server, on standard input and output."
    )
    parser.add_argument("--tcp", metavar="HOST:PORT", help="serve any number of clients on this address instead")
    parser.add_argument("--log", metavar="FILE", help="write a log there")
    options = parser.parse_args()
    try:
        serve(tcp=options.tcp, log_file=options.log)
    except MtmcError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(error.exit_code)


def serve(*, tcp: str | None = None, log_file: str | None = None, host_command: Sequence[str] = HOST_COMMAND) -> None:
    """Serve until the client is gone (with ``tcp``: until interrupted).

    Raises:
        RequestError: the address cannot be read.
        EnvironmentNotAble: the address cannot be served on, or the log cannot be written.
    """
    # Standard output is the protocol's; without a file only errors are said, on standard error.
    level = logging.INFO if log_file else logging.CRITICAL
    try:
        logging.basicConfig(filename=log_file, level=level, format="%(asctime)s %(name)s %(levelname)s %(message)s")
    except OSError as error:
        remedy = "Choose another file for the log."
        raise EnvironmentNotAble(f"cannot write {log_file}: {error.strerror}", remedy=remedy) from None
    if tcp is None:
        make_server(host_command).start_io()
        return
    host, _, port = tcp.rpartition(":")
    if not port.isdigit():
        raise RequestError(f"cannot read the address {tcp!r}", remedy="Write HOST:PORT, as in 127.0.0.1:7007.")
    try:
        asyncio.run(_serve_tcp(host or "127.0.0.1", int(port), host_command))
    except KeyboardInterrupt:
        pass
    except OSError as error:
        raise EnvironmentNotAble(f"cannot serve on {tcp}: {error.strerror}", remedy="Choose another port.") from None


async def _serve_tcp(host: str, port: int, host_command: Sequence[str]) -> None:
    """One server object for each client, in one process."""

    async def converse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        server = make_server(host_command)
        server.is_alone = False
        server.protocol.set_writer(writer)
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
            writer.close()

    listening = await asyncio.start_server(converse, host, port, limit=1 << 26)
    address = listening.sockets[0].getsockname()
    print(f"mtmc-lsp listens on {address[0]}:{address[1]}", file=sys.stderr, flush=True)
    async with listening:
        await listening.serve_forever()


if __name__ == "__main__":
    main()
