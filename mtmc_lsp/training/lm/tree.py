"""The trees of measured transitions as texts: what the trainer's process needs, and nothing else.

They are kept beside a training (``trees.jsonl``, one program a line), so that a training resumes with the same data.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from mtmc_lsp.core.errors import Location, RequestError
from mtmc_lsp.core.json_codec import from_json, to_json
from mtmc_lsp.core.learning.transitions import Outcome
from mtmc_lsp.policies.lm.numbers import ActionNumbers
from mtmc_lsp.search.acceptance import BASE_RATIO


@dataclass(frozen=True)
class Edge:
    """An action that was tried on a version."""

    key: str
    text: str
    outcome: Outcome
    ratio: float | None
    result: str
    """The version that it leads to; empty if there is none in the tree."""
    numbers: ActionNumbers | None = None
    """What the cost model predicts for it; None if it is not told."""

    def is_kept(self, *, is_first: bool) -> bool:
        """Whether the greedy search goes on from its version: it is faster, or correct where nothing is timed.

        Args:
            is_first: whether it changes the user's code; then a version that is nearly as fast is a base for later steps.
        """
        if is_first and self.outcome is Outcome.SLOWER and self.ratio is not None:
            return self.ratio >= BASE_RATIO
        return self.outcome in (Outcome.FASTER, Outcome.CORRECT)


@dataclass(frozen=True)
class Node:
    """A version with the actions that were tried on it, in the order of the roofline planner."""

    schedule: str
    """As text, with what the cost model predicts for the version."""
    edges: tuple[Edge, ...]
    path: tuple[tuple[str, str], ...] = ()
    """The versions from the root to this one, and the key of the action that was taken at each."""
    predicted_us: float = 0.0
    """By the cost model; 0 if it is not known."""


@dataclass(frozen=True)
class DecisionTree:
    """One program."""

    program: str
    is_held_out: bool
    """Whether its family serves validation only."""
    device: str
    """As text."""
    gpu: str
    """Name of the GPU; empty if nothing was timed."""
    task: str
    """As text."""
    root: str
    nodes: Mapping[str, Node]


def share_of(trees: Sequence[DecisionTree], share: float, seed: int) -> list[DecisionTree]:
    """A share of the trees, at least one; a smaller share is part of a larger one."""
    ordered = sorted(trees, key=lambda tree: _hash(f"{seed} {tree.program}"))
    chosen = {tree.program for tree in ordered[: max(1, round(share * len(ordered)))]}
    return [tree for tree in trees if tree.program in chosen]


def write_trees(path: Path, trees: Iterable[DecisionTree]) -> None:
    """Write the trees, one a line."""
    temporary = path.with_suffix(".tmp")
    with temporary.open("w", encoding="utf-8") as file:
        for tree in trees:
            file.write(json.dumps(to_json(tree)) + "\n")
    temporary.replace(path)


def read_trees(path: Path) -> list[DecisionTree]:
    """Read the trees.

    Raises:
        RequestError: the file is missing or damaged.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
        return [from_json(DecisionTree, json.loads(line)) for line in lines]
    except OSError as error:
        raise RequestError(f"cannot read the trees: {error.strerror}", where=Location(str(path))) from None
    except (KeyError, TypeError, ValueError) as error:
        remedy = "Remove the folder and start the training again."
        raise RequestError(f"the trees are damaged: {error}", where=Location(str(path)), remedy=remedy) from None


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
