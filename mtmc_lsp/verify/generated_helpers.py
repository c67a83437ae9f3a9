"""Blanks helpers of generated code before a text is scanned: those that compare source code, settings and numbers, or launch.

They use ``inspect``, ``sys.modules`` and ``eval`` and handle exceptions, which no candidate may do otherwise. Only text that is
known to be safe is blanked: the fixed functions that compare source code or read a setting of torch, comparisons without other
effects, attempts at pure arithmetic, and the helper of launches, which evaluates text about the names of parameters.
"""

from __future__ import annotations

import ast

from mtmc_lsp.codegen.module.direct_launches import DIRECT_LAUNCHES
from mtmc_lsp.codegen.module.guard_helpers import GUARD_HELPERS, HAVE_NUMBER_TYPES, TF32_HELPERS
from mtmc_lsp.codegen.module.up_to_date import CODE_HELPERS, IS_UNCHANGED_CODE
from mtmc_lsp.codegen.standalone import LOOK_UP, LOOK_UP_SOURCE
from mtmc_lsp.core.sizes import MATH_FUNCTIONS
from mtmc_lsp.guard.conditions import MODULE

SUFFIXES = ("_up_to_date", "_up_to_date_code")
PURE_CALLS = frozenset({"repr", "type", "float", "os.environ.get", IS_UNCHANGED_CODE})
PURE_NODES = (
    ast.BoolOp, ast.And, ast.Or, ast.Compare, ast.Is, ast.IsNot, ast.Eq, ast.NotEq, ast.Attribute, ast.Subscript, ast.Name,
    ast.Load, ast.Constant, ast.Call, ast.UnaryOp, ast.USub, ast.Not,
)  # fmt: skip
"""Syntax that reads values and changes nothing, apart from attributes with side effects."""
ARITHMETIC_NODES = (
    ast.Tuple, ast.BinOp, ast.Add, ast.Sub, ast.Mult, ast.Div, ast.Pow, ast.UnaryOp, ast.USub, ast.UAdd, ast.Attribute,
    ast.Subscript, ast.Name, ast.Load, ast.Constant, ast.Call,
)  # fmt: skip
"""Syntax of arithmetic with numbers."""


def without_generated_checks(source: str) -> str:
    """``source`` with these functions blanked; lines keep their numbers. Text that does not parse is returned unchanged."""
    number_check = GUARD_HELPERS[HAVE_NUMBER_TYPES].strip()
    try:
        tree = ast.parse(source)
    except SyntaxError:
        return source
    helpers = [GUARD_HELPERS[name].strip() for name in TF32_HELPERS.values()]
    helpers += [
        DIRECT_LAUNCHES.strip(),
        CODE_HELPERS.strip(),
        *([number_check] if _attempts_only_arithmetic(tree) else []),
    ]
    helpers += [LOOK_UP_SOURCE.strip()] if _looks_up_only_itself(tree) else []
    for helper in helpers:
        source = source.replace(helper, "\n" * helper.count("\n"))
    tree = ast.parse(source)
    lines = source.splitlines(keepends=True)
    for node in tree.body:
        if isinstance(node, ast.FunctionDef) and node.name.endswith(SUFFIXES) and _is_pure_check(node):
            for number in range(node.lineno - 1, node.end_lineno or node.lineno):
                lines[number] = "\n"
            # A decorator needs a function below it.
            lines[node.lineno - 1] = f"def {node.name}(): ...\n"
            for imported in _imports_of_user_modules(node):
                # Several statements may share a line.
                before = lines[imported.lineno - 1].strip()
                lines[imported.lineno - 1] = f"{'; '.join(filter(None, (before, ast.unparse(imported))))}\n"
    return "".join(lines)


def _attempts_only_arithmetic(tree: ast.Module) -> bool:
    """Whether all uses of the function that catches arithmetic errors pass nothing but arithmetic with numbers."""
    names = sum(isinstance(node, ast.Name) and node.id == HAVE_NUMBER_TYPES for node in ast.walk(tree))
    calls = [
        node.args[0]
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and ast.unparse(node.func) == HAVE_NUMBER_TYPES and node.args
    ]
    return names == len(calls) and all(
        isinstance(call, ast.Lambda) and not call.args.args and _is_arithmetic(call.body) for call in calls
    )


def _looks_up_only_itself(tree: ast.Module) -> bool:
    """Whether only guards look up the user's module, and each call of such a guard passes ``__name__``."""
    names = sum(isinstance(node, ast.Name) and node.id == LOOK_UP for node in ast.walk(tree))
    guards = [
        node.name
        for node in tree.body
        if isinstance(node, ast.FunctionDef)
        and node.args.args
        and f"{MODULE} = {LOOK_UP}({node.args.args[-1].arg}" in ast.unparse(node)
    ]
    uses = sum(isinstance(node, ast.Name) and node.id in guards for node in ast.walk(tree))
    calls = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id in guards
        and node.args
        and ast.unparse(node.args[-1]) == "__name__"
    ]
    return names == len(guards) and uses == len(calls)


def _is_arithmetic(expression: ast.expr) -> bool:
    calls = [ast.unparse(node.func) for node in ast.walk(expression) if isinstance(node, ast.Call)]
    return all(isinstance(node, ARITHMETIC_NODES) for node in ast.walk(expression)) and all(
        call.removeprefix("math.") in MATH_FUNCTIONS and call.startswith("math.") for call in calls
    )


def _is_pure_check(function: ast.FunctionDef) -> bool:
    """Whether it takes nothing but the user's module, and returns a comparison of values, or False if one cannot be read."""
    arguments = function.args
    if [item.arg for item in arguments.args] not in ([], [MODULE]) or (
        arguments.posonlyargs or arguments.kwonlyargs or arguments.vararg or arguments.kwarg
    ):
        return False
    *before, last = function.body
    allowed = all(
        (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant))
        or (isinstance(node, ast.Import) and {alias.name for alias in node.names} <= {"os", "sys"})
        for node in before
    )
    if not allowed or not isinstance(last, ast.Try) or last.orelse or last.finalbody:
        return False
    attempted = [node for node in last.body if not isinstance(node, ast.Import)]
    results = [*attempted, *(node for handler in last.handlers for node in handler.body)]
    return all(isinstance(node, ast.Return) and node.value is not None and _is_pure(node.value) for node in results)


def _imports_of_user_modules(function: ast.FunctionDef) -> list[ast.Import]:
    """The imports in the ``try`` block of a check. They stay in the text, because they are scanned as all imports are."""
    return [
        statement
        for attempt in function.body
        if isinstance(attempt, ast.Try)
        for statement in attempt.body
        if isinstance(statement, ast.Import)
    ]


def _is_pure(expression: ast.expr) -> bool:
    for node in ast.walk(expression):
        if not isinstance(node, PURE_NODES):
            return False
        if isinstance(node, ast.Call):
            name = ast.unparse(node.func)
            if name not in PURE_CALLS and not name.endswith(SUFFIXES):
                return False
    return True
