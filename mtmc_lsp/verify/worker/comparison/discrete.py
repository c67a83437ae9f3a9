"""Compares integer and boolean results: values next to a rounding edge, and indices of extreme values. Runs in workers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from mtmc_lsp.verify.worker.comparison.distances import NOISE


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
    inputs. Each difference may be as large as the largest difference of the reference. An index may differ if the values at
    both indices tie.

    Args:
        candidate: the candidate's result.
        reference: the reference's result.
        oracle: the float64 oracle's result.
        sensitivity: the part of the oracle's elements that rounding changes.
        ties: for indices: the ``values`` that they were selected from, along ``dim``; ``epsilon``, the relative difference up to
            which floats tie; ``is_order``, whether each row has several indices, which must be distinct.
        factor: how many times the reference's differences are permitted.
    """
    differs = candidate != reference
    if ties is not None and bool(differs.any()):
        values, dim = ties["values"], ties["dim"]
        a, b = (_values_at(values, index, dim) for index in (candidate, reference))
        if a is not None and b is not None:
            differs &= ~_tie(a, b, ties["epsilon"], is_order=ties["is_order"]).view(differs.shape)
        if ties["is_order"] and candidate.dim():
            ordered = candidate.sort(dim).values
            repeated = int((ordered.diff(dim=dim) == 0).sum())
            if repeated:
                return f"{repeated} indices occur twice"
    count = int(differs.sum())
    if not count:
        return ""
    detail = f"{count} of {reference.numel()} elements differ"
    if ties is not None or not isinstance(oracle, torch.Tensor) or oracle.shape != reference.shape:
        return detail
    reference_count, moved = int((reference != oracle).sum()), sensitivity * reference.numel()
    limit = min(factor * max(reference_count, moved), max(2.0 * reference_count, NOISE * reference.numel()))
    if not limit:
        return detail
    count = int((candidate != oracle).sum())
    if count <= limit and _largest_difference(candidate, oracle) <= max(1, _largest_difference(reference, oracle)):
        return ""
    return (
        f"{detail}; {count} differ from the float64 oracle, {reference_count} in your code, the limit is {int(limit)}"
    )


def _tie(candidate: torch.Tensor, reference: torch.Tensor, epsilon: float, *, is_order: bool) -> torch.Tensor:
    """Where the values at the candidate's indices are as good as those at the reference's.

    Equal values tie, infinite ones included. Finite floats tie if they differ by rounding alone; integers and booleans never
    differ by rounding. Torch returns the first NaN as the extreme value, so no other index is correct. A sort leaves the order
    of NaNs open.
    """
    is_equal = candidate == reference
    if not reference.is_floating_point():
        return is_equal
    is_finite = torch.isfinite(candidate) & torch.isfinite(reference)
    is_close = is_finite & ((candidate - reference).abs() <= epsilon * reference.abs())
    both_nan = torch.isnan(candidate) & torch.isnan(reference)
    return is_equal | is_close | both_nan if is_order else is_equal | is_close


def _largest_difference(result: torch.Tensor, oracle: torch.Tensor) -> int:
    """The largest difference of two integer results."""
    return int((result.to(torch.int64) - oracle.to(torch.int64)).abs().max())


def _values_at(values: torch.Tensor, index: torch.Tensor, dim: int | None) -> torch.Tensor | None:
    """The values at the indices that a reduction over ``dim`` returned; None if an index is out of range."""
    if dim is None:
        values, dim = values.flatten(), 0
    if not values.dim():
        return values
    indices = index if index.dim() == values.dim() else index.unsqueeze(dim)
    if bool((indices < 0).any()) or bool((indices >= values.shape[dim]).any()):
        return None
    return values.gather(dim, indices)
