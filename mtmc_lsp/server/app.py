"""``mtmc-lsp``: the language server on standard input and output, or on a TCP port.

Only a few modules are imported before ``initialize`` is answered (``handshake.py``). The others are imported while the editor
processes the answer.
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
from mtmc_lsp.process.watchdog import start_watchdog
from mtmc_lsp.server.handshake import greet

if TYPE_CHECKING:
    from mtmc_lsp.server.server import Server

HOST_COMMAND = isolated_command("mtmc_lsp.server.host")


def make_server(host_command: Sequence[str] = HOST_COMMAND) -> Server:
    """A server for one client.

    Args:
        host_command: command of the process that runs a job. Tests pass a host with a fake search.
    """
    from mtmc_lsp.server import features
    from mtmc_lsp.server.server import Server

    server = Server(host_command)
    # Tests with a fake host need no workers.
    server.warms = host_command is HOST_COMMAND
    features.register_all(server)
    return server


def main() -> None:
    """Entry point of ``mtmc-lsp``."""
    parser = argparse.ArgumentParser(
        prog="mtmc-lsp", description="The mtmc language server, on standard input and output."
    )
    parser.add_argument("--tcp", metavar="HOST:PORT", help="serve any number of clients on this TCP address instead")
    parser.add_argument("--log", metavar="FILE", help="write a log to this file")
    options = parser.parse_args()
    try:
        serve(tcp=options.tcp, log_file=options.log)
    except MtmcError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(error.exit_code)


def serve(*, tcp: str | None = None, log_file: str | None = None, host_command: Sequence[str] = HOST_COMMAND) -> None:
    """Serve until the client disconnects (with ``tcp``: until interrupted).

    Raises:
        RequestError: the address has the wrong format.
        EnvironmentNotAble: the address is not available, or the log file cannot be written.
    """
    leave_working_folder()
    drop_relative_entries()
    # Standard output carries the protocol. Without a log file, only critical errors are logged, on standard error.
    level = logging.INFO if log_file else logging.CRITICAL
    try:
        logging.basicConfig(filename=log_file, level=level, format="%(asctime)s %(name)s %(levelname)s %(message)s")
    except OSError as error:
        remedy = "Choose another log file."
        raise EnvironmentNotAble(f"cannot write {log_file}: {error.strerror}", remedy=remedy) from None
    if tcp is None:
        greeting = greet(requests=0, answers=1)
        start_watchdog(greeting.client)
        server = _make_permanent_server(host_command)
        from mtmc_lsp.server.connection import serve_stdio

        serve_stdio(server, greeting)
        return
    host, _, port = tcp.rpartition(":")
    if not port.isdigit():
        raise RequestError(f"invalid address {tcp!r}", remedy="Write HOST:PORT, for example 127.0.0.1:7007.")
    from mtmc_lsp.server.connection import serve_tcp

    serve_tcp(host or "127.0.0.1", int(port), lambda: make_server(host_command))


def _make_permanent_server(host_command: Sequence[str]) -> Server:
    """Create the server with garbage collection disabled: its objects live until the process ends."""
    gc.disable()
    server = make_server(host_command)
    gc.freeze()
    gc.enable()
    return server


if __name__ == "__main__":
    main()
