"""Imports the user's file as the user does: with relative imports, sibling modules and the project root."""

from __future__ import annotations

import ast
import contextlib
import importlib
import importlib.util
import linecache
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

from mtmc_lsp.capture.module_paths import module_name, package_of, project_root
from mtmc_lsp.process.worker_process import SCRATCH


def load_user_module(
    path: str, source: str | None = None, as_name: str | None = None, *, in_place: bool = False
) -> ModuleType:
    """Run the file, or another text instead of it, as a module. Its name is never ``__main__``.

    Args:
        path: the user's file, also for relative imports and ``__file__``.
        source: text to run instead, stored in a real file because Triton reads the source of kernels.
        as_name: name in ``sys.modules``; by default the usual module name of the file.
        in_place: whether the text runs under the file's own path, so that exceptions name the user's file. A process can run at
            most one text of a file this way.
    """
    file = Path(path).resolve()
    package = _enter_project(file)
    if package:
        importlib.import_module(package)
    name = as_name or module_name(file)
    location = file
    if source is not None and source.encode() == file.read_bytes():
        source = None
    if source is not None and not in_place:
        location = Path(tempfile.mkdtemp(prefix="mtmc-", dir=os.environ.get(SCRATCH))) / file.name
        location.write_bytes(source.encode("utf-8"))
    spec = importlib.util.spec_from_file_location(name, location)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    module.__file__ = str(file)
    module.__package__ = package
    sys.modules[name] = module
    if source is not None and in_place:
        # Without a modification time, linecache does not reload the entry, and Triton finds the source of kernels in it.
        linecache.cache[str(file)] = (len(source), None, source.splitlines(keepends=True), str(file))
        exec(compile(source.encode(), str(file), "exec", dont_inherit=True), module.__dict__)
    else:
        spec.loader.exec_module(module)
    return module


def import_dependencies(path: str) -> None:
    """Run the import statements at the top level of the user's file, and nothing else of it. Errors are left to the file itself.

    Statements under a condition are left out, because the condition may depend on other statements.
    """
    file = Path(path).resolve()
    package = _enter_project(file)
    with contextlib.suppress(Exception):
        imports = _top_level_imports(ast.parse(file.read_bytes()).body)
        if package:
            imports.insert(0, ast.parse(f"import {package}").body[0])
        namespace = {"__name__": module_name(file), "__package__": package}
        for statement in imports:
            # Modules of the user may raise anything, and end the process.
            with contextlib.suppress(Exception, SystemExit):
                exec(compile(ast.Module([statement], []), str(file), "exec", dont_inherit=True), namespace)


def _top_level_imports(statements: Sequence[ast.stmt]) -> list[ast.stmt]:
    imports: list[ast.stmt] = []
    for statement in statements:
        if isinstance(statement, ast.Try):
            imports += _top_level_imports(statement.body)
        elif isinstance(statement, ast.Import) or (
            isinstance(statement, ast.ImportFrom) and statement.module != "__future__"
        ):
            imports.append(statement)
    return imports


def _enter_project(file: Path) -> str:
    """Make the project importable; returns the package of the file, empty if it is in none."""
    package, folder = package_of(file)
    for entry in (str(project_root(file)), str(folder)):
        if entry not in sys.path:
            sys.path.insert(0, entry)
    return package
