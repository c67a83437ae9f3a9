"""Bundles: files of the user's projects that travel to workers, named by a hash of their content.

A worker unpacks a bundle once, read-only, into a folder that is called by the hash. Bundles contain only files below the folders
that they were made for; symbolic links that lead elsewhere are left out.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
import shutil
import tempfile
import zipfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from mtmc_lsp.capture.module_paths import PROJECT_MARKERS
from mtmc_lsp.core.errors import Location, RequestError

MAX_BYTES = 256 << 20
"""Most bytes of all files of a bundle."""
DIGEST_LENGTH = 20
EMPTY_MARKER = "setup.cfg"
"""Added empty to a copy of a folder without a project file, so that the search for the project ends there."""


@dataclass(frozen=True)
class Bundle:
    """Files of some folders as one archive."""

    digest: str
    """Of the names and the content of all files."""
    data: bytes
    folders: tuple[str, ...]
    """The folders on the user's machine, in the order of their numbers in the archive."""

    def copies(self, place: Path) -> dict[str, str]:
        """The folders with their copies, if the bundle is unpacked in ``place``."""
        return {
            folder: str(place / self.digest / str(number) / Path(folder).name)
            for number, folder in enumerate(self.folders)
        }


def pack(files: Mapping[Path, Iterable[Path]]) -> Bundle:
    """Pack files.

    Args:
        files: files by the folder that contains them; both are absolute paths.

    Raises:
        RequestError: they are too large together, or one cannot be read.
    """
    contents: dict[str, bytes] = {}
    for number, (folder, paths) in enumerate(files.items()):
        prefix = PurePosixPath(str(number), folder.name)
        for path in sorted(set(paths)):
            relative = path.relative_to(folder)
            if ".." not in relative.parts and is_inside(path, folder):
                contents[str(prefix / relative.as_posix())] = _read(path)
        if not any(str(prefix / marker) in contents for marker in PROJECT_MARKERS):
            contents[str(prefix / EMPTY_MARKER)] = b""
    total = sum(map(len, contents.values()))
    if total > MAX_BYTES:
        largest = max(contents, key=lambda name: len(contents[name]))
        raise RequestError(
            f"the files for the cluster have {total >> 20} MB, more than {MAX_BYTES >> 20} MB; the largest is {largest}",
            remedy="Put large files on a disk that all workers share.",
        )
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", zipfile.ZIP_DEFLATED) as archive:
        for name in sorted(contents):
            archive.writestr(zipfile.ZipInfo(name), contents[name], zipfile.ZIP_DEFLATED)
    return Bundle(_digest(contents), stream.getvalue(), tuple(str(folder) for folder in files))


def unpack(bundle: Bundle, place: Path) -> None:
    """Unpack a bundle below ``place``, unless it is there. Several processes may do so at the same time.

    Raises:
        ValueError: its content does not fit its hash, or it names a file outside its folders.
    """
    target = place / bundle.digest
    if target.is_dir():
        return
    place.mkdir(mode=0o700, parents=True, exist_ok=True)
    with zipfile.ZipFile(io.BytesIO(bundle.data)) as archive:
        contents = {name: archive.read(name) for name in archive.namelist()}
    if _digest(contents) != bundle.digest:
        raise ValueError(f"the content of the bundle is not that of {bundle.digest}")
    unfinished = Path(tempfile.mkdtemp(prefix=".unpacking-", dir=place))
    try:
        for name, content in contents.items():
            relative = PurePosixPath(name)
            if relative.is_absolute() or ".." in relative.parts:
                raise ValueError(f"{name} is outside the bundle")
            path = unfinished / relative
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
            path.chmod(0o444)
        for folder, _, _ in os.walk(unfinished):
            # The outermost folder is renamed below, for which some systems need write access.
            if folder != str(unfinished):
                os.chmod(folder, 0o555)
        # Another process may have been faster; its copy is the same.
        with contextlib.suppress(OSError):
            unfinished.rename(target)
            target.chmod(0o555)
    finally:
        if unfinished.is_dir():
            remove(unfinished)


def remove(folder: Path) -> None:
    """Remove a folder of read-only files."""
    for name, _, _ in os.walk(folder):
        os.chmod(name, 0o700)
    shutil.rmtree(folder, ignore_errors=True)


def is_inside(path: Path, folder: Path) -> bool:
    """Whether a file is below a folder, also after following symbolic links."""
    return folder.resolve() in path.resolve().parents


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        where = Location(str(path))
        raise RequestError(f"cannot be read: {error.strerror}", where=where, remedy="Make the file readable.") from None


def _digest(contents: Mapping[str, bytes]) -> str:
    digest = hashlib.sha256()
    for name in sorted(contents):
        digest.update(f"{name}\0{len(contents[name])}\0".encode())
        digest.update(contents[name])
    return digest.hexdigest()[:DIGEST_LENGTH]
