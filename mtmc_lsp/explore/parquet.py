"""Reads and writes a folder of transitions: Parquet files, and the journals of processes that are still writing.

Parquet files cannot be extended. So a process appends each row to a journal (JSON lines), which survives a kill at any point.
A full journal becomes one part file for each table, under a temporary name that is replaced at once; :func:`compact` merges
the parts. A row that a kill left in two files counts once. The rows of one program are in the order of their measurement.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

from mtmc_lsp.core.errors import EnvironmentNotAble, Location, RequestError
from mtmc_lsp.core.learning.transitions import Program, Transition, Version
from mtmc_lsp.explore.rows import (
    PROGRAMS,
    SCHEMA_VERSION,
    TABLES,
    TRANSITIONS,
    VERSIONS,
    Row,
    Table,
    program_of,
    program_row,
    transition_of,
    transition_row,
    version_of,
    version_row,
)

ROWS_OF_PART = 2000
"""Rows of a journal that make it full."""
JOURNAL, LOCK = "journal-*.jsonl", ".lock"
COMPACT = "all"
"""Files with this word hold the merged rows of many parts."""
SCHEMA_KEY, WRITTEN_KEY = b"mtmc:schema", b"mtmc:written"
"""Keys in a file's footer: the version of the columns, and when it was written, in nanoseconds since the epoch. Only one
process at a time writes about a program, so this orders the rows of a program."""
READ_TRIES = 5
"""How often a read begins again because another process merged the files meanwhile."""
NOT_A_STORE = "this folder holds no transitions"
REMEDY = "pip install 'mtmc-lsp[learn]'"
DAMAGED_REMEDY = "Copy it again, or move it out of this folder."
T = TypeVar("T")


# Reading ----------------------------------------------------------------------------------------------------------


def read_programs(folder: Path, program: str = "") -> list[Program]:
    """All programs of a folder, or the one with an id.

    Raises:
        RequestError: the folder does not exist, holds no transitions, is damaged, or has columns of another version.
        EnvironmentNotAble: pyarrow is not installed.
    """
    return _decoded(folder, PROGRAMS, program_of, program)


def read_versions(folder: Path, program: str = "") -> list[Version]:
    """All versions of a folder, or those of one program. Errors are those of :func:`read_programs`."""
    return _decoded(folder, VERSIONS, version_of, program)


def read_transitions(folder: Path, program: str = "") -> list[Transition]:
    """All transitions of a folder, or those of one program, each program's in the order in which they were measured.

    Errors are those of :func:`read_programs`.
    """
    return _decoded(folder, TRANSITIONS, transition_of, program)


def _decoded(folder: Path, table: Table, decode: Callable[[Row], T], program: str) -> list[T]:
    try:
        return [decode(row) for row in read_rows(folder, table, program)]
    except (KeyError, TypeError, ValueError, RecursionError):
        remedy = "Copy the folder again, or explore into a new one."
        raise RequestError(f"a row of {table.name} is damaged", where=Location(str(folder)), remedy=remedy) from None


def read_rows(folder: Path, table: Table, program: str = "", columns: Sequence[str] = ()) -> list[Row]:
    """The rows of a table without repetitions.

    Args:
        program: id of the only program to read; empty for all.
        columns: the only columns to read, with those of the table's identity; empty for all.
    """
    check_store(folder)
    wanted = [name for name in table.columns if not columns or name in (*columns, *table.identity)]
    for _ in range(READ_TRIES):
        try:
            return _without_repetitions(table, _all_rows(folder, table, program, wanted))
        except FileNotFoundError:
            continue
    raise RequestError("its files change all the time", where=Location(str(folder)), remedy="Try again later.")


def check_store(folder: Path) -> None:
    """Refuse a folder without transitions.

    Raises:
        RequestError: it does not exist, or holds something else.
    """
    if not folder.is_dir():
        raise RequestError(
            "no such folder", where=Location(str(folder)), remedy="Name a folder of `mtmc explore --out`."
        )
    if not _is_store(folder):
        raise RequestError(NOT_A_STORE, where=Location(str(folder)), remedy="Name a folder of `mtmc explore --out`.")


def prepare_store(folder: Path) -> None:
    """Create the folder unless it exists.

    Raises:
        RequestError: it holds files of something else.
        EnvironmentNotAble: it cannot be written, or pyarrow is not installed.
    """
    _arrow()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        names = [entry.name for entry in folder.iterdir()]
    except OSError as error:
        where = Location(str(folder))
        raise EnvironmentNotAble(
            f"cannot be written: {error.strerror}", where=where, remedy="Name another folder."
        ) from None
    if any(not name.startswith(".") for name in names) and not _is_store(folder):
        remedy = "Name a new folder, or one that `mtmc explore` wrote."
        raise RequestError("holds files of something else", where=Location(str(folder)), remedy=remedy)
    for part in _parts(folder):
        _written_at(part)


def _is_store(folder: Path) -> bool:
    return bool(_parts(folder)) or any(folder.glob(JOURNAL)) or (folder / LOCK).exists()


def _parts(folder: Path, tables: Sequence[Table] = TABLES) -> list[Path]:
    return [path for table in tables for path in sorted(folder.glob(f"{table.name}-*.parquet"))]


def _all_rows(folder: Path, table: Table, program: str, columns: list[str]) -> Iterator[Row]:
    """The rows of all files, the oldest file first."""
    # Read journals first. If another process turns a journal into a part meanwhile, its rows are read twice, not lost.
    journals = {path: _journal_rows(path) for path in sorted(folder.glob(JOURNAL))}
    filters = [(table.program, "=", program)] if program else None
    for path in sorted(_parts(folder, [table]), key=_written_at):
        yield from _part_rows(path, columns, filters)
    for rows in journals.values():
        for name, row in rows:
            if name == table.name and program in ("", row[table.program]):
                yield {column: row[column] for column in columns}


def _part_rows(path: Path, columns: list[str], filters: list[tuple[str, str, str]] | None) -> list[Row]:
    arrow = _arrow()
    try:
        read = arrow.parquet.read_table(path, columns=columns, filters=filters, page_checksum_verification=True)
        rows: list[Row] = read.to_pylist()
    except FileNotFoundError:
        raise
    except (arrow.ArrowException, OSError, ValueError):
        raise RequestError("is damaged", where=Location(str(path)), remedy=DAMAGED_REMEDY) from None
    return rows


def _without_repetitions(table: Table, rows: Iterable[Row]) -> list[Row]:
    kept: dict[tuple[Any, ...], Row] = {}
    for row in rows:
        identity = tuple(row[name] for name in table.identity)
        if identity not in kept or table.is_better(row, kept[identity]):
            kept[identity] = row
    return list(kept.values())


def _written_at(path: Path) -> int:
    """When a file was written.

    Raises:
        RequestError: the file is damaged or no part of a store, or its columns are of another version.
    """
    arrow = _arrow()
    where = Location(str(path))
    try:
        footer = arrow.parquet.read_schema(path).metadata or {}
    except FileNotFoundError:
        raise
    except (arrow.ArrowException, OSError):
        message = "is damaged, or no Parquet file"
        raise RequestError(message, where=where, remedy=DAMAGED_REMEDY) from None
    if SCHEMA_KEY not in footer:
        raise RequestError("was not written by `mtmc explore`", where=where, remedy="Move it out of this folder.")
    if int(footer[SCHEMA_KEY]) != SCHEMA_VERSION:
        raise RequestError(
            f"has columns of version {int(footer[SCHEMA_KEY])}; this version of mtmc-lsp reads version {SCHEMA_VERSION}",
            where=where,
            remedy="Use the version of mtmc-lsp that wrote it, or another folder.",
        )
    return int(footer[WRITTEN_KEY])


def _journal_rows(path: Path) -> list[tuple[str, Row]]:
    """The rows of a journal with the names of their tables. A line that a kill cut off, or that is no row, is left out."""
    rows = []
    columns = {table.name: table.columns.keys() for table in TABLES}
    for line in path.read_bytes().split(b"\n"):
        with contextlib.suppress(ValueError, KeyError, TypeError, AttributeError, RecursionError):
            entry = json.loads(line)
            name, row = entry["table"], entry["row"]
            if columns[name] <= row.keys():
                rows.append((name, row))
    return rows


def _arrow() -> Any:
    """The package pyarrow.

    Raises:
        EnvironmentNotAble: it is not installed.
    """
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise EnvironmentNotAble("Parquet files need the package pyarrow", remedy=REMEDY) from None
    return pyarrow


# Writing ----------------------------------------------------------------------------------------------------------


class Writer:
    """Adds rows to a folder. Each process has one; rows are in the journal when a method returns."""

    def __init__(self, folder: Path, *, rows_of_part: int = ROWS_OF_PART) -> None:
        """Prepare; the folder is created if it is missing.

        Args:
            rows_of_part: rows after which a journal becomes a part.
        """
        prepare_store(folder)
        (folder / LOCK).touch()
        self._folder, self._rows_of_part = folder, rows_of_part
        self._families: dict[str, str] = {}
        self._handle: int | None = None
        self._path = folder
        self._count = 0

    def __enter__(self) -> Writer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.flush()

    def add_program(self, program: Program) -> None:
        """Add a program; once more is harmless."""
        self._families[program.id] = program.family
        self._add([(PROGRAMS, program_row(program))])

    def add_version(self, version: Version) -> None:
        """Add a version."""
        self.add([version], [])

    def add_transition(self, transition: Transition) -> None:
        """Add a transition."""
        self.add([], [transition])

    def add(self, versions: Sequence[Version], transitions: Sequence[Transition]) -> None:
        """Add versions and transitions at once: after a kill, the folder holds a first part of them."""
        rows = [(VERSIONS, version_row(version)) for version in versions]
        self._add([*rows, *((TRANSITIONS, transition_row(item, self._family(item.program))) for item in transitions)])

    def add_rows(self, rows: Mapping[str, Sequence[Row]]) -> None:
        """Add rows of another folder by the name of their table, programs before what refers to them."""
        self._add([(table, row) for table in TABLES for row in rows.get(table.name, ())])

    def flush(self) -> None:
        """Turn the journal into parts, so that readers need not parse it."""
        if self._handle is not None:
            _seal(self._path)
            os.close(self._handle)
            self._handle, self._count = None, 0

    def _add(self, rows: Sequence[tuple[Table, Row]]) -> None:
        if not rows:
            return
        if self._handle is None:
            self._path, self._handle = _new_journal(self._folder)
        lines = [json.dumps({"table": table.name, "row": row}, separators=(",", ":")) for table, row in rows]
        try:
            _write(self._handle, ("\n".join(lines) + "\n").encode())
        except OSError as error:
            where = Location(str(self._path))
            raise EnvironmentNotAble(f"cannot be written: {error.strerror}", where=where, remedy="Make room.") from None
        self._count += len(rows)
        if self._count >= self._rows_of_part:
            self.flush()

    def _family(self, program: str) -> str:
        if program not in self._families:
            stored = read_rows(self._folder, PROGRAMS, program, ["family"])
            self._families[program] = stored[0]["family"] if stored else ""
        return self._families[program]


def _new_journal(folder: Path) -> tuple[Path, int]:
    """A new journal of this process, and its locked file."""
    number = 0
    while True:
        path = folder / f"journal-{os.getpid()}-{number}.jsonl"
        with contextlib.suppress(FileExistsError):
            handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC, 0o644)
            fcntl.flock(handle, fcntl.LOCK_EX)
            return path, handle
        number += 1


def _write(handle: int, data: bytes) -> None:
    while data:
        data = data[os.write(handle, data) :]


def _seal(journal: Path) -> None:
    """Turn a journal into one part for each table, then remove it."""
    entries = _journal_rows(journal)
    now = time.time_ns()
    for table in TABLES:
        rows = [row for name, row in entries if name == table.name]
        if rows:
            _write_part(_free_name(journal.parent, table, str(os.getpid())), table, rows, now)
    journal.unlink()


def _free_name(folder: Path, table: Table, word: str) -> Path:
    number = 0
    while (path := folder / f"{table.name}-{word}-{number}.parquet").exists():
        number += 1
    return path


def _write_part(path: Path, table: Table, rows: Sequence[Row], written_at: int) -> None:
    """Write a file under a temporary name, and then give it its name."""
    arrow = _arrow()
    fields = [arrow.field(name, getattr(arrow, kind)()) for name, kind in table.columns.items()]
    schema = arrow.schema(fields, metadata={SCHEMA_KEY: str(SCHEMA_VERSION), WRITTEN_KEY: str(written_at)})
    part = path.with_name(f".{path.name}.{os.getpid()}")
    arrow.parquet.write_table(
        arrow.Table.from_pylist(list(rows), schema=schema), part, compression="zstd", write_page_checksum=True
    )
    part.replace(path)


@contextlib.contextmanager
def only_writer(folder: Path) -> Iterator[None]:
    """Be the only command that writes to a folder, after taking over what killed processes left in their journals.

    Raises:
        RequestError: another command writes to it.
    """
    prepare_store(folder)
    with (folder / LOCK).open("a+b") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            remedy = "Wait for it, or write to another folder."
            raise RequestError(
                "another `mtmc explore` writes to it", where=Location(str(folder)), remedy=remedy
            ) from None
        take_over_journals(folder)
        yield


def take_over_journals(folder: Path) -> None:
    """Turn the journals of processes that ended into parts. Waits for processes that are about to end."""
    for path in sorted(folder.glob(JOURNAL)):
        with contextlib.suppress(FileNotFoundError), path.open("rb") as journal:
            fcntl.flock(journal, fcntl.LOCK_EX)
            if path.exists():
                _seal(path)


def compact(folder: Path) -> None:
    """Merge all parts into one file for each table. Only the command that :func:`only_writer` admits may call it."""
    take_over_journals(folder)
    for unfinished in folder.glob(".*.parquet.*"):
        unfinished.unlink()
    for table in TABLES:
        parts = _parts(folder, [table])
        if len(parts) < 2:
            continue
        written_at = min(_written_at(part) for part in parts)
        rows = read_rows(folder, table)
        # Rows of one program together compress better, and one program is read without the others.
        programs: dict[str, list[Row]] = {}
        for row in rows:
            programs.setdefault(row[table.program], []).append(row)
        merged = [row for group in programs.values() for row in group]
        _write_part(_free_name(folder, table, COMPACT), table, merged, written_at)
        for part in parts:
            part.unlink()
