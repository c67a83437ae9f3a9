"""Inputs of a case by distribution, and the comparison of results. Runs in workers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from mtmc_lsp.core.dtypes import EPSILON, TOLERANCE

ERROR_FACTOR = 8.0
"""An error may be this many times the reference's error, as in verification."""
FLOOR = 4.0
"""The error in units of the last place that is always permitted."""
SHAPES = {"large": 30.0, "tiny": 1e-3}
OFFSET = 4.0


def distribute(value: torch.Tensor, distribution: str) -> None:
    """Change random values in place to those of a distribution."""
    if value.dtype.itemsize == 1:
        # torch does not compute with float8.
        wide = value.float()
        distribute(wide, distribution)
        value.copy_(wide)
        return
    if distribution == "negative":
        value.abs_().neg_().sub_(OFFSET)
    elif distribution == "positive":
        value.abs_().add_(OFFSET)
    elif distribution in SHAPES:
        value.mul_(SHAPES[distribution])


def tensors_of(result: Sequence[Any]) -> list[torch.Tensor]:
    """The tensors among values."""
    return [value for value in result if isinstance(value, torch.Tensor)]


def difference(
    results: Sequence[torch.Tensor], wanted: Sequence[torch.Tensor], precise: Sequence[torch.Tensor] | None = None
) -> str:
    """How results differ, as a clause; empty if they do not.

    Args:
        precise: the expected results in float64, if they are known.
    """
    if len(results) != len(wanted):
        return f"it returns {len(results)} tensors instead of {len(wanted)}"
    oracles = precise if precise is not None and len(precise) == len(wanted) else wanted
    for result, other, oracle in zip(results, wanted, oracles, strict=True):
        if result.shape != other.shape:
            return f"a result has the shape {list(result.shape)} instead of {list(other.shape)}"
        one, two, exact = (tensor.detach().double() for tensor in (result, other, oracle))
        finite = torch.isfinite(exact) & torch.isfinite(two)
        if bool((~torch.isfinite(one) & finite).any()):
            return "a result has NaN or infinite elements where the expected one has none"
        if not finite.any():
            continue
        size = exact[finite].norm().clamp_min(1e-30)
        error, own = float((one - exact)[finite].norm() / size), float((two - exact)[finite].norm() / size)
        name = str(other.dtype).removeprefix("torch.")
        limit = TOLERANCE.get(name, 0.0)
        if precise is not None and name in EPSILON:
            limit = min(limit, max(ERROR_FACTOR * own, FLOOR * EPSILON[name]))
        if error > limit:
            return f"a result has a relative error of {error:.1e}"
    return ""
