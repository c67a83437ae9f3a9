"""Cases at the edges of a foreign candidate: sizes next to the numbers in its text, other layouts, and telling values.

A kernel that is wrong beyond some size has that size, or a block size, in its text.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Mapping
from dataclasses import replace

from mtmc_lsp.core.dtypes import is_float
from mtmc_lsp.core.graph import InputKind
from mtmc_lsp.core.workload import Capture
from mtmc_lsp.verify.cases import (
    EXPANDED,
    EXPANDED_COLUMNS,
    PACKED,
    SLICED,
    TRANSPOSED,
    UNALIGNED,
    VALUES,
    Case,
    is_small_enough,
    raised_sizes,
    reduced_sizes,
)

MOST_SIZES = 16
"""Limit for the cases with sizes from the text."""
LEAST, LARGEST = 4, 1 << 17
"""Smaller numbers in the text are sizes that are tried anyway, and larger ones take too long."""
SMALL_SIZE = 3
"""The other sizes of a case, where all cannot be as large as the number in the text."""
DISTRIBUTIONS = ("offset", "ties", "zero rows", "extreme", "negative")
"""A mean far above the spread, many equal values, rows of zeros, large values, and negative values only."""
OPERATORS: Mapping[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.LShift: operator.lshift,
    ast.Pow: operator.pow,
}
"""How constant expressions are computed."""


def edge_cases(capture: Capture, text: str, model: Case, *, interpreted: bool, seed: int) -> tuple[Case, ...]:
    """Further cases for a foreign candidate.

    Args:
        text: the candidate's file.
        model: a case of small sizes, for layouts and values.
        interpreted: whether Triton's interpreter runs the kernels.
        seed: of the first case.
    """
    arguments = [item for item in capture.graph.inputs if item.kind is InputKind.ARGUMENT]
    cases = [
        replace(model, sizes=sizes, distribution="normal") for sizes in _sizes(capture, text, interpreted=interpreted)
    ]
    if any(is_float(item.type.dtype) for item in arguments):
        cases += [replace(model, distribution=name) for name in DISTRIBUTIONS]
    # Elements that share memory cannot be written.
    written = {mutation.input for mutation in capture.graph.mutations} & {item.name for item in arguments}
    cases += [
        replace(model, distribution="normal", layout=name)
        for name in (SLICED, PACKED, TRANSPOSED, UNALIGNED, *(() if written else (EXPANDED, EXPANDED_COLUMNS)))
    ]
    return tuple(replace(case, kind=VALUES, seed=seed + i) for i, case in enumerate(cases))


def numbers_in(text: str) -> list[int]:
    """The whole numbers in a text of Python that may be sizes, also those of ``1 << 10`` and ``4 * 256``; the largest first."""
    try:
        tree = ast.parse(text)
    except SyntaxError:
        return []
    values = (_value(node) for node in ast.walk(tree) if isinstance(node, ast.expr))
    return sorted({value for value in values if value is not None and LEAST <= value <= LARGEST}, reverse=True)


def _value(node: ast.expr) -> int | None:
    """The value of a constant expression of whole numbers."""
    if isinstance(node, ast.Constant):
        return node.value if type(node.value) is int else None
    if not isinstance(node, ast.BinOp) or type(node.op) not in OPERATORS:
        return None
    left, right = _value(node.left), _value(node.right)
    # Also bounds what powers and shifts can compute.
    if left is None or right is None or not (0 < left <= LARGEST and 0 < right <= LARGEST.bit_length() * LEAST):
        return None
    is_power = isinstance(node.op, (ast.LShift, ast.Pow))
    return None if is_power and right > LARGEST.bit_length() else OPERATORS[type(node.op)](left, right)


def _sizes(capture: Capture, text: str, *, interpreted: bool) -> list[dict[str, int]]:
    """Sizes next to each number in the text: one above it, one below, the number, and one above its double."""
    graph, numbers = capture.graph, numbers_in(text)
    variable = [name for name in capture.variable_sizes if name in graph.sizes]
    edges = [*(n + 1 for n in numbers), *(n - 1 for n in numbers), *numbers, *(2 * n + 1 for n in numbers)]
    chosen: list[dict[str, int]] = []
    for edge in dict.fromkeys(edges) if variable else ():
        whole = raised_sizes(graph, {**graph.sizes, **dict.fromkeys(variable, edge)}, variable)
        small = dict.fromkeys(variable, SMALL_SIZE)
        single = [raised_sizes(graph, {**graph.sizes, **small, name: edge}, variable) for name in variable]
        # One case for all sizes, or else one for each while the others are small.
        choices = [whole] if is_small_enough(graph, whole, interpreted=interpreted) else single
        chosen += [
            sizes for sizes in choices if sizes not in chosen and is_small_enough(graph, sizes, interpreted=interpreted)
        ]
    # Each size is 1 while the others are not small.
    reduced = reduced_sizes(capture)
    flat = [raised_sizes(graph, {**reduced, name: 1}, variable) for name in variable]
    flat = [sizes for sizes in flat if is_small_enough(graph, sizes, interpreted=interpreted)]
    return [*(flat if len(variable) > 1 else ()), *chosen][:MOST_SIZES]
