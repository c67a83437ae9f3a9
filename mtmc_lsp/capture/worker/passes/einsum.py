"""Products of two tensors in Einstein's notation as matrix products, as people who write ``@`` have them. Runs in workers.

PyTorch goes over axes of size 1 and orders in which sizes are no longer free to vary, which hides what a product is part of.
"""

from __future__ import annotations

import re
import string
from collections.abc import Callable, Sequence
from typing import Any

import torch

EQUATION = re.compile(r"(\.\.\.)?([A-Za-z]*),(\.\.\.)?([A-Za-z]*)->(\.\.\.)?([A-Za-z]*)")


def einsum_by(other: Callable[..., Any]) -> Callable[..., Any]:
    """``torch.einsum`` by matrix products, and by ``other`` where that would not be one."""

    def einsum(equation: str, operands: Sequence[torch.Tensor], *, path: Any = None) -> Any:
        product = _product(equation.replace(" ", ""), operands)
        return other(equation, operands, path=path) if product is None else product

    return einsum


def _product(equation: str, operands: Sequence[torch.Tensor]) -> torch.Tensor | None:
    labels = _labels(equation, operands)
    if labels is None:
        return None
    (a, b), (left, right, out) = operands, labels
    if any(len(set(own)) < len(own) for own in labels) or set(left) ^ set(right) != set(out) - (set(left) & set(right)):
        return None
    both = [label for label in left if label in right]
    if any(a.shape[left.index(label)] != b.shape[right.index(label)] for label in both):
        return None
    batch, summed = [label for label in both if label in out], [label for label in both if label not in out]
    rows, columns = [label for label in left if label not in right], [label for label in right if label not in left]
    if not summed or not rows or not columns:
        return None
    made = _matrices(a, b, left, right, (batch, rows, summed, columns))
    if made is None:
        return None
    value = torch.ops.aten.matmul.default(*made)
    if len(columns) > 1:
        value = value.unflatten(-1, [b.shape[right.index(label)] for label in columns])
    order = [*batch, *rows, *columns]
    return value if order == out else value.permute([order.index(label) for label in out])


def _labels(equation: str, operands: Sequence[torch.Tensor]) -> tuple[list[str], list[str], list[str]] | None:
    """The label of each axis of both operands and of the result; axes behind dots get some of their own."""
    found = EQUATION.fullmatch(equation)
    if found is None or len(operands) != 2:
        return None
    dots, texts = found.groups()[::2], found.groups()[1::2]
    more = [operand.ndim - len(text or "") for operand, text in zip(operands, texts, strict=False)]
    if any(number < 0 or (number > 0 and not dot) for number, dot in zip(more, dots, strict=False)):
        return None
    if any(dots) and (len(set(more)) > 1 or not all(dots)):
        return None
    free = [letter for letter in string.ascii_letters if letter not in equation][: more[0]]
    left, right, out = ([*(free if dot else []), *(text or "")] for dot, text in zip(dots, texts, strict=True))
    return (left, right, out) if len(free) == more[0] else None


def _matrices(
    a: torch.Tensor,
    b: torch.Tensor,
    left: list[str],
    right: list[str],
    kinds: tuple[list[str], list[str], list[str], list[str]],
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Both operands in the order of a matrix product; ``None`` where axes would have to be copied to lie side by side."""
    batch, rows, summed, columns = kinds
    if batch and len(rows) > 1:
        return None
    first, second = [*batch, *rows, *summed], [*batch, *summed, *columns]
    if first != left:
        if len(summed) > 1:
            return None
        a = a.permute([left.index(label) for label in first])
    if second != right:
        if len(summed) > 1 or len(columns) > 1:
            return None
        b = b.permute([right.index(label) for label in second])
    if len(summed) > 1:
        a, b = a.flatten(-len(summed)), b.flatten(len(batch), len(batch) + len(summed) - 1)
    return a, b if len(columns) == 1 else b.flatten(-len(columns))
