"""The operator ``catalogue``: a sequence of macro actions and configurations, drawn by the policy. It needs no language model."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from typing import Protocol

from mtmc_lsp.core.action import MacroAction
from mtmc_lsp.core.device_model import DeviceModel
from mtmc_lsp.core.protocols import CannotCode, Coder, Planner, State
from mtmc_lsp.core.run import Candidate, Step, StepStatus
from mtmc_lsp.core.workload import Capture
from mtmc_lsp.evolve.lineage import Operator
from mtmc_lsp.evolve.operators.base import Direction, Draft, Task, steps_to
from mtmc_lsp.explore.choices import variants_of
from mtmc_lsp.search.tree.priors import WeighingPlanner, by_saving
from mtmc_lsp.search.trial import version_key

PLANNING_SECONDS = 10.0
"""Time limit for the list of the actions of one version."""
LENGTHS = {1: 0.5, 2: 0.3, 3: 0.2}
"""Probabilities of the number of actions of a sequence."""
LONGER = {3: 0.5, 4: 0.3, 5: 0.2}
"""The same for the direction ``longer``."""
UNLISTED_SHARE = 0.35
"""Part of the draws that take an action which the planner does not list: a configuration, or a random fusion."""
UNLISTED = 8
"""Number of unlisted actions that are drawn to choose from."""
FOCUS = 8.0
"""Factor on the probability of an action of a kind that the direction prefers."""
DRAWS = 6
"""Sequences that are drawn before the operator gives up: the others are known or cannot be written."""
NOTHING_NEW = f"none of {DRAWS} sequences of actions gave a version that is new"


class ListedActions(Protocol):
    """Finds the legal actions of a state."""

    def legal(
        self, state: State, tried: Sequence[str], count: int, rng: random.Random
    ) -> tuple[list[tuple[int, MacroAction]], list[MacroAction]]:
        """The untried actions that a planner lists with their positions, and up to ``count`` other legal ones."""


class CatalogueOperator:
    """Draws sequences of actions."""

    def __init__(
        self,
        capture: Capture,
        *,
        actions: ListedActions,
        planner: Planner,
        coder: Coder,
        device: DeviceModel,
    ) -> None:
        """Prepare.

        Args:
            actions: lists the legal actions.
            planner: weighs them, if it has a policy.
            coder: the built-in coder.
        """
        self._capture, self._actions, self._planner = capture, actions, planner
        self._coder, self._device = coder, device

    def vary(self, task: Task) -> Draft:
        refusal = NOTHING_NEW
        for _ in range(DRAWS):
            actions, candidate, problem = self._sequence(task)
            if candidate is None:
                refusal = problem or refusal
            elif not task.is_known(version_key(candidate)):
                return Draft(Operator.CATALOGUE, tuple(actions), candidate, _remark(task.direction))
        return Draft(Operator.CATALOGUE, (), None, refusal)

    def _sequence(self, task: Task) -> tuple[list[MacroAction], Candidate | None, str]:
        """A drawn sequence with the version that it leads to, or why there is none."""
        rng, parent = task.rng, task.parent.candidate
        assert parent is not None
        lengths = LONGER if task.direction.name == "longer" else LENGTHS
        (length,) = rng.choices(list(lengths), list(lengths.values()))
        candidate, actions = parent, list[MacroAction]()
        history, problem = list(steps_to(task.lineage, task.parent)), ""
        for _ in range(length):
            action = self._draw(candidate, history, task.direction, rng)
            if action is None:
                break
            try:
                candidate = self._coder.write(self._capture, candidate, action)
            except CannotCode as reason:
                problem = f"{action.text}: {reason}"
                history.append(Step(len(history) + 1, action, StepStatus.FAILED, str(reason)))
                continue
            actions.append(action)
            history.append(Step(len(history) + 1, action, StepStatus.ACCEPTED, "", candidate=candidate))
        if candidate.source == parent.source:
            return [], None, problem
        return actions, candidate, ""

    def _draw(
        self, candidate: Candidate, history: Sequence[Step], direction: Direction, rng: random.Random
    ) -> MacroAction | None:
        """One action; ``None`` if none is legal."""
        # As on a machine with a GPU, so that configurations are listed.
        deadline = time.monotonic() + PLANNING_SECONDS
        state = State(self._capture, candidate, tuple(history), self._device, True, deadline=deadline)
        tried = [step.action.key for step in history]
        listed, unlisted = self._actions.legal(state, tried, UNLISTED, rng)
        whole = [action for _, action in listed if not variants_of(action)]
        single = [*unlisted, *(variant for _, action in listed for variant in variants_of(action))]
        if direction.name == "tune":
            whole = whole if not single else []
        if single and (not whole or rng.random() < UNLISTED_SHARE):
            weights = [FOCUS if action.kind.value in direction.focus else 1.0 for action in single]
            return rng.choices(single, weights)[0]
        if not whole:
            return None
        probabilities = self._probabilities(state, whole)
        weights = [
            probabilities.get(action.key, 0.0) * (FOCUS if action.kind.value in direction.focus else 1.0)
            for action in whole
        ]
        return rng.choices(whole, weights)[0] if sum(weights) > 0 else rng.choice(whole)

    def _probabilities(self, state: State, actions: Sequence[MacroAction]) -> dict[str, float]:
        """The policy's probability of each action; without a policy, by the predicted savings."""
        if isinstance(self._planner, WeighingPlanner):
            return {choice.key: choice.probability for choice in self._planner.choices(state)}
        return {choice.key: choice.probability for choice in by_saving(actions)}


def _remark(direction: Direction) -> str:
    return f"drawn in the direction {direction.name!r}" if direction.text else "drawn by the policy"
