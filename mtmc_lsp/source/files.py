"""Writing a file the user also has open, and showing what would change in it."""

from __future__ import annotations

import difflib
import glob
import hashlib
import os
import shutil
import tempfile
from pathlib import Path

from mtmc_lsp.core.errors import FileChanged, Location, RequestError
from mtmc_lsp.process.project_files import make_folder, replace_bytes

UNFINISHED = ".mtmc-new"
"""Ending of a file's new text until it takes the file's place."""


def unified_diff(before: str, after: str, path: str) -> str:
    """What changed, as ``diff -u`` shows it and ``patch`` takes it; empty where nothing did."""
    # Lines end at line feeds alone, as for `patch`: str.splitlines would also cut at form feeds.
    lines = difflib.unified_diff(_lines(before), _lines(after), f"a/{path}", f"b/{path}")
    return "".join(line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n" for line in lines)


def _lines(text: str) -> list[str]:
    parts = text.split("\n")
    return [f"{part}\n" for part in parts[:-1]] + [part for part in parts[-1:] if part]


def write_if_unchanged(path: Path, expected_sha256: str, new_bytes: bytes, backup_folder: Path) -> Path:
    """Replace a file in one step, unless it changed on disk since it was read; the old bytes are kept first.

    The file is the one that the user named: a link to it is followed, and it keeps its mode.

    Returns:
        Where the old bytes are kept.

    Raises:
        FileChanged: the file is gone or no longer has that hash; nothing is written.
        RequestError: the file or its folder cannot be written.
        UnsafeFile: the folder for backups is a link, or is reached through one.
    """
    real = Path(os.path.realpath(path))
    try:
        current = real.read_bytes()
    except FileNotFoundError:
        raise FileChanged(
            "the file is gone, so nothing was written", where=Location(str(path)), remedy="Put it back and run again."
        ) from None
    digest = hashlib.sha256(current).hexdigest()
    if digest != expected_sha256:
        raise FileChanged(
            "the file changed on disk since it was read, so nothing was written",
            where=Location(str(path)),
            remedy="Run the command again on the file as it is now.",
        )
    try:
        make_folder(backup_folder)
        backup = backup_folder / f"{real.name}.{digest[:12]}"
        replace_bytes(backup, current)
        _replace(real, new_bytes)
    except OSError as error:
        raise RequestError(
            f"cannot be written: {error.strerror}",
            where=Location(str(path)),
            remedy=f"Make {error.filename or real.parent} writable; the file is as it was.",
        ) from None
    return backup


def _replace(path: Path, new_bytes: bytes) -> None:
    # What a write that was killed left behind; the suffix tells it from an editor's own files.
    for left in path.parent.glob(f".{glob.escape(path.name)}.*{UNFINISHED}"):
        left.unlink(missing_ok=True)
    handle, temporary = tempfile.mkstemp(UNFINISHED, f".{path.name}.", path.parent)
    try:
        with os.fdopen(handle, "wb") as stream:
            stream.write(new_bytes)
            stream.flush()
            os.fsync(stream.fileno())
        shutil.copymode(path, temporary)
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
