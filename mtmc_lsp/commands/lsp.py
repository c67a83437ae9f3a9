"""``mtmc lsp``: the language server."""

from __future__ import annotations

from typing import Annotated

import typer


def lsp(
    tcp: Annotated[str, typer.Option("--tcp", metavar="HOST:PORT", help="Serve clients on this address.")] = "",
    log: Annotated[str, typer.Option("--log", metavar="FILE", help="Write a log there.")] = "",
) -> int:
    """Start the language server on standard input and output, as `mtmc-lsp` does."""
    from mtmc_lsp.server.app import serve

    serve(tcp=tcp or None, log_file=log or None)
    return 0
