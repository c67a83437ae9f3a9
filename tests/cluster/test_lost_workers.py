"""Workers that are killed at any time: no result is lost, and at most the work in flight is repeated."""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from mtmc_lsp.app.bench.runner import Bench, Plan, read_results
from mtmc_lsp.app.bench.suite import find_problems
from mtmc_lsp.cluster.address import ClusterAddress
from mtmc_lsp.cluster.imports import bundle_of
from mtmc_lsp.cluster.machine import CPU
from mtmc_lsp.cluster.results import cluster_plan
from mtmc_lsp.core.settings import Settings
from mtmc_lsp.search.store import Store

pytest.importorskip("distributed")
from mtmc_lsp.cluster.session import connect

PROBLEM = "import torch\n\nclass Model(torch.nn.Module):\n    pass\n\ndef get_inputs():\n    return []\n"
PROBLEMS, KILLS, WORKERS = 80, 20, 4
SECONDS = 0.6
"""Of each problem."""
RESULTS_BETWEEN_KILLS = 2
"""Fewest results that arrive between two kills."""
# The process notes its start, its worker and its end. It ends with its worker, as mtmc_lsp.app.bench.problem does.
ANSWER = """
import json, os, pathlib, sys, time
from mtmc_lsp.core.workload import Environment
from mtmc_lsp.process.parent_watch import end_with_parent
from mtmc_lsp.search.store import Store
worker = int(os.environ["MTMC_PARENT"])
end_with_parent()
request = json.load(sys.stdin)
name = pathlib.Path(request["path"]).stem
def note(what):
    with open(LOG, "a") as log:
        log.write(json.dumps([what, name, worker]) + chr(10))
note("start")
with Store(pathlib.Path(request["store"])) as store:
    run = store.begin(request["path"], "Model", "", Environment("", "", "", "", ""))
time.sleep(SECONDS)
pathlib.Path(sys.argv[1]).write_text(json.dumps({"status": "unmeasured", "run": run, "steps": []}))
note("end")
"""


def notes(log: Path) -> Iterator[tuple[str, str, int]]:
    """What the processes of problems noted: start or end, the problem, and the worker's process."""
    text = log.read_text() if log.exists() else ""
    yield from (tuple(json.loads(line)) for line in text.splitlines())


class Killer:
    """Kills the workers of problems that have started, each time after a random pause."""

    def __init__(self, log: Path, results: Path, rng: random.Random) -> None:
        self._log, self._results, self._rng = log, results, rng
        self.killed: dict[int, set[str]] = {}
        """The killed workers, each with the problems whose results had arrived before."""
        self._is_over = False
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Killer:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._is_over = True
        self._thread.join()

    def _run(self) -> None:
        before = 0
        while len(self.killed) < KILLS and not self._is_over:
            time.sleep(self._rng.uniform(0.0, SECONDS))
            arrived = {record["problem"] for record in read_results(self._results)}
            workers = sorted({worker for _, _, worker in notes(self._log)} - set(self.killed))
            alive = [worker for worker in workers if not is_gone(worker)]
            # A worker that is killed needs seconds to return: without a pause, all are away most of the time.
            if alive and len(arrived) >= before + RESULTS_BETWEEN_KILLS:
                worker, before = self._rng.choice(alive), len(arrived)
                os.kill(worker, signal.SIGKILL)
                self.killed[worker] = arrived

    def in_flight(self) -> int:
        """How many problems the killed workers had started whose results had not arrived."""
        starts = [(name, by) for what, name, by in notes(self._log) if what == "start"]
        return sum(by in self.killed and name not in self.killed[by] for name, by in starts)


def is_gone(pid: int) -> bool:
    """Whether a process is not a living child of this one, as workers are."""
    try:
        state, parent = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[:2]
    except OSError:
        return True
    return state == "Z" or int(parent) != os.getpid()


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_twenty_killed_workers_lose_no_result_and_repeat_only_what_they_ran(tmp_path: Path) -> None:
    suite, log, results = tmp_path / "suite", tmp_path / "log.jsonl", tmp_path / "results.jsonl"
    suite.mkdir()
    for number in range(PROBLEMS):
        (suite / f"p{number}.py").write_text(f"{PROBLEM}# {number}\n")
    problems = find_problems(suite)
    settings = Settings()
    program = (sys.executable, "-c", f"LOG, SECONDS = {str(log)!r}, {SECONDS}\n{ANSWER}")
    lost: list[str] = []
    bundle = bundle_of(problems, settings)
    with connect(ClusterAddress("local:4", WORKERS), bundle, sys.executable, on_lost=lost.append, forks=False) as here:
        plan = cluster_plan(Plan(settings, sys.executable, 20.0, {}), here.software, CPU)
        bench = Bench(plan, results, here.jobs(CPU), program=program)
        with Killer(log, results, random.Random(7)) as killer:
            found = [(problem.name, record["status"]) for problem, record, _ in bench.run(problems)]
    assert len(killer.killed) == KILLS
    assert sorted(found) == sorted((problem.name, "unmeasured") for problem in problems)
    assert len(results.read_text().splitlines()) == PROBLEMS
    records = read_results(results)
    with Store(tmp_path / ".mtmc") as store:
        assert {record["run"] for record in records} == {run.id for run in store.runs()}
    starts = Counter(name for what, name, _ in notes(log) if what == "start")
    assert set(starts) == {problem.name for problem in problems}
    repeated = starts.total() - PROBLEMS
    in_flight = killer.in_flight()
    print(f"{len(killer.killed)} workers killed, {len(lost)} with a job; {repeated} repeated, {in_flight} in flight")
    # A worker has one job, and perhaps a result that is on its way.
    assert 0 < repeated <= in_flight <= 2 * KILLS


def awaited(condition: Callable[[], bool]) -> bool:
    end = time.monotonic() + 60
    while not condition() and time.monotonic() < end:
        time.sleep(0.05)
    return condition()


@pytest.mark.slow
def test_the_process_of_a_problem_ends_with_its_worker(tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    (tmp_path / "p.py").write_text(PROBLEM)
    problems = find_problems(tmp_path)
    program = (sys.executable, "-c", f"LOG, SECONDS = {str(log)!r}, 3\n{ANSWER}")
    lost: list[str] = []
    bundle, environment = bundle_of(problems, Settings()), dict(os.environ)
    with connect(ClusterAddress("local:2", 2), bundle, sys.executable, on_lost=lost.append, forks=False) as here:
        plan = cluster_plan(Plan(Settings(), sys.executable, 20.0, {}), here.software, CPU)
        results = Bench(plan, tmp_path / "r.jsonl", here.jobs(CPU), program=program).run(problems)
        found: list[str] = []
        thread = threading.Thread(target=lambda: found.extend(record["status"] for _, record, _ in results))
        thread.start()
        assert awaited(lambda: any(notes(log)))
        os.kill(next(notes(log))[2], signal.SIGKILL)
        thread.join()
    assert found == ["unmeasured"]
    assert Counter(what for what, _, _ in notes(log)) == {"start": 2, "end": 1}
    assert len(lost) == 1
    assert dict(os.environ) == environment, "later programs get the variables of the workers"
