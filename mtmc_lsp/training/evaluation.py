"""Evaluates a ranker on held-out families, and compares it with the roofline planner's order and with chance."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mtmc_lsp.core.learning.policy import Policy
from mtmc_lsp.policies.random import RandomPolicy
from mtmc_lsp.policies.ranker import RankerModel, RankerPolicy
from mtmc_lsp.policies.roofline import RooflinePolicy
from mtmc_lsp.programs.splits import Split
from mtmc_lsp.training.dataset import SplitOf, groups_of
from mtmc_lsp.training.metrics import RankingMetrics, by_model, by_roofline, ranking_metrics
from mtmc_lsp.training.ranker import programs_of
from mtmc_lsp.training.replay import (
    MOST_CANDIDATES,
    Replay,
    best_in_tree,
    geometric_mean,
    replay,
    replayed_pairs,
)
from mtmc_lsp.training.tree import MeasuredTree

PARTS = (Split.VALIDATION, Split.TEST)
SECONDS = (1, 2, 5, 10, 15, 20, 25, 40, 60)
"""Times at which the speedup is reported."""
RANDOM_SEEDS = 3
"""Runs of the random policy for each program."""
ROOFLINE, RANKER, RANDOM = "roofline-greedy", "ranker-greedy", "random"


@dataclass(frozen=True)
class PolicyReplays:
    """The replays of one policy on all programs of a part."""

    by_candidates: tuple[float, ...]
    """Geometric mean of the speedups after 0, 1, 2, ... candidates."""
    by_seconds: tuple[float, ...]
    """The same after each time of :data:`SECONDS`."""
    candidates: float
    """Mean number of candidates until the end of a run."""
    ends: Mapping[str, int]
    """How many runs ended for each reason."""

    @property
    def speedup(self) -> float:
        """Geometric mean of the final speedups."""
        return self.by_candidates[-1]

    def candidates_for(self, speedup: float) -> int | None:
        """The first number of candidates with at least this geometric mean; None if it is never reached."""
        return next((count for count, value in enumerate(self.by_candidates) if value >= speedup), None)


@dataclass(frozen=True)
class PartEvaluation:
    """The results on the programs of one part."""

    part: Split
    programs: int
    families: int
    ranker: RankingMetrics | None
    roofline: RankingMetrics | None
    timed_programs: int
    """Programs whose user's code has a timed transition; only these are replayed."""
    best_in_tree: float
    """Geometric mean of the largest speedups that the trees contain."""
    replays: Mapping[str, PolicyReplays]


def evaluate(tree: MeasuredTree, model: RankerModel, split_of: SplitOf) -> list[PartEvaluation]:
    """The results on the validation and the test families, without parts that have no program."""
    parts = ((part, programs_of(tree, split_of, part)) for part in PARTS)
    return [_of_part(tree, model, part, programs) for part, programs in parts if programs]


def _of_part(tree: MeasuredTree, model: RankerModel, part: Split, programs: Sequence[str]) -> PartEvaluation:
    groups, _ = groups_of(tree, programs)
    pairs = replayed_pairs(tree, programs)
    policies: Mapping[str, Sequence[Policy]] = {
        ROOFLINE: [RooflinePolicy()],
        RANKER: [RankerPolicy(model)],
        RANDOM: [RandomPolicy(seed) for seed in range(RANDOM_SEEDS)],
    }
    replays = {
        name: _summary([replay(tree, program, policy, device) for policy in several for program, device in pairs])
        for name, several in policies.items()
    }
    return PartEvaluation(
        part,
        len(programs),
        len({tree.programs[program].family for program in programs}),
        ranking_metrics(groups, by_model(model)),
        ranking_metrics(groups, by_roofline),
        len({program for program, _ in pairs}),
        geometric_mean([best_in_tree(tree, program, device) for program, device in pairs]),
        replays,
    )


def _summary(replays: Sequence[Replay]) -> PolicyReplays:
    return PolicyReplays(
        tuple(geometric_mean([item.after(count) for item in replays]) for count in range(MOST_CANDIDATES + 1)),
        tuple(geometric_mean([item.after_seconds(seconds) for item in replays]) for seconds in SECONDS),
        sum(len(item.points) for item in replays) / len(replays) if replays else 0.0,
        dict(sorted(Counter(item.end for item in replays).items())),
    )
