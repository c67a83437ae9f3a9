"""Where a file belongs: its project and its package."""

from __future__ import annotations

from pathlib import Path

ROOT_MARKS = ("pyproject.toml", "setup.py", "setup.cfg", ".git")


def project_root(path: Path) -> Path:
    """The nearest folder above the file with a project mark, else the folder of its top-level package."""
    for folder in path.parents:
        if any((folder / mark).exists() for mark in ROOT_MARKS):
            return folder
    return package_of(path)[1]


def package_of(path: Path) -> tuple[str, Path]:
    """The dotted package that holds the file (empty for none), and the folder that must be on the path for it."""
    parts: list[str] = []
    folder = path.parent
    while (folder / "__init__.py").exists():
        parts.insert(0, folder.name)
        folder = folder.parent
    return ".".join(parts), folder


def module_name(path: Path) -> str:
    """The name under which the file is imported."""
    package, _ = package_of(path)
    return f"{package}.{path.stem}" if package else path.stem
