"""Folders as somebody would prepare them for whoever opens them: links and pipes below ``.mtmc``, modules that hide others."""

from __future__ import annotations

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
