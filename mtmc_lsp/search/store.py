"""Runs and their steps in an SQLite file; every step is there before it is shown, so a killed run can go on."""

from __future__ import annotations

import json
import sqlite3
import time
import uuid
from dataclasses import dataclass
from pathlib import Path

from mtmc_lsp.core.jsonable import from_json, to_json
from mtmc_lsp.core.run import RunResult, RunStatus, Step

TABLES = """
create table if not exists runs (
    id text primary key, path text not null, qualname text not null, source_hash text not null,
    started real not null, status text not null, result text);
create table if not exists steps (
    run text not null references runs(id), number integer not null, document text not null, primary key (run, number));
"""


@dataclass(frozen=True)
class RunRecord:
    """A run as the store lists it."""

    id: str
    path: str
    qualname: str
    source_hash: str
    started: float
    """Seconds since the epoch."""
    status: RunStatus
    steps: int


class Store:
    """The runs of a project, in ``.mtmc/store.db``."""

    def __init__(self, folder: Path) -> None:
        """Open (or make) the store in ``folder``, which keeps itself out of version control."""
        folder.mkdir(parents=True, exist_ok=True)
        ignore = folder / ".gitignore"
        if not ignore.exists():
            ignore.write_text("*\n")
        self.folder = folder
        self._db = sqlite3.connect(folder / "store.db", isolation_level=None)
        self._db.execute("pragma journal_mode=wal")
        self._db.execute("pragma synchronous=normal")
        self._db.executescript(TABLES)

    def close(self) -> None:
        """Close the file."""
        self._db.close()

    def begin(self, path: str, qualname: str, source_hash: str) -> str:
        """A new run; returns its id."""
        run_id = uuid.uuid4().hex[:10]
        row = (run_id, path, qualname, source_hash, time.time(), RunStatus.RUNNING.value)
        self._db.execute("insert into runs values (?, ?, ?, ?, ?, ?, null)", row)
        return run_id

    def add_step(self, run_id: str, step: Step) -> None:
        """Store a step."""
        document = json.dumps(to_json(step))
        self._db.execute("insert or replace into steps values (?, ?, ?)", (run_id, step.index, document))

    def finish(self, result: RunResult) -> None:
        """Store a run's result."""
        document = json.dumps(to_json(result))
        self._db.execute(
            "update runs set status = ?, result = ? where id = ?", (result.status.value, document, result.id)
        )

    def steps(self, run_id: str) -> list[Step]:
        """The steps of a run, in order."""
        rows = self._db.execute("select document from steps where run = ? order by number", (run_id,))
        return [from_json(Step, json.loads(document)) for (document,) in rows]

    def result(self, run_id: str) -> RunResult | None:
        """The result of a finished run."""
        row = self._db.execute("select result from runs where id = ?", (run_id,)).fetchone()
        return from_json(RunResult, json.loads(row[0])) if row and row[0] else None

    def runs(self) -> list[RunRecord]:
        """Every run, newest first."""
        rows = self._db.execute(
            "select id, path, qualname, source_hash, started, status, "
            "(select count(*) from steps where run = runs.id) from runs order by started desc"
        )
        return [RunRecord(r[0], r[1], r[2], r[3], r[4], RunStatus(r[5]), r[6]) for r in rows]

    def unfinished(self, path: str, qualname: str) -> RunRecord | None:
        """The newest run of a target that was never finished."""
        found = (r for r in self.runs() if r.path == path and r.qualname == qualname and r.status is RunStatus.RUNNING)
        return next(found, None)
