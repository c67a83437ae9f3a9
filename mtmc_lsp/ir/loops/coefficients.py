"""Coefficients of the updates of a loop's states: small expressions over the primitives of the body."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class Leaf:
    """The value of a primitive of the body."""

    prim: str


@dataclass(frozen=True)
class Term:
    """A pointwise function of values."""

    fn: str
    args: tuple[Value, ...]


Value = Leaf | Term | float
"""A coefficient of an update."""


def leaves(value: Value) -> Iterator[str]:
    """The primitives that a coefficient reads."""
    if isinstance(value, Leaf):
        yield value.prim
    elif isinstance(value, Term):
        for item in value.args:
            yield from leaves(item)


def add(left: Value, right: Value) -> Value:
    """The sum."""
    if left == 0 or right == 0:
        return right if left == 0 else left
    return Term("add", (left, right)) if _has_leaf(left, right) else float(left) + float(right)  # type: ignore[arg-type]


def subtract(left: Value, right: Value) -> Value:
    """The difference."""
    if right == 0:
        return left
    if not _has_leaf(left, right):
        return float(left) - float(right)  # type: ignore[arg-type]
    return Term("neg", (right,)) if left == 0 else Term("sub", (left, right))


def multiply(left: Value, right: Value) -> Value:
    """The product."""
    if left == 0 or right == 0:
        return 0.0
    if left == 1 or right == 1:
        return right if left == 1 else left
    return Term("mul", (left, right)) if _has_leaf(left, right) else float(left) * float(right)  # type: ignore[arg-type]


def divide(left: Value, right: Value) -> Value:
    """The quotient."""
    return 0.0 if left == 0 else Term("div", (left, right))


def where(condition: Value, left: Value, right: Value) -> Value:
    """``left`` where the condition holds."""
    return left if left == right else Term("where", (condition, left, right))


def union(left: Value, right: Value) -> Value:
    """*or* of booleans."""
    if left == 0 or right == 0:
        return right if left == 0 else left
    return 1.0 if 1 in (left, right) else Term("logical_or", (left, right))


def both(left: Value, right: Value) -> Value:
    """*and* of booleans."""
    if left == 0 or right == 0:
        return 0.0
    if left == 1 or right == 1:
        return right if left == 1 else left
    return Term("logical_and", (left, right))


def _has_leaf(*values: Value) -> bool:
    return any(isinstance(value, (Leaf, Term)) for value in values)
