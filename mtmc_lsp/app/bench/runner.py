"""Optimizes every problem of a suite, each in a separate process.

Problems are captured, compiled and verified in parallel; a process that measures time holds the GPU alone
(:mod:`mtmc_lsp.process.gpu_lock`). Each result is appended to a JSONL file at once, so an interrupted bench can be continued.
Which problems a suite contains is in :mod:`mtmc_lsp.app.bench.suite`.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from mtmc_lsp.app.bench.jobs import Jobs, Program, WorkerLost
from mtmc_lsp.app.bench.problem import ProblemRequest, failed
from mtmc_lsp.app.bench.solving import Solved, solve_problem
from mtmc_lsp.app.bench.suite import Problem
from mtmc_lsp.app.interpreter import query_gpus, versions
from mtmc_lsp.app.provenance import current_build, without_absolute_paths
from mtmc_lsp.core.errors import EnvironmentNotAble, FailureKind, Location, RequestError
from mtmc_lsp.core.json_codec import to_json
from mtmc_lsp.core.run import SCHEMA
from mtmc_lsp.core.settings import Settings
from mtmc_lsp.process.project_files import FOLDER
from mtmc_lsp.search.store import Store

PROGRAM = "mtmc_lsp.app.bench.problem"
LOST = "lost"
"""The status of a problem whose workers were lost; it is not a result."""


@dataclass(frozen=True)
class Plan:
    """How problems are solved. Everything that changes a result is part of its key."""

    settings: Settings
    python: str
    seconds: float
    """The time limit of one problem."""
    environment: Mapping[str, str]
    """Versions of the interpreter and its packages, and the GPUs."""

    def key(self, problem: Problem) -> str:
        """Identifies a result by a hash of what it depends on."""
        parts = [to_json(self._settings), self.seconds, dict(self.environment), to_json(current_build()), SCHEMA]
        text = json.dumps([*parts, problem.target], sort_keys=True).encode() + problem.path.read_bytes()
        return hashlib.sha256(text).hexdigest()[:20]

    @property
    def _settings(self) -> Settings:
        """The settings with the content of the policy, a file or a folder, instead of its path."""
        path = Path(self.settings.policy_file)
        if not self.settings.policy_file or not path.exists():
            return self.settings
        files = [path] if path.is_file() else sorted(file for file in path.rglob("*") if file.is_file())
        content = hashlib.sha256()
        for file in files:
            content.update(file.read_bytes())
        return replace(self.settings, policy_file=content.hexdigest())


def describe_environment(python: str) -> dict[str, str]:
    """What a result depends on besides the problem: versions, and the names and the driver of the GPUs."""
    return {**versions(python), "gpus": ", ".join(query_gpus("name,driver_version"))}


def visible_devices() -> list[str]:
    """Values of ``CUDA_VISIBLE_DEVICES`` that select one GPU each; empty without a GPU."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return [name for name in visible.split(",") if name.strip()]
    return [str(index) for index in range(len(query_gpus("name")))]


# The file of results ----------------------------------------------------------------------------------------------


