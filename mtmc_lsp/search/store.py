"""Runs and their steps in an SQLite file. A step is stored before it is reported, so a killed run can be resumed."""

from __future__ import annotations

import json
import sqlite3
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

from mtmc_lsp.core.chat import Exchange
from mtmc_lsp.core.errors import EnvironmentNotAble, Location
from mtmc_lsp.core.json_codec import from_json, to_json
from mtmc_lsp.core.run import RunResult, RunStatus, Step
from mtmc_lsp.core.workload import Environment
from mtmc_lsp.process.project_files import check_database, make_folder, read_bytes, replace_bytes, set_aside
from mtmc_lsp.search.packing import pack, unpack

T = TypeVar("T")
StoreRows = dict[str, list[list[Any]]]
"""Rows by the name of their table."""


class DamagedStore(EnvironmentNotAble):
    """The file is not a store, or its content cannot be read. It was renamed, and the next use creates a new one."""

    code = "damaged-store"


STORE = "store.db"
"""The file in the project's ``.mtmc``."""
VERSION = 3
"""Of the tables and of the JSON documents in them. Version 1 had no table ``reviewed``, and version 2 none of evolutions; opening
a store adds them."""
LOCK_SECONDS = 30.0
"""How long a write waits for a write of another process."""
TABLES = """
create table if not exists runs (
    id text primary key, path text not null, qualname text not null, source_hash text not null,
    environment text not null, started real not null, status text not null, result text);
create table if not exists steps (
    run text not null references runs(id), number integer not null, document text not null, primary key (run, number));
create table if not exists exchanges (
    run text not null references runs(id), number integer not null, step integer not null, document text not null,
    primary key (run, number));
create table if not exists setups (run text primary key references runs(id), document text not null);
create table if not exists reviewed (
    path text not null, qualname text not null, change text not null, primary key (path, qualname, change));
create table if not exists evolutions (run text primary key references runs(id), document text not null);
create table if not exists generations (
    run text not null references runs(id), number integer not null, document text not null, primary key (run, number));
create table if not exists versions (
    run text not null references runs(id), number integer not null, document text not null, primary key (run, number));
"""
COLUMNS = {
    "runs": ["id", "path", "qualname", "source_hash", "environment", "started", "status", "result"],
    "steps": ["run", "number", "document"],
    "exchanges": ["run", "number", "step", "document"],
    "setups": ["run", "document"],
    "reviewed": ["path", "qualname", "change"],
    "evolutions": ["run", "document"],
    "generations": ["run", "number", "document"],
    "versions": ["run", "number", "document"],
}
"""The tables with the names of their columns. A store contains nothing else."""
RUN_TABLES = ("runs", "steps", "exchanges", "setups")
"""The tables of runs, those that others refer to first."""
KNOWN_DOCUMENTS = 64
"""Number of documents whose values are kept: a review reads the same run many times."""
RETRY_SECONDS = 0.02
"""The pause before a lock that SQLite does not wait for is tried again."""
PROGRESS_STEPS = 100_000
"""Number of instructions of SQLite, some milliseconds, between two checks of the time."""


def _parsed(kind: type[T], document: str) -> T:
    """The value of a document. Values are immutable, so equal documents share one."""
    known_kind: Any = kind
    value: T = _known_value(known_kind, document)
    return value


@lru_cache(maxsize=KNOWN_DOCUMENTS)
def _known_value(kind: Any, document: str) -> Any:
    return from_json(kind, json.loads(document))


@dataclass(frozen=True)
class RunRecord:
    """A run as the store lists it."""

    id: str
    path: str
    qualname: str
    source_hash: str
    environment: Environment
    """The machine that the run began on."""
    started: float
    """Seconds since the epoch."""
    status: RunStatus
    """``running`` until the run is finished: it is in progress, or it was killed and can be resumed."""
    steps: int


