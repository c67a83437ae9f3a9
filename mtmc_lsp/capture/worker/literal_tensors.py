"""Constant tensors that the target writes out, such as ``torch.tensor([1, 2, 1])``."""

from __future__ import annotations

import math
from typing import Any

import torch

from mtmc_lsp.core.graph import Argument

MAX_LITERAL_ELEMENTS = 4096
"""Elements of the largest constant tensor that is written out in the generated launcher."""


def nested_literals(tensor: torch.Tensor) -> tuple[Argument, ...]:
    """The elements of a tensor as nested tuples, each with the fewest digits that give the same value."""

    def short(number: Any) -> Argument:
        if not isinstance(number, float) or not math.isfinite(number):
            return number  # type: ignore[no-any-return]
        texts = (float(f"{number:.{digits}g}") for digits in range(1, 18))
        return next(text for text in texts if torch.tensor(text, dtype=tensor.dtype).item() == number)

    def nested(value: Any) -> Any:
        return tuple(map(nested, value)) if isinstance(value, list) else short(value)

    literals: tuple[Argument, ...] = nested(tensor.tolist())
    return literals


def literal_inputs(program: Any) -> set[str]:
    """The inputs of an exported program that are constant tensors written out in the target, not tensors from elsewhere."""
    lift = torch.ops.aten.lift_fresh_copy.default
    constants = program.graph_signature.inputs_to_lifted_tensor_constants
    return {
        node.name
        for node in program.graph.nodes
        if node.name in constants
        and all(user.target is lift for user in node.users)
        and program.constants[constants[node.name]].numel() <= MAX_LITERAL_ELEMENTS
    }
