"""Runs survive in the store: killed processes, other processes, damaged files."""

from __future__ import annotations

import base64
import os
import signal
import sqlite3
import subprocess
import sys
import threading
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from fakes import ENVIRONMENT, action, search

from mtmc_lsp.core.errors import EnvironmentNotAble, Location
from mtmc_lsp.core.run import RunStatus
from mtmc_lsp.search.packing import MOST_BYTES
from mtmc_lsp.search.store import DamagedStore, Store
from tests.hostile import DAMAGED_STORES, damage_store

HERE = Path(__file__).resolve().parent
ACTIONS = [action(i, outcome) for i, outcome in enumerate(("better", "wrong", "better", "better", "same"))]


def test_a_run_comes_back_from_the_store_as_it_was(tmp_path: Path) -> None:
    result = search(ACTIONS)
    with Store(tmp_path / ".mtmc") as store:
        run_id = store.begin("/project/model.py", "f", "hash", ENVIRONMENT)
        for step in result.steps:
            store.add_step(run_id, step)
    with Store(tmp_path / ".mtmc") as store:
        assert store.steps(run_id) == list(result.steps)
        assert store.result(run_id) is None
        assert store.runs()[0].status is RunStatus.RUNNING
        assert store.runs()[0].environment == ENVIRONMENT
        assert store.runs()[0].steps == len(result.steps)


def test_a_killed_run_goes_on_where_it_was_and_ends_as_if_it_had_not_been_killed(tmp_path: Path) -> None:
    code = f"import sys; sys.path.insert(0, {str(HERE)!r}); import fakes; fakes.run_until_killed({str(tmp_path)!r})"
    done = subprocess.run([sys.executable, "-c", code], check=False)
    assert done.returncode == -signal.SIGKILL
    with Store(tmp_path) as store:
        record = store.runs()[0]
        assert record.status is RunStatus.RUNNING
        stored = store.steps(record.id)
        assert len(stored) == 3
        told: list[str] = []
        result = search(ACTIONS, done=stored, told=told)
        whole = search(ACTIONS)
        assert (result.steps, result.final, result.status) == (whole.steps, whole.final, whole.status)
        assert told.count("compiling") == len(whole.steps) - 3


def test_the_store_keeps_itself_out_of_version_control(tmp_path: Path) -> None:
    Store(tmp_path / ".mtmc").close()
    assert (tmp_path / ".mtmc" / ".gitignore").read_text() == "*\n"


