"""How well a ranker orders the choices of held-out states: NDCG, and how often the best choice is among the first."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from mtmc_lsp.policies.ranker import RankerModel
from mtmc_lsp.training.dataset import Group
from mtmc_lsp.training.labels import LABEL_GAIN, STOP
from mtmc_lsp.training.ranker import inputs_of

Score = Callable[[Group], Sequence[float]]
"""The score of each choice of a group; the choice with the highest one is taken."""


@dataclass(frozen=True)
class RankingMetrics:
    """Means over states."""

    states: int
    ndcg: float
    top_1: float
    """Share of the states where the first choice is one of the best."""
    top_3: float
    """Share of the states where one of the first three choices is one of the best."""
    stop_precision: float | None
    """Of the states where STOP is the first choice, the share where nothing gains; None if STOP is never the first."""
    stop_recall: float | None
    """Of the states where nothing gains, the share where STOP is the first choice."""


def by_model(model: RankerModel) -> Score:
    """The scores of a ranker."""
    return lambda group: model.scores(inputs_of(group, model.header.features))


def by_roofline(group: Group) -> Sequence[float]:
    """The roofline planner's order, with STOP at the end."""
    return [-float(rank) for rank in group.ranks]


def ranking_metrics(groups: Sequence[Group], score: Score) -> RankingMetrics | None:
    """The metrics over timed states; None if there is none."""
    timed = [group for group in groups if group.has_stop]
    if not timed:
        return None
    ndcg: list[float] = []
    firsts: list[tuple[bool, bool]] = []
    stops: list[tuple[bool, bool]] = []
    for group in timed:
        scores = score(group)
        order = sorted(range(len(group.rows)), key=lambda index: (-scores[index], index))
        labels = [group.labels[index] for index in order]
        best = max(labels)
        ndcg.append(_ndcg(labels))
        firsts.append((labels[0] == best, best in labels[:3]))
        stops.append((order[0] == len(group.rows) - 1, best == STOP))
    count = len(timed)
    return RankingMetrics(
        count,
        sum(ndcg) / count,
        sum(first for first, _ in firsts) / count,
        sum(among for _, among in firsts) / count,
        _share([right for stopped, right in stops if stopped]),
        _share([stopped for stopped, right in stops if right]),
    )


def _ndcg(labels: Sequence[int]) -> float:
    ideal = _dcg(sorted(labels, reverse=True))
    return _dcg(labels) / ideal if ideal else 1.0


def _dcg(labels: Sequence[int]) -> float:
    return sum(LABEL_GAIN[label] / math.log2(position + 2) for position, label in enumerate(labels))


def _share(items: Sequence[bool]) -> float | None:
    return sum(items) / len(items) if items else None
