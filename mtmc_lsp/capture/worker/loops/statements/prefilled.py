"""Lists of a known length whose items a loop assigns: ``outs = [None] * T``."""

from __future__ import annotations

import ast

CONSTANTS = (type(None), int, float)


def prefilled(statement: ast.stmt) -> tuple[ast.expr, ast.expr] | None:
    """The item and the length of a list that a statement assigns to a variable, where all items are one constant."""
    if not isinstance(statement, ast.Assign) or len(statement.targets) != 1:
        return None
    value = statement.value
    if not isinstance(statement.targets[0], ast.Name):
        return None
    if isinstance(value, ast.BinOp) and isinstance(value.op, ast.Mult):
        items, count = (value.left, value.right) if isinstance(value.left, ast.List) else (value.right, value.left)
        if isinstance(items, ast.List) and len(items.elts) == 1 and _is_constant(items.elts[0]):
            return items.elts[0], count
    if isinstance(value, ast.ListComp) and len(value.generators) == 1 and _is_constant(value.elt):
        generator = value.generators[0]
        call = generator.iter
        is_range = isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id == "range"
        if isinstance(call, ast.Call) and is_range and len(call.args) == 1 and not (generator.ifs or call.keywords):
            return value.elt, call.args[0]
    return None


def _is_constant(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and type(node.value) in CONSTANTS
