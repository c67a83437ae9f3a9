"""Explores the programs of a suite, several at a time, each in a process like a problem of ``mtmc bench``."""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass
from pathlib import Path

from mtmc_lsp.app.bench.jobs import Jobs, Program, WorkerLost
from mtmc_lsp.app.bench.suite import Problem
from mtmc_lsp.core.settings import Settings
from mtmc_lsp.explore.families import Families
from mtmc_lsp.explore.growing import Grown, grow_program, rows_of_program
from mtmc_lsp.explore.parquet import Writer, read_rows
from mtmc_lsp.explore.program import ExploreAnswer, ExploreRequest
from mtmc_lsp.explore.rows import PROGRAMS, TRANSITIONS

PROGRAM = "mtmc_lsp.explore.program"
LEAST_SECONDS = 20.0
"""Least time of one program: capturing takes several seconds."""


@dataclass(frozen=True)
class Plan:
    """How the programs are explored."""

    settings: Settings
    python: str
    families: Families
    out: Path
    seconds: float
    """For all programs together."""
    depth: int
    width: int
    seed: int


@dataclass(frozen=True)
class Explored:
    """A program that was explored."""

    problem: Problem
    answer: ExploreAnswer
    seconds: float
    """Wall time of its process."""


class Exploration:
    """Explores programs until each had its share of the time."""

    def __init__(self, plan: Plan, jobs: Jobs, *, program: Program = PROGRAM) -> None:
        """Prepare.

        Args:
            jobs: where the programs are explored.
            program: explores one program, as :mod:`mtmc_lsp.explore.program` does.
        """
        self._plan, self._jobs, self._program = plan, jobs, program

    def run(self, problems: Sequence[Problem]) -> Iterator[Explored]:
        """Yield each program when its process has ended. Those with the fewest transitions go first."""
        end = time.monotonic() + self._plan.seconds
        waiting = in_order(problems, self._plan.out)
        running: dict[Future[Grown], Problem] = {}
        with Writer(self._plan.out) if self._jobs.is_remote else contextlib.nullcontext() as writer:
            try:
                while waiting or running:
                    while waiting and len(running) < self._jobs.count and end - time.monotonic() > 0.0:
                        count = self._jobs.count
                        share = (end - time.monotonic()) * count / max(count, len(waiting) + len(running))
                        problem = waiting.pop(0)
                        running[self._submit(problem, max(LEAST_SECONDS, share))] = problem
                    if not running:
                        return
                    for future in wait(running, return_when=FIRST_COMPLETED).done:
                        yield self._explored(running.pop(future), future, writer)
            finally:
                for future in running:
                    future.cancel()

    def _submit(self, problem: Problem, seconds: float) -> Future[Grown]:
        plan = self._plan
        request = ExploreRequest(
            path=str(problem.path),
            target=problem.target,
            suite=str(problem.suite),
            name=problem.name,
            family=plan.families.family(problem),
            origin=plan.families.origin,
            stores_source=plan.families.stores_source,
            python=plan.python,
            settings=plan.settings,
            out=str(plan.out.resolve()),
            seconds=seconds,
            depth=plan.depth,
            width=plan.width,
            seed=plan.seed,
        )
        known = rows_of_program(plan.out, problem.name) if self._jobs.is_remote else {}
        return self._jobs.submit(grow_program, self._program, request, known)

    def _explored(self, problem: Problem, future: Future[Grown], writer: Writer | None) -> Explored:
        try:
            grown = self._jobs.result(future)
        except WorkerLost as error:
            return Explored(problem, ExploreAnswer(reason=str(error)), 0.0)
        if writer is not None:
            writer.add_rows(grown.rows)
        return Explored(problem, grown.answer, grown.seconds)


def in_order(problems: Sequence[Problem], out: Path) -> list[Problem]:
    """The programs, those with the fewest transitions first."""
    names = {row["id"]: row["name"] for row in read_rows(out, PROGRAMS, columns=["name"])}
    counts = Counter(names.get(row["program"], "") for row in read_rows(out, TRANSITIONS, columns=["program"]))
    return sorted(problems, key=lambda problem: counts[problem.name])
