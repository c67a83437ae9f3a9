"""A beam: each level tries a few actions on the fastest versions of the level before."""

from __future__ import annotations

import math
from collections.abc import Sequence

from mtmc_lsp.search.tree.strategy import OptionsOf, Pick
from mtmc_lsp.search.tree.versions import Tree, Version

WIDTH = 2
"""Versions and trials of a level. With 24 steps, a beam of two reaches versions of 12 steps."""
LEAST_PROBABILITY = 1e-9
"""Stands for a probability that is rounded to zero."""


class Beam:
    """Keeps the fastest ``width`` versions of each level.

    A level makes ``width`` trials, and further ones while none of them was kept. Pairs of version and action are tried in the
    order of the version's measured speedup times the action's probability. If a level ends without a version, the beam begins
    again with the best pair of all versions that it left behind.
    """

    def __init__(self, width: int = WIDTH) -> None:
        self._width = width

    def choose(self, tree: Tree, options: OptionsOf) -> Pick | None:
        """The next pair of the level; if it ended before its last trial, of the next level, then of all versions."""
        level, children = self._level(tree)
        return _best(level, options) or _best(self._fastest(children), options) or _best([*tree.root.below()], options)

    def _level(self, tree: Tree) -> tuple[list[Version], list[Version]]:
        """The present level, and the versions that it made so far."""
        versions = {version.step.index: version for version in tree.versions if version.step is not None}
        bases = {step.index: version for version in tree.root.below() for step in version.trials}
        level, children, trials = [tree.root], list[Version](), 0
        for step in tree.steps:
            base = bases.get(step.index)
            if base is not None and base not in level:
                # The level before ended early.
                following = self._fastest(children)
                level = following if base in following else [base]
                children, trials = [], 0
            trials += 1
            if step.index in versions:
                children.append(versions[step.index])
            if trials >= self._width and children:
                level, children, trials = self._fastest(children), [], 0
        return level, children

    def _fastest(self, versions: Sequence[Version]) -> list[Version]:
        return sorted(versions, key=lambda version: -version.gain)[: self._width]


def _best(versions: Sequence[Version], options: OptionsOf) -> Pick | None:
    """The pair of version and action with the largest product of speedup and probability; None if there is none."""
    pairs = [
        (version.gain + math.log(max(option.probability, LEAST_PROBABILITY)), Pick(version, option))
        for version in versions
        for option in options(version).open
    ]
    return max(pairs, key=lambda pair: pair[0])[1] if pairs else None
