"""Runs and their steps in an SQLite file. A step is stored before it is reported, so a killed run can be resumed."""

from __future__ import annotations

import json
import sqlite3
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TypeVar

from mtmc_lsp.core.chat import Exchange
from mtmc_lsp.core.errors import EnvironmentNotAble, Location
from mtmc_lsp.core.json_codec import from_json, to_json
from mtmc_lsp.core.run import RunResult, RunStatus, Step
from mtmc_lsp.core.workload import Environment
from mtmc_lsp.process.project_files import check_database, make_folder, read_bytes, replace_bytes

T = TypeVar("T")
STORE = "store.db"
"""The file in the project's ``.mtmc``."""
VERSION = 1
"""Of the tables and of the JSON documents in them."""
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
"""


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

    def __init__(self, folder: Path) -> None:
        """Open or create the store in ``folder``, with a ``.gitignore`` for its content.

        Raises:
            UnsafeFile: the folder or a file in it is a link, a pipe or a device.
            EnvironmentNotAble: the file cannot be written, is not a store, or has another version.
        """
        self.folder = folder
        self._file = folder / STORE
        with self._explained_errors():
            make_folder(folder)
            ignore = folder / ".gitignore"
            if read_bytes(ignore) is None:
                replace_bytes(ignore, b"*\n")
            check_database(self._file)
            self._db = sqlite3.connect(self._file, isolation_level=None, timeout=LOCK_SECONDS)
            self._db.execute("pragma journal_mode=wal")
            self._db.execute("pragma synchronous=normal")
            version = self._db.execute("pragma user_version").fetchone()[0]
            if version in (0, VERSION):
                self._db.executescript(TABLES)
            if not version:
                self._db.execute(f"pragma user_version={VERSION}")
        if version not in (0, VERSION):
            raise EnvironmentNotAble(
                f"the store of runs has version {version}, and this program reads version {VERSION}",
                where=Location(str(self._file)),
                remedy="Delete the file, or use the version of mtmc that wrote it.",
            )

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
        """Turn database errors into errors that tell the user what to do."""
        try:
            yield
        except sqlite3.DatabaseError as error:
            raise EnvironmentNotAble(
                f"the store of runs cannot be used: {error}",
                where=Location(str(self._file)),
                remedy="Free disk space and make the folder writable; delete the file if it is damaged.",
            ) from None
        except OSError as error:
            raise EnvironmentNotAble(
                f"the store of runs cannot be created: {error.strerror}",
                where=Location(str(self.folder)),
                remedy="Make the project's folder writable.",
            ) from None

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

    # Reading -----------------------------------------------------------------------------------------------------

    def steps(self, run_id: str) -> list[Step]:
        """The steps of a run, in order."""
        rows = self._rows("select document from steps where run = ? order by number", run_id)
        return [from_json(Step, json.loads(row[0])) for row in rows]

    def exchanges(self, run_id: str) -> list[Exchange]:
        """The requests to a model in a run and their answers, in order."""
        rows = self._rows("select document from exchanges where run = ? order by number", run_id)
        return [from_json(Exchange, json.loads(row[0])) for row in rows]

    def config(self, run_id: str, kind: type[T]) -> T | None:
        """How a run was started; None if that was not stored, or another version wrote it."""
        rows = self._rows("select document from setups where run = ?", run_id)
        try:
            return from_json(kind, json.loads(rows[0][0])) if rows else None
        except (TypeError, ValueError):
            return None

    def result(self, run_id: str) -> RunResult | None:
        """The result of a finished run."""
        rows = self._rows("select result from runs where id = ? and result is not null", run_id)
        return from_json(RunResult, json.loads(rows[0][0])) if rows else None

    def runs(self) -> list[RunRecord]:
        """Every run, newest first."""
        rows = self._rows(
            "select id, path, qualname, source_hash, environment, started, status, "
            "(select count(*) from steps where run = runs.id) from runs order by started desc"
        )
        return [
            RunRecord(r[0], r[1], r[2], r[3], from_json(Environment, json.loads(r[4])), r[5], RunStatus(r[6]), r[7])
            for r in rows
        ]

    def _rows(self, query: str, *values: str) -> list[tuple[str, str, str, str, str, float, str, int]]:
        with self._explained_errors():
            return self._db.execute(query, values).fetchall()
