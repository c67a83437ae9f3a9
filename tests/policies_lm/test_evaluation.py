"""Replays on measured trees compare the policy with the roofline planner and with chance."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from mtmc_lsp.core.action import MacroAction
from mtmc_lsp.core.learning.policy import Choice
from mtmc_lsp.core.protocols import State
from mtmc_lsp.programs.splits import Split
from mtmc_lsp.training.lm.evaluation import LM, evaluate_lm
from mtmc_lsp.training.replays import RANDOM, ROOFLINE
from tests.policies.trees import learnable_tree


class KnowsTheRule:
    """Of a learnable tree: exactly the actions that change rounding gain."""

    name = "lm"

    def choices(self, state: State, actions: Sequence[MacroAction]) -> list[Choice]:
        best = [action for action in actions if action.changes_rounding]
        ordered = [*best, None, *(action for action in actions if not action.changes_rounding)]
        return [Choice(action, 1 / (index + 2), "rule") for index, action in enumerate(ordered)]


def test_a_policy_that_knows_the_rule_reaches_the_best_with_one_candidate() -> None:
    tree = learnable_tree(10)
    evaluation = evaluate_lm(tree, KnowsTheRule(), lambda program: Split.TEST, Split.TEST, 100)
    assert evaluation is not None and evaluation.replayed.programs == 10
    assert evaluation.replayed.best_in_tree == pytest.approx(1.5)
    assert evaluation.replayed.replays[LM].by_candidates[1] == pytest.approx(1.5)
    assert evaluation.replayed.replays[LM].candidates == 1.0 and evaluation.replayed.replays[LM].ends == {"stopped": 10}
    for name in (ROOFLINE, RANDOM):
        assert evaluation.replayed.replays[name].by_candidates[1] < 1.4
        assert evaluation.replayed.replays[name].candidates > 1.0
    assert "lm-greedy       1.500x" in "\n".join(evaluation.lines)


def test_a_limit_of_programs_holds_and_a_part_without_programs_has_no_result() -> None:
    tree = learnable_tree(10)
    few = evaluate_lm(tree, KnowsTheRule(), lambda program: Split.TEST, Split.TEST, 3)
    assert few is not None and few.replayed.programs == 3
    assert evaluate_lm(tree, KnowsTheRule(), lambda program: Split.TEST, Split.VALIDATION, 3) is None
