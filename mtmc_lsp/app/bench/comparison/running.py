"""Runs several planners on the same problems.

The runs of a problem follow each other on one GPU with the same CPU cores, and the order of the planners rotates from problem to
problem: what one run leaves in the caches of torch helps each planner equally often. Timings are never taken from a cache.
"""

from __future__ import annotations

import hashlib
import json
import statistics
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from mtmc_lsp.app.bench.jobs import Jobs, Place, Program
from mtmc_lsp.app.bench.problem import ProblemRequest
from mtmc_lsp.app.bench.runner import PROGRAM, Plan, append_result
from mtmc_lsp.app.bench.solving import Solved, solve_problem
from mtmc_lsp.app.bench.suite import Problem
from mtmc_lsp.app.provenance import current_build, without_absolute_paths
from mtmc_lsp.core.errors import Location, RequestError
from mtmc_lsp.core.json_codec import to_json
from mtmc_lsp.core.run import SCHEMA
from mtmc_lsp.core.settings import RANDOM
from mtmc_lsp.process.project_files import FOLDER


@dataclass(frozen=True)
class Entrant:
    """A planner with a search."""

    name: str
    planner: str
    search: str
    needs_policy: bool = False


ENTRANTS: Mapping[str, Entrant] = {
    each.name: each
    for each in (
        Entrant("roofline-greedy", "roofline", "greedy"),
        Entrant("ranker-greedy", "ranker", "greedy"),
        Entrant("ranker-beam", "ranker", "beam"),
        Entrant("ranker-mcts", "ranker", "mcts"),
        Entrant("lm-greedy", "lm", "greedy", needs_policy=True),
        Entrant(RANDOM, RANDOM, "greedy"),
        Entrant("roofline-beam", "roofline", "beam"),
        Entrant("roofline-mcts", "roofline", "mcts"),
        Entrant("lm-beam", "lm", "beam", needs_policy=True),
        Entrant("lm-mcts", "lm", "mcts", needs_policy=True),
    )
}
"""What can be compared; the first is the reference."""
PATIENCE = 3.0
"""How many times as long as others the first run may take, which counts for nothing."""
REFERENCE = next(iter(ENTRANTS))
USUAL = tuple(ENTRANTS)[:6]


@dataclass(frozen=True)
class Contest:
    """One problem, and how each entrant solves it."""

    problem: Problem
    group: str
    """Level or suite, by which results are also summarised."""
    plans: Mapping[str, Plan]
    """By the name of the entrant, in the order of the command line."""


def mixed(contests: Sequence[Contest]) -> list[Contest]:
    """In turn from each group, and at random within a group, so that a comparison that ends early has a sample of all groups."""
    groups: dict[str, list[Contest]] = {}
    for contest in sorted(contests, key=lambda each: hashlib.sha256(each.problem.name.encode()).hexdigest()):
        groups.setdefault(contest.group, []).append(contest)
    longest = max(map(len, groups.values()), default=0)
    return [group[index] for index in range(longest) for _, group in sorted(groups.items()) if index < len(group)]


def read_runs(path: Path) -> list[dict[str, Any]]:
    """The runs in a file; the newest one of each key. A line that a killed comparison did not finish is ignored.

    Raises:
        RequestError: the file contains something else.
    """
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except FileNotFoundError:
        return []
    except (OSError, UnicodeDecodeError) as error:
        raise RequestError(f"cannot be read: {error}", where=Location(str(path)), remedy="Name another file.") from None
    newest: dict[str, dict[str, Any]] = {}
    for number, line in enumerate(lines, 1):
        try:
            record = json.loads(line or "null")
            if record is not None:
                newest[f"{record['entrant']} {record['key']}"] = record
        except (ValueError, KeyError, TypeError):
            if number == len(lines) or not line.endswith("}"):
                continue
            remedy = "Name a file that scripts/compare_planners.py wrote."
            raise RequestError("this line is no run", where=Location(str(path), number), remedy=remedy) from None
    return list(newest.values())


