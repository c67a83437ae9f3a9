"""Chooses how sure the ranker must be before a search ends: a search that ends too early loses speedup."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from mtmc_lsp.policies.model_file import ModelFile
from mtmc_lsp.policies.ranker import RankerModel, RankerPolicy
from mtmc_lsp.training.replay import geometric_mean, replay, replayed_pairs
from mtmc_lsp.training.tree import MeasuredTree

MARGINS = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0)
"""What may be subtracted from STOP's score."""
NEVER = 1e6
MOST_LOSS = 0.005
"""Share of the final geometric mean that stopping may cost."""


def best_stop_margin(tree: MeasuredTree, programs: Collection[str], model: ModelFile) -> float:
    """The least margin under which greedy replays end with the speedup of replays that never stop, but for :data:`MOST_LOSS`.

    Args:
        programs: ids of the validation families' programs. Without timed ones, the margin is 0.
    """
    pairs = replayed_pairs(tree, programs)

    def final(margin: float) -> float:
        policy = RankerPolicy(RankerModel(replace(model, header=replace(model.header, stop_margin=margin))))
        return geometric_mean([replay(tree, program, policy, device).speedup for program, device in pairs])

    if not pairs:
        return 0.0
    least = final(NEVER) * (1 - MOST_LOSS)
    return next((margin for margin in MARGINS if final(margin) >= least), MARGINS[-1])
