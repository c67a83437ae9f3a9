"""Products in the body of a loop that are elementwise, where one operand has all of their dimensions, and reads of parts.

``einsum("bdn,bn->bd", x, c)`` multiplies each element of ``x`` once. As a multiplication and a sum it runs step by step.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from mtmc_lsp.capture.worker.loops.iteration import known

MATRIX_PRODUCTS = (torch.matmul, torch.bmm, torch.Tensor.matmul, torch.Tensor.bmm, torch.Tensor.__matmul__)

POSITIONS: dict[Any, Any] = {
    torch.argmax: torch.max,
    torch.Tensor.argmax: torch.max,
    torch.argmin: torch.min,
    torch.Tensor.argmin: torch.min,
}
"""Functions that return positions, with those that return the values, too."""

VECTOR_PRODUCTS = (
    *MATRIX_PRODUCTS,
    torch.mv,
    torch.Tensor.mv,
    torch.dot,
    torch.Tensor.dot,
    torch.inner,
    torch.Tensor.inner,
)
OUTER_PRODUCTS = (torch.outer, torch.ger, torch.Tensor.outer, torch.Tensor.ger)


def vector_product(function: Any, args: tuple[Any, ...]) -> torch.Tensor | None:
    """The result of a product with a vector as a product of matrices of one row; ``None`` if it is another call."""
    if len(args) != 2 or not all(isinstance(item, torch.Tensor) for item in args):
        return None
    left, right = args
    ranks = left.dim(), right.dim()
    if function in OUTER_PRODUCTS and ranks == (1, 1):
        return left.unsqueeze(1) * right
    if function not in VECTOR_PRODUCTS or left.dtype != right.dtype:
        return None
    if ranks == (1, 1):
        return (left * right).sum(0)
    if ranks == (2, 1) and function not in (torch.inner, torch.Tensor.inner):
        return torch.mm(right.unsqueeze(0), left.t()).squeeze(0)
    if ranks == (1, 2) and function not in (torch.inner, torch.Tensor.inner):
        return torch.mm(left.unsqueeze(0), right).squeeze(0)
    return None


def padded_by_dimension(function: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> torch.Tensor | None:
    """``F.pad`` of several dimensions as one pad for each of them; ``None`` if it is another call."""
    if function is not torch.nn.functional.pad or len(args) > 4:
        return None
    given = {**dict(zip(("input", "pad", "mode", "value"), args, strict=False)), **kwargs}
    x, widths, value = given.get("input"), given.get("pad"), given.get("value")
    if given.get("mode", "constant") != "constant" or not isinstance(widths, (tuple, list)) or x is None:
        return None
    pairs = [tuple(widths[i : i + 2]) for i in range(0, len(widths), 2)]
    padded = [i for i, pair in enumerate(pairs) if pair != (0, 0)]
    if len(padded) < 2:
        return None
    for i in padded:
        x = torch.nn.functional.pad(x, (0, 0) * i + pairs[i], value=value)
    return x


def elementwise_product(function: Any, args: tuple[Any, ...]) -> torch.Tensor | None:
    """The result of a product as a multiplication and a sum; ``None`` if it is another call, or combines more elements."""
    if function is torch.einsum and isinstance(args[0], str):
        operands = args[1] if len(args) == 2 and isinstance(args[1], (list, tuple)) else args[1:]
        return _einsum(args[0].replace(" ", ""), list(operands))
    if function in MATRIX_PRODUCTS and len(args) == 2 and all(isinstance(item, torch.Tensor) for item in args):
        left, right = args
        if left.dim() > 2 and right.dim() > 2 and _is_one(left.shape[-1]) and _is_one(right.shape[-2]):
            return left * right
        if left.dim() > 2 and right.dim() > 2 and _is_one(right.shape[-1]):
            return (left * right.transpose(-1, -2)).sum(-1, keepdim=True)
        if left.dim() > 2 and right.dim() > 2 and _is_one(left.shape[-2]):
            return (left.transpose(-1, -2) * right).sum(-2, keepdim=True)
    return None


def selected_parts(function: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[torch.Tensor, ...] | None:
    """``x.unbind(dim)`` as slices of one element each; ``None`` if it is another call, or the size may change."""
    if function not in (torch.unbind, torch.Tensor.unbind):
        return None
    given = {**dict(zip(("input", "dim"), args, strict=False)), **kwargs}
    x, dim = given.pop("input", None), given.pop("dim", 0)
    if (
        given
        or not isinstance(x, torch.Tensor)
        or not isinstance(dim, int)
        or not x.dim()
        or type(x.shape[dim]) is not int
    ):
        return None
    return tuple(x.select(dim, i) for i in range(x.shape[dim]))


def compared_gather(function: Any, args: tuple[Any, ...]) -> torch.Tensor | None:
    """``source.gather(dim, index)`` as a sum over ``dim`` of the element whose number is the index.

    A body reads so at an index that depends on its state, as the path of a Viterbi search does. ``None`` if it is another call.
    """
    if function not in (torch.gather, torch.Tensor.gather) or len(args) != 3 or not isinstance(args[1], int):
        return None
    source, dim, index = args
    if not source.dim() or source.dim() != index.dim():
        return None
    dim %= source.dim()
    if not all(known(source.shape[d] == index.shape[d]) for d in range(source.dim()) if d != dim):
        return None
    numbers = torch.arange(source.shape[dim], device=source.device)
    is_read = index.unsqueeze(dim) == numbers.reshape([-1] + [1] * (source.dim() - dim))
    values = source.unsqueeze(dim + 1)
    if source.dtype is torch.bool:
        return (is_read & values).any(dim)
    return torch.where(is_read, values, torch.zeros_like(values)).sum(dim, dtype=source.dtype)


def compared_position(function: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> torch.Tensor | None:
    """``argmax`` and ``argmin`` as the indices of ``max`` and ``min``, and ``one_hot`` as a comparison.

    ``None`` if it is another call, or one of all elements.
    """
    extremum = POSITIONS.get(function)
    if extremum is not None and len(args) <= 3:
        given = {**dict(zip(("input", "dim", "keepdim"), args, strict=False)), **kwargs}
        if isinstance(given.get("dim"), int) and given["input"].dim() and given.keys() <= {"input", "dim", "keepdim"}:
            indices: torch.Tensor = extremum(given["input"], given["dim"], given.get("keepdim", False)).indices
            return indices
    if function is torch.nn.functional.one_hot and args:
        given = {**dict(zip(("tensor", "num_classes"), args, strict=False)), **kwargs}
        classes = given.get("num_classes", -1)
        if known(classes > 0):
            return (args[0].unsqueeze(-1) == torch.arange(classes, device=args[0].device)).to(torch.int64)
    return None


def _einsum(equation: str, operands: list[torch.Tensor]) -> torch.Tensor | None:
    inputs, arrow, output = equation.partition("->")
    terms = inputs.split(",")
    labels = "".join(dict.fromkeys(inputs.replace(",", "")))
    if not arrow or not labels.isalpha() or len(terms) != len(operands):
        return None
    if any(len(set(term)) < len(term) for term in (*terms, output)) or not set(output) <= set(labels):
        return None
    if set(output) != set(labels) and not any(set(term) == set(labels) for term in terms):
        return None
    # The dimensions of the result come first, in its order; then those that are summed.
    order = output + "".join(label for label in labels if label not in output)
    total: Any = None
    for term, operand in zip(terms, operands, strict=True):
        if operand.dim() != len(term):
            return None
        present = [label for label in order if label in term]
        aligned = operand.permute([term.index(label) for label in present])
        for dim, label in enumerate(order):
            aligned = aligned if label in term else aligned.unsqueeze(dim)
        total = aligned if total is None else total * aligned
    summed = list(range(len(output), len(order)))
    result: torch.Tensor = total.sum(summed) if summed else total
    return result


def _is_one(size: Any) -> bool:
    return isinstance(size, int) and size == 1
