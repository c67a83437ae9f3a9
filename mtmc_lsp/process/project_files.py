"""Safe access to files below a project's ``.mtmc``: symbolic links are never followed.

A cloned project can contain its own ``.mtmc`` with links to other files. So every file in it is opened here, relative to the
folder's descriptor. Paths without ``.mtmc`` were chosen by the user and are opened normally.
"""

from __future__ import annotations

import contextlib
import os
import stat
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from mtmc_lsp.core.errors import EnvironmentNotAble, Location

FOLDER = ".mtmc"
"""The folder in a project's root that holds our files."""
SQLITE_FILES = ("", "-wal", "-shm", "-journal")
"""Suffixes of the files that SQLite opens for one database."""


class UnsafeFile(EnvironmentNotAble):
    """A file below ``.mtmc`` is a symbolic link, a pipe or a device."""

    code = "unsafe-file"


def make_folder(folder: Path) -> None:
    """Create the folder and its parents.

    Raises:
        UnsafeFile: ``.mtmc`` or a folder below it is a symbolic link.
        OSError: it cannot be created.
    """
    with _open_folder(folder, create=True):
        pass


def check_file(path: Path) -> None:
    """Refuse a path below ``.mtmc`` that is reached through a link or is not a regular file. A missing file is allowed.

    Raises:
        UnsafeFile: it is a link, a pipe or a device.
    """
    with contextlib.suppress(FileNotFoundError), _open_folder(path.parent) as parent:
        _check_entry(parent, path)


def check_database(path: Path) -> None:
    """Check an SQLite database and its journal files. SQLite opens them itself and writes them in place.

    Raises:
        UnsafeFile: one of them is a link, a pipe or a device.
    """
    with contextlib.suppress(FileNotFoundError), _open_folder(path.parent) as parent:
        for ending in SQLITE_FILES:
            _check_entry(parent, path.with_name(f"{path.name}{ending}"), in_place=True)


def read_bytes(path: Path) -> bytes | None:
    """The file's content; ``None`` if it does not exist.

    Raises:
        UnsafeFile: it is a link, a pipe or a device.
        OSError: it cannot be read.
    """
    try:
        with os.fdopen(_open(path, os.O_RDONLY), "rb") as stream:
            return stream.read()
    except FileNotFoundError:
        return None


@contextmanager
def writing(path: Path) -> Iterator[BinaryIO]:
    """Open the file for writing and empty it.

    Raises:
        UnsafeFile: it is a link, a pipe or a device.
        OSError: it cannot be written.
    """
    with os.fdopen(_open(path, os.O_WRONLY | os.O_CREAT), "wb") as stream:
        # Truncate only after the checks: O_TRUNC would empty a file that is then refused.
        stream.truncate()
        yield stream


def replace_bytes(path: Path, data: bytes) -> None:
    """Replace the file atomically: a reader sees either the old or the new content.

    Raises:
        UnsafeFile: it is a link, a pipe or a device.
        OSError: it cannot be written.
    """
    with _open_folder(path.parent) as parent:
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


def set_aside(path: Path) -> Path:
    """Rename a damaged SQLite database, with its journal files, so that a new one can be created. Returns the new path.

    Raises:
        OSError: it cannot be renamed.
    """
    aside = path.with_name(f"{path.name}.damaged-{time.strftime('%Y%m%d-%H%M%S')}-{uuid.uuid4().hex[:4]}")
    with _open_folder(path.parent) as parent:
        for ending in SQLITE_FILES:
            with contextlib.suppress(FileNotFoundError):
                old, new = f"{path.name}{ending}", f"{aside.name}{ending}"
                os.rename(old, new, src_dir_fd=parent, dst_dir_fd=parent)
    return aside


def _open(path: Path, flags: int) -> int:
    """Open the file and return its descriptor."""
    with _open_folder(path.parent) as parent:
        _check_entry(parent, path)
        # The file may become a link or a pipe between the check and this call: do not follow or wait for it.
        if _is_checked(path):
            flags |= os.O_NOFOLLOW | os.O_NONBLOCK
        file_descriptor = os.open(path.name, flags | os.O_CLOEXEC, 0o666, dir_fd=parent)
        if _is_checked(path) and not stat.S_ISREG(os.fstat(file_descriptor).st_mode):
            os.close(file_descriptor)
            raise _unsafe(path, "is not a regular file")
        return file_descriptor


@contextmanager
def _open_folder(folder: Path, *, create: bool = False) -> Iterator[int]:
    """Open the folder and yield its descriptor; from ``.mtmc`` on, no link is followed."""
    parts = folder.parts
    first = len(parts) - parts[::-1].index(FOLDER) - 1 if FOLDER in parts else len(parts)
    current_path = Path(*parts[:first])
    if create:
        current_path.mkdir(parents=True, exist_ok=True)
    current = os.open(current_path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        for name in parts[first:]:
            current_path /= name
            if create:
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
        status = os.lstat(path.name, dir_fd=parent)
    except FileNotFoundError:
        return
    if stat.S_ISLNK(status.st_mode):
        raise _unsafe(path, "is a symbolic link")
    if not stat.S_ISREG(status.st_mode):
        raise _unsafe(path, "is not a regular file")
    if in_place and status.st_nlink > 1:
        raise _unsafe(path, "is a hard link to another file")


def _is_checked(path: Path) -> bool:
    return FOLDER in path.parts


def _unsafe(path: Path, problem: str) -> UnsafeFile:
    return UnsafeFile(
        f"{problem}, so it is neither read nor written",
        where=Location(str(path)),
        remedy=f"Remove it: files below {FOLDER} must be regular files inside the project.",
    )
