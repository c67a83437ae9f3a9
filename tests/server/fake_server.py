"""The language server with the fake host, started like ``mtmc-lsp``."""

from __future__ import annotations

import sys
from pathlib import Path

from mtmc_lsp.server.app import serve

if __name__ == "__main__":
    host = (sys.executable, str(Path(__file__).resolve().parent / "fake_host.py"))
    serve(tcp=sys.argv[2] if sys.argv[1:2] == ["--tcp"] else None, host_command=host)
