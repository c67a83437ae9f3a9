"""Files below a project's ``.mtmc``: none of them is reached through a symbolic link.

A cloned project can contain a ``.mtmc`` of its own, with links to files elsewhere. So every file in it is opened here, starting
from the folder's descriptor. Paths without ``.mtmc`` were named by the user, and are opened as usual.
"""

from __future__ import annotations

import contextlib
import os
import stat
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from mtmc_lsp.core.errors import EnvironmentNotAble, Location

FOLDER = ".mtmc"
"""The folder in a project's root that holds what this program keeps of it."""
SQLITE_FILES = ("", "-wal", "-shm", "-journal")
"""Endings of the files that SQLite opens for one database."""


class UnsafeFile(EnvironmentNotAble):
    """A file below ``.mtmc`` is a link, a pipe or a device."""

    code = "unsafe-file"


def make_folder(folder: Path) -> None:
    """Create the folder and its parents.

    Raises:
        UnsafeFile: ``.mtmc`` or a folder below it is a symbolic link.
        OSError: it cannot be created.
    """
    with _descriptor(folder, make=True):
        pass


def check_file(path: Path) -> None:
    """Refuse a path below ``.mtmc`` that exists and is no regular file, or is reached through a link.

    Raises:
        UnsafeFile: it is a link, a pipe or a device.
    """
    with contextlib.suppress(FileNotFoundError), _descriptor(path.parent) as parent:
        _check_entry(parent, path)


def check_database(path: Path) -> None:
    """The same for an SQLite database and the files beside it. SQLite opens them itself, and writes them in place.

    Raises:
        UnsafeFile: one of them is a link, a pipe or a device.
    """
    with contextlib.suppress(FileNotFoundError), _descriptor(path.parent) as parent:
        for ending in SQLITE_FILES:
            _check_entry(parent, path.with_name(f"{path.name}{ending}"), in_place=True)


def read_bytes(path: Path) -> bytes | None:
    """The file's content; ``None`` where it does not exist.

    Raises:
        UnsafeFile: it is a link, a pipe or a device.
        OSError: it cannot be read.
    """
    try:
        with os.fdopen(_opened(path, os.O_RDONLY), "rb") as stream:
            return stream.read()
    except FileNotFoundError:
        return None


@contextmanager
def writing(path: Path) -> Iterator[BinaryIO]:
    """The file opened for writing, empty.

    Raises:
        UnsafeFile: it is a link, a pipe or a device.
        OSError: it cannot be written.
    """
    with os.fdopen(_opened(path, os.O_WRONLY | os.O_CREAT), "wb") as stream:
        # Only after the checks: O_TRUNC would empty a file that is refused.
        stream.truncate()
        yield stream


def replace_bytes(path: Path, data: bytes) -> None:
    """Write the file in one step: a reader sees the old content or the new.

    Raises:
        UnsafeFile: it is a link, a pipe or a device.
        OSError: it cannot be written.
    """
    with _descriptor(path.parent) as parent:
        _check_entry(parent, path)
        temporary = f"{path.name}.{uuid.uuid4().hex[:12]}"
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        try:
            with os.fdopen(os.open(temporary, flags, 0o666, dir_fd=parent), "wb") as stream:
                stream.write(data)
            os.rename(temporary, path.name, src_dir_fd=parent, dst_dir_fd=parent)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(temporary, dir_fd=parent)
            raise


def _opened(path: Path, flags: int) -> int:
    """A descriptor of the file."""
    with _descriptor(path.parent) as parent:
        _check_entry(parent, path)
        # Between the check and this call the file may become a link or a pipe: neither is followed nor waited for.
        if _is_checked(path):
            flags |= os.O_NOFOLLOW | os.O_NONBLOCK
        descriptor = os.open(path.name, flags | os.O_CLOEXEC, 0o666, dir_fd=parent)
        if _is_checked(path) and not stat.S_ISREG(os.fstat(descriptor).st_mode):
            os.close(descriptor)
            raise _unsafe(path, "is not a regular file")
        return descriptor


@contextmanager
def _descriptor(folder: Path, *, make: bool = False) -> Iterator[int]:
    """A descriptor of the folder; no link is followed from ``.mtmc`` on."""
    parts = folder.parts
    first = len(parts) - parts[::-1].index(FOLDER) - 1 if FOLDER in parts else len(parts)
    current_path = Path(*parts[:first])
    if make:
        current_path.mkdir(parents=True, exist_ok=True)
    current = os.open(current_path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        for name in parts[first:]:
            current_path /= name
            if make:
                with contextlib.suppress(FileExistsError):
                    os.mkdir(name, dir_fd=current)
            if stat.S_ISLNK(os.lstat(name, dir_fd=current).st_mode):
                raise _unsafe(current_path, "is a symbolic link")
            flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
            inner = os.open(name, flags, dir_fd=current)
            os.close(current)
            current = inner
        yield current
    finally:
        os.close(current)


def _check_entry(parent: int, path: Path, *, in_place: bool = False) -> None:
    if not _is_checked(path):
        return
    try:
        found = os.lstat(path.name, dir_fd=parent)
    except FileNotFoundError:
        return
    if stat.S_ISLNK(found.st_mode):
        raise _unsafe(path, "is a symbolic link")
    if not stat.S_ISREG(found.st_mode):
        raise _unsafe(path, "is not a regular file")
    if in_place and found.st_nlink > 1:
        raise _unsafe(path, "is a hard link to another file")


def _is_checked(path: Path) -> bool:
    return FOLDER in path.parts


def _unsafe(path: Path, problem: str) -> UnsafeFile:
    return UnsafeFile(
        f"{problem}, so it is neither read nor written",
        where=Location(str(path)),
        remedy=f"Remove it: files below {FOLDER} must be regular files inside the project.",
    )
