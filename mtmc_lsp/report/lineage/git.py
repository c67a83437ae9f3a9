"""The lineage of an evolution as a git repository: one commit for each version, with the commit of its parent as parent."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

from mtmc_lsp.core.errors import EnvironmentNotAble, Location, RequestError
from mtmc_lsp.evolve.lineage import Version
from mtmc_lsp.evolve.stored import StoredEvolution
from mtmc_lsp.report.lineage.text import speed_text

AUTHOR = b"mtmc <mtmc@localhost>"
SUBJECT = 72
"""Most characters of a subject."""
GIT_SECONDS = 120.0


def write_repository(stored: StoredEvolution, folder: Path) -> int:
    """Write the repository; returns the number of commits.

    ``main`` is the best version, and each version has a tag ``vN``. Versions that were not written are left out.

    Raises:
        RequestError: the folder is not empty, or cannot be written.
        EnvironmentNotAble: git is not installed, or failed.
    """
    if shutil.which("git") is None:
        raise EnvironmentNotAble("git is not installed", remedy="Install git, or use mtmc lineage --html FILE.")
    try:
        if folder.exists() and any(folder.iterdir()):
            raise RequestError("is not empty", where=Location(str(folder)), remedy="Choose a new folder.")
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RequestError(
            f"cannot be written: {error.strerror}", where=Location(str(folder)), remedy="Choose another folder."
        ) from None
    versions = [version for version in stored.lineage.versions if version.candidate is not None]
    _git(folder, "init", "--quiet", "--initial-branch=main")
    _git(folder, "fast-import", "--quiet", "--done", data=b"".join(_stream(stored, versions)))
    _git(folder, "checkout", "--quiet", "main")
    return len(versions)


def _stream(stored: StoredEvolution, versions: list[Version]) -> Iterator[bytes]:
    """The commands of ``git fast-import``."""
    name = Path(stored.record.path).name
    when = f"{stored.record.started:.0f} +0000".encode()
    written = {version.number for version in versions}
    for version in versions:
        assert version.candidate is not None
        message = _message(stored, version).encode("utf-8", "replace")
        text = version.candidate.source.encode("utf-8", "surrogatepass")
        yield b"commit refs/heads/main\nmark :%d\n" % (version.number + 1)
        yield b"author %s %s\ncommitter %s %s\n" % (AUTHOR, when, AUTHOR, when)
        yield b"data %d\n%s\n" % (len(message), message)
        if version.parent is not None and version.parent in written:
            yield b"from :%d\n" % (version.parent + 1)
        yield b"M 100644 inline %s\ndata %d\n%s\n" % (_quoted(name), len(text), text)
        yield b"reset refs/tags/v%d\nfrom :%d\n\n" % (version.number, version.number + 1)
    yield b"reset refs/heads/main\nfrom :%d\n\ndone\n" % (stored.lineage.best().number + 1)


def _quoted(name: str) -> bytes:
    """A path as git reads it: quoted, so that no character ends it."""
    escaped = name.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'"{escaped}"'.encode("utf-8", "surrogateescape")


def _message(stored: StoredEvolution, version: Version) -> str:
    subject = f"{version.number}: {version.title}"
    subject = subject if len(subject) <= SUBJECT else f"{subject[: SUBJECT - 3]}..."
    scores = [
        f"{name}: {score.us:.1f} us, {score.gain:.3f}x"
        for (name, _), score in zip(stored.setup.workloads, version.scores, strict=False)
    ]
    body = [
        version.title,
        f"{version.status.value}: {version.reason}",
        f"Operator: {version.operator.value}, generation {version.generation}, island {version.island + 1}",
        *([f"Speed: {speed_text(version, stored.setup)}"] if version.scores else []),
        *scores,
    ]
    return "\n".join([subject, "", *body])


def _git(folder: Path, *arguments: str, data: bytes = b"") -> None:
    """Run git without the user's configuration and hooks.

    Raises:
        EnvironmentNotAble: git failed.
    """
    environment = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    environment |= {"GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_NOSYSTEM": "1", "GIT_TEMPLATE_DIR": ""}
    try:
        done = subprocess.run(
            ["git", *arguments],
            cwd=folder,
            env=environment,
            input=data,
            capture_output=True,
            check=False,
            timeout=GIT_SECONDS,
        )
    except subprocess.TimeoutExpired:
        raise EnvironmentNotAble(f"git {arguments[0]} took longer than {GIT_SECONDS:.0f} s") from None
    if done.returncode:
        reason = next(iter(done.stderr.decode("utf-8", "replace").strip().splitlines()), "no reason given")
        raise EnvironmentNotAble(f"git {arguments[0]} failed: {reason}", where=Location(str(folder)))
