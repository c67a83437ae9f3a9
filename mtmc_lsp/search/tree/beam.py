"""A beam: it goes down one path at a time, and then continues with the best version that it left behind."""

from __future__ import annotations

import math
from collections.abc import Sequence

from mtmc_lsp.search.tree.strategy import OptionsOf, Pick
from mtmc_lsp.search.tree.versions import Tree, Version

LEAST_PROBABILITY = 1e-9
"""Stands for a probability that is rounded to zero."""


class Beam:
    """Tries actions on one version until one of them is kept, and goes on with the version that this made.

    So the first path is that of the greedy search. When nothing is left to try on a version, the beam continues with the best
    pair of version and action in the tree: the one with the largest product of measured speedup and probability. On measured
    trees, alternatives to a step that gained are worth less than steps after it, so they wait until the path ends.
    """

    def choose(self, tree: Tree, options: OptionsOf) -> Pick | None:
        """The next pair of the present version; if there is none, of all versions."""
        return _best([_present(tree)], options) or _best([*tree.root.below()], options)


def _present(tree: Tree) -> Version:
    """The version that the last step made if it was kept, else the version that the step changed."""
    made = {version.step.index: version for version in tree.versions if version.step is not None}
    changed = {step.index: version for version in tree.root.below() for step in version.trials}
    # A step whose base was withdrawn is on no version.
    found = (made.get(step.index) or changed.get(step.index) for step in reversed(tree.steps))
    return next((version for version in found if version is not None), tree.root)


def _best(versions: Sequence[Version], options: OptionsOf) -> Pick | None:
    """The pair of version and action with the largest product of speedup and probability; None if there is none."""
    pairs = [
        (version.gain + math.log(max(option.probability, LEAST_PROBABILITY)), Pick(version, option))
        for version in versions
        for option in options(version).open
    ]
    return max(pairs, key=lambda pair: pair[0])[1] if pairs else None
