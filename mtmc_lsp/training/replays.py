"""Compares planners and searches by their replays on the same programs."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mtmc_lsp.core.learning.policy import Policy
from mtmc_lsp.policies.random import RandomPolicy
from mtmc_lsp.policies.ranker import RankerModel, RankerPolicy
from mtmc_lsp.policies.roofline import RooflinePolicy
from mtmc_lsp.training.replay import MOST_CANDIDATES, Replay, best_in_tree, geometric_mean, replay
from mtmc_lsp.training.tree import MeasuredTree

SECONDS = (1, 2, 5, 10, 15, 20, 25, 40, 60)
"""Times at which the speedup is reported."""
RANDOM_SEEDS = 3
"""Runs of the random policy for each program."""
DRAWS = 2000
"""Samples of families from which an interval follows."""
ROOFLINE, RANKER, RANDOM = "roofline-greedy", "ranker-greedy", "random"


@dataclass(frozen=True)
class Entrant:
    """A policy with a search."""

    policies: Sequence[Policy]
    """One, or several that differ in their seeds."""
    search: str = "greedy"


@dataclass(frozen=True)
class PolicyReplays:
    """The replays of one entrant on all programs."""

    by_candidates: tuple[float, ...]
    """Geometric mean of the speedups after 0, 1, 2, ... candidates."""
    by_seconds: tuple[float, ...]
    """The same after each time of :data:`SECONDS`, in which trials took as long as they did when they were measured."""
    by_all_seconds: tuple[float, ...]
    """The same if the choices count, too, with the times that they took in the replay."""
    candidates: float
    """Mean number of candidates until the end of a run."""
    decision_seconds: float
    """Mean time of the choices before a candidate."""
    ends: Mapping[str, int]
    """How many runs ended for each reason."""
    relative: float
    """The final speedup as a multiple of that of the roofline planner's greedy search; geometric mean."""
    relative_range: tuple[float, float]
    """Its 95 % interval: families are drawn with replacement."""

    @property
    def speedup(self) -> float:
        """Geometric mean of the final speedups."""
        return self.by_candidates[-1]

    def candidates_for(self, speedup: float) -> int | None:
        """The first number of candidates with at least this geometric mean; None if it is never reached."""
        return next((count for count, value in enumerate(self.by_candidates) if value >= speedup), None)


@dataclass(frozen=True)
class ReplayedPrograms:
    """The replays of all entrants on the same programs."""

    programs: int
    families: int
    best_in_tree: float
    """Geometric mean of the largest speedups that the trees contain."""
    replays: Mapping[str, PolicyReplays]


def usual_entrants(model: RankerModel) -> dict[str, Entrant]:
    """The cost model and the ranker with each search, and chance."""
    roofline, ranker = [RooflinePolicy()], [RankerPolicy(model)]
    return {
        ROOFLINE: Entrant(roofline),
        "roofline-beam": Entrant(roofline, "beam"),
        "roofline-mcts": Entrant(roofline, "mcts"),
        RANKER: Entrant(ranker),
        "ranker-beam": Entrant(ranker, "beam"),
        "ranker-mcts": Entrant(ranker, "mcts"),
        RANDOM: Entrant([RandomPolicy(seed) for seed in range(RANDOM_SEEDS)]),
    }


def replay_all(
    tree: MeasuredTree, pairs: Sequence[tuple[str, str]], entrants: Mapping[str, Entrant]
) -> ReplayedPrograms:
    """Replay all entrants.

    Args:
        pairs: programs, each with the GPU whose measurements count.
        entrants: by their names; ``roofline-greedy`` is one of them.
    """
    runs = {
        name: [
            replay(tree, program, policy, device, search=entrant.search)
            for policy in entrant.policies
            for program, device in pairs
        ]
        for name, entrant in entrants.items()
    }
    families = [tree.programs[program].family for program, _ in pairs]
    reference = [run.speedup for run in runs[ROOFLINE]]
    return ReplayedPrograms(
        len({program for program, _ in pairs}),
        len(set(families)),
        geometric_mean([best_in_tree(tree, program, device) for program, device in pairs]),
        {name: _summary(several, reference, families) for name, several in runs.items()},
    )


def _summary(runs: Sequence[Replay], reference: Sequence[float], families: Sequence[str]) -> PolicyReplays:
    count = len(families)
    logs: dict[str, list[float]] = {}
    for number, run in enumerate(runs):
        logs.setdefault(families[number % count], []).append(math.log(run.speedup / reference[number % count]))
    candidates = sum(len(run.points) for run in runs)
    decided = sum(run.points[-1].decided for run in runs if run.points)
    return PolicyReplays(
        tuple(geometric_mean([run.after(number) for run in runs]) for number in range(MOST_CANDIDATES + 1)),
        tuple(geometric_mean([run.after_seconds(seconds) for run in runs]) for seconds in SECONDS),
        tuple(geometric_mean([run.after_seconds(seconds, with_decisions=True) for run in runs]) for seconds in SECONDS),
        candidates / len(runs) if runs else 0.0,
        decided / candidates if candidates else 0.0,
        dict(sorted(Counter(run.end for run in runs).items())),
        _mean_of(list(logs.values())),
        _interval(list(logs.values())),
    )


def _interval(families: Sequence[Sequence[float]]) -> tuple[float, float]:
    """The 95 % interval of the geometric mean, by a bootstrap over families. The same families give the same interval."""
    if not families:
        return (1.0, 1.0)
    draw = random.Random(0)
    means = sorted(_mean_of(draw.choices(families, k=len(families))) for _ in range(DRAWS))
    return means[round(0.025 * DRAWS)], means[round(0.975 * DRAWS) - 1]


def _mean_of(families: Sequence[Sequence[float]]) -> float:
    logs = [log for family in families for log in family]
    return math.exp(math.fsum(logs) / len(logs)) if logs else 1.0
