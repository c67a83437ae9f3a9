"""The language server with the host ``llm_host.py``, started like ``mtmc-lsp``."""

from __future__ import annotations

import sys
from pathlib import Path

from mtmc_lsp.server.app import serve

if __name__ == "__main__":
    serve(host_command=(sys.executable, str(Path(__file__).resolve().parent / "llm_host.py")))
