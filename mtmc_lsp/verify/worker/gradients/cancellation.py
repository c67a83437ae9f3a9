"""Gradients whose terms cancel, and elements of gradients that are 0 whatever rounding does. Runs in workers."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

import torch

ZERO_DRAWS = 2
"""Draws of noise that tell masked elements from cancelled ones: a sum of noisy terms is hardly ever exactly 0."""

Gradients = Mapping[int | str, torch.Tensor]
"""Tensors by number of result."""


@dataclass(frozen=True)
class Cancellation:
    """How the gradients of a case follow rounding errors of the user's code."""

    draws: tuple[Gradients, ...]
    """The doubtful gradients with random rounding errors."""
    zeros: Gradients
    """Where each draw, the reference and the oracle are exactly 0."""


def cancellation(
    expected: Gradients, exact: Gradients, doubtful: Collection[int | str], run: Callable[[int], Gradients], draws: int
) -> Cancellation:
    """Run the user's code with random rounding errors, if its gradients are in doubt or have elements that are 0.

    Args:
        expected: the reference's gradients.
        exact: the oracle's.
        doubtful: the gradients that are 0 or may be rounding noise.
        run: the reference's results in a draw.
        draws: the number of draws for doubtful gradients.
    """
    zeros = {i: (value == 0) & (exact[i] == 0) for i, value in expected.items()}
    has_zeros = any(bool(mask.any()) for mask in zeros.values())
    noisy: list[Gradients] = []
    try:
        for draw in range(draws if doubtful else ZERO_DRAWS if has_zeros else 0):
            results = run(draw)
            zeros = {i: mask & (results[i] == 0) for i, mask in zeros.items() if i in results}
            noisy.append({i: results[i] for i in doubtful if i in results})
    except torch.OutOfMemoryError:
        return Cancellation(tuple(noisy), {})
    return Cancellation(tuple(noisy), {i: mask for i, mask in zeros.items() if bool(mask.any())})
