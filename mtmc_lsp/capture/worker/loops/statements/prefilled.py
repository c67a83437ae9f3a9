"""Variables that statements before a loop assign for it: lists of a known length (``outs = [None] * T``), and ranges."""

from __future__ import annotations

import ast
from collections.abc import Collection, Sequence

CONSTANTS = (type(None), int, float)


def prefilled_values(statement: ast.stmt) -> list[ast.expr]:
    """The lists of equal constants among the values that a statement assigns to variables, also to several at once."""
    if not isinstance(statement, ast.Assign) or len(statement.targets) != 1:
        return []
    target, value = statement.targets[0], statement.value
    pairs = [(target, value)]
    if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple) and len(target.elts) == len(value.elts):
        pairs = list(zip(target.elts, value.elts, strict=True))
    return [each for name, each in pairs if isinstance(name, ast.Name) and prefilled(each) is not None]


def prefilled(value: ast.expr) -> tuple[ast.expr, ast.expr] | None:
    """The item and the length of a list where all items are one constant."""
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


def assigned_ranges(body: Sequence[ast.stmt], hidden: Collection[str]) -> set[str]:
    """The variables that hold a range (``steps = reversed(range(T))``) and are read by one ``for`` statement alone."""
    nodes = [node for statement in body for node in ast.walk(statement)]
    names = [node for node in nodes if isinstance(node, ast.Name)]
    iterated = {
        item.id
        for node in nodes
        if isinstance(node, ast.For)
        for item in ([node.iter] if isinstance(node.iter, ast.Name) else [])
    }
    held = {
        node.targets[0].id
        for node in nodes
        if isinstance(node, ast.Assign)
        and len(node.targets) == 1
        and isinstance(node.targets[0], ast.Name)
        and is_range(node.value, hidden)
    }
    return {name for name in held & iterated if sum(node.id == name for node in names) == 2}


def is_range(value: ast.expr, hidden: Collection[str]) -> bool:
    """Whether an expression is ``range(...)`` or ``reversed(range(...))``."""
    if not isinstance(value, ast.Call) or not isinstance(value.func, ast.Name) or value.func.id in hidden:
        return False
    if value.func.id == "reversed" and len(value.args) == 1:
        return is_range(value.args[0], hidden)
    return value.func.id == "range" and bool(value.args)
