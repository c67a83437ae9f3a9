"""How the programs of a suite share the time, and what becomes of processes that fail."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest
from growing import grow

from mtmc_lsp.app.bench import processes
from mtmc_lsp.app.bench.jobs import LocalJobs
from mtmc_lsp.app.bench.suite import Problem
from mtmc_lsp.core.settings import Settings
from mtmc_lsp.explore import growing, runner
from mtmc_lsp.explore.families import Families
from mtmc_lsp.explore.runner import Exploration, Explored, Plan

ANSWER = """
import json, pathlib, sys, time
request = json.load(sys.stdin)
name = request["name"]
if name == "hang":
    time.sleep(60)
if name == "die":
    print("last words", flush=True)
    sys.exit(7)
answer = {"added": int(request["seconds"]), "total": 1, "stages": {"started": time.monotonic()}}
pathlib.Path(sys.argv[1]).write_text(json.dumps(answer))
"""


def run(folder: Path, *names: str, seconds: float = 600.0, jobs: int = 1) -> dict[str, Explored]:
    grow(folder, depth=1)
    plan = Plan(Settings(), sys.executable, Families("suite"), folder, seconds, depth=2, width=2, seed=0)
    problems = [Problem(name, Path("x.py"), Path("."), "") for name in names]
    with LocalJobs(jobs) as local:
        exploration = Exploration(plan, local, program=(sys.executable, "-c", ANSWER))
        return {item.problem.name: item for item in exploration.run(problems)}


def test_programs_that_hang_or_die_are_named_and_the_others_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "END_SECONDS", 0.5)
    monkeypatch.setattr(runner, "LEAST_SECONDS", 0.5)
    monkeypatch.setattr(growing, "BATCH_SECONDS", 0.5)
    explored = run(tmp_path, "hang", "die", "good", seconds=0.6, jobs=3)
    assert explored["hang"].answer.reason.endswith("and was ended")
    assert explored["die"].answer.reason == "its process ended with code 7: last words"
    assert explored["good"].answer.reason == ""


def test_each_program_gets_an_equal_part_of_the_time_that_is_left(tmp_path: Path) -> None:
    explored = run(tmp_path, "a", "b", "c", "d", seconds=400.0, jobs=2)
    shares = sorted(item.answer.added for item in explored.values())
    # Two at a time: each of the first two gets the half. They end at once, so the last one gets nearly all of it.
    assert all(150 <= share <= 200 for share in shares[:2])
    assert 300 <= shares[-1] <= 400


def test_no_program_starts_after_the_end(tmp_path: Path) -> None:
    began = time.monotonic()
    explored = run(tmp_path, "a", "b", "c", seconds=1e-6)
    assert explored == {}
    assert time.monotonic() - began < 30
