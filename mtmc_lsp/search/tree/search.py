"""A search that keeps a tree of versions. A strategy chooses the version and the action of each trial.

The delivered version is the fastest that was verified. The steps on the path to it are accepted; steps of other branches are
alternatives, and become accepted if their branch becomes the fastest. A version is verified as soon as it is the fastest, or a
trial begins with it; a version that is neither is not verified at all.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

from mtmc_lsp.core.action import Stop
from mtmc_lsp.core.learning.policy import Choice
from mtmc_lsp.core.run import Candidate, Step, StepStatus
from mtmc_lsp.core.workload import Capture
from mtmc_lsp.search.components import Events, SearchComponents
from mtmc_lsp.search.loop import MAX_FAILURES, Chosen, Search
from mtmc_lsp.search.tree.beam import Beam
from mtmc_lsp.search.tree.mcts import Mcts
from mtmc_lsp.search.tree.priors import choices_of
from mtmc_lsp.search.tree.strategy import Option, Options, Strategy, end_reason
from mtmc_lsp.search.tree.versions import Tree, Version, is_kept, plain, timed_gain
from mtmc_lsp.search.trial import version_key
from mtmc_lsp.tuning.schedule_cost import estimated_us

RANKED_BY_PREDICTION = "versions were ranked by predicted time, since nothing is timed without a GPU"
PATIENCE = 2 * MAX_FAILURES
"""The search ends after this many steps without a faster version: a greedy search tries half as many after its last gain."""
FAILED_ELSEWHERE = 0.25
"""Factor on an action's probability for each other version on which it failed. An estimate: most failures are the action's."""
UNKNOWN_US = 1000.0
"""Stands for the time of user's code that the cost model cannot read; only relations to it are used."""


