"""Expresses einsums of two tensors as matrix products, as if the user had written ``@``. Runs in workers.

PyTorch's decomposition inserts axes of size 1 and permutations with fixed sizes, which hides the structure of the product.
"""

from __future__ import annotations

import re
import string
from collections.abc import Callable, Sequence
from typing import Any

import torch

EQUATION = re.compile(r"(\.\.\.)?([A-Za-z]*),(\.\.\.)?([A-Za-z]*)->(\.\.\.)?([A-Za-z]*)")


def einsum_with_fallback(fallback: Callable[..., Any]) -> Callable[..., Any]:
    """``torch.einsum`` as a matrix product, with ``fallback`` for all other cases."""

    def einsum(equation: str, operands: Sequence[torch.Tensor], *, path: Any = None) -> Any:
        product = _product(equation.replace(" ", ""), operands)
        return fallback(equation, operands, path=path) if product is None else product

    return einsum


def _product(equation: str, operands: Sequence[torch.Tensor]) -> torch.Tensor | None:
    labels = _labels(equation, operands)
    if labels is None:
        return None
    (a, b), (left, right, out) = operands, labels
    if any(len(set(axes)) < len(axes) for axes in labels) or set(left) ^ set(right) != set(out) - (
        set(left) & set(right)
    ):
        return None
    shared = [label for label in left if label in right]
    if any(a.shape[left.index(label)] != b.shape[right.index(label)] for label in shared):
        return None
    batch, summed = [label for label in shared if label in out], [label for label in shared if label not in out]
    rows, columns = [label for label in left if label not in right], [label for label in right if label not in left]
    if not summed or not rows or not columns:
        return None
    matrices = _matrices(a, b, left, right, (batch, rows, summed, columns))
    if matrices is None:
        return None
    value = torch.ops.aten.matmul.default(*matrices)
    if len(columns) > 1:
        value = value.unflatten(-1, [b.shape[right.index(label)] for label in columns])
    order = [*batch, *rows, *columns]
    return value if order == out else value.permute([order.index(label) for label in out])


def _labels(equation: str, operands: Sequence[torch.Tensor]) -> tuple[list[str], list[str], list[str]] | None:
    """The axis labels of both operands and of the result. Axes of an ellipsis get unused letters."""
    match = EQUATION.fullmatch(equation)
    if match is None or len(operands) != 2:
        return None
    dots, label_texts = match.groups()[::2], match.groups()[1::2]
    ellipsis_ranks = [operand.ndim - len(text or "") for operand, text in zip(operands, label_texts, strict=False)]
    if any(number < 0 or (number > 0 and not dot) for number, dot in zip(ellipsis_ranks, dots, strict=False)):
        return None
    if any(dots) and (len(set(ellipsis_ranks)) > 1 or not all(dots)):
        return None
    ellipsis_labels = [letter for letter in string.ascii_letters if letter not in equation][: ellipsis_ranks[0]]
    left, right, out = (
        [*(ellipsis_labels if dot else []), *(text or "")] for dot, text in zip(dots, label_texts, strict=True)
    )
    return (left, right, out) if len(ellipsis_labels) == ellipsis_ranks[0] else None


def _matrices(
    a: torch.Tensor,
    b: torch.Tensor,
    left: list[str],
    right: list[str],
    kinds: tuple[list[str], list[str], list[str], list[str]],
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Both operands permuted for a matrix product; ``None`` if that needs a copy to make axes adjacent."""
    batch, rows, summed, columns = kinds
    if batch and len(rows) > 1:
        return None
    left_order, right_order = [*batch, *rows, *summed], [*batch, *summed, *columns]
    if left_order != left:
        if len(summed) > 1:
            return None
        a = a.permute([left.index(label) for label in left_order])
    if right_order != right:
        if len(summed) > 1 or len(columns) > 1:
            return None
        b = b.permute([right.index(label) for label in right_order])
    if len(summed) > 1:
        a, b = a.flatten(-len(summed)), b.flatten(len(batch), len(batch) + len(summed) - 1)
    return a, b if len(columns) == 1 else b.flatten(-len(columns))
