"""Import the user's file as it imports for the user: package-relative imports, sibling modules, project root."""

from __future__ import annotations

import importlib
import importlib.util
import sys
import tempfile
from pathlib import Path
from types import ModuleType

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


def load_user_module(path: str, source: str | None = None, as_name: str | None = None) -> ModuleType:
    """Run the file (or another text in its place) as a module, never as ``__main__``.

    Args:
        path: the user's file; relative imports and ``__file__`` are as for it.
        source: text to run instead; it is put into a real file, because Triton reads a kernel's source back.
        as_name: name in ``sys.modules``; the file's own name by default.
    """
    file = Path(path).resolve()
    package, folder = package_of(file)
    for entry in (str(project_root(file)), str(folder)):
        if entry not in sys.path:
            sys.path.insert(0, entry)
    if package:
        importlib.import_module(package)
    name = as_name or module_name(file)
    location = file
    if source is not None:
        location = Path(tempfile.mkdtemp(prefix="mtmc-")) / file.name
        location.write_bytes(source.encode("utf-8"))
    spec = importlib.util.spec_from_file_location(name, location)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    module.__file__ = str(file)
    module.__package__ = package
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module
