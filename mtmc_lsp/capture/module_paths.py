"""The project and the package that a file belongs to."""

from __future__ import annotations

import os
from pathlib import Path

PROJECT_MARKERS = ("pyproject.toml", "setup.py", "setup.cfg", ".git")


def project_root(path: Path) -> Path:
    """The nearest parent folder that contains a project file, else the parent folder of the top-level package."""
    for folder in path.parents:
        # Not Path.exists, which raises OSError for some paths.
        if any(os.path.exists(folder / marker) for marker in PROJECT_MARKERS):
            return folder
    return package_of(path)[1]


def package_of(path: Path) -> tuple[str, Path]:
    """The dotted name of the file's package (empty if none), and the folder that has to be in ``sys.path`` to import it."""
    parts: list[str] = []
    folder = path.parent
    while os.path.exists(folder / "__init__.py"):
        parts.insert(0, folder.name)
        folder = folder.parent
    return ".".join(parts), folder


def module_name(path: Path) -> str:
    """The file's module name for imports."""
    package, _ = package_of(path)
    return f"{package}.{path.stem}" if package else path.stem
