"""Find scripts and tests of a project that use a module; running them shows how its functions are called."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

MAIN = re.compile(rb"^if __name__ ==", re.MULTILINE)
FOLDERS = ("", "scripts", "examples", "tests", "test")
"""Folders below the project root that are searched for scripts and tests."""
MAX_FILES = 400
MAX_BYTES = 1 << 20


def programs_using(path: Path, root: Path) -> list[str]:
    """Commands, relative to ``root``, of scripts that import the file: the file itself first, then scripts, then tests."""
    programs, tests = [], []
    import_pattern = re.compile(rb"^\s*(?:from|import)\b.*\b" + re.escape(path.stem.encode()) + rb"\b", re.MULTILINE)
    for file in _files(path, root):
        try:
            text = file.read_bytes() if file.stat().st_size <= MAX_BYTES else b""
        except OSError:
            continue
        if file != path and not import_pattern.search(text):
            continue
        relative = file.relative_to(root).as_posix()
        if re.fullmatch(r"test_.*\.py|.*_test\.py", file.name):
            tests.append(f"python -m pytest {shlex.quote(relative)}")
        elif MAIN.search(text):
            programs.append(f"python {shlex.quote(relative)}")
    return [*programs, *tests]


def _files(path: Path, root: Path) -> Iterator[Path]:
    files = [path] if root in path.parents and path.is_file() else []
    for folder in [root / name for name in FOLDERS]:
        if folder.is_dir():
            files += sorted(item for item in folder.glob("*.py") if item.is_file())
    return iter(list(dict.fromkeys(files))[:MAX_FILES])
