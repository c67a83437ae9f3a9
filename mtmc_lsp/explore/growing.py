"""The job of ``mtmc explore``: explores one program where it runs.

On a worker of a cluster, the process writes into a new folder that begins with the known rows of the program. The job returns the
rows that were added, and the command on the user's machine writes them.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from mtmc_lsp.app.bench.jobs import Place, Program
from mtmc_lsp.app.bench.processes import Crashed, TookTooLong
from mtmc_lsp.core.json_codec import from_json
from mtmc_lsp.explore.parquet import Writer, read_rows, take_over_journals
from mtmc_lsp.explore.program import BATCH_SECONDS, ExploreAnswer, ExploreRequest
from mtmc_lsp.explore.rows import PROGRAMS, TABLES, Row

Rows = Mapping[str, Sequence[Row]]
"""Rows by the name of their table."""


@dataclass(frozen=True)
class Grown:
    """What came of one program."""

    answer: ExploreAnswer
    seconds: float
    """Wall time of its process."""
    rows: Rows = field(default_factory=dict)
    """The rows that were added; empty on the user's machine, where the process writes them itself."""


def grow_program(place: Place, program: Program, request: ExploreRequest, known: Rows) -> Grown:
    """Run the process of a program; a failure of the process is the reason of the answer.

    Args:
        known: the rows of the program in the folder of transitions, on a worker of a cluster.
    """
    began = time.monotonic()
    request = replace(request, cores=place.slot.cores)
    if not place.is_remote:
        return Grown(_answer(place, program, request), time.monotonic() - began)
    with tempfile.TemporaryDirectory(prefix="mtmc-run-") as scratch:
        folder = Path(scratch) / "transitions"
        with Writer(folder) as writer:
            writer.add_rows(known)
        moved = replace(
            request,
            path=place.here(request.path),
            suite=place.here(request.suite),
            python=place.python or request.python,
            out=str(folder),
        )
        answer = _answer(place, program, moved)
        seconds = time.monotonic() - began
        # A process that was ended leaves its journal.
        take_over_journals(folder)
        added = {
            table.name: [row for row in read_rows(folder, table) if row not in known.get(table.name, ())]
            for table in TABLES
        }
    return Grown(answer, seconds, place.there(added))


def rows_of_program(folder: Path, name: str) -> Rows:
    """All rows about the programs with a name."""
    programs = [row["id"] for row in read_rows(folder, PROGRAMS, columns=["name"]) if row["name"] == name]
    return {table.name: [row for item in programs for row in read_rows(folder, table, item)] for table in TABLES}


def _answer(place: Place, program: Program, request: ExploreRequest) -> ExploreAnswer:
    try:
        return from_json(ExploreAnswer, place.answer(program, request, request.seconds + BATCH_SECONDS))
    except TookTooLong:
        return ExploreAnswer(reason=f"it took longer than its {request.seconds:.0f} s, and was ended")
    except Crashed as error:
        return ExploreAnswer(reason=str(error))
