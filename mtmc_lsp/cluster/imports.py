"""The files that targets depend on: what their modules import inside the project, from the text alone."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from pathlib import Path

from mtmc_lsp.app.bench.suite import Problem
from mtmc_lsp.capture.module_paths import PROJECT_MARKERS, package_of, project_root
from mtmc_lsp.capture.recorded_calls import RECORDS
from mtmc_lsp.cluster.bundle import Bundle, is_inside, pack
from mtmc_lsp.core.settings import Settings
from mtmc_lsp.process.project_files import FOLDER


def bundle_of(problems: Iterable[Problem], settings: Settings) -> Bundle:
    """The files that the problems depend on, with the settings' further files and the policy.

    Raises:
        RequestError: they are too large, or one cannot be read.
    """
    files: dict[Path, set[Path]] = {}
    for problem in problems:
        root = project_root(problem.path)
        known = files.setdefault(root, set(_common_files(root, settings.cluster_files)))
        add_imports(problem.path, root, known)
    policy = Path(settings.policy_file)
    if settings.policy_file and policy.exists():
        files.setdefault(policy.parent, set()).update(
            [policy] if policy.is_file() else (path for path in policy.rglob("*") if path.is_file())
        )
    return pack(files)


def _common_files(root: Path, patterns: Iterable[str]) -> Iterator[Path]:
    """Files of a project that no import names: its project files, the recorded calls, and what the settings name."""
    named = (root / name for name in (*PROJECT_MARKERS, f"{FOLDER}/{RECORDS}"))
    yield from (path for path in named if path.is_file())
    for pattern in patterns:
        yield from (path for path in root.glob(pattern) if path.is_file() and is_inside(path, root))


def add_imports(path: Path, root: Path, known: set[Path]) -> None:
    """Add a file, and the files of the project that it imports, directly or not."""
    pending = [path, *_package_files(path, root)]
    while pending:
        file = pending.pop()
        if file in known or not is_inside(file, root):
            continue
        known.add(file)
        for module in _imported(file):
            pending += _files_of(module, file, root)


def _package_files(path: Path, root: Path) -> list[Path]:
    """The ``__init__.py`` of the packages that contain a file: Python runs them before it."""
    folders = [folder for folder in path.parents if folder == root or root in folder.parents]
    return [file for folder in folders if (file := folder / "__init__.py").is_file()]


def _imported(file: Path) -> set[str]:
    """Names of imported modules, with leading dots; ``from a import b`` may name the module ``a.b`` too."""
    try:
        tree = ast.parse(file.read_bytes())
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):
        # The process that imports the file reports it.
        return set()
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            module = "." * node.level + (node.module or "")
            separator = "" if module.endswith(".") else "."
            names.update((module, *(f"{module}{separator}{alias.name}" for alias in node.names)))
    return names


def _files_of(module: str, importer: Path, root: Path) -> list[Path]:
    """The files that Python runs to import a module of the project: those of its packages, then its own."""
    dots = len(module) - len(module.lstrip("."))
    if dots > len(importer.parents):
        return []
    folders = [importer.parents[dots - 1]] if dots else [importer.parent, package_of(importer)[1], root, root / "src"]
    parts = [part for part in module.split(".") if part]
    names = ["__init__.py"] if dots else []
    for count in range(1, len(parts) + 1):
        base = "/".join(parts[:count])
        names += [f"{base}/__init__.py", f"{base}.py"]
    return [path for folder in dict.fromkeys(folders) for name in names if (path := folder / name).is_file()]