class Store:
    """The runs of a project, in ``.mtmc/store.db``."""

    def __init__(self, folder: Path, *, wait_seconds: float = LOCK_SECONDS) -> None:
        """Open or create the store in ``folder``, with a ``.gitignore`` for its content.

        Args:
            wait_seconds: how long to wait for another process that writes, and how long one query may take.

        Raises:
            UnsafeFile: the folder or a file in it is a link, a pipe or a device.
            DamagedStore: the file is not a store; it was set aside.
            EnvironmentNotAble: the file cannot be read or written, is locked, or has another version.
        """
        self.folder = folder
        self._file = folder / STORE
        self._seconds = wait_seconds
        with self._explained_errors():
            make_folder(folder)
            ignore = folder / ".gitignore"
            if read_bytes(ignore) is None:
                replace_bytes(ignore, b"*\n")
            check_database(self._file)
            self._db = sqlite3.connect(self._file, isolation_level=None, timeout=wait_seconds)
        try:
            with self._explained_errors():
                self._open()
        except BaseException:
            self._db.close()
            raise

    def _open(self) -> None:
        self._db.text_factory = lambda data: data.decode("utf-8", "replace")
        self._db.set_progress_handler(self._is_late, PROGRESS_STEPS)
        self._end = time.monotonic() + self._seconds
        # A store of somebody else may contain views and triggers that compute anything, for ever.
        self._db.execute("pragma trusted_schema=off")
        version = self._db.execute("pragma user_version").fetchone()[0]
        if version not in range(VERSION + 1):
            raise EnvironmentNotAble(
                f"the store of runs has version {version}, and this program reads version {VERSION}",
                where=Location(str(self._file)),
                remedy="Move the file away, or use the version of mtmc that wrote it.",
            )
        schema = "select type, name from sqlite_master where name not like 'sqlite\\_%' escape '\\'"
        for kind, name in self._db.execute(schema).fetchall():
            if kind != "table" or name not in COLUMNS:
                raise sqlite3.DatabaseError(f"it contains the {kind} {name}, which mtmc did not create")
        self._use_write_ahead_log()
        self._db.execute("pragma synchronous=normal")
        self._db.executescript(TABLES)
        for name, columns in COLUMNS.items():
            if [row[1] for row in self._db.execute(f"pragma table_xinfo({name})")] != columns:
                raise sqlite3.DatabaseError(f"its table {name} has other columns")
        if version != VERSION:
            self._db.execute(f"pragma user_version={VERSION}")

    def _use_write_ahead_log(self) -> None:
        """Switch the journal's mode. SQLite does not wait for the lock of another process that creates the file just now."""
        end = time.monotonic() + self._seconds
        while True:
            try:
                self._db.execute("pragma journal_mode=wal")
                return
            except sqlite3.OperationalError as error:
                if "locked" not in str(error) or time.monotonic() > end:
                    raise
            time.sleep(RETRY_SECONDS)

    def _is_late(self) -> bool:
        """Whether the current query takes too long; SQLite then ends it."""
        return time.monotonic() > self._end

    def __enter__(self) -> Store:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the file."""
        self._db.close()

    @contextmanager
    def _explained_errors(self) -> Iterator[None]:
        """Turn database errors into errors that tell the user what to do. A damaged file is set aside."""
        self._end = time.monotonic() + self._seconds
        try:
            yield
        except sqlite3.OperationalError as error:
            # The file is usable: the disk is full, another process holds a lock, or the time is over.
            raise self._unusable(error) from None
        except sqlite3.DatabaseError as error:
            raise self._damaged(error) from None
        except OSError as error:
            raise EnvironmentNotAble(
                f"the store of runs cannot be created: {error.strerror}",
                where=Location(str(self.folder)),
                remedy="Make the project's folder writable.",
            ) from None

    def _unusable(self, error: sqlite3.OperationalError) -> EnvironmentNotAble:
        return EnvironmentNotAble(
            f"the store of runs cannot be used: {error}",
            where=Location(str(self._file)),
            remedy="Free disk space, make the folder writable, and end other programs that hold the file locked.",
        )

    def _damaged(self, reason: object) -> EnvironmentNotAble:
        """Set the file aside, and return the error that says where it is."""
        self.close()
        try:
            aside = set_aside(self._file)
        except OSError as error:
            return EnvironmentNotAble(
                f"the store of runs is damaged ({reason}) and cannot be renamed: {error.strerror}",
                where=Location(str(self._file)),
                remedy="Make the project's folder writable.",
            )
        return DamagedStore(
            f"the store of runs is damaged: {reason}. It is now {aside.name}, and the next run begins a new store",
            where=Location(str(self._file)),
            remedy="Repeat what you did. `sqlite3 FILE .recover` may show what the old file contains.",
        )

    def _decoded(self, kind: type[T], document: object) -> T:
        """A stored document.

        Raises:
            DamagedStore: it is none.
        """
        try:
            return _parsed(kind, str(document))
        except (TypeError, ValueError, KeyError, AttributeError, RecursionError) as error:
            raise self._damaged(f"a document is no {kind.__name__} ({error})") from None

    # Writing -----------------------------------------------------------------------------------------------------

    def begin(self, path: str, qualname: str, source_hash: str, environment: Environment) -> str:
        """Add a run; returns its id."""
        run_id = uuid.uuid4().hex[:10]
        machine = json.dumps(to_json(environment))
        row = (run_id, path, qualname, source_hash, machine, time.time(), RunStatus.RUNNING.value)
        with self._explained_errors():
            self._db.execute("insert into runs values (?, ?, ?, ?, ?, ?, ?, null)", row)
        return run_id

    def add_step(self, run_id: str, step: Step) -> None:
        """Store a step."""
        document = json.dumps(to_json(step))
        with self._explained_errors():
            self._db.execute("insert or replace into steps values (?, ?, ?)", (run_id, step.index, document))

    def replace_steps(self, run_id: str, steps: Sequence[Step]) -> None:
        """Store the steps of a run instead of those that it has, in one transaction."""
        rows = [(run_id, step.index, json.dumps(to_json(step))) for step in steps]
        with self._transaction():
            self._db.execute("delete from steps where run = ?", (run_id,))
            self._db.executemany("insert into steps values (?, ?, ?)", rows)

    def add_evolution(self, run_id: str, setup: object) -> None:
        """Store that a run evolves versions, and how."""
        document = json.dumps(to_json(setup))
        with self._explained_errors():
            self._db.execute("insert or replace into evolutions values (?, ?)", (run_id, document))

    def add_generation(self, run_id: str, number: int, generation: object, versions: Mapping[int, object]) -> None:
        """Store a generation and its versions by their numbers, in one transaction."""
        rows = [(run_id, index, pack(json.dumps(to_json(version)))) for index, version in versions.items()]
        document = json.dumps(to_json(generation))
        with self._transaction():
            self._db.execute("insert or replace into generations values (?, ?, ?)", (run_id, number, document))
            self._db.executemany("insert or replace into versions values (?, ?, ?)", rows)

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        """All changes or none of them, whenever the process is killed."""
        with self._explained_errors():
            self._db.execute("begin immediate")
            try:
                yield
            except BaseException:
                self._db.execute("rollback")
                raise
            self._db.execute("commit")

    def add_exchange(self, run_id: str, step: int, exchange: Exchange) -> None:
        """Store a request to a model for a step, and its answer."""
        document = json.dumps(to_json(exchange))
        query = "insert into exchanges select ?, 1 + count(*), ?, ? from exchanges where run = ?"
        with self._explained_errors():
            self._db.execute(query, (run_id, step, document, run_id))

    def add_config(self, run_id: str, config: object) -> None:
        """Store how a run was started: planner, coder and settings."""
        document = json.dumps(to_json(config))
        with self._explained_errors():
            self._db.execute("insert or replace into setups values (?, ?)", (run_id, document))

    def finish(self, result: RunResult) -> None:
        """Store a run's result."""
        document = json.dumps(to_json(result))
        row = (result.status.value, document, result.id)
        with self._explained_errors():
            self._db.execute("update runs set status = ?, result = ? where id = ?", row)

    def set_started(self, run_id: str, started: float) -> None:
        """Change when a run started. Of the runs of a target, the newest counts."""
        with self._explained_errors():
            self._db.execute("update runs set started = ? where id = ?", (started, run_id))

    def mark_reviewed(self, path: str, qualname: str, change: str, *, is_reviewed: bool) -> None:
        """Store whether the user reviewed a change of a target, given by a hash."""
        add = "insert or ignore into reviewed values (?, ?, ?)"
        remove = "delete from reviewed where path = ? and qualname = ? and change = ?"
        with self._explained_errors():
            self._db.execute(add if is_reviewed else remove, (path, qualname, change))

    def import_rows(self, rows: StoreRows) -> None:
        """Add the runs of another store, or none of them if that fails. Rows that are here already are replaced."""
        with self._explained_errors(), self._db:
            self._db.execute("begin immediate")
            for table in RUN_TABLES:
                places = ", ".join("?" * len(COLUMNS[table]))
                self._db.executemany(f"insert or replace into {table} values ({places})", rows.get(table, ()))

    # Reading -----------------------------------------------------------------------------------------------------

    def export_rows(self) -> StoreRows:
        """All runs with their steps, as plain values for :meth:`import_rows`."""
        with self._explained_errors():
            return {table: [list(row) for row in self._db.execute(f"select * from {table}")] for table in RUN_TABLES}

    def steps(self, run_id: str) -> list[Step]:
        """The steps of a run, in order."""
        rows = self._rows("select document from steps where run = ? order by number", run_id)
        return [self._decoded(Step, row[0]) for row in rows]

    def exchanges(self, run_id: str) -> list[Exchange]:
        """The requests to a model in a run and their answers, in order."""
        rows = self._rows("select document from exchanges where run = ? order by number", run_id)
        return [self._decoded(Exchange, row[0]) for row in rows]

    def reviewed(self, path: str) -> set[tuple[str, str]]:
        """The target and the hash of each change in a file that the user reviewed."""
        rows = self._rows("select qualname, change from reviewed where path = ?", path)
        return {(str(row[0]), str(row[1])) for row in rows}

    def config(self, run_id: str, kind: type[T]) -> T | None:
        """How a run was started; None if that was not stored, or another version wrote it."""
        rows = self._rows("select document from setups where run = ?", run_id)
        try:
            return _parsed(kind, str(rows[0][0])) if rows else None
        except (TypeError, ValueError, RecursionError):
            return None

    def evolution(self, run_id: str, kind: type[T]) -> T | None:
        """How a run evolves versions; None if it does not."""
        rows = self._rows("select document from evolutions where run = ?", run_id)
        return self._decoded(kind, rows[0][0]) if rows else None

    def evolutions(self) -> set[str]:
        """The ids of the runs that evolve versions."""
        return {row[0] for row in self._rows("select run from evolutions")}

    def generations(self, run_id: str, kind: type[T]) -> list[T]:
        """The generations of an evolution, in order."""
        rows = self._rows("select document from generations where run = ? order by number", run_id)
        return [self._decoded(kind, row[0]) for row in rows]

    def versions(self, run_id: str, kind: type[T]) -> list[T]:
        """The versions of an evolution, in order."""
        rows = self._rows("select document from versions where run = ? order by number", run_id)
        try:
            documents = [unpack(row[0]) for row in rows]
        except ValueError as error:
            raise self._damaged(f"a version cannot be read ({error})") from None
        return [self._decoded(kind, document) for document in documents]

    def result(self, run_id: str) -> RunResult | None:
        """The result of a finished run."""
        rows = self._rows("select result from runs where id = ? and result is not null", run_id)
        return self._decoded(RunResult, rows[0][0]) if rows else None

    def runs(self) -> list[RunRecord]:
        """Every run, newest first."""
        rows = self._rows(
            "select id, path, qualname, source_hash, environment, started, status, "
            "(select count(*) from steps where run = runs.id) from runs order by started desc"
        )
        environments = [self._decoded(Environment, row[4]) for row in rows]
        try:
            return [
                RunRecord(str(r[0]), str(r[1]), str(r[2]), str(r[3]), environment, float(r[5]), RunStatus(r[6]), r[7])
                for r, environment in zip(rows, environments, strict=True)
            ]
        except (TypeError, ValueError) as error:
            raise self._damaged(error) from None

    def _rows(self, query: str, *values: str) -> list[tuple[str, str, str, str, str, float, str, int]]:
        with self._explained_errors():
            return self._db.execute(query, values).fetchall()
