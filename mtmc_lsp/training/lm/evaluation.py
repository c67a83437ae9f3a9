"""Replays of the policy on the measured trees of held-out families, beside the roofline planner and chance."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from mtmc_lsp.core.learning.policy import Policy
from mtmc_lsp.core.learning.transitions import Program
from mtmc_lsp.policies.lm.client import LmPolicy
from mtmc_lsp.policies.random import RandomPolicy
from mtmc_lsp.policies.roofline import RooflinePolicy
from mtmc_lsp.programs.splits import Split, split_of
from mtmc_lsp.training.lm.train import TrainedLm
from mtmc_lsp.training.replay import replayed_pairs
from mtmc_lsp.training.replay_page import MARKS
from mtmc_lsp.training.replays import RANDOM, ROOFLINE, Entrant, ReplayedPrograms, replay_all
from mtmc_lsp.training.tree import MeasuredTree

LM = "lm-greedy"


@dataclass(frozen=True)
class LmEvaluation:
    """The replays on the programs of one part."""

    part: Split
    replayed: ReplayedPrograms

    @property
    def lines(self) -> list[str]:
        """A table of the replays as text."""
        best = f"the best of their trees is {self.replayed.best_in_tree:.3f}x"
        head = f"Replay on {self.replayed.programs} programs of {self.part.value} families; {best}"
        rows = [f"  candidates      {'  '.join(f'{mark:>6}' for mark in MARKS)}"]
        for name, item in self.replayed.replays.items():
            ends = ", ".join(f"{reason} {count}" for reason, count in item.ends.items())
            speedups = "  ".join(f"{item.by_candidates[mark]:>5.3f}x" for mark in MARKS)
            rows.append(f"  {name:<15} {speedups}  ends: {ends}")
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
    pairs = replayed_pairs(tree, programs)[:most]
    if not pairs:
        return None
    entrants = {
        LM: Entrant([policy]),
        ROOFLINE: Entrant([RooflinePolicy()]),
        RANDOM: Entrant([RandomPolicy(0)]),
    }
    return LmEvaluation(part, replay_all(tree, pairs, entrants))