class Comparison:
    """Solves each problem with each entrant."""

    def __init__(self, out: Path, jobs: Jobs, seconds: float, *, program: Program = PROGRAM) -> None:
        """Prepare.

        Args:
            out: the file of the runs; what is in it is not run again.
            jobs: on this machine.
            seconds: no run starts if its time limit would end later than this.
            program: solves one problem.
        """
        self._out, self._jobs, self._program = out, jobs, program
        self._end = time.monotonic() + seconds
        self._store = out.resolve().parent / FOLDER / "comparison"
        known = read_runs(out)
        self._known = {(record["entrant"], record["key"]) for record in known}
        self._seconds = [float(record["wall_seconds"]) for record in known]
        self._writing = threading.Lock()

    def warm_up(self, contest: Contest) -> None:
        """Solve a problem once without a result: the first run on a machine also measures the GPU and reads all packages."""
        plan = next(iter(contest.plans.values()))
        left = self._end - time.monotonic()
        if not self._known and left > plan.seconds:
            patient = replace(plan, seconds=min(left, PATIENCE * plan.seconds))
            self._jobs.result(self._jobs.submit(self._solved, contest, patient, "warm-up"))

    def run(self, contests: Sequence[Contest]) -> Iterator[tuple[Contest, list[dict[str, Any]]]]:
        """Yield each problem with its new runs as soon as it is done. A problem is started only if all its runs seem to fit."""
        waiting = list(enumerate(contests))
        pending: dict[Future[list[dict[str, Any]]], Contest] = {}
        try:
            while waiting or pending:
                while waiting and len(pending) < self._jobs.count:
                    number, contest = waiting.pop(0)
                    pending[self._jobs.submit(self._solve, contest, number)] = contest
                for future in wait(pending, return_when=FIRST_COMPLETED).done:
                    yield pending.pop(future), self._jobs.result(future)
        finally:
            for future in pending:
                future.cancel()

    def _solve(self, place: Place, contest: Contest, number: int) -> list[dict[str, Any]]:
        """Run the entrants that have no result yet, one after the other in this place."""
        names = list(contest.plans)
        turn = number % len(names)
        order = [*names[turn:], *names[:turn]]
        todo = [name for name in order if (name, contest.plans[name].key(contest.problem)) not in self._known]
        if not self._fits(contest, todo):
            return []
        done: list[dict[str, Any]] = []
        for name in todo:
            plan = contest.plans[name]
            if time.monotonic() + plan.seconds > self._end:
                break
            record = self._record(place, contest, name, order.index(name))
            with self._writing:
                append_result(self._out, record)
                self._seconds.append(record["wall_seconds"])
            done.append(record)
        return done

    def _fits(self, contest: Contest, todo: Sequence[str]) -> bool:
        """Whether all runs that are left probably end in time: half a problem says nothing."""
        if not todo:
            return False
        limit = contest.plans[todo[-1]].seconds
        with self._writing:
            usual = min(limit, statistics.fmean(self._seconds)) if self._seconds else 0.0
        return time.monotonic() + usual * (len(todo) - 1) + limit <= self._end

    def _solved(self, place: Place, contest: Contest, plan: Plan, name: str) -> Solved:
        store = self._store / name
        store.mkdir(parents=True, exist_ok=True)
        known = (
            str(contest.problem.path),
            contest.problem.target,
            plan.python,
            plan.settings,
            plan.seconds,
            str(store),
        )
        return solve_problem(place, self._program, ProblemRequest(*known, fresh=True))

    def _record(self, place: Place, contest: Contest, name: str, position: int) -> dict[str, Any]:
        problem, plan = contest.problem, contest.plans[name]
        solved = self._solved(place, contest, plan, name)
        record = {
            "schema": SCHEMA,
            **to_json(current_build()),
            "problem": problem.name,
            "level": contest.group,
            "entrant": name,
            "position": position,
            "budget": plan.settings.budget_seconds,
            "key": plan.key(problem),
            "wall_seconds": round(solved.seconds, 3),
            **solved.answer,
        }
        relative: dict[str, Any] = without_absolute_paths(record, problem.suite)
        return relative
