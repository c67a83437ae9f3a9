"""The trees of measured transitions as texts: what the trainer's process needs, and nothing else.

They are kept beside a training (``trees.jsonl``, one program a line), so that a training resumes with the same data.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from mtmc_lsp.core.errors import Location, RequestError
from mtmc_lsp.core.json_codec import from_json, to_json
from mtmc_lsp.core.learning.transitions import Outcome


@dataclass(frozen=True)
class Edge:
    """An action that was tried on a version."""

    key: str
    text: str
    outcome: Outcome
    ratio: float | None
    result: str
    """The version that it leads to; empty if there is none in the tree."""

    @property
    def is_kept(self) -> bool:
        """Whether the greedy search goes on from its version: it is faster, or correct where nothing is timed."""
        return self.outcome in (Outcome.FASTER, Outcome.CORRECT)


@dataclass(frozen=True)
class Node:
    """A version with the actions that were tried on it, in the order in which they were tried."""

    schedule: str
    """As text."""
    edges: tuple[Edge, ...]
    path: tuple[tuple[str, str], ...] = ()
    """The versions from the root to this one, and the key of the action that was taken at each."""


@dataclass(frozen=True)
class DecisionTree:
    """One program."""

    program: str
    family: str
    device: str
    """As text."""
    gpu: str
    """Name of the GPU; empty if nothing was timed."""
    task: str
    """As text."""
    root: str
    nodes: Mapping[str, Node]


def split_by_family(
    trees: Sequence[DecisionTree], share: float, seed: int
) -> tuple[list[DecisionTree], list[DecisionTree]]:
    """Training and validation trees. Whole families are held out; with a single family none is.

    Which families are held out depends on their names and the seed only, not on the other families' sizes.
    """
    families = sorted({tree.family for tree in trees}, key=lambda name: _hash(f"{seed} {name}"))
    count = min(len(families) - 1, max(1, round(share * len(families)))) if share > 0 else 0
    held_out = set(families[: max(0, count)])
    return _others(trees, held_out), [tree for tree in trees if tree.family in held_out]


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


def _others(trees: Sequence[DecisionTree], held_out: Collection[str]) -> list[DecisionTree]:
    return [tree for tree in trees if tree.family not in held_out]


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