def read_results(path: Path) -> list[dict[str, Any]]:
    """The newest result of each problem in the file. Lines that an interrupted bench did not finish are ignored.

    Raises:
        RequestError: the file cannot be read, or contains something else.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return []
    except (OSError, UnicodeDecodeError) as error:
        raise RequestError(f"cannot be read: {error}", where=Location(str(path)), remedy="Name another file.") from None
    newest: dict[str, dict[str, Any]] = {}
    lines = text.split("\n")
    for number, line in enumerate(lines, 1):
        if not line:
            continue
        try:
            record = json.loads(line)
            newest.pop(record["problem"], None)
            newest[record["problem"]] = record
        except (ValueError, KeyError, TypeError):
            if number == len(lines) or not line.endswith("}"):
                continue
            remedy = "Name a file that `mtmc bench` wrote."
            raise RequestError("this line is not a result", where=Location(str(path), number), remedy=remedy) from None
    return list(newest.values())


def append_result(path: Path, record: Mapping[str, Any]) -> None:
    """Append a line. Several processes may write to one file; an unfinished line of another one is ended first.

    Raises:
        EnvironmentNotAble: the file cannot be written.
    """
    try:
        with path.open("a+b") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            size = file.seek(0, os.SEEK_END)
            if size:
                file.seek(size - 1)
            broken = bool(size) and file.read(1) != b"\n"
            file.write(b"\n" * broken + json.dumps(record).encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        where = Location(str(path))
        raise EnvironmentNotAble(f"cannot be written: {error.strerror}", where=where, remedy="Make room.") from None


# Running ----------------------------------------------------------------------------------------------------------


class Bench:
    """Solves problems, several in parallel."""

    def __init__(self, plan: Plan, out: Path, jobs: Jobs, *, program: Program = PROGRAM) -> None:
        """Prepare.

        Args:
            jobs: where the problems are solved.
            program: solves one problem: it reads the request from standard input and writes the answer to the file that is its
                last argument.
        """
        self._plan, self._out, self._jobs, self._program = plan, out, jobs, program
        self._store = out.resolve().parent / FOLDER

    def run(
        self, problems: Sequence[Problem], *, fresh: bool = False
    ) -> Iterator[tuple[Problem, dict[str, Any], bool]]:
        """Yield each problem, its result as soon as it is known, and whether it was in the file before.

        A problem whose workers were lost too often has the status :data:`LOST`; it is not written, so the next bench solves it.

        Args:
            problems: in the order in which they start.
            fresh: whether problems with a result in the file are solved again.
        """
        known = {record["key"]: record for record in read_results(self._out)}
        todo = []
        for problem in problems:
            record = known.get(self._plan.key(problem))
            if record is not None and not fresh:
                yield problem, record, True
            else:
                todo.append(problem)
        pending: dict[Future[Solved], Problem] = {}
        try:
            out_of_memory = []
            for problem, record in self._solved(todo, pending, lambda: self._jobs.count):
                if self._jobs.shares_gpus and ran_out_of_memory(record):
                    out_of_memory.append(problem)
                    continue
                self._keep(record)
                yield problem, record, False
            # Other problems used memory of the GPU at the same time; alone it may fit.
            for problem, record in self._solved(out_of_memory, pending, lambda: 1):
                self._keep(record)
                yield problem, record, False
        finally:
            for future in pending:
                future.cancel()

    def _solved(
        self, problems: Sequence[Problem], pending: dict[Future[Solved], Problem], count: Callable[[], int]
    ) -> Iterator[tuple[Problem, dict[str, Any]]]:
        """Solve problems, at most ``count()`` at a time; those that run are in ``pending``."""
        waiting = list(problems)
        while waiting or pending:
            while waiting and len(pending) < count():
                problem = waiting.pop(0)
                pending[self._jobs.submit(solve_problem, self._program, self._request(problem))] = problem
            for future in wait(pending, return_when=FIRST_COMPLETED).done:
                problem = pending.pop(future)
                yield problem, self._record(problem, future)

    def _request(self, problem: Problem) -> ProblemRequest:
        plan = self._plan
        return ProblemRequest(
            str(problem.path), problem.target, plan.python, plan.settings, plan.seconds, str(self._store)
        )

    def _record(self, problem: Problem, future: Future[Solved]) -> dict[str, Any]:
        """The line of a result, after its run is in the store."""
        try:
            solved = self._jobs.result(future)
        except WorkerLost as error:
            solved = Solved(failed(LOST, str(error)), 0.0)
        if solved.rows:
            with Store(self._store) as store:
                store.import_rows(solved.rows)
        head = {
            "schema": SCHEMA,
            **to_json(current_build()),
            "problem": problem.name,
            "level": problem.level,
            "key": self._plan.key(problem),
        }
        result = {**head, "wall_seconds": round(solved.seconds, 3), **solved.answer}
        relative: dict[str, Any] = without_absolute_paths(result, problem.suite)
        return relative

    def _keep(self, record: Mapping[str, Any]) -> None:
        if record["status"] != LOST:
            append_result(self._out, record)


def ran_out_of_memory(record: Mapping[str, Any]) -> bool:
    """Whether a problem or one of its steps ran out of memory."""
    kinds = [step.get("failure") for step in record.get("steps") or ()]
    kinds.append((record.get("error") or {}).get("kind"))
    return any(kind is not None and FailureKind(kind).is_out_of_memory for kind in kinds)
