"""A host whose measurements alone are faked: captures, coders, the store and the talk with a model are the real ones."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
from searching import Agreeing

from mtmc_lsp.app.pipeline import Pipeline
from mtmc_lsp.server.host import Job, serve


class UnmeasuredPipeline(Pipeline):
    """Finds every candidate correct without running it."""

    def _open_measurer(self, capture: object) -> Agreeing:
        return Agreeing()


if __name__ == "__main__":
    serve(Job(UnmeasuredPipeline))
