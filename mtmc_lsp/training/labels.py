"""The grade of each choice for LambdaRank: failures are the worst, then slower steps, STOP, and gains by their size."""

from __future__ import annotations

from bisect import bisect_right

from mtmc_lsp.core.learning.transitions import Outcome, Transition
from mtmc_lsp.policies.history import FAILURES

STOP_GAIN = 0.02
"""STOP is better than an action that gains less than this share: a step costs seconds."""
GAINS = (1 + STOP_GAIN, 1.1, 1.3, 2.0, 4.0)
"""Speedups from which a gain has the next grade."""
FAILED, SLOWER, SMALL_GAIN, STOP = range(4)
BEST = STOP + len(GAINS)
LABEL_GAIN = tuple((1 << grade) - 1 for grade in range(BEST + 1))
"""The gain of each grade in NDCG."""
UNTIMED_CORRECT = SLOWER
"""The grade of a correct version in a group where nothing was timed. Only failures are known to be worse."""


def grade_of(transition: Transition, *, with_failures: bool = True, reached: float = 1.0) -> int:
    """The grade of an action.

    Args:
        reached: the speedup over the present version that later steps reach from a slower one that a run accepts as a base.
        with_failures: whether failures are worse than slower steps; false for the ablation of that part of the reward.
    """
    if transition.outcome in FAILURES:
        return FAILED if with_failures else SLOWER
    if transition.outcome is Outcome.CORRECT:
        return UNTIMED_CORRECT
    ratio = transition.ratio
    if transition.outcome is Outcome.SLOWER or ratio is None:
        # Two steps for one gain: one of them counts as its cost.
        ratio = reached * (1 - STOP_GAIN)
        if ratio <= 1.0:
            return SLOWER
    grade = bisect_right(GAINS, ratio)
    return STOP + grade if grade else SMALL_GAIN
