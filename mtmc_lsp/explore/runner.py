"""Explores the programs of a suite, several at a time, each in a process like a problem of ``mtmc bench``."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path

from mtmc_lsp.app.bench.processes import Crashed, Processes, TookTooLong
from mtmc_lsp.app.bench.suite import Problem
from mtmc_lsp.core.json_codec import from_json
from mtmc_lsp.core.settings import Settings
from mtmc_lsp.explore.families import Families
from mtmc_lsp.explore.parquet import read_rows
from mtmc_lsp.explore.program import BATCH_SECONDS, ExploreAnswer, ExploreRequest
from mtmc_lsp.explore.rows import PROGRAMS, TRANSITIONS
from mtmc_lsp.process.fork_server import ForkServer
from mtmc_lsp.process.isolation import isolated_command

COMMAND = isolated_command("mtmc_lsp.explore.program")
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

    def __init__(
        self,
        plan: Plan,
        *,
        jobs: int = 1,
        devices: Sequence[str] = (),
        command: Sequence[str] = COMMAND,
        fork_server: ForkServer | None = None,
    ) -> None:
        """Prepare.

        Args:
            devices: the GPUs that programs run on; empty without a GPU.
            command: explores one program, as :mod:`mtmc_lsp.explore.program` does.
            fork_server: starts the workers of all programs; the caller closes it.
        """
        self._plan, self._jobs = plan, max(1, jobs)
        self._processes = Processes(command, self._jobs, devices, fork_server)

    def run(self, problems: Sequence[Problem]) -> Iterator[Explored]:
        """Yield each program when its process has ended. Those with the fewest transitions go first."""
        end = time.monotonic() + self._plan.seconds
        waiting = in_order(problems, self._plan.out)
        running: set[Future[Explored]] = set()
        with ThreadPoolExecutor(self._jobs) as pool:
            try:
                while waiting or running:
                    while waiting and len(running) < self._jobs and end - time.monotonic() > 0.0:
                        share = (end - time.monotonic()) * self._jobs / max(self._jobs, len(waiting))
                        running.add(pool.submit(self._one, waiting.pop(0), max(LEAST_SECONDS, share)))
                    if not running:
                        return
                    done, running = wait(running, return_when=FIRST_COMPLETED)
                    yield from (future.result() for future in done)
            finally:
                pool.shutdown(wait=False, cancel_futures=True)
                self._processes.stop()

    def _one(self, problem: Problem, seconds: float) -> Explored:
        began, plan = time.monotonic(), self._plan
        with self._processes.slot() as slot:
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
                cores=slot.cores,
            )
            try:
                answer = from_json(ExploreAnswer, self._processes.answer(request, slot, seconds + BATCH_SECONDS))
            except TookTooLong:
                answer = ExploreAnswer(reason=f"it took longer than its {seconds:.0f} s, and was ended")
            except Crashed as error:
                answer = ExploreAnswer(reason=str(error))
        return Explored(problem, answer, time.monotonic() - began)


def in_order(problems: Sequence[Problem], out: Path) -> list[Problem]:
    """The programs, those with the fewest transitions first."""
    names = {row["id"]: row["name"] for row in read_rows(out, PROGRAMS, columns=["name"])}
    counts = Counter(names.get(row["program"], "") for row in read_rows(out, TRANSITIONS, columns=["program"]))
    return sorted(problems, key=lambda problem: counts[problem.name])