def test_two_processes_write_runs_at_the_same_time(tmp_path: Path) -> None:
    steps = search(ACTIONS).steps

    def one_run() -> None:
        with Store(tmp_path) as store:
            run_id = store.begin("/project/model.py", "f", "hash", ENVIRONMENT)
            for step in steps:
                store.add_step(run_id, step)

    threads = [threading.Thread(target=one_run) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    with Store(tmp_path) as store:
        assert [record.steps for record in store.runs()] == [len(steps)] * 4


@pytest.mark.parametrize("kind", DAMAGED_STORES)
def test_a_damaged_store_is_set_aside_with_one_message(tmp_path: Path, kind: str) -> None:
    damage_store(tmp_path, kind, "/project/model.py")
    with pytest.raises(DamagedStore) as caught, Store(tmp_path) as store:
        store.runs()
    (aside,) = (file for file in tmp_path.glob("store.db.damaged-*") if file.name[-4:] not in ("-wal", "-shm"))
    assert f"It is now {aside.name}, and the next run begins a new store" in caught.value.message
    assert aside.stat().st_size >= 4096, "the old content is still there"
    with Store(tmp_path) as store:
        assert store.runs() == []
        run = store.begin("/project/model.py", "f", "hash", ENVIRONMENT)
    with Store(tmp_path) as store:
        assert [record.id for record in store.runs()] == [run]


def test_a_store_with_an_unreadable_step_is_set_aside(tmp_path: Path) -> None:
    with Store(tmp_path) as store:
        run = store.begin("/project/model.py", "f", "hash", ENVIRONMENT)
    with sqlite3.connect(tmp_path / "store.db") as db:
        db.execute("insert into steps values (?, 1, ?)", (run, '{"index": "one"}'))
    db.close()
    with pytest.raises(DamagedStore, match="a document is no Step"), Store(tmp_path) as store:
        store.steps(run)
    aside = next(tmp_path.glob("store.db.damaged-*"))
    with sqlite3.connect(aside) as db:
        assert db.execute("select id from runs").fetchall() == [(run,)]
    db.close()


def test_a_store_of_version_1_gets_the_table_of_reviewed_changes(tmp_path: Path) -> None:
    Store(tmp_path).close()
    with sqlite3.connect(tmp_path / "store.db") as db:
        db.execute("drop table reviewed")
        db.execute("pragma user_version=1")
    db.close()
    for _ in range(2):
        with Store(tmp_path) as store:
            store.mark_reviewed("/project/model.py", "f", "abc", is_reviewed=True)
            assert store.reviewed("/project/model.py") == {("f", "abc")}
    with Store(tmp_path) as store:
        store.mark_reviewed("/project/model.py", "f", "abc", is_reviewed=False)
        assert store.reviewed("/project/model.py") == set()


def test_a_store_of_version_2_gets_the_tables_of_evolutions(tmp_path: Path) -> None:
    with Store(tmp_path) as store:
        run = store.begin("/project/model.py", "f", "hash", ENVIRONMENT)
    with sqlite3.connect(tmp_path / "store.db") as db:
        for table in ("evolutions", "generations", "versions"):
            db.execute(f"drop table {table}")
        db.execute("pragma user_version=2")
    db.close()
    with Store(tmp_path) as store:
        assert store.evolutions() == set()
        store.add_evolution(run, Location("setup"))
        store.add_generation(run, 0, Location("generation"), {0: Location("version", 1), 1: Location("version", 2)})
        assert store.evolutions() == {run}
        assert store.evolution(run, Location) == Location("setup")
        assert store.versions(run, Location) == [Location("version", 1), Location("version", 2)]
        assert store.generations(run, Location) == [Location("generation")]
        assert [record.id for record in store.runs()] == [run]


def test_a_generation_is_stored_with_all_of_its_versions_or_not_at_all(tmp_path: Path) -> None:
    with Store(tmp_path) as store:
        run = store.begin("/project/model.py", "f", "hash", ENVIRONMENT)
        with pytest.raises(EnvironmentNotAble):
            # The second version has no number, which the table refuses.
            store.add_generation(run, 1, Location("generation"), {0: Location("version"), None: Location("version")})  # type: ignore[dict-item]
    with Store(tmp_path) as store:
        assert store.generations(run, Location) == []
        assert store.versions(run, Location) == []


def test_versions_are_compressed_and_one_that_expands_without_end_is_refused(tmp_path: Path) -> None:
    text = "def f(x):\n    return x\n" * 5000
    with Store(tmp_path) as store:
        run = store.begin("/project/model.py", "f", "hash", ENVIRONMENT)
        store.add_generation(run, 0, Location("generation"), {0: Location(text)})
        assert store.versions(run, Location) == [Location(text)]
    bomb = base64.b64encode(zlib.compress(b" " * (MOST_BYTES + 1))).decode()
    with sqlite3.connect(tmp_path / "store.db") as db:
        assert db.execute("select length(document) from versions").fetchone()[0] < len(text) / 20
        db.execute("update versions set document = ?", (bomb,))
    db.close()
    with pytest.raises(DamagedStore, match="a version cannot be read"), Store(tmp_path) as store:
        store.versions(run, Location)


def test_steps_are_replaced_as_a_whole(tmp_path: Path) -> None:
    steps = search(ACTIONS).steps
    with Store(tmp_path) as store:
        run = store.begin("/project/model.py", "f", "hash", ENVIRONMENT)
        store.replace_steps(run, steps)
        store.replace_steps(run, steps[:2])
        assert store.steps(run) == list(steps[:2])


def test_a_locked_store_is_reported_and_stays_in_place(tmp_path: Path) -> None:
    Store(tmp_path).close()
    holder = sqlite3.connect(tmp_path / "store.db", isolation_level=None)
    holder.execute("pragma locking_mode=exclusive")
    holder.execute("begin exclusive")
    with pytest.raises(EnvironmentNotAble, match="database is locked") as caught:
        Store(tmp_path, wait_seconds=0.1)
    assert "end other programs that hold the file locked" in caught.value.remedy
    holder.execute("rollback")
    holder.close()
    assert list(tmp_path.glob("*damaged*")) == []
    Store(tmp_path).close()


def test_a_store_of_a_later_version_is_refused_and_left_alone(tmp_path: Path) -> None:
    Store(tmp_path).close()
    with sqlite3.connect(tmp_path / "store.db") as db:
        db.execute("pragma user_version=99")
    with pytest.raises(EnvironmentNotAble, match="version 99"):
        Store(tmp_path)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_project_that_cannot_be_written_says_so(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(EnvironmentNotAble, match="cannot be created"):
        Store(tmp_path / ".mtmc")


def test_a_file_in_the_place_of_the_folder_is_reported(tmp_path: Path) -> None:
    (tmp_path / ".mtmc").write_text("")
    with pytest.raises(EnvironmentNotAble, match="cannot be created"):
        Store(tmp_path / ".mtmc")


def test_several_runs_may_create_the_store_at_once(tmp_path: Path) -> None:
    runs = 8
    for attempt in range(10):
        gate = threading.Barrier(runs)

        def create(_: int, gate: threading.Barrier = gate, folder: Path = tmp_path / str(attempt)) -> bool:
            gate.wait()
            with Store(folder):
                return True

        with ThreadPoolExecutor(runs) as threads:
            assert all(threads.map(create, range(runs)))