class TreeSearch(Search):
    """One run for one capture."""

    strategy: Strategy

    def __init__(self, capture: Capture, source: str, components: SearchComponents, events: Events) -> None:
        super().__init__(capture, source, components, events)
        self._same: set[tuple[str, str]] = set()
        """Versions and actions that lead to a version which was tried before."""
        self._set_aside: dict[tuple[str, str], Step] = {}
        """Trials by version and action that were made after a version whose verification failed."""
        self._weighed: dict[tuple[object, ...], list[Choice]] = {}
        """The policy's choices by version and history."""
        self._predicted: dict[str, float] = {}
        """Predicted times of versions by id."""

    # The tree ----------------------------------------------------------------------------------------------------

    def _tree(self, steps: Sequence[Step]) -> Tree:
        return Tree(self._root, steps, timed_gain if self._has_gpu else self._predicted_gain)

    def _predicted_gain(self, step: Step, base: Version) -> float:
        if step.candidate is None:
            return base.gain
        if step.candidate.id not in self._predicted:
            before = self._us(base.candidate)
            # Without an estimate of the version, the planner's estimate of the action counts.
            us = self._estimate(step.candidate) or max(before / 2, before - step.action.expected.saved_us)
            self._predicted[step.candidate.id] = us
        return math.log(self._us(self._root) / self._us(step.candidate))

    def _us(self, candidate: Candidate) -> float:
        if candidate.id not in self._predicted:
            self._predicted[candidate.id] = self._estimate(candidate) or UNKNOWN_US
        return self._predicted[candidate.id]

    def _estimate(self, candidate: Candidate) -> float | None:
        return estimated_us(self._capture.graph, candidate.schedule, self._measurer.device())

    def _arranged(self, steps: list[Step]) -> list[Step]:
        return self._tree(steps).arranged()

    def _wanted(self) -> list[Step]:
        fastest = self._tree(self._steps).fastest(verified=False)
        path = fastest.path if fastest is not None else []
        return [plain(item.step) for item in path if item.step is not None and item.step.verdict is None]

    def _forget(self, steps: Sequence[Step]) -> None:
        # The versions that other actions led to may be those of the steps.
        self._same.clear()
        for step in steps:
            if step.candidate is not None:
                self._set_aside[step.base, step.action.key] = plain(step)

    def _remembered(self, index: int, chosen: Chosen) -> Step | None:
        step = self._set_aside.get((chosen.base.id, chosen.action.key))
        if step is None or (step.candidate is not None and version_key(step.candidate) in self._known()):
            return None
        candidate = step.candidate
        if candidate is not None and candidate.action is not None:
            # Its title may have had another number.
            candidate = replace(candidate, action=replace(candidate.action, text=chosen.action.text))
        return replace(step, index=index, action=chosen.action, candidate=candidate)

    def _ended(self, reason: str) -> str:
        return reason if self._has_gpu else f"{reason}; {RANKED_BY_PREDICTION}"

    # Choices -----------------------------------------------------------------------------------------------------

    def _known(self) -> Mapping[str, int]:
        return {version_key(step.candidate): step.index for step in self._steps if step.candidate is not None}

    def _skip(self, chosen: Chosen) -> None:
        self._same.add((chosen.base.id, chosen.action.key))

    def _choose(self, steps: Sequence[Step], seconds: float) -> Chosen | Stop:
        tree = self._tree(steps)
        fastest = tree.fastest(verified=False)
        if fastest is not None and fastest.step is not None and len(steps) >= fastest.step.index + PATIENCE:
            return Stop(f"the last {PATIENCE} steps led to no faster version")

        def options(version: Version) -> Options:
            return self._options(tree, version, seconds)

        pick = self.strategy.choose(tree, options)
        if pick is None:
            return end_reason(tree, options)
        step = pick.version.step
        unverified = plain(step) if step is not None and step.verdict is None else None
        return Chosen(pick.version.candidate, pick.option.action, pick.option.probability, unverified)

    def _options(self, tree: Tree, version: Version, seconds: float) -> Options:
        """The actions that may be tried on a version: those that the policy prefers to STOP, and that did not fail before."""
        if self._has_failed_too_often(version.trials):
            return Options((), "the last steps in a row were not accepted")
        choices = self._choices(tree, version, seconds)
        tried = self._tried(version)
        # Planners weigh untried actions alone. With the share of those that were tried, an action's weight stays the same.
        share = max(0.0, 1.0 - sum(step.prior or 0.0 for step in version.trials))
        failures = Counter(step.action.key for step in tree.steps if step.status is StepStatus.FAILED)
        chosen: list[Option] = []
        end = "every other action was tried on another branch"
        for choice in choices:
            if choice.action is None:
                end = choice.reason
                break
            if choice.key not in tried:
                doubt = FAILED_ELSEWHERE ** failures[choice.key]
                chosen.append(Option(choice.action, share * doubt * choice.probability))
        chosen.sort(key=lambda option: -option.probability)
        return Options(tuple(chosen), end)

    def _choices(self, tree: Tree, version: Version, seconds: float) -> list[Choice]:
        history = tree.history(version)
        key = (version.candidate.id, *((step.index, step.action.key, step.status) for step in history))
        if key not in self._weighed:
            state = self._state(version.candidate, history, seconds)
            self._weighed[key] = choices_of(self._components.planner, state)
        return self._weighed[key]

    def _tried(self, version: Version) -> set[str]:
        """The keys of actions that are not tried on a version.

        They were tried on it, lead to a known version, or gained nothing on a version before it.
        """
        on_path = {step.action.key for item in version.path for step in item.trials if not is_kept(step)}
        path = {item.step.action.key for item in version.path if item.step is not None}
        own = {step.action.key for step in version.trials}
        same = {key for base, key in self._same if base == version.candidate.id}
        return on_path | path | own | same


class BeamSearch(TreeSearch):
    """Keeps the fastest versions of each level."""

    strategy = Beam()


class MctsSearch(TreeSearch):
    """Monte Carlo tree search."""

    strategy = Mcts()
