"""Write a file that may be open in the user's editor, and show changes as diffs."""

from __future__ import annotations

import difflib
import glob
import hashlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from mtmc_lsp.core.errors import FileChanged, Location, RequestError
from mtmc_lsp.process.project_files import make_folder, replace_bytes

TEMPORARY_SUFFIX = ".mtmc-new"
"""Suffix of the temporary file that then replaces the original."""


def unified_diff(before: str, after: str, path: str) -> str:
    """Diff in the format of ``diff -u``; empty if nothing changed."""
    # Split only at line feeds, like `patch`: str.splitlines would also split at form feeds.
    lines = difflib.unified_diff(_lines(before), _lines(after), f"a/{path}", f"b/{path}")
    return "".join(line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n" for line in lines)


def _lines(text: str) -> list[str]:
    parts = text.split("\n")
    return [f"{part}\n" for part in parts[:-1]] + [part for part in parts[-1:] if part]


def write_if_unchanged(path: Path, expected_sha256: str, new_bytes: bytes | None, backup_folder: Path) -> Path:
    """Replace a file atomically, unless it changed on disk since it was read. The old bytes are backed up first.

    A symbolic link to the file is followed. The file's mode is preserved.

    Args:
        new_bytes: the new content; None deletes the file.

    Returns:
        Path of the backup.

    Raises:
        FileChanged: the file does not exist or its hash differs; nothing is written.
        RequestError: the file or its folder cannot be written.
        UnsafeFile: the backup folder is a symbolic link or is reached through one.
    """
    real = Path(os.path.realpath(path))
    current = check_unchanged(path, expected_sha256)
    try:
        make_folder(backup_folder)
        backup = backup_folder / f"{real.name}.{expected_sha256[:12]}"
        replace_bytes(backup, current)
        if new_bytes is None:
            real.unlink()
        else:
            _replace(real, new_bytes)
    except OSError as error:
        raise RequestError(
            f"cannot be written: {error.strerror}",
            where=Location(str(path)),
            remedy=f"Make {error.filename or real.parent} writable; the file is unchanged.",
        ) from None
    return backup


def check_unchanged(path: Path, expected_sha256: str) -> bytes:
    """The content of a file that must be as it was read.

    Raises:
        FileChanged: the file does not exist or its hash differs.
    """
    try:
        current = path.read_bytes()
    except FileNotFoundError:
        raise FileChanged(
            "the file was deleted, so nothing was written",
            where=Location(str(path)),
            remedy="Restore it and run again.",
        ) from None
    if hashlib.sha256(current).hexdigest() != expected_sha256:
        raise FileChanged(
            "the file changed on disk since it was read, so nothing was written",
            where=Location(str(path)),
            remedy="Run the command again on the changed file.",
        )
    return current


def create_file(path: Path, new_bytes: bytes, like: Path) -> None:
    """Create a file with its whole content at once, with the mode of another file.

    Raises:
        FileChanged: the path exists by now; nothing is written.
        RequestError: the folder cannot be written.
    """
    try:
        with _temporary(path, new_bytes, like) as temporary:
            # Unlike a rename, a link never replaces a file.
            os.link(temporary, path)
    except FileExistsError:
        raise FileChanged(
            "the file was created meanwhile, so nothing was written",
            where=Location(str(path)),
            remedy="Run the command again.",
        ) from None
    except OSError as error:
        raise RequestError(
            f"cannot be created: {error.strerror}", where=Location(str(path)), remedy=f"Make {path.parent} writable."
        ) from None


def _replace(path: Path, new_bytes: bytes) -> None:
    with _temporary(path, new_bytes, path) as temporary:
        os.replace(temporary, path)


@contextmanager
def _temporary(path: Path, new_bytes: bytes, like: Path) -> Iterator[str]:
    """A file beside ``path`` with the new content, removed at the end if it is still there."""
    # Remove leftovers of interrupted writes. The suffix distinguishes them from an editor's files.
    for leftover in path.parent.glob(f".{glob.escape(path.name)}.*{TEMPORARY_SUFFIX}"):
        leftover.unlink(missing_ok=True)
    handle, temporary = tempfile.mkstemp(TEMPORARY_SUFFIX, f".{path.name}.", path.parent)
    try:
        with os.fdopen(handle, "wb") as stream:
            stream.write(new_bytes)
            stream.flush()
            os.fsync(stream.fileno())
        shutil.copymode(like, temporary)
        yield temporary
    finally:
        Path(temporary).unlink(missing_ok=True)
