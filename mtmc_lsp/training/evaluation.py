"""Evaluates a ranker on held-out families, and compares it with the roofline planner's order and with chance."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mtmc_lsp.policies.ranker import RankerModel
from mtmc_lsp.programs.splits import Split
from mtmc_lsp.training.dataset import SplitOf, groups_of
from mtmc_lsp.training.metrics import RankingMetrics, by_model, by_roofline, ranking_metrics
from mtmc_lsp.training.ranker import programs_of
from mtmc_lsp.training.replay import replayed_pairs
from mtmc_lsp.training.replays import ReplayedPrograms, replay_all, usual_entrants
from mtmc_lsp.training.tree import MeasuredTree

PARTS = (Split.VALIDATION, Split.TEST)


@dataclass(frozen=True)
class PartEvaluation:
    """The results on the programs of one part."""

    part: Split
    programs: int
    families: int
    ranker: RankingMetrics | None
    roofline: RankingMetrics | None
    timed: ReplayedPrograms
    """The programs whose user's code has a timed transition; only these are replayed."""


def evaluate(tree: MeasuredTree, model: RankerModel, split_of: SplitOf) -> list[PartEvaluation]:
    """The results on the validation and the test families, without parts that have no program."""
    parts = ((part, programs_of(tree, split_of, part)) for part in PARTS)
    return [_of_part(tree, model, part, programs) for part, programs in parts if programs]


def _of_part(tree: MeasuredTree, model: RankerModel, part: Split, programs: Sequence[str]) -> PartEvaluation:
    groups, _ = groups_of(tree, programs)
    return PartEvaluation(
        part,
        len(programs),
        len({tree.programs[program].family for program in programs}),
        ranking_metrics(groups, by_model(model)),
        ranking_metrics(groups, by_roofline),
        replay_all(tree, replayed_pairs(tree, programs), usual_entrants(model)),
    )
