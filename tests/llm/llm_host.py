"""A host with a fake measurer. Captures, coders, the store and model requests are real."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
from searching import AgreeingMeasurer

from mtmc_lsp.app import pipeline as session
from mtmc_lsp.server.host import SearchEngine, serve

if __name__ == "__main__":
    session.open_measurer = lambda *_, **__: AgreeingMeasurer()
    serve(SearchEngine())
