"""Monte Carlo tree search with PUCT (Rosin 2011; AlphaZero's form). A trial takes the place of a rollout.

The value of an action is the largest measured gain below it. The maximum is backed up and not the mean: timings are nearly
deterministic, one version is delivered, and a mean would punish a good version for the failed trials that were made on it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from mtmc_lsp.search.tree.strategy import Option, OptionsOf, Pick
from mtmc_lsp.search.tree.versions import Tree, Version

EXPLORATION = 1.25
"""PUCT's constant, as in AlphaZero's published pseudocode; gains are scaled to the range 0 to 1."""


@dataclass(frozen=True)
class _Edge:
    """An action of a version."""

    gain: float
    """The largest gain below it; before its trial the gain of the version, as if it changed nothing."""
    probability: float
    visits: int
    target: Version | Option


class Mcts:
    """Descends to the edge with the largest upper bound until it meets an action that was not tried."""

    def choose(self, tree: Tree, options: OptionsOf) -> Pick | None:
        """The next trial; None if no version has an open action."""
        gains = [version.gain for version in tree.root.below()]
        least, scale = min(gains), (max(gains) - min(gains)) or 1.0
        ended: set[int] = set()
        while id(tree.root) not in ended:
            version = tree.root
            while True:
                edges = _edges(version, options, ended)
                if not edges:
                    ended.add(id(version))
                    break
                total = math.sqrt(1 + _visits(version))

                def bound(edge: _Edge, total: float = total) -> float:
                    value = (edge.gain - least) / scale
                    return value + EXPLORATION * edge.probability * total / (1 + edge.visits)

                target = max(edges, key=bound).target
                if isinstance(target, Option):
                    return Pick(version, target)
                version = target
        return None


def _edges(version: Version, options: OptionsOf, ended: set[int]) -> list[_Edge]:
    """The edges of a version that can lead to a trial: versions below it, and untried actions."""
    below = [
        _Edge(max(v.gain for v in child.below()), _prior(child), 1 + _visits(child), child)
        for child in version.children
        if id(child) not in ended
    ]
    untried = [_Edge(version.gain, option.probability, 0, option) for option in options(version).open]
    return [*below, *untried]


def _prior(version: Version) -> float:
    """The probability of the action that led to a version; of a greedy run that is resumed as a tree, certainty."""
    prior = version.step.prior if version.step is not None else None
    return 1.0 if prior is None else prior


def _visits(version: Version) -> int:
    """The number of trials on a version and on those below it."""
    return sum(len(item.trials) for item in version.below())
