"""Checks for results that rounding moves far, for which the norm of the errors proves little. Runs in workers.

A large relative error of the reference has one of two causes. The first is magnified rounding: values cancel, or a value is next
to an edge. Then the float64 oracle varies as much if its operations round stochastically to the user's dtypes, and it varies at
*the same elements*: at the others a candidate must be as exact as usual. The second is that the oracle computes another function
than the reference. Then the oracle does not vary, and the candidate is compared with the reference's results.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from mtmc_lsp.core.dtypes import EPSILON
from mtmc_lsp.verify.error_limits import ElementCount
from mtmc_lsp.verify.worker.comparison.distances import PIECE, Distances, comparable, finite, pieces

OUTLIERS = 0.01
"""The part of the elements that may exceed their limit where values are next to edges: some are not crossed in any draw."""


SAMPLE = 1 << 16
"""About as many elements determine the typical rounding error. With the median of all, which sorts them, the comparison of a case
of ``rmsnorm_residual`` with 67 million elements took 0.1 instead of 0.02 s (H100)."""


@dataclass
class IllConditioned:
    """A reference result with a large error."""

    spread: torch.Tensor | None = None
    """How far each element of the oracle varies; ``None`` for results that are too large to store it."""
    is_unexplained: bool = False
    """Whether the reference's error is larger than rounding explains."""
    is_uneven: bool = False
    """Whether rounding may move some elements much further than others, although it moves the whole little."""
    is_partial: bool = False
    """Whether rounding is magnified at some elements only: ``outliers`` is then a part of these, and no other may differ."""
    edge: float = 0.0
    """Epsilon of the dtype that the code rounds to on the way. A value next to an edge between two of its numbers may be
    rounded to either, at other elements than in the draws."""
    outliers: float = OUTLIERS
    """The part of the elements that may exceed their limit."""

    def add_draw(self, result: torch.Tensor, oracle: torch.Tensor) -> None:
        """Add the oracle's result with stochastic rounding."""
        if oracle.numel() > PIECE or result.shape != oracle.shape:
            return
        difference = (result.double() - oracle.double()).abs().nan_to_num_(nan=torch.inf, posinf=torch.inf).float()
        self.spread = difference if self.spread is None else torch.maximum(self.spread, difference)


def elementwise_counts(
    candidate: torch.Tensor,
    reference: torch.Tensor,
    oracle: torch.Tensor,
    spread: torch.Tensor,
    factor: float,
    *,
    edge: float = 0.0,
) -> torch.Tensor:
    """Counts of elements: beyond ``factor`` times the rounding error, where zeros would be beyond it, and all; then the first
    and the last of these counts for the elements at which rounding is magnified.

    The rounding error of one element is known from few draws, which may all be small by chance. So an element may always have
    the largest error that chance gives one of so many elements with the typical error. Where draws exceed that, rounding is
    magnified.

    Args:
        edge: as in :class:`IllConditioned`.
    """
    counts = torch.zeros(5, dtype=torch.float64, device=reference.device)
    epsilon = EPSILON[str(reference.dtype).removeprefix("torch.")]
    for part, reference_part, oracle_part, spread_part in pieces(candidate, reference, oracle, spread):
        is_compared = comparable(reference_part, oracle_part)
        exact = oracle_part.double()
        rounding = torch.maximum(spread_part.double(), (reference_part.double() - exact).abs())
        ordinary = _largest_ordinary_error(rounding, is_compared & ((rounding > 0) | (exact != 0)))
        limit = factor * torch.maximum(rounding, ordinary) + max(4 * epsilon, edge) * exact.abs()
        outside, zeros = ((value.abs() > limit) & is_compared for value in (part.double() - exact, exact))
        magnified = (rounding > ordinary) & is_compared
        masks = (outside, zeros, is_compared, outside & magnified, magnified)
        counts += torch.stack([torch.count_nonzero(mask) for mask in masks])
    return counts


def _largest_ordinary_error(rounding: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """The largest of as many normal errors as there are elements; typical is the median of the elements that count."""
    # An odd step visits all columns of a power of two.
    step = rounding.numel() // SAMPLE | 1
    sample, counted = rounding.flatten()[::step], counts.flatten()[::step]
    typical = sample.masked_fill(~counted, torch.nan).nanmedian().nan_to_num(nan=0.0, posinf=0.0)
    return typical * math.sqrt(2.0 * math.log(2.0 * max(1, rounding.numel())))


def distance_from_reference(candidate: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
    """The L2 distance between the candidate's and the reference's result, and the reference's norm, where that is finite."""
    distances = Distances(reference.device)
    for part, reference_part in pieces(candidate, reference):
        distances.add(reference_part, finite(reference_part), part)
    return torch.stack([distances.values[0], distances.norm])


def judge_counts(
    counts: Sequence[float], outliers: float, name: str = "", *, is_partial: bool
) -> tuple[str, bool, ElementCount | None]:
    """The error according to :func:`elementwise_counts`, whether the check is conclusive (whether zeros would fail), and the
    number that decides; ``None`` where no element may differ.

    Args:
        outliers: the part of the elements that may exceed their limit.
        name: of the check.
        is_partial: whether it is a part of the elements at which rounding is magnified.
    """
    outside, zeros, count, outside_magnified, magnified = map(int, counts)
    limit, ordinary = int(outliers * (magnified if is_partial else count)), outside - outside_magnified
    detail = f"{outside} of {count} elements differ by more than rounding explains, the limit is {limit}"
    if is_partial and ordinary:
        detail = f"{ordinary} of {count - magnified} elements differ by more than rounding explains, the limit is 0"
        return detail, zeros > limit, None
    return detail if outside > limit else "", zeros > limit, ElementCount(name, outside, limit)
