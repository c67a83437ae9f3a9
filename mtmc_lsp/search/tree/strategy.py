"""The interface of a strategy: which version gets the next trial, with which action."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from mtmc_lsp.core.action import MacroAction, Stop
from mtmc_lsp.search.tree.versions import Tree, Version


@dataclass(frozen=True)
class Option:
    """An action that may be tried on a version."""

    action: MacroAction
    probability: float


@dataclass(frozen=True)
class Options:
    """What may be tried on a version."""

    open: tuple[Option, ...]
    """The most probable first; none if the branch ended."""
    end: str = ""
    """Why it ended."""


@dataclass(frozen=True)
class Pick:
    """The choice of a strategy."""

    version: Version
    option: Option


OptionsOf = Callable[[Version], Options]


class Strategy(Protocol):
    """A function of the tree: the same steps give the same choice, so a resumed run continues as it would have."""

    def choose(self, tree: Tree, options: OptionsOf) -> Pick | None:
        """The next trial; None if all branches ended."""


def end_reason(tree: Tree, options: OptionsOf) -> Stop:
    """Why all branches ended."""
    fastest = tree.fastest(verified=False)
    if fastest is None:
        return Stop(options(tree.root).end)
    return Stop(f"every branch ended; on the fastest version, {options(fastest).end}")
