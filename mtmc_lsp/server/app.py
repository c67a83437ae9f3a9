"""``mtmc-lsp``: the language server on standard input and output, or on a TCP port.

Little is imported until ``initialize`` is answered (``handshake.py``); the rest is while the editor reads the answer.
"""

from __future__ import annotations

import argparse
import gc
import logging
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from mtmc_lsp.core.errors import EnvironmentNotAble, MtmcError, RequestError
from mtmc_lsp.process.isolation import drop_relative_entries, isolated_command, leave_working_folder
from mtmc_lsp.server.handshake import greet

if TYPE_CHECKING:
    from mtmc_lsp.server.server import Server

HOST_COMMAND = isolated_command("mtmc_lsp.server.host")


def make_server(host_command: Sequence[str] = HOST_COMMAND) -> Server:
    """A server for one client.

    Args:
        host_command: the process that does a job. Tests of the server alone bring one that searches with fakes.
    """
    from mtmc_lsp.server import features
    from mtmc_lsp.server.server import Server

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
    leave_working_folder()
    drop_relative_entries()
    # Standard output is the protocol's; without a file only errors are said, on standard error.
    level = logging.INFO if log_file else logging.CRITICAL
    try:
        logging.basicConfig(filename=log_file, level=level, format="%(asctime)s %(name)s %(levelname)s %(message)s")
    except OSError as error:
        remedy = "Choose another file for the log."
        raise EnvironmentNotAble(f"cannot write {log_file}: {error.strerror}", remedy=remedy) from None
    if tcp is None:
        greeting = greet(requests=0, answers=1)
        server = _start(host_command)
        from mtmc_lsp.server.connection import serve_stdio

        serve_stdio(server, greeting)
        return
    host, _, port = tcp.rpartition(":")
    if not port.isdigit():
        raise RequestError(f"cannot read the address {tcp!r}", remedy="Write HOST:PORT, as in 127.0.0.1:7007.")
    from mtmc_lsp.server.connection import serve_tcp

    serve_tcp(host or "127.0.0.1", int(port), lambda: make_server(host_command))


def _start(host_command: Sequence[str]) -> Server:
    """The server, without looking for garbage in what is only just being made, nor in what stays to the end."""
    gc.disable()
    server = make_server(host_command)
    gc.freeze()
    gc.enable()
    return server


if __name__ == "__main__":
    main()
