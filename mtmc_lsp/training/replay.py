"""Runs planners on measured trees without a GPU: which speedup they reach after how many candidates and seconds.

A replay is a greedy search whose trials are looked up. It can only try what was measured, so the legal actions of a version are
its transitions, and a run ends at versions that were not explored further. It is deterministic.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from mtmc_lsp.core.action import MacroAction
from mtmc_lsp.core.learning.policy import Policy
from mtmc_lsp.core.learning.transitions import Outcome, Transition
from mtmc_lsp.core.protocols import State
from mtmc_lsp.policies.planner import PolicyPlanner
from mtmc_lsp.search.loop import MAX_FAILURES, MAX_REFUSALS
from mtmc_lsp.training.tree import MeasuredTree, action_of

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

    def after_seconds(self, seconds: float) -> float:
        """The speedup after a time."""
        return max((point.speedup for point in self.points if point.seconds <= seconds), default=1.0)


class _Listed:
    """The measured actions of the present version, as the planner's list of legal actions."""

    def __init__(self, actions: Sequence[MacroAction]) -> None:
        self._actions = list(actions)

    def ranked(self, state: State) -> list[MacroAction]:
        return self._actions


def replay(tree: MeasuredTree, program: str, policy: Policy, device: str, limit: int = MOST_CANDIDATES) -> Replay:
    """Run a policy on the tree of one program.

    Args:
        device: the GPU whose measurements count.
        limit: most candidates.
    """
    version = tree.roots[program]
    history: list[Transition] = []
    points: list[ReplayPoint] = []
    present, seconds, failures, refusals = 1.0, 0.0, 0, 0
    best = 1.0
    end = "limit"
    while len(points) < limit:
        known = tree.choices_of(version.id, device)
        tried = {(item.version, item.key) for item in history}
        left = [item for item in known if (item.version, item.key) not in tried and _is_known(item)]
        if not left:
            end = "nothing left" if known else "unexplored"
            break
        if failures >= MAX_FAILURES or refusals >= MAX_REFUSALS:
            end = "failures"
            break
        actions = [action_of(item) for item in left]
        chosen = PolicyPlanner(_Listed(actions), policy).propose(tree.state(version, history, device))
        if not isinstance(chosen, MacroAction):
            end = "stopped"
            break
        item = next(item for item in left if item.key == chosen.key)
        history.append(item)
        seconds += item.seconds
        if (item.outcome is Outcome.FASTER or tree.is_base(item)) and item.result in tree.versions:
            present *= item.ratio or 1.0
            best = max(best, present)
            version, failures, refusals = tree.versions[item.result], 0, 0
        elif item.outcome is Outcome.NOT_LEGAL:
            refusals += 1
        else:
            failures += 1
        points.append(ReplayPoint(len(points) + 1, seconds, best))
    return Replay(program, tuple(points), end)


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


def _is_known(item: Transition) -> bool:
    """Whether it is known what a timed run would have done: not for correct versions without a time."""
    return item.outcome is not Outcome.CORRECT
