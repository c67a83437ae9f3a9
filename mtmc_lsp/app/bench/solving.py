"""The job of ``mtmc bench``: solves one problem where it runs."""

from __future__ import annotations

import tempfile
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from mtmc_lsp.app.bench.jobs import Place, Program
from mtmc_lsp.app.bench.problem import ProblemRequest, failed
from mtmc_lsp.app.bench.processes import Crashed, TookTooLong
from mtmc_lsp.search.store import STORE, Store, StoreRows


@dataclass(frozen=True)
class Solved:
    """What came of one problem."""

    answer: dict[str, Any]
    """The document of its run, or an error."""
    seconds: float
    """Wall time of its process."""
    rows: StoreRows = field(default_factory=dict)
    """Its run as rows of a store; empty on the user's machine, where the process writes the store itself."""


def solve_problem(place: Place, program: Program, request: ProblemRequest) -> Solved:
    """Run the process of a problem; a failure of the process is part of the answer."""
    began = time.monotonic()
    request = replace(request, cores=place.slot.cores)
    if not place.is_remote:
        return Solved(_answer(place, program, request), time.monotonic() - began)
    settings = replace(request.settings, policy_file=place.here(request.settings.policy_file))
    with tempfile.TemporaryDirectory(prefix="mtmc-run-") as folder:
        moved = replace(
            request,
            path=place.here(request.path),
            python=place.python or request.python,
            settings=settings,
            store=folder,
        )
        answer = _answer(place, program, moved)
        seconds = time.monotonic() - began
        rows: StoreRows = {}
        if (Path(folder) / STORE).exists():
            with Store(Path(folder)) as store:
                rows = store.export_rows()
    return Solved(place.there(answer), seconds, place.there(rows))


def _answer(place: Place, program: Program, request: ProblemRequest) -> dict[str, Any]:
    try:
        return place.answer(program, request, request.seconds)
    except TookTooLong:
        return failed("timeout", f"took longer than the time limit of {request.seconds:.0f} s, and was ended")
    except Crashed as error:
        return failed("crashed", str(error))
