"""Values of a kernel's integer expressions on the workload, for estimates."""

from __future__ import annotations

import ast
from collections.abc import Mapping

from tree_sitter import Node

from mtmc_lsp.kernels.actions.base import Facts
from mtmc_lsp.source.lint.kernel import argument
from mtmc_lsp.source.syntax import field, text_of

MOST_DEPTH = 4


def trips(loop: Node, facts: Facts) -> float | None:
    """The number of iterations of a loop on the workload; None if it is unknown."""
    steps = field(loop, "right")
    if steps is None or steps.type != "call" or not text_of(field(steps, "function")).endswith("range"):
        return None
    values = [value_of(item, facts) for i in range(3) if (item := argument(steps, i, "")) is not None]
    if not values or any(value is None for value in values):
        return None
    numbers = [value for value in values if value is not None]
    start, stop = (0, numbers[0]) if len(numbers) == 1 else (numbers[0], numbers[1])
    step = numbers[2] if len(numbers) == 3 else 1
    return float(max(0, -(-(stop - start) // step))) if step else None


def value_of(node: Node, facts: Facts) -> int | None:
    """The value of an integer expression; None if it is unknown."""
    known = {name: value for name, value in {**facts.numbers, **facts.constants}.items() if isinstance(value, int)}
    try:
        return _value(ast.parse(text_of(node), mode="eval").body, known, facts, MOST_DEPTH)
    except (SyntaxError, ValueError, ZeroDivisionError):
        return None


def _value(node: ast.expr, known: Mapping[str, int], facts: Facts, depth: int) -> int:
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return node.value
    if isinstance(node, ast.Name):
        if node.id in known:
            return known[node.id]
        values = facts.site.kernel.values.get(node.id, ())
        if depth and len(values) == 1:
            return _value(ast.parse(text_of(values[0]), mode="eval").body, known, facts, depth - 1)
    if isinstance(node, ast.Call):
        name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        arguments = [_value(item, known, facts, depth) for item in node.args]
        if name == "cdiv" and len(arguments) == 2:
            return -(-arguments[0] // arguments[1])
    if isinstance(node, ast.BinOp):
        left, right = _value(node.left, known, facts, depth), _value(node.right, known, facts, depth)
        if isinstance(node.op, ast.Add):
            return left + right
        if isinstance(node.op, ast.Sub):
            return left - right
        if isinstance(node.op, ast.Mult):
            return left * right
        if isinstance(node.op, ast.FloorDiv):
            return left // right
        if isinstance(node.op, ast.Mod):
            return left % right
    raise ValueError("unknown")
