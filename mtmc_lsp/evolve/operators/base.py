"""The interface of operators, and what they know."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from mtmc_lsp.core.action import MacroAction
from mtmc_lsp.core.run import Candidate, Step, StepStatus
from mtmc_lsp.evolve.lineage import Lineage, Operator, Spent, Version, VersionStatus


@dataclass(frozen=True)
class Direction:
    """What an operator should try next on an island."""

    name: str = "free"
    """``free``, ``tune``, ``untried``, ``longer`` or ``restart``."""
    text: str = ""
    """For people and language models; empty for ``free``."""
    focus: tuple[str, ...] = ()
    """Kinds of actions to prefer."""


FREE = Direction()


@dataclass(frozen=True)
class Task:
    """One variation to make."""

    parent: Version
    island: int
    lineage: Lineage
    direction: Direction
    rng: random.Random
    """Decides everything that is random."""
    is_known: Callable[[str], bool] = field(default=lambda key: False)
    """Whether the version with a key was tried before."""


@dataclass(frozen=True)
class Draft:
    """A variation: a new version to try, or why there is none."""

    operator: Operator
    actions: tuple[MacroAction, ...]
    candidate: Candidate | None
    """``None`` if nothing new was written."""
    remark: str = ""
    """Why the operator made it, or why there is none."""
    spent: Spent = field(default_factory=Spent)


class VaryingOperator(Protocol):
    """Makes versions from versions."""

    def vary(self, task: Task) -> Draft:
        """A variation of the parent.

        Raises:
            ModelNotUsable: a language model must be asked and none can be reached.
            BudgetSpent: the budget for the language model is spent.
        """


def steps_to(lineage: Lineage, version: Version) -> tuple[Step, ...]:
    """The actions that lead to a version and those that failed on it, as planners read a history."""
    steps = [
        Step(0, action, StepStatus.ACCEPTED, item.reason, candidate=item.candidate if last else None)
        for item in lineage.path(version.number)
        for action, last in _marked(item.actions)
    ]
    for other in lineage.versions:
        if other.parent == version.number and len(other.actions) == 1 and not other.is_alive:
            failed = other.status is VersionStatus.FAILED
            status = StepStatus.FAILED if failed else StepStatus.REJECTED
            steps.append(Step(0, other.actions[0], status, other.reason, candidate=other.candidate))
    return tuple(Step(number, s.action, s.status, s.reason, candidate=s.candidate) for number, s in enumerate(steps, 1))


def _marked(actions: Sequence[MacroAction]) -> list[tuple[MacroAction, bool]]:
    """Each action with whether it is the last."""
    return [(action, number == len(actions)) for number, action in enumerate(actions, 1)]
