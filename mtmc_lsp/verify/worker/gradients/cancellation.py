"""Gradients whose terms cancel, and elements of gradients that are 0 whatever rounding does. Runs in workers."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

import torch

MOST_PAIRS = 8
"""Pairs of draws of coarse noise that tell masked elements from cancelled ones: a sum of noisy terms is hardly ever exactly 0.

The second draw of a pair is the opposite of the first: where rounding decides a sign, and the sign whether an element is 0, as in
a maximum of two multiples of a difference, one of both has the other sign. A pair that leaves the same elements 0 is the last.

Noise of one unit often leaves equal terms equal: two numbers that change by -1, 0, or 1 units stay equal in a third of all draws.
In bfloat16, noise of a quarter still leaves some numbers as they are, so coarse noise needs float64."""

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
    expected: Gradients,
    exact: Gradients,
    doubtful: Collection[int | str],
    run: Callable[[int], Gradients],
    coarse_run: Callable[[int], Gradients],
    draws: int,
) -> Cancellation:
    """Run the user's code with random rounding errors, if its gradients are in doubt or have elements that are 0.

    Args:
        expected: the reference's gradients, and its results that are 0.
        exact: the oracle's.
        doubtful: the gradients that are 0 or may be rounding noise.
        run: the reference's results, with rounding errors of one unit in the last place, by number of the draw.
        coarse_run: the oracle's results, with coarse noise, by number of the draw; an odd number has the opposite noise of the
            even one before it.
        draws: the number of draws for doubtful gradients.
    """
    zeros: Gradients = {i: (value == 0) & (exact[i] == 0) for i, value in expected.items()}
    noisy: list[Gradients] = []
    try:
        for draw in range(draws if doubtful else 0):
            results = run(draw)
            zeros = _also_zero(zeros, results)
            noisy.append({i: results[i] for i in doubtful if i in results})
        first, before, count = draws + draws % 2, -1, _count(zeros)
        for draw in range(first, first + 2 * MOST_PAIRS, 2):
            if count in (0, before):
                break
            zeros = _also_zero(_also_zero(zeros, coarse_run(draw)), coarse_run(draw + 1))
            before, count = count, _count(zeros)
    except torch.OutOfMemoryError:
        return Cancellation(tuple(noisy), {})
    return Cancellation(tuple(noisy), {i: mask for i, mask in zeros.items() if bool(mask.any())})


def _count(masks: Gradients) -> int:
    """The number of elements in the masks."""
    return sum(int(mask.sum()) for mask in masks.values())


def _also_zero(zeros: Gradients, results: Gradients) -> Gradients:
    """The masks without the elements that are not 0 in these results."""
    return {i: mask & (results[i] == 0) for i, mask in zeros.items() if i in results}
