"""A host whose measurements alone are faked: captures, coders, the store and the talk with a model are the real ones."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
from searching import Agreeing

from mtmc_lsp.app import pipeline as session
from mtmc_lsp.server.host import SearchEngine, serve

if __name__ == "__main__":
    session.open_measurer = lambda *_, **__: Agreeing()
    serve(SearchEngine())
