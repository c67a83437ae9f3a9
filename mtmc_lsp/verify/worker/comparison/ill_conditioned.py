"""What holds of results that rounding moves far, so that the norm of their errors says little. Runs in workers.

An error of the user's own code that is not small beside its result has one of two reasons. Either rounding is magnified, for
something cancels or a value lies on an edge. Then the float64 oracle itself scatters as far when its operations round by chance
to the user's dtypes, and it scatters at *these elements*: elsewhere a candidate is as exact as ever, and what is not is wrong.
Or the oracle does not scatter, and computes something else than the user's code: then that code's own result is what counts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from mtmc_lsp.core.dtypes import EPSILON
from mtmc_lsp.verify.worker.comparison.distances import PIECE, Distances, comparable, finite, pieces

OUTLIERS = 0.01
"""The part of the elements that may be further off than their scatter: at edges which no draw happened to cross."""


@dataclass
class IllConditioned:
    """A result whose own error is far from small."""

    spread: torch.Tensor | None = None
    """How far each element of the oracle scatters; ``None`` for results so large that there is no room for it."""
    is_strange: bool = False
    """Whether the own error is not explained by that."""

    def take_in(self, there: torch.Tensor, oracle: torch.Tensor) -> None:
        """Note one more draw of the oracle's result."""
        if oracle.numel() > PIECE or there.shape != oracle.shape:
            return
        apart = (there.double() - oracle.double()).abs().nan_to_num_(nan=torch.inf, posinf=torch.inf).float()
        self.spread = apart if self.spread is None else torch.maximum(self.spread, apart)


def singly(
    mine: torch.Tensor, own: torch.Tensor, oracle: torch.Tensor, spread: torch.Tensor, factor: float
) -> torch.Tensor:
    """Counts of elements that are further off than ``factor`` times what rounding explains, that zeros would be, and of all."""
    found = torch.zeros(3, dtype=torch.float64, device=own.device)
    epsilon = EPSILON[str(own.dtype).removeprefix("torch.")]
    for part, theirs, truth, scatter in pieces(mine, own, oracle, spread):
        told = comparable(theirs, truth)
        exact = truth.double()
        allowed = factor * torch.maximum(scatter.double(), (theirs.double() - exact).abs()) + 4 * epsilon * exact.abs()
        outside, zeros = ((value.abs() > allowed) & told for value in (part.double() - exact, exact))
        found += torch.stack([each.sum() for each in (outside, zeros, told)])
    return found


def beside_own(mine: torch.Tensor, own: torch.Tensor) -> torch.Tensor:
    """The L2 distance of a result from the user's own, and that one's norm, where it is finite."""
    distances = Distances(own.device)
    for part, theirs in pieces(mine, own):
        distances.add(theirs, finite(theirs), part)
    return torch.stack([distances.apart[0], distances.scale])


def too_many(facts: Sequence[float]) -> tuple[str, bool]:
    """What is wrong by the counts of :func:`singly`, and whether they say anything: whether zeros would be wrong."""
    outside, zeros, count = map(int, facts)
    permitted = int(OUTLIERS * count)
    detail = f"{outside} of {count} elements are further off than rounding moves them, allowed are {permitted}"
    return detail if outside > permitted else "", zeros > permitted
