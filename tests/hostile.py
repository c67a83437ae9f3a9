"""Folders as somebody would prepare them for whoever opens them: links and pipes below ``.mtmc``, modules that hide others."""

from __future__ import annotations

import json
import os
import sqlite3
import stat
from pathlib import Path
from typing import Any

MODULES = ("json", "types", "typing", "asyncio", "subprocess", "mtmc_lsp", "pygls", "sitecustomize", "usercustomize")
"""Each of them would leave a file ``ran-NAME`` beside it."""
STORES = ("folder", "loop", "database", "wal", "shm", "journal", "hard-link", "database-pipe", "ignore", "ignore-pipe")
"""What keeps a store from being opened."""
OTHERS = ("records", "records-pipe", "backups", "failures")
"""What only some commands come across."""


def project(folder: Path, kind: str) -> Path:
    """A project whose ``.mtmc`` leads to files beside it; gives the folder that they are in, which must stay as it is."""
    elsewhere = folder.parent / "elsewhere"
    elsewhere.mkdir()
    database = elsewhere / "store.db"
    with sqlite3.connect(database) as db:
        db.execute("create table theirs (text)")
        db.execute("insert into theirs values ('kept')")
    db.close()
    folder.mkdir(exist_ok=True)
    (folder / "pyproject.toml").touch()
    own = folder / ".mtmc"
    if kind == "folder":
        own.symlink_to(elsewhere)
        return elsewhere
    if kind == "loop":
        own.symlink_to(own)
        return elsewhere
    own.mkdir()
    links = {
        "database": ("store.db", "store.db"),
        "wal": ("store.db-wal", "new-wal"),
        "shm": ("store.db-shm", "new-shm"),
        "journal": ("store.db-journal", "new-journal"),
        "ignore": (".gitignore", "new-ignore"),
        "records": ("records.jsonl", "new-records"),
        "backups": ("backups", ""),
        "failures": ("failures", ""),
    }
    pipes = {"database-pipe": "store.db", "ignore-pipe": ".gitignore", "records-pipe": "records.jsonl"}
    if kind in links:
        name, to = links[kind]
        (own / name).symlink_to(elsewhere / to)
    elif kind == "hard-link":
        os.link(database, own / "store.db")
    else:
        os.mkfifo(own / pipes[kind])
    return elsewhere


DAMAGED_STORES = (
    "garbage",
    "empty-header",
    "other-tables",
    "endless-view",
    "endless-trigger",
    "other-columns",
    "deep-json",
    "no-json",
    "other-json",
    "binary-document",
    "other-status",
)
"""Files in the place of a store whose content cannot be one."""
ENDLESS = "with recursive n(i) as (select 1 union all select i + 1 from n) select count(*) from n"
ENVIRONMENT = {"python": "3.11", "torch": "2.11", "triton": "3.6", "gpu": "", "driver": ""}


def damage_store(folder: Path, kind: str, path: str) -> None:
    """Put a damaged store into a ``.mtmc``; the row that it contains, if any, is a run of the file ``path``."""
    from mtmc_lsp.search.store import Store

    folder.mkdir(exist_ok=True)
    file = folder / "store.db"
    if kind == "garbage":
        file.write_bytes(b"this is no database, " * 5000)
        return
    if kind == "empty-header":
        file.write_bytes(b"SQLite format 3\0" + bytes(8176))
        return
    if kind not in ("other-tables", "endless-view", "other-columns"):
        Store(folder).close()
    db = sqlite3.connect(file)
    with db:
        if kind == "other-tables":
            db.execute("create table theirs (text)")
        elif kind == "endless-view":
            columns = "id, path, qualname, source_hash, environment, started, status, result"
            db.execute(f"create view runs ({columns}) as select ({ENDLESS}), 2, 3, 4, 5, 6, 7, 8")
        elif kind == "endless-trigger":
            db.execute(
                f"create trigger slow after insert on runs begin insert into setups values (({ENDLESS}), 1); end"
            )
        elif kind == "other-columns":
            db.execute("create table runs (id, path)")
        else:
            document: object = json.dumps(ENVIRONMENT)
            if kind == "deep-json":
                document = "[" * 200_000 + "]" * 200_000
            document = {"no-json": "{", "other-json": "[1]", "binary-document": b"\0\xff"}.get(kind, document)
            status = "unheard-of" if kind == "other-status" else "running"
            row = ("r", path, "f", "hash", document, 1.0, status, None)
            db.execute("insert into runs values (?, ?, ?, ?, ?, ?, ?, ?)", row)
    db.close()


def plant_modules(folder: Path) -> None:
    """Put modules there that tell when they are imported."""
    for name in MODULES:
        marker = str(folder / f"ran-{name}")
        (folder / f"{name}.py").write_text(f"open({marker!r}, 'w').close()\n")


def imported(folder: Path) -> list[str]:
    """Those of the modules that were imported."""
    return sorted(item.name for item in folder.glob("ran-*"))


def snapshot(folder: Path) -> dict[str, Any]:
    """Every entry with its kind, time of change and content."""
    found: dict[str, Any] = {}
    for item in [folder, *sorted(folder.rglob("*"))]:
        state = item.lstat()
        what: Any = state.st_size
        if stat.S_ISLNK(state.st_mode):
            what = os.readlink(item)
        elif stat.S_ISREG(state.st_mode):
            what = item.read_bytes()
        found[str(item.relative_to(folder))] = (stat.S_IFMT(state.st_mode), state.st_mtime_ns, what)
    return found
