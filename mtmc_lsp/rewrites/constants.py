"""Folds consecutive constants: ``(x * a) * b = x * (a * b)``, ``(x + a) + b = x + (a + b)``."""

from __future__ import annotations

import math
import struct

from mtmc_lsp.core.graph import Argument, Graph, Node, Ref
from mtmc_lsp.rewrites.graph_editing import AlgebraRule, Edit, base_name, is_only_reader, new_node, producer

LARGEST, SMALLEST = 1e30, 1e-30
"""Within these bounds a folded constant neither overflows nor becomes denormal in float32."""


def _constant(node: Node) -> float | None:
    """The constant right operand of a plain binary operation; ``None`` if it has none."""
    if len(node.args) != 2 or node.kwargs or node.type.dtype not in ("float32", "float64"):
        return None
    value: Argument = node.args[1]
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else None


def fold(graph: Graph, node: Node) -> Edit | None:
    """Merge two consecutive operations with constants, if the first has no other reader."""
    inner = producer(graph, node.args[0]) if node.args else None
    if inner is None or inner.type.dtype != node.type.dtype or not is_only_reader(graph, inner.name, node.name):
        return None
    outer_value, inner_value = _constant(node), _constant(inner)
    if outer_value is None or inner_value is None:
        return None
    names = base_name(inner), base_name(node)
    number: float | None = None
    op = ""
    if set(names) <= {"mul", "div"} and (0.0 not in (outer_value, inner_value)):
        number = _as_factor(names[0], inner_value) * _as_factor(names[1], outer_value)
        op = "aten.mul.Tensor"
        if not SMALLEST < abs(number) < LARGEST:
            return None
    elif set(names) <= {"add", "sub"}:
        number = _as_term(names[0], inner_value) + _as_term(names[1], outer_value)
        op = "aten.add.Tensor"
    if number is None or not math.isfinite(number):
        return None
    new = new_node(
        node,
        "folded",
        op,
        (inner.args[0], _shortest_decimal(number, node.type.dtype)),
        node.type,
        variable=node.variable,
    )
    why = f"one operation with {new.args[1]!r} instead of two"
    return Edit(node.name, Ref(new.name), (new,), why, f"fold the constants of the {names[0]} and the {names[1]}")


def _as_factor(name: str, value: float) -> float:
    return value if name == "mul" else 1.0 / value


def _as_term(name: str, value: float) -> float:
    return value if name == "add" else -value


def _shortest_decimal(number: float, dtype: str) -> float:
    """The shortest decimal that rounds to the same number in ``dtype``, for readable code."""
    if dtype == "float64":
        return number
    packed = struct.pack("f", number)
    return next(short for digits in range(1, 18) if struct.pack("f", short := float(f"{number:.{digits}g}")) == packed)


REWRITES = (
    AlgebraRule(
        "fold-constants",
        fold,
        "Multiplication and addition of reals are associative; in floating point one rounding replaces two. "
        "The results differ only where the first operation would overflow.",
    ),
)
