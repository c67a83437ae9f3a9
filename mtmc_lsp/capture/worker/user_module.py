"""Imports the user's file as the user does: with relative imports, sibling modules and the project root."""

from __future__ import annotations

import ast
import importlib
import linecache
import sys
import tempfile
import traceback
from collections.abc import Callable, Sequence
from importlib.abc import Loader
from pathlib import Path
from types import ModuleType
from typing import Any

from mtmc_lsp.capture.module_paths import module_name, package_of, project_root
from mtmc_lsp.capture.worker.autocast.regions import gpu_autocast
from mtmc_lsp.process.module_files import module_of
from mtmc_lsp.process.worker.scratch import scratch_folder


def load_user_module(
    path: str,
    source: str | None = None,
    as_name: str | None = None,
    *,
    in_place: bool = False,
    execute: Callable[..., Any] = lambda function, *arguments: function(*arguments),
) -> ModuleType:
    """Run the file, or another text instead of it, as a module. Its name is never ``__main__``.

    Args:
        path: the user's file, also for relative imports and ``__file__``; it need not exist if there is a text.
        source: text to run instead, stored in a real file because Triton reads the source of kernels.
        as_name: name in ``sys.modules``; by default the usual module name of the file.
        in_place: whether the text runs under the file's own path, so that exceptions name the user's file. A process can run at
            most one text of a file this way.
        execute: calls the function that runs the module, with its arguments.
    """
    file = Path(path).resolve()
    package = _enter_project(file)
    if package:
        importlib.import_module(package)
    name = as_name or module_name(file)
    location = file
    if source is not None and file.is_file() and source.encode() == file.read_bytes():
        source = None
    if source is not None and not in_place:
        location = Path(tempfile.mkdtemp(prefix="mtmc-", dir=scratch_folder())) / file.name
        location.write_bytes(source.encode("utf-8"))
    module = module_of(location, name)
    assert module.__spec__ is not None and module.__spec__.loader is not None
    module.__file__ = str(file)
    module.__package__ = package
    with gpu_autocast():
        _execute(module, module.__spec__.loader, file, source if in_place else None, execute)
    return module


def _execute(module: ModuleType, loader: Loader, file: Path, source: str | None, execute: Callable[..., Any]) -> None:
    """Run a module, or another text under its path."""
    if source is None:
        execute(loader.exec_module, module)
        return
    # Without a modification time, linecache does not reload the entry, and Triton finds the source of kernels in it.
    linecache.cache[str(file)] = (len(source), None, source.splitlines(keepends=True), str(file))
    execute(exec, compile(source.encode(), str(file), "exec", dont_inherit=True), module.__dict__)


def import_dependencies(path: str) -> bool:
    """Run the import statements at the beginning of the user's file, for processes that are forked to run the file.

    It stops at the first statement that may have another effect, since later imports may depend on that.

    Returns:
        Whether the file then behaves as in a process that imported nothing: no module failed, which would run a second
        time, and none imported the file itself.
    """
    file = Path(path).resolve()
    package = _enter_project(file)
    name = module_name(file)
    namespace = {"__name__": name, "__package__": package}

    def run(statement: ast.stmt) -> bool:
        try:
            exec(compile(ast.Module([statement], []), str(file), "exec", dont_inherit=True), namespace)
        except (Exception, SystemExit) as error:
            frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
            # The first one is the statement itself.
            if sum(frame.f_code.co_name == "<module>" for frame in frames) > 1:
                raise _ModuleFailed from error
            return False
        return True

    try:
        statements = ast.parse(file.read_bytes()).body
        if package and not run(ast.parse(f"import {package}").body[0]):
            return True
        # The file's package may import the file. It does so in every process.
        earlier = sys.modules.get(name)
        _run_imports(statements, run)
    except (OSError, SyntaxError, ValueError, _ModuleFailed):
        return False
    return sys.modules.get(name) is earlier


class _ModuleFailed(Exception):
    """An imported module raised while it ran."""


def _run_imports(statements: Sequence[ast.stmt], run: Callable[[ast.stmt], bool]) -> bool:
    """Run import statements up to the first other statement or failure; returns whether it came to the end."""
    for statement in statements:
        if isinstance(statement, ast.Try):
            if not _run_imports(statement.body, run) or statement.orelse or statement.finalbody:
                return False
        elif isinstance(statement, (ast.Import, ast.ImportFrom)):
            if not run(statement):
                return False
        elif not _has_no_effect(statement):
            return False
    return True


def _has_no_effect(statement: ast.stmt) -> bool:
    """Whether imports after this statement cannot depend on it: a docstring, a constant, or imports for type checkers."""
    if isinstance(statement, ast.If):
        return ast.unparse(statement.test).rpartition(".")[2] == "TYPE_CHECKING" and not statement.orelse
    if isinstance(statement, ast.Assign) and not all(isinstance(target, ast.Name) for target in statement.targets):
        return False
    if not isinstance(statement, (ast.Assign, ast.Expr)):
        return False
    try:
        ast.literal_eval(statement.value)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return False
    return True


def _enter_project(file: Path) -> str:
    """Make the project importable; returns the package of the file, empty if it is in none."""
    package, folder = package_of(file)
    for entry in (str(project_root(file)), str(folder)):
        if entry not in sys.path:
            sys.path.insert(0, entry)
    return package
