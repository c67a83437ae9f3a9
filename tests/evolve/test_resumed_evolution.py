"""An evolution that is killed at any point continues with the same lineage as one that is not."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from evolving import Landscape, World, comparable, evolve

from mtmc_lsp.core.json_codec import to_json
from mtmc_lsp.search.store import Store

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
BOUNDARIES, RANDOM_TIMES = 18, 12
GENERATIONS = 9
TRIAL_SECONDS = 0.02


def killed_at_transaction(folder: str, number: int) -> None:
    """A process that is ended at the given one of its transactions: before it if the number is even, else after it."""
    seen = iter(range(1000))

    def on_store(when: str) -> None:
        if next(seen) == number:
            os.kill(os.getpid(), signal.SIGKILL)

    with Store(Path(folder)) as store:
        world = World(store, generations=GENERATIONS, on_store=on_store)
        world.go(world.begin())


def killed_at_time(folder: str, seconds: float) -> None:
    """A process that is ended some time after its evolution began, wherever it is then."""
    with Store(Path(folder)) as store:
        world = World(store, generations=GENERATIONS, seconds=TRIAL_SECONDS)
        run, evolving = world.begin(), os.getpid()
        if os.fork() == 0:
            time.sleep(seconds)
            if os.getppid() == evolving:
                os.kill(evolving, signal.SIGKILL)
            os._exit(0)
        world.go(run)


def resumed(folder: Path) -> str:
    """The lineage after the end of the evolution that a store holds, as JSON text."""
    with Store(folder) as store:
        run = next(iter(store.evolutions()))
        world = World(store, generations=GENERATIONS)
        return json.dumps(to_json(comparable(world.go(run))))


def whole(folder: Path) -> str:
    return json.dumps(to_json(comparable(evolve(folder, generations=GENERATIONS))))


def child(folder: Path, call: str) -> int:
    """Run a call of this module in a process; returns its exit status."""
    code = f"import sys; sys.path[:0] = [{str(HERE)!r}, {str(ROOT)!r}]\nimport test_resumed_evolution as t\nt.{call}\n"
    return subprocess.run([sys.executable, "-c", code], check=False, cwd=folder).returncode


@pytest.mark.slow
def test_an_evolution_that_was_killed_at_thirty_points_has_the_same_lineage(tmp_path: Path) -> None:
    expected = whole(tmp_path / "whole")
    chance = random.Random(5)
    for number in range(BOUNDARIES):
        folder = tmp_path / f"boundary{number}"
        folder.mkdir()
        assert child(folder, f"killed_at_transaction({str(folder)!r}, {number})") == -signal.SIGKILL
        assert resumed(folder) == expected, f"killed at transaction {number}"
    most_seconds, killed = 0.3, 0
    while killed < RANDOM_TIMES:
        seconds = chance.uniform(0.0, most_seconds)
        folder = tmp_path / f"time{seconds}"
        folder.mkdir()
        if child(folder, f"killed_at_time({str(folder)!r}, {seconds})") == -signal.SIGKILL:
            killed += 1
        else:
            # The process was fast enough to end by itself.
            most_seconds = max(seconds, most_seconds / 2)
        assert resumed(folder) == expected, f"killed after {seconds} s"


def test_an_evolution_that_is_killed_again_and_again_has_the_same_lineage(tmp_path: Path) -> None:
    class Killed(BaseException):
        pass

    expected = whole(tmp_path / "whole")
    folder = tmp_path / "often"
    with Store(folder) as store:
        run = World(store).begin()
    kills = 0
    for _ in range(100):

        def on_store(when: str) -> None:
            if when == "after":
                raise Killed

        try:
            with Store(folder) as store:
                World(store, generations=GENERATIONS, on_store=on_store).go(run)
        except Killed:
            kills += 1
            continue
        break
    assert kills == GENERATIONS + 1
    assert resumed(folder) == expected


def test_what_a_resumed_evolution_stored_before_is_not_tried_again(tmp_path: Path) -> None:
    with Store(tmp_path) as store:
        world = World(store, generations=4)
        run = world.begin()
        first = world.go(run)
        # As if the process had been killed before the end of the evolution was stored.
        last = first.generations[-1]
        store.add_generation(run, last.number, type(last)(last.number, (), last.spent), {})
        again = World(store, landscape=Landscape(), generations=4)
        assert again.go(run) == first
        assert again.told == []
