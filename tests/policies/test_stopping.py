"""When the ranker may end a search: not earlier than the replayed speedups allow."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from mtmc_lsp.core.action import ActionKind
from mtmc_lsp.core.learning.transitions import Outcome
from mtmc_lsp.policies.feature_names import FEATURES
from mtmc_lsp.policies.model_file import ModelFile, ModelHeader
from mtmc_lsp.training import stopping
from mtmc_lsp.training.stopping import best_stop_margin
from mtmc_lsp.training.tree import MeasuredTree
from tests.policies.trees import action, edge, tree_of

FIRST, SECOND = action(ActionKind.FUSE), action(ActionKind.AUTOTUNE)
MODEL = ModelFile(ModelHeader(FEATURES, temperature=1.0, stop_gain=0.02), "")


class LikesStop:
    """Scores STOP by 1.2 above all actions."""

    def __init__(self, model: ModelFile) -> None:
        self.header = model.header

    def scores(self, rows: Sequence[Sequence[float]]) -> list[float]:
        return [*(0.0 for _ in rows[1:]), 1.2]

    def contributions(self, rows: Sequence[Sequence[float]]) -> list[list[float]]:
        return [[0.0] * (len(FEATURES) + 1) for _ in rows]


def tree_with_second_step(outcome: Outcome, ratio: float) -> MeasuredTree:
    return tree_of(
        [
            edge("p/0", FIRST, Outcome.FASTER, 1.5, result="p/1"),
            edge("p/1", SECOND, outcome, ratio, result="p/2"),
        ]
    )


@pytest.mark.parametrize(
    ("outcome", "ratio", "margin"),
    [(Outcome.FASTER, 1.4, 1.5), (Outcome.FASTER, 1.004, 0.0), (Outcome.SLOWER, 0.7, 0.0)],
    ids=["a lost gain", "a gain within noise", "nothing to gain"],
)
def test_a_search_ends_early_only_where_that_costs_no_speedup(
    outcome: Outcome, ratio: float, margin: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stopping, "RankerModel", LikesStop)
    assert best_stop_margin(tree_with_second_step(outcome, ratio), ["p"], MODEL) == margin


def test_without_timed_programs_stop_has_its_score() -> None:
    assert best_stop_margin(tree_of([edge("p/0", FIRST, Outcome.WRONG)]), ["p"], MODEL) == 0.0
