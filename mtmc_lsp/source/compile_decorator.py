"""Adds ``@torch.compile`` to a target of the user's file."""

from __future__ import annotations

import ast
import re

DECORATOR = "@torch.compile"


def add_compile_decorator(source: str, qualname: str) -> str | None:
    """The file with the decorator directly above the target's ``def``; for a module, above its ``forward``.

    Returns:
        The text; ``None`` if the file does not parse, or the target is not there or has the decorator already.
    """
    try:
        tree = ast.parse(source)
    except SyntaxError:
        return None
    node = _function(tree, qualname.split("."))
    if node is None or any(_is_compile(decorator) for decorator in node.decorator_list):
        return None
    lines = re.split(r"(?<=\n)", source)
    line = lines[node.lineno - 1]
    indent = line[: len(line) - len(line.lstrip())]
    end = "\r\n" if line.endswith("\r\n") else "\n"
    lines.insert(node.lineno - 1, f"{indent}{DECORATOR}{end}")
    if not _imports_torch(tree):
        lines.insert(_first_import(tree), f"import torch{end}")
    return "".join(lines)


def _function(scope: ast.AST, names: list[str]) -> ast.FunctionDef | None:
    name, *inner = names
    for node in ast.iter_child_nodes(scope):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and node.name == name:
            if inner:
                return _function(node, inner)
            return node if isinstance(node, ast.FunctionDef) else _function(node, ["forward"])
    return None


def _is_compile(decorator: ast.expr) -> bool:
    function = decorator.func if isinstance(decorator, ast.Call) else decorator
    name = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
    return name == "compile"


def _imports_torch(tree: ast.Module) -> bool:
    return any(
        alias.name.split(".")[0] == "torch" and alias.asname is None
        for node in tree.body
        if isinstance(node, ast.Import)
        for alias in node.names
    )


def _first_import(tree: ast.Module) -> int:
    """The 0-based line for a new import: before the first import, but after a docstring and ``__future__``."""
    line = 0
    for node in tree.body:
        is_future = isinstance(node, ast.ImportFrom) and node.module == "__future__"
        is_docstring = line == 0 and isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        if is_future or is_docstring:
            line = node.end_lineno or line
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            return node.lineno - 1
    return line
