"""Reads and writes the file of kernels. The user's file works after each single write, also if the process ends there."""

from __future__ import annotations

import hashlib
import os
import stat
from pathlib import Path

from mtmc_lsp.core.errors import Location, RequestError
from mtmc_lsp.source.files import check_unchanged, create_file, write_if_unchanged
from mtmc_lsp.source.sibling.pair import FilePair, block_of, kernels_path
from mtmc_lsp.source.sibling.statement import find_kernel_import


def read_kernels(path: Path) -> bytes | None:
    """The file of kernels beside the user's file; None if there is none.

    Raises:
        RequestError: it is a link, which may lead out of the project, or no regular file, or it cannot be read.
    """
    kernels = kernels_path(path)
    try:
        descriptor = os.open(kernels, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise _unusable(kernels, "is a link" if kernels.is_symlink() else f"cannot be read: {error.strerror}") from None
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise _unusable(kernels, "is no regular file")
    with os.fdopen(descriptor, "rb") as stream:
        return stream.read()


def _unusable(kernels: Path, problem: str) -> RequestError:
    return RequestError(
        f"{problem}, so no kernels are read from it or written to it",
        where=Location(str(kernels)),
        remedy='Remove it, or leave out place = "sibling".',
    )


def kernels_of(path: Path, text: bytes) -> bytes | None:
    """The file of kernels of a user's file with the text ``text``; None if it imports none.

    Raises:
        RequestError: see :func:`read_kernels`.
    """
    return read_kernels(path) if find_kernel_import(text) is not None else None


def write_pair(path: Path, qualname: str, before: FilePair, plain: bytes, after: FilePair, backups: Path) -> Path:
    """Write new texts of both files.

    Args:
        path: of the user's file.
        qualname: the target whose kernels change.
        before: what was read from the disk.
        plain: the user's file without generated code of the target.
        after: the new texts.
        backups: the folder for the old texts.

    Returns:
        The backup of the user's file.

    Raises:
        FileChanged: one of the files changed since it was read.
        RequestError: a file cannot be written.
    """
    present, backup = before.user, None
    check_unchanged(path, _digest(before.user))
    if before.kernels != after.kernels:
        if before.kernels is not None and block_of(before.kernels, qualname) is not None and plain != present:
            # The file must not call kernels of another version, or miss some, while theirs are replaced.
            backup = _write(path, present, plain, backups)
            present = plain
        write_kernels(path, before.kernels, after.kernels, backups)
    if backup is None or present != after.user:
        written = _write(path, present, after.user, backups)
        backup = backup or written
    return backup


def _write(path: Path, before: bytes, after: bytes | None, backups: Path) -> Path:
    return write_if_unchanged(path, _digest(before), after, backups)


def _digest(text: bytes) -> str:
    return hashlib.sha256(text).hexdigest()


def write_kernels(path: Path, before: bytes | None, after: bytes | None, backups: Path) -> None:
    """Write, create or delete the file of kernels, unless it is no longer what it was.

    Args:
        path: the user's file.
        before: the text of the file of kernels that was read; None if there was none.
        after: its new text; None deletes it.
        backups: the folder for its old text.

    Raises:
        FileChanged: it changed since it was read.
        RequestError: it is a link, or cannot be written.
    """
    kernels = kernels_path(path)
    # Refuses links. The file may have become one since it was read.
    read_kernels(path)
    if before is not None:
        _write(kernels, before, after, backups)
    elif after is not None:
        create_file(kernels, after, path)
