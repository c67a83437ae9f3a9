"""Blanks the functions of generated guards that compare source code and the environment, before a text is scanned.

They use ``inspect`` and handle exceptions, which no candidate may do otherwise. Only text that is known to be safe is blanked:
the fixed functions that compare source code, and comparisons without other effects.
"""

from __future__ import annotations

import ast

from mtmc_lsp.codegen.module.up_to_date import CODE_HELPERS, IS_UNCHANGED_CODE

SUFFIXES = ("_up_to_date", "_up_to_date_code")
PURE_CALLS = frozenset({"repr", "type", "float", "os.environ.get", IS_UNCHANGED_CODE})
PURE_NODES = (
    ast.BoolOp, ast.And, ast.Or, ast.Compare, ast.Is, ast.IsNot, ast.Eq, ast.NotEq, ast.Attribute, ast.Subscript, ast.Name,
    ast.Load, ast.Constant, ast.Call, ast.UnaryOp, ast.USub, ast.Not,
)  # fmt: skip
"""Syntax that reads values and changes nothing, apart from attributes with side effects."""


def without_generated_checks(source: str) -> str:
    """``source`` with these functions blanked; lines keep their numbers. Text that does not parse is returned unchanged."""
    helpers = CODE_HELPERS.strip()
    source = source.replace(helpers, "\n" * helpers.count("\n"))
    try:
        tree = ast.parse(source)
    except SyntaxError:
        return source
    lines = source.splitlines(keepends=True)
    for node in tree.body:
        if isinstance(node, ast.FunctionDef) and node.name.endswith(SUFFIXES) and _is_pure_check(node):
            for number in range(node.lineno - 1, node.end_lineno or node.lineno):
                lines[number] = "\n"
            # A decorator needs a function below it.
            lines[node.lineno - 1] = f"def {node.name}(): ...\n"
    return "".join(lines)


def _is_pure_check(function: ast.FunctionDef) -> bool:
    """Whether it takes nothing and returns a comparison of values, or False if one of them cannot be read."""
    arguments = function.args
    if arguments.args or arguments.posonlyargs or arguments.kwonlyargs or arguments.vararg or arguments.kwarg:
        return False
    *before, last = function.body
    allowed = all(
        (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant))
        or (isinstance(node, ast.Import) and {alias.name for alias in node.names} <= {"os", "sys"})
        for node in before
    )
    if not allowed or not isinstance(last, ast.Try) or last.orelse or last.finalbody:
        return False
    results = [*last.body, *(node for handler in last.handlers for node in handler.body)]
    return all(isinstance(node, ast.Return) and node.value is not None and _is_pure(node.value) for node in results)


def _is_pure(expression: ast.expr) -> bool:
    for node in ast.walk(expression):
        if not isinstance(node, PURE_NODES):
            return False
        if isinstance(node, ast.Call):
            name = ast.unparse(node.func)
            if name not in PURE_CALLS and not name.endswith(SUFFIXES):
                return False
    return True
