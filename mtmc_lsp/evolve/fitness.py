"""Fitness of a version: a vector of its speed on every workload. It must not be slower than its parent on any of them."""

from __future__ import annotations

import math
from collections.abc import Sequence

from mtmc_lsp.evolve.lineage import TOLERANCE, Score, Version, geometric_mean
from mtmc_lsp.evolve.trials import TrialResult

ERRORS = 2.0
"""Standard errors that a difference must exceed."""


def scores_of(result: TrialResult, parent: Version) -> tuple[Score, ...]:
    """The scores of a tried version, from its speed over its parent."""
    return tuple(
        Score(item.us, before.gain * item.ratio, item.ratio, item.error)
        for item, before in zip(result.workloads, parent.scores, strict=True)
    )


def slower_on(scores: Sequence[Score]) -> list[int]:
    """The workloads on which a version is slower than its parent beyond noise."""
    return [i for i, score in enumerate(scores) if score.ratio + ERRORS * score.error < 1.0 - TOLERANCE]


def is_faster(scores: Sequence[Score]) -> bool:
    """Whether a version is faster than its parent beyond noise, on all workloads together."""
    ratio = geometric_mean([score.ratio for score in scores])
    error = max((score.error for score in scores), default=0.0) / math.sqrt(max(1, len(scores)))
    return ratio - ERRORS * error > 1.0 + TOLERANCE


def ratio_text(scores: Sequence[Score]) -> str:
    """The speed over the parent as text: ``1.25x``."""
    return f"{geometric_mean([score.ratio for score in scores]):.2f}x"
