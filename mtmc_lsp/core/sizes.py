"""Symbolic tensor sizes: polynomials with integer coefficients over named sizes, such as ``s0*s1`` or ``64``.

A subexpression that is not a polynomial, such as a floor division, is one opaque factor, stored as Python text.

Also here: Python numbers among the target's arguments that only arithmetic uses. The kernels take them at run time.
"""

from __future__ import annotations

import ast
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import reduce
from math import prod
from operator import mul
from typing import Union

FUNCTIONS = {"max": max, "min": min}
"""Functions that conditions over named sizes may call. No size has these names."""
Monomial = tuple[str, ...]
SizeLike = Union["Size", int]


@dataclass(frozen=True)
class Size:
    """A size: the sum of ``coefficient * product(factors)`` over ``terms``, sorted so equal sizes compare equal."""

    terms: tuple[tuple[Monomial, int], ...]

    @staticmethod
    def of(value: SizeLike) -> Size:
        """Convert ``value`` to a size."""
        if isinstance(value, Size):
            return value
        return Size((((), value),)) if value else Size(())

    @staticmethod
    def symbol(name: str) -> Size:
        """A size that consists of one name."""
        return Size((((name,), 1),))

    @staticmethod
    def parse(text: str) -> Size:
        """Parse Python arithmetic with ``+ - * // **`` and names.

        Raises:
            ValueError: the text uses other syntax.
        """
        return _from_ast(ast.parse(text, mode="eval").body)

    @staticmethod
    def from_json(data: object) -> Size:
        if isinstance(data, bool) or not isinstance(data, (int, str)):
            raise TypeError(f"not a size: {data!r}")
        return Size.of(data) if isinstance(data, int) else Size.parse(data)

    def to_json(self) -> int | str:
        return self.constant if self.is_constant else str(self)

    @property
    def is_constant(self) -> bool:
        """Whether the size contains no names."""
        # Equal monomials are merged, so a constant has one term. Planning asks this millions of times.
        return not self.terms or (len(self.terms) == 1 and not self.terms[0][0])

    @property
    def constant(self) -> int:
        """Value of a constant size.

        Raises:
            ValueError: the size contains a name.
        """
        if not self.is_constant:
            raise ValueError(f"{self} is not constant")
        return self.terms[0][1] if self.terms else 0

    @property
    def is_symbol(self) -> bool:
        """Whether the size is a single name."""
        return (
            len(self.terms) == 1 and self.terms[0][1] == 1 and len(self.terms[0][0]) == 1 and str(self).isidentifier()
        )

    def symbols(self) -> Iterator[str]:
        """The names in the size, with repeats, including those inside opaque factors."""
        for factors, _ in self.terms:
            for factor in factors:
                for node in ast.walk(ast.parse(factor, mode="eval")):
                    if isinstance(node, ast.Name):
                        yield node.id

    def value(self, sizes: Mapping[str, int]) -> int:
        """Evaluate the size with the given values of the names."""
        total = 0
        for factors, coefficient in self.terms:
            total += coefficient * reduce(mul, (_evaluate(factor, sizes) for factor in factors), 1)
        return total

    def substitute(self, sizes: Mapping[str, Size]) -> Size:
        """Replace each name that is in ``sizes``."""
        return _from_ast(ast.parse(str(self), mode="eval").body, sizes)

    def divide_exactly(self, other: SizeLike) -> Size | None:
        """``self / other`` if it is a polynomial with integer coefficients, else ``None``."""
        divisor = Size.of(other)
        if len(divisor.terms) != 1:
            return self._long_division(divisor)
        factors, coefficient = divisor.terms[0]
        quotient: list[tuple[Monomial, int]] = []
        for term_factors, term_coefficient in self.terms:
            remaining = list(term_factors)
            for factor in factors:
                if factor not in remaining:
                    return None
                remaining.remove(factor)
            if term_coefficient % coefficient:
                return None
            quotient.append((tuple(remaining), term_coefficient // coefficient))
        return _normal(quotient)

    def _long_division(self, divisor: Size) -> Size | None:
        """Polynomial long division by a sum of terms."""
        if not divisor.terms:
            return None
        quotient, remaining = Size.of(0), self
        first = Size(divisor.terms[:1])
        while remaining.terms:
            # Terms are sorted in a monomial order, so each round eliminates the first term.
            part = Size(remaining.terms[:1]).divide_exactly(first)
            if part is None:
                return None
            quotient, remaining = quotient + part, remaining - part * divisor
        return quotient

    def __add__(self, other: SizeLike) -> Size:
        return _normal([*self.terms, *Size.of(other).terms])

    __radd__ = __add__

    def __neg__(self) -> Size:
        return self * -1

    def __sub__(self, other: SizeLike) -> Size:
        return self + -Size.of(other)

    def __rsub__(self, other: SizeLike) -> Size:
        return Size.of(other) - self

    def __mul__(self, other: SizeLike) -> Size:
        return _normal(
            [(tuple(sorted(a + b)), x * y) for a, x in self.terms for b, y in Size.of(other).terms],
        )

    __rmul__ = __mul__

    def __floordiv__(self, other: SizeLike) -> Size:
        divisor = Size.of(other)
        if self.is_constant and divisor.is_constant:
            return Size.of(self.constant // divisor.constant)
        exact = self.divide_exactly(divisor)
        if exact is None and divisor.is_constant:
            # Only the constant term that is not a multiple of the divisor needs rounding.
            remainder = Size.of(sum(coefficient for factors, coefficient in self.terms if not factors))
            exact_part = (self - remainder).divide_exactly(divisor)
            exact = exact_part + remainder // divisor if exact_part is not None else None
        return exact if exact is not None else Size.symbol(f"({self.as_factor()} // {divisor.as_factor()})")

    def as_factor(self) -> str:
        """The text as a factor, in parentheses if needed."""
        text = str(self)
        simple = len(self.terms) <= 1 and "*" not in text and not text.startswith("-")
        return text if simple else f"({text})"

    def __str__(self) -> str:
        if not self.terms:
            return "0"
        parts = []
        for factors, coefficient in self.terms:
            names = " * ".join(factors)
            if not factors:
                parts.append(str(coefficient))
            elif coefficient == 1:
                parts.append(names)
            elif coefficient == -1:
                parts.append(f"-{names}")
            else:
                parts.append(f"{coefficient} * {names}")
        return " + ".join(parts).replace("+ -", "- ")


MATH_FUNCTIONS = frozenset("sqrt exp log log2 log10 log1p expm1 pow sin cos tanh".split())
"""Functions of ``math`` that may be part of a run-time number."""
PlainNumber = Union[int, float]
"""A Python number; never a bool."""


@dataclass(frozen=True)
class NumberArgument:
    """A number among the target's arguments. The graph is valid for every value of the same type."""

    name: str
    """A Python identifier, unique among the graph's inputs and numbers."""
    access: str
    """Python expression for it inside the target's body: ``eps``, ``batch['scale']``."""
    value: PlainNumber
    """Its value in the workload."""

    def to_json(self) -> dict[str, object]:
        value = str(self.value) if isinstance(self.value, float) and not math.isfinite(self.value) else self.value
        return {"name": self.name, "access": self.access, "value": value}

    @staticmethod
    def from_json(data: object) -> NumberArgument:
        if not isinstance(data, dict):
            raise TypeError(f"not a number among the arguments: {data!r}")
        value = data["value"]
        return NumberArgument(data["name"], data["access"], float(value) if isinstance(value, str) else value)


@dataclass(frozen=True)
class Number:
    """A number that the target computes from its arguments by Python arithmetic, as an argument of a node."""

    text: str
    """Python over names of :class:`NumberArgument`: ``eps``, ``1 - beta1 ** step``."""
    kind: str
    """``float`` or ``int``."""
    variable: str = ""
    """The user's variable that holds it; empty if there is none."""

    @property
    def is_argument(self) -> bool:
        """Whether it is an argument itself."""
        return self.text.isidentifier()

    @property
    def preferred_name(self) -> str:
        """A name for a variable that holds it: the argument's, the user's, or one made of its arguments."""
        if self.is_argument:
            return self.text
        return self.variable or "_".join([*dict.fromkeys(self.names()), "term"])

    @property
    def may_fail(self) -> bool:
        """Whether Python may raise an error for some arguments, or compute a number of another type."""
        operators = {type(node.op) for node in ast.walk(self._tree) if isinstance(node, ast.BinOp)}
        calls = any(isinstance(node, ast.Call) for node in ast.walk(self._tree))
        return calls or bool(operators & {ast.Div, ast.Pow})

    @property
    def uses_math(self) -> bool:
        """Whether it calls functions of the module ``math``."""
        return any(isinstance(node, ast.Call) for node in ast.walk(self._tree))

    def names(self) -> tuple[str, ...]:
        """The arguments that it is computed from, with repeats."""
        nodes = (node.id for node in ast.walk(self._tree) if isinstance(node, ast.Name))
        return tuple(name for name in nodes if name != "math")

    def to_json(self) -> dict[str, object]:
        return {"number": self.text, "kind": self.kind, "variable": self.variable}

    @property
    def _tree(self) -> ast.Expression:
        return ast.parse(self.text, mode="eval")


def product(sizes: tuple[Size, ...] | list[Size]) -> Size:
    """The product of ``sizes``; 1 for none."""
    # Multiply constants first: most sizes are constant, and normalising terms is most of the work.
    number = prod(size.constant for size in sizes if size.is_constant)
    return reduce(mul, (size for size in sizes if not size.is_constant), Size.of(number))


def conditions_hold(conditions: Iterable[str], sizes: Mapping[str, int]) -> bool:
    """Evaluate conditions in Python over named sizes, such as ``B % 2 == 0``."""
    try:
        return all(bool(eval(text, {"__builtins__": {}, **FUNCTIONS}, dict(sizes))) for text in conditions)
    except (ArithmeticError, TypeError):
        # The user's code evaluates the same expression and raises for these sizes, for example a division by 0.
        return False


def rename_symbols(condition: str, names: Mapping[str, str]) -> str:
    """Replace names in a condition or size text. The ``e`` of ``1e-05`` is not a name."""
    return re.sub(r"(?<![\w.])[A-Za-z_]\w*", lambda match: names.get(match.group(), match.group()), condition)


def names_in(condition: str) -> set[str]:
    """The named sizes in a condition."""
    names = {node.id for node in ast.walk(ast.parse(condition, mode="eval")) if isinstance(node, ast.Name)}
    return names - FUNCTIONS.keys()


def greater_than(size: Size, count: int) -> str:
    """The condition ``size > count``."""
    return f"{size} > {count}"


def _normal(terms: list[tuple[Monomial, int]]) -> Size:
    collected: dict[Monomial, int] = {}
    for factors, coefficient in terms:
        collected[factors] = collected.get(factors, 0) + coefficient
    nonzero_terms = [(factors, coefficient) for factors, coefficient in collected.items() if coefficient]
    return Size(tuple(sorted(nonzero_terms, key=lambda term: (-len(term[0]), term[0]))))


def _evaluate(factor: str, sizes: Mapping[str, int]) -> int:
    if factor in sizes:
        return sizes[factor]
    return _evaluate_ast(ast.parse(factor, mode="eval").body, sizes)


def _evaluate_ast(node: ast.expr, sizes: Mapping[str, int]) -> int:
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return node.value
    if isinstance(node, ast.Name):
        return sizes[node.id]
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_evaluate_ast(node.operand, sizes)
    if isinstance(node, ast.BinOp):
        left, right = _evaluate_ast(node.left, sizes), _evaluate_ast(node.right, sizes)
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
        if isinstance(node.op, ast.Pow):
            return int(left**right)
    raise ValueError(f"not a size: {ast.unparse(node)}")


def _from_ast(node: ast.expr, sizes: Mapping[str, Size] | None = None) -> Size:
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return Size.of(node.value)
    if isinstance(node, ast.Name):
        return (sizes or {}).get(node.id, Size.symbol(node.id))
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_from_ast(node.operand, sizes)
    if isinstance(node, ast.BinOp):
        left, right = _from_ast(node.left, sizes), _from_ast(node.right, sizes)
        if isinstance(node.op, ast.Add):
            return left + right
        if isinstance(node.op, ast.Sub):
            return left - right
        if isinstance(node.op, ast.Mult):
            return left * right
        if isinstance(node.op, ast.FloorDiv):
            return left // right
        if isinstance(node.op, ast.Pow) and right.is_constant and right.constant >= 0:
            return product([left] * right.constant)
    raise ValueError(f"not a size: {ast.unparse(node)}")
