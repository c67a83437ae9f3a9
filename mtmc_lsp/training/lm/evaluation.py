"""Replays of the policy on the measured trees of held-out families, beside the roofline planner and chance."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from mtmc_lsp.core.learning.policy import Policy
from mtmc_lsp.core.learning.transitions import Program
from mtmc_lsp.policies.lm.client import LmPolicy
from mtmc_lsp.policies.random import RandomPolicy
from mtmc_lsp.policies.roofline import RooflinePolicy
from mtmc_lsp.programs.splits import Split, split_of
from mtmc_lsp.training.lm.train import TrainedLm
from mtmc_lsp.training.replay import MOST_CANDIDATES, Replay, best_in_tree, geometric_mean, replay
from mtmc_lsp.training.tree import MeasuredTree

MARKS = (1, 2, 4, 8, 16, 24)
"""Numbers of candidates at which the speedup is reported."""
LM, ROOFLINE, RANDOM = "lm-greedy", "roofline-greedy", "random"


@dataclass(frozen=True)
class Replays:
    """The replays of one policy on all programs."""

    speedups: tuple[float, ...]
    """Geometric means over the user's code after :data:`MARKS` candidates."""
    candidates: float
    """Mean number of candidates of a run."""
    ends: Mapping[str, int]
    """How many runs ended for each reason."""


@dataclass(frozen=True)
class LmEvaluation:
    """The replays on the programs of one part."""

    part: Split
    programs: int
    best_in_tree: float
    """Geometric mean of the largest speedups that the trees contain."""
    replays: Mapping[str, Replays]

    @property
    def lines(self) -> list[str]:
        """A table of the replays as text."""
        best = f"the best of their trees is {self.best_in_tree:.3f}x"
        head = f"Replay on {self.programs} programs of {self.part.value} families; {best}"
        rows = [f"  candidates      {'  '.join(f'{mark:>6}' for mark in MARKS)}"]
        for name, item in self.replays.items():
            ends = ", ".join(f"{reason} {count}" for reason, count in item.ends.items())
            rows.append(f"  {name:<15} {'  '.join(f'{value:>5.3f}x' for value in item.speedups)}  ends: {ends}")
        return [head, *rows]


def replay_held_out(trained: TrainedLm, tree: MeasuredTree, most: int) -> list[LmEvaluation]:
    """Replay the policy as it is now on the validation and the test families, at most ``most`` programs of each."""
    policy = LmPolicy(trained.policy, device=trained.status.device)
    try:
        parts = [evaluate_lm(tree, policy, split_of, part, most) for part in (Split.VALIDATION, Split.TEST)]
    finally:
        policy.close()
    return [part for part in parts if part is not None]


def evaluate_lm(
    tree: MeasuredTree, policy: Policy, part_of: Callable[[Program], Split], part: Split, most: int
) -> LmEvaluation | None:
    """Replay on the programs of a part whose user's code has timed transitions; None if there is none.

    Args:
        most: most programs: each decision of a language model takes its time.
    """
    programs = sorted(name for name, program in tree.programs.items() if part_of(program) == part)
    pairs = [(program, device) for program in programs for device in tree.devices_of(program)]
    pairs = [(program, device) for program, device in pairs if program in tree.roots][:most]
    if not pairs:
        return None
    policies: Mapping[str, Policy] = {LM: policy, ROOFLINE: RooflinePolicy(), RANDOM: RandomPolicy(0)}
    replays = {
        name: _summary([replay(tree, program, each, device) for program, device in pairs])
        for name, each in policies.items()
    }
    best = geometric_mean([best_in_tree(tree, program, device) for program, device in pairs])
    return LmEvaluation(part, len({program for program, _ in pairs}), best, replays)


def _summary(replays: Sequence[Replay]) -> Replays:
    return Replays(
        tuple(geometric_mean([item.after(min(mark, MOST_CANDIDATES)) for item in replays]) for mark in MARKS),
        sum(len(item.points) for item in replays) / len(replays),
        dict(sorted(Counter(item.end for item in replays).items())),
    )
