"""A host with a fake measurer. Captures, coders, the store and model requests are real."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
from searching import AgreeingMeasurer

from mtmc_lsp.app.pipeline import Pipeline
from mtmc_lsp.server.host import Job, serve


class UnmeasuredPipeline(Pipeline):
    """Finds every candidate correct without running it."""

    def _open_measurer(self, capture: object) -> AgreeingMeasurer:
        return AgreeingMeasurer()


if __name__ == "__main__":
    serve(Job(UnmeasuredPipeline))
