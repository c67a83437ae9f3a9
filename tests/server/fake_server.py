"""The language server with the fake host, started like ``mtmc-lsp``."""

from __future__ import annotations

import sys
from pathlib import Path

from mtmc_lsp.app.revisions import recompose
from mtmc_lsp.app.run_recorder import RunConfig
from mtmc_lsp.core.protocols import Coder
from mtmc_lsp.core.run import Placement
from mtmc_lsp.server.app import serve


def open_coder(config: RunConfig) -> Coder:
    """The coder of the fake host."""
    from fake_host import ComposingCoder

    return ComposingCoder(Placement(config.settings.place))


if __name__ == "__main__":
    host = (sys.executable, str(Path(__file__).resolve().parent / "fake_host.py"))
    recompose.open_coder = open_coder
    serve(tcp=sys.argv[2] if sys.argv[1:2] == ["--tcp"] else None, host_command=host)
