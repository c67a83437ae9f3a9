"""What makes a measured number traceable: the tool's version and git commit, and no path of the machine it comes from."""

from __future__ import annotations

import functools
import importlib.metadata
import json
import os
import re
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mtmc_lsp

PACKAGE = Path(mtmc_lsp.__file__).resolve().parent
GIT_SECONDS = 20.0
COMMIT_LENGTH = 12
SOURCES = frozenset({"source"})
"""Fields that hold code, which is stored unchanged."""
ABSOLUTE_PATH = re.compile(r"(?<![\w.:/<)\]])/(?:[\w.+@~-]+/)+")
"""The folder part of an absolute path; a path after ``:`` or ``/`` is part of a URL."""


@dataclass(frozen=True)
class Build:
    """The version of this tool that made a result."""

    version: str
    commit: str
    """12 digits, with ``-dirty`` if the package was changed after the commit; empty if it is not known."""


@functools.cache
def current_build() -> Build:
    """The installed version, with its commit if it runs from a checkout or was installed from git."""
    return Build(mtmc_lsp.__version__, _checkout_commit() or _installed_commit())


def _checkout_commit() -> str:
    root = PACKAGE.parent
    # The repository of a user's project may contain an environment with this package: that is not our commit.
    if not (root / ".git").exists():
        return ""
    commit = _git(root, "rev-parse", f"--short={COMMIT_LENGTH}", "HEAD")
    if not commit:
        return ""
    return f"{commit}-dirty" if _git(root, "status", "--porcelain", "--", PACKAGE.name) else commit


def _git(folder: Path, *arguments: str) -> str:
    """The output of git; empty if it fails or is not installed."""
    # Git hooks set variables that name another repository.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *arguments],
            capture_output=True,
            text=True,
            timeout=GIT_SECONDS,
            check=True,
            env=environment,
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip()


def _installed_commit() -> str:
    """The commit that pip noted when it installed the package from git."""
    try:
        text = importlib.metadata.distribution("mtmc-lsp").read_text("direct_url.json")
    except importlib.metadata.PackageNotFoundError:
        return ""
    try:
        origin = json.loads(text or "{}")
    except ValueError:
        return ""
    return str(origin.get("vcs_info", {}).get("commit_id", ""))[:COMMIT_LENGTH]


def without_absolute_paths(value: Any, folder: Path) -> Any:
    """JSON data with paths below ``folder`` relative to it, and every other absolute path cut to its last part.

    Code is not changed.
    """
    if isinstance(value, dict):
        return {name: item if name in SOURCES else without_absolute_paths(item, folder) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [without_absolute_paths(item, folder) for item in value]
    return ABSOLUTE_PATH.sub("", value.replace(f"{folder}/", "")) if isinstance(value, str) else value
