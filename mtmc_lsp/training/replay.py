"""Runs planners on measured trees without a GPU: which speedup they reach after how many candidates and seconds.

A replay is a search of the product whose trials are looked up. It can only try what was measured, so the legal actions of a
version are its transitions, and a run ends at versions that were not explored further. All but the time of choices is the same
each time.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass, field

from mtmc_lsp.core.learning.policy import Policy
from mtmc_lsp.training.replayed_search import REPLAYED
from mtmc_lsp.training.tree import MeasuredTree

MOST_CANDIDATES = 24
"""As the default of the setting ``max-steps``."""


@dataclass(frozen=True)
class ReplayPoint:
    """A run after one more candidate."""

    candidates: int
    seconds: float
    """Sum of the seconds that the candidates took when they were measured."""
    speedup: float
    """Of the best version so far over the user's code; 1 if none is faster."""
    decided: float = field(default=0.0, compare=False)
    """Sum of the seconds that the choices of these candidates took, as measured in the replay."""


@dataclass(frozen=True)
class Replay:
    """One run on one program's tree."""

    program: str
    points: tuple[ReplayPoint, ...]
    end: str
    """Why it ended: ``stopped`` by the policy, ``nothing left``, ``unexplored`` version, ``failures`` in a row, or ``limit``."""

    @property
    def speedup(self) -> float:
        """Of the best version over the user's code."""
        return self.points[-1].speedup if self.points else 1.0

    def after(self, candidates: int) -> float:
        """The speedup after a number of candidates; the last one if the run ended before."""
        return max((point.speedup for point in self.points if point.candidates <= candidates), default=1.0)

    def after_seconds(self, seconds: float, *, with_decisions: bool = False) -> float:
        """The speedup after a time of trials, or of trials and choices."""
        times = ((point.seconds + point.decided * with_decisions, point.speedup) for point in self.points)
        return max((speedup for time, speedup in times if time <= seconds), default=1.0)


def replay(
    tree: MeasuredTree,
    program: str,
    policy: Policy,
    device: str,
    limit: int = MOST_CANDIDATES,
    *,
    search: str = "greedy",
) -> Replay:
    """Run a policy on the tree of one program.

    Args:
        device: the GPU whose measurements count.
        limit: most candidates.
        search: ``greedy``, ``beam`` or ``mcts``.
    """
    run = REPLAYED[search](tree, program, policy, device, limit)
    points: list[ReplayPoint] = []
    seconds = decided = 0.0
    while run.advance():
        seconds += run.items[-1].seconds
        decided += run.decision_seconds[-1]
        points.append(ReplayPoint(len(points) + 1, seconds, run.speedup, decided))
    return Replay(program, tuple(points), run.end)


def replayed_pairs(tree: MeasuredTree, programs: Collection[str]) -> list[tuple[str, str]]:
    """The programs with a timed action on the user's code, each with each GPU that timed one."""
    pairs = [(program, device) for program in programs for device in tree.devices_of(program)]
    return [
        (program, device)
        for program, device in pairs
        if program in tree.roots and any(item.device == device for item in tree.of_version(tree.roots[program].id))
    ]


def best_in_tree(tree: MeasuredTree, program: str, device: str) -> float:
    """The largest speedup that steps which each gain can reach in the tree of a program."""
    return tree.best_from(tree.roots[program].id, device)


def geometric_mean(values: Collection[float]) -> float:
    """The geometric mean; 1 of nothing."""
    return math.exp(sum(math.log(value) for value in values) / len(values)) if values else 1.0
