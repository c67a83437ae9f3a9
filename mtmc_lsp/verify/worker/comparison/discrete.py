"""Compares integer and boolean results: values next to a rounding edge, and indices of scores. Runs in workers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from mtmc_lsp.verify.error_limits import NOISE

MOST_ALTERNATIVES = 1 << 24
"""Limit for the alternatives of one result that are stored."""


@dataclass
class Ties:
    """Which other values an integer or boolean result may have because scores tie; see :mod:`mtmc_lsp.verify.worker.choices`."""

    choices: list[Mapping[str, Any]] = field(default_factory=list)
    """Choices whose indices are the result: ``values``, the scores; ``error``, how far rounding moves each of them; ``dim``,
    the dimension that was searched; ``shape`` of the indices in it; ``is_order``, whether each row has several distinct
    indices."""
    alternatives: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)
    """Elements that other choices change, as positions in the flattened result, and their values then."""
    epsilon: float = 0.0
    """The machine epsilon of the computation."""

    def add_draw(self, result: torch.Tensor, oracle: torch.Tensor) -> None:
        """Add the oracle's result with other choices."""
        if result.shape != oracle.shape:
            return
        positions = (result != oracle).flatten().nonzero().flatten()
        stored = sum(len(held) for held, _ in self.alternatives)
        if len(positions) and stored + len(positions) <= MOST_ALTERNATIVES:
            self.alternatives.append((positions, result.flatten()[positions]))


def discrete_difference(
    candidate: torch.Tensor,
    reference: torch.Tensor,
    oracle: Any,
    sensitivity: float,
    ties: Mapping[str, Any] | None,
    factor: float,
) -> str:
    """The error of an integer or boolean result as text; empty if there is none.

    Rounding decides the result of ``round(x / scale)`` or ``x > threshold`` if a value is next to an edge. The number of
    elements that differ from the oracle may be ``factor`` times that of the reference, or that of the oracle on perturbed
    inputs. Each difference may be as large as the largest difference of the reference.

    An index of a score must be right at each element: equal to the reference's, or the index of a score that ties with the
    reference's. A result that depends on such an index may have the values that the oracle has with other choices among ties.

    Args:
        candidate: the candidate's result.
        reference: the reference's result.
        oracle: the float64 oracle's result.
        sensitivity: the part of the oracle's elements that rounding changes.
        ties: the fields of :class:`Ties`; ``None`` if no index of a score decides the result.
        factor: how many times the reference's differences are permitted.
    """
    differs = candidate != reference
    for choice in ties["choices"] if ties is not None else ():
        index = candidate.reshape(choice["shape"]).long()
        problem = _repeated(index, choice)
        if problem:
            return problem
        if bool(differs.any()):
            other = reference.reshape(choice["shape"]).long()
            differs &= ~_ties(index, other, choice, ties["epsilon"] if ties else 0.0, factor).view(differs.shape)
    if ties is not None:
        for positions, values in ties["alternatives"]:
            flat = differs.flatten()
            flat[positions] &= candidate.flatten()[positions] != values
            differs = flat.view(differs.shape)
    count = int(differs.sum())
    if not count:
        return ""
    detail = f"{count} of {reference.numel()} elements differ"
    if (
        (ties is not None and ties["choices"])
        or not isinstance(oracle, torch.Tensor)
        or oracle.shape != reference.shape
    ):
        return detail
    reference_count, moved = int((reference != oracle).sum()), sensitivity * reference.numel()
    limit = min(factor * max(reference_count, moved), max(2.0 * reference_count, NOISE * reference.numel()))
    if not limit:
        return detail
    count = int((candidate != oracle).sum())
    if count <= limit:
        largest, allowed = (_largest_difference(result, oracle) for result in (candidate, reference))
        if largest <= max(1, allowed):
            return ""
        return f"{detail}, by up to {largest} from the float64 oracle; your code differs from it by up to {allowed}"
    return (
        f"{detail}; {count} differ from the float64 oracle, {reference_count} in your code, the limit is {int(limit)}"
    )


def _repeated(index: torch.Tensor, choice: Mapping[str, Any]) -> str:
    """The error of an order in which an index occurs twice."""
    if not choice["is_order"]:
        return ""
    ordered = index.sort(choice["dim"]).values
    repeated = int((ordered.diff(dim=choice["dim"]) == 0).sum())
    return f"{repeated} indices occur twice" if repeated else ""


def _ties(
    candidate: torch.Tensor, reference: torch.Tensor, choice: Mapping[str, Any], epsilon: float, factor: float
) -> torch.Tensor:
    """Where the scores at the candidate's indices are as good as those at the reference's.

    Equal scores tie, infinite ones included. Finite floats tie if they differ by rounding alone: by ``factor`` times the error
    of the reference's scores, or a few units in the last place. Integers and booleans never differ by rounding. Torch returns
    the first NaN as the extreme value, so no other index is correct. A sort leaves the order of NaNs open.
    """
    values, dim = choice["values"], choice["dim"]
    is_inside = (candidate >= 0) & (candidate < values.shape[dim])
    inside = candidate.where(is_inside, 0)
    a, b = (values.gather(dim, index) for index in (inside, reference))
    is_tie = a == b
    if values.is_floating_point():
        errors = torch.maximum(*(choice["error"].gather(dim, index) for index in (inside, reference)))
        is_finite = torch.isfinite(a) & torch.isfinite(b)
        is_tie |= is_finite & ((a - b).abs() <= tie_limits(b, errors, epsilon, factor))
        if choice["is_order"]:
            is_tie |= torch.isnan(a) & torch.isnan(b)
    return is_tie & is_inside


def tie_limits(scores: torch.Tensor, errors: torch.Tensor, epsilon: float, factor: float) -> torch.Tensor:
    """The differences up to which scores tie: ``factor`` times their errors, or a few units in the last place."""
    return torch.maximum(factor * errors, 4 * epsilon * scores.abs().nan_to_num(0.0, 0.0, 0.0).double())


def _largest_difference(result: torch.Tensor, oracle: torch.Tensor) -> int:
    """The largest difference of two integer results."""
    return int((result.to(torch.int64) - oracle.to(torch.int64)).abs().max())
