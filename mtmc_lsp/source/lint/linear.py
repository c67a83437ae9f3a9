"""Index expressions as sums of products."""

from __future__ import annotations

import ast
from collections import Counter

from tree_sitter import Node

from mtmc_lsp.source.lint.kernel import Kernel
from mtmc_lsp.source.syntax import text_of

MOST_DEPTH = 6
ARANGE = "arange"
Term = tuple[str, ...]
"""Factors of a product, sorted: ``("BLOCK", "pid")``; ``("arange:BLOCK",)`` for ``tl.arange(0, BLOCK)``."""


def linear(node: Node, kernel: Kernel) -> Counter[Term] | None:
    """An expression as a sum of products with integer factors, names replaced by their values; None if it is none."""
    try:
        return _sum(ast.parse(text_of(node).replace("\n", " ").strip(), mode="eval").body, kernel, MOST_DEPTH)
    except (SyntaxError, ValueError):
        return None


def _sum(node: ast.expr, kernel: Kernel, depth: int) -> Counter[Term]:
    if isinstance(node, ast.Subscript):
        return _sum(node.value, kernel, depth)
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return Counter({(): node.value}) if node.value else Counter()
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return Counter({term: -count for term, count in _sum(node.operand, kernel, depth).items()})
    if isinstance(node, ast.BinOp) and isinstance(node.op, (ast.Add, ast.Sub)):
        left, right = _sum(node.left, kernel, depth), _sum(node.right, kernel, depth)
        sign = 1 if isinstance(node.op, ast.Add) else -1
        total = Counter(left)
        for term, count in right.items():
            total[term] += sign * count
        return Counter({term: count for term, count in total.items() if count})
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult):
        product: Counter[Term] = Counter()
        for one, first in _sum(node.left, kernel, depth).items():
            for other, second in _sum(node.right, kernel, depth).items():
                product[tuple(sorted((*one, *other)))] += first * second
        return product
    if isinstance(node, ast.Name):
        values = kernel.values.get(node.id, ())
        if depth and len(values) == 1 and values[0].type in ("binary_operator", "call", "parenthesized_expression"):
            try:
                return _sum(ast.parse(text_of(values[0]), mode="eval").body, kernel, depth - 1)
            except ValueError:
                return Counter({(node.id,): 1})
        return Counter({(node.id,): 1})
    if isinstance(node, ast.Call):
        name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        if name == ARANGE and len(node.args) == 2:
            start = node.args[0]
            if not isinstance(start, ast.Constant) or start.value != 0:
                raise ValueError("no block from 0")
            return Counter({(f"{ARANGE}:{ast.unparse(node.args[1])}",): 1})
        if name == "program_id":
            return Counter({(f"program_id({_axis(node)})",): 1})
        if name in ("multiple_of", "max_contiguous") and node.args:
            return _sum(node.args[0], kernel, depth)
    raise ValueError("no sum of products")


def _axis(call: ast.Call) -> str:
    values = [*call.args, *(item.value for item in call.keywords if item.arg == "axis")]
    return ast.unparse(values[0]) if values else ""
