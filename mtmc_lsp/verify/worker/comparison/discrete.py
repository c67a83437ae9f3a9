"""Compares integer and boolean results: values on an edge, and indices of extreme values. Runs in workers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from mtmc_lsp.verify.worker.comparison.distances import NOISE


def discrete_difference(
    mine: torch.Tensor, own: torch.Tensor, oracle: Any, near: float, ties: Mapping[str, Any] | None, factor: float
) -> str:
    """What is wrong with an integer or boolean result.

    Rounding decides where a value lies on an edge (``round(x / scale)``, ``x > threshold``): as many elements may be another
    than the oracle's as ``factor`` times those of the user's own code, or of the oracle on inputs that moved by rounding
    (``near``, a part of all), and by no more than the own ones are. An index may differ where the values at both places tie.

    Args:
        mine: the candidate's result.
        own: that of the user's own code.
        oracle: the float64 oracle's.
        near: how far the oracle moves with rounding, as a part of its elements.
        ties: of indices: ``values`` they were chosen from, along ``dim``; ``epsilon``, up to what part of them floats tie;
            ``is_order``, whether each row's are several, which then must be different ones.
        factor: how many times the user's own differences are allowed.
    """
    wrong = mine != own
    if ties is not None and bool(wrong.any()):
        values, dim = ties["values"], ties["dim"]
        a, b = (_pick(values, index, dim) for index in (mine, own))
        if a is not None and b is not None:
            wrong &= ~_tie(a, b, ties["epsilon"], is_order=ties["is_order"]).view(wrong.shape)
        if ties["is_order"] and mine.dim():
            ordered = mine.sort(dim).values
            repeated = int((ordered.diff(dim=dim) == 0).sum())
            if repeated:
                return f"{repeated} indices are given twice"
    count = int(wrong.sum())
    if not count:
        return ""
    detail = f"{count} of {own.numel()} elements differ"
    if ties is not None or not isinstance(oracle, torch.Tensor) or oracle.shape != own.shape:
        return detail
    own_wrong, moved = int((own != oracle).sum()), near * own.numel()
    allowed = min(factor * max(own_wrong, moved), max(2.0 * own_wrong, NOISE * own.numel()))
    if not allowed:
        return detail
    count = int((mine != oracle).sum())
    if count <= allowed and _furthest(mine, oracle) <= max(1, _furthest(own, oracle)):
        return ""
    return f"{detail}; {count} from the oracle's, of the user's own code {own_wrong}, allowed are {int(allowed)}"


def _tie(mine: torch.Tensor, own: torch.Tensor, epsilon: float, *, is_order: bool) -> torch.Tensor:
    """Where values are as good as the ones chosen.

    Equal ones are, infinite ones too; finite floats are that differ by rounding alone; integers and truth values have none.
    Of several NaN torch takes the first as the extreme one, so no other index is right; an order leaves open which comes first.
    """
    same = mine == own
    if not own.is_floating_point():
        return same
    close = torch.isfinite(mine) & torch.isfinite(own) & ((mine - own).abs() <= epsilon * own.abs())
    return same | close | (torch.isnan(mine) & torch.isnan(own)) if is_order else same | close


def _furthest(result: torch.Tensor, oracle: torch.Tensor) -> int:
    """The largest difference of two integer results."""
    return int((result.to(torch.int64) - oracle.to(torch.int64)).abs().max())


def _pick(values: torch.Tensor, index: torch.Tensor, dim: int | None) -> torch.Tensor | None:
    """The values at the indices that a reduction over ``dim`` returned; None where an index is out of range."""
    if dim is None:
        values, dim = values.flatten(), 0
    if not values.dim():
        return values
    places = index if index.dim() == values.dim() else index.unsqueeze(dim)
    if bool((places < 0).any()) or bool((places >= values.shape[dim]).any()):
        return None
    return values.gather(dim, places)
