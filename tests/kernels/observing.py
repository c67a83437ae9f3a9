"""A worker that observes kernels, and small files for it."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

from mtmc_lsp.kernels.messages import CaseTrace, TraceCase, TraceRequest
from mtmc_lsp.process.worker_process import Worker
from mtmc_lsp.source.targets import find_target
from mtmc_lsp.source.workload.directive import parse_directive, reference_name

HEADER = "import torch\nimport triton\nimport triton.language as tl\n\n\n"


class Observing:
    """Observes calls of one worker, which is kept for all of them."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._worker = Worker(sys.executable, cwd=str(folder), env={"TRITON_INTERPRET": "1"})

    def close(self) -> None:
        """End the worker."""
        self._worker.close()

    def __call__(
        self, text: str, launcher: str, *sizes: dict[str, int], most_programs: int = 0, original: str = ""
    ) -> list[CaseTrace]:
        """What calls of a launcher show, one for each set of sizes."""
        path = str(self._folder / "model.py")
        target = find_target(text.encode(), path, launcher)
        workload = parse_directive(text.encode(), target, path)
        assert workload is not None
        name = reference_name(text.encode(), target, path)
        reference = replace(workload, target=find_target(text.encode(), path, name)) if name else None
        cases = tuple(TraceCase(each) for each in sizes)
        request = TraceRequest(workload, text, cases, reference, original, most_programs)
        answer = self._worker.call(request, 120)
        assert not answer.problem, answer.problem
        return list(answer.cases)
