"""``while`` statements with a counter as ``for`` statements.

``while t < T: h = a[t] * h; t += 1`` becomes::

    counter = LOOPS.counting(t, "<", T, 1)
    for t in counter:
        h = a[t] * h
    t = counter.after
"""

from __future__ import annotations

import ast
from collections.abc import Collection

COUNTER = "_mtmc_counter_"
SYMBOLS = {ast.Lt: "<", ast.LtE: "<=", ast.Gt: ">", ast.GtE: ">=", ast.NotEq: "!="}
SWAPPED = {"<": ">", "<=": ">=", ">": "<", ">=": "<=", "!=": "!="}
PURE_CALLS = frozenset({"len", "size", "dim", "numel"})
"""Functions and methods that a bound may call: their result is the same in all iterations."""


def as_for(loop: ast.While, namespace: str) -> tuple[ast.stmt, ast.For, ast.stmt] | None:
    """The statement before the loop, the loop and the statement after it; ``None`` if the loop has no counter.

    The counter must be compared with a bound that no iteration assigns, and the last statement of the body must add a constant.
    """
    increment = _as_augmented(loop.body[-1])
    if loop.orelse or increment is None or not isinstance(increment.target, ast.Name):
        return None
    counter, step = increment.target.id, _step(increment)
    condition = _condition(loop.test, counter)
    if step is None or condition is None or len(loop.body) < 2:
        return None
    symbol, bound = condition
    assigned = _assigned(loop.body[:-1])
    if counter in assigned or not _is_fixed(bound, {*assigned, counter}):
        return None
    variable = f"{COUNTER}{loop.lineno}_{loop.col_offset}_"
    before = ast.parse(f"{variable} = {namespace}.counting({counter}, {symbol!r}, 0, {step})").body[0]
    assert isinstance(before, ast.Assign) and isinstance(before.value, ast.Call)
    before.value.args[2] = bound
    target = ast.copy_location(ast.Name(counter, ast.Store()), increment.target)
    iterable = ast.copy_location(ast.Name(variable, ast.Load()), loop.test)
    result = ast.copy_location(ast.For(target, iterable, loop.body[:-1], []), loop)
    return before, result, ast.parse(f"{counter} = {variable}.after").body[0]


def _as_augmented(statement: ast.stmt) -> ast.AugAssign | None:
    """``t += 1`` for ``t = t + 1``, ``t = 1 + t`` and ``t = t - 1``."""
    if isinstance(statement, ast.AugAssign):
        return statement
    if not isinstance(statement, ast.Assign) or len(statement.targets) != 1:
        return None
    target, value = statement.targets[0], statement.value
    if not isinstance(target, ast.Name) or not isinstance(value, ast.BinOp):
        return None
    left, right = value.left, value.right
    if isinstance(value.op, ast.Add) and isinstance(left, ast.Constant):
        left, right = right, left
    if not isinstance(left, ast.Name) or left.id != target.id:
        return None
    return ast.copy_location(ast.AugAssign(target, value.op, right), statement)


def _step(increment: ast.AugAssign) -> int | None:
    """The constant that a statement adds."""
    value = increment.value
    if not isinstance(value, ast.Constant) or type(value.value) is not int or not value.value:
        return None
    return {ast.Add: value.value, ast.Sub: -value.value}.get(type(increment.op))


def _condition(test: ast.expr, counter: str) -> tuple[str, ast.expr] | None:
    """The comparison of the counter with a bound."""
    if not isinstance(test, ast.Compare) or len(test.ops) != 1 or type(test.ops[0]) not in SYMBOLS:
        return None
    symbol, left, right = SYMBOLS[type(test.ops[0])], test.left, test.comparators[0]
    if isinstance(left, ast.Name) and left.id == counter:
        return symbol, right
    if isinstance(right, ast.Name) and right.id == counter:
        return SWAPPED[symbol], left
    return None


def _assigned(body: Collection[ast.stmt]) -> set[str]:
    """Names that a statement assigns, or whose items or attributes it sets."""
    names: set[str] = set()
    for statement in body:
        for node in ast.walk(statement):
            if isinstance(node, (ast.Name, ast.Subscript, ast.Attribute)) and not isinstance(node.ctx, ast.Load):
                root: ast.expr = node
                while isinstance(root, (ast.Subscript, ast.Attribute)):
                    root = root.value
                names |= {root.id} if isinstance(root, ast.Name) else set()
    return names


def _is_fixed(bound: ast.expr, assigned: set[str]) -> bool:
    """Whether a bound is the same number in all iterations. Shapes of tensors that the loop changes are not trusted."""
    for node in ast.walk(bound):
        if isinstance(node, ast.Name) and node.id in assigned:
            return False
        if isinstance(node, ast.Call):
            function = node.func
            name = function.id if isinstance(function, ast.Name) else getattr(function, "attr", "")
            if name not in PURE_CALLS:
                return False
        if isinstance(node, (ast.NamedExpr, ast.Await, ast.Yield, ast.YieldFrom, ast.Lambda)):
            return False
    return True
