"""The searches of the product, on measured trees: choices are made by their code, and trials are looked up.

A version's legal actions are its transitions, since only what was measured can be tried. A kept version counts as verified.
"""

from __future__ import annotations

import math
import time
from abc import ABC
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from mtmc_lsp.core.action import MacroAction, Stop
from mtmc_lsp.core.device_model import DeviceModel
from mtmc_lsp.core.learning.policy import Policy
from mtmc_lsp.core.learning.transitions import Outcome, Transition
from mtmc_lsp.core.protocols import State
from mtmc_lsp.core.results import CompileReport, Timing, Verdict, VerdictStatus
from mtmc_lsp.core.run import Candidate, Step, StepStatus
from mtmc_lsp.core.workload import Capture
from mtmc_lsp.policies.history import FAILURES
from mtmc_lsp.policies.planner import PolicyPlanner
from mtmc_lsp.search.components import Events, Limits, SearchComponents
from mtmc_lsp.search.greedy import GreedySearch
from mtmc_lsp.search.loop import Chosen, Search
from mtmc_lsp.search.tree.search import BeamSearch, MctsSearch
from mtmc_lsp.training.tree import MeasuredTree, action_of, device_of, step_of

VERIFIED = Verdict(VerdictStatus.CORRECT, (), "")


class ReplayedSearch(Search, ABC):
    """A search on the tree of one program."""

    def __init__(self, tree: MeasuredTree, program: str, policy: Policy, device: str, limit: int) -> None:
        """Prepare a run from the user's code.

        Args:
            device: the GPU whose measurements count.
            limit: most candidates.
        """
        self._measured = tree
        self._gpu = device
        known = _Stored(tree.candidate(tree.roots[program].id), device_of(device))
        planner = PolicyPlanner(_Listed(self._untried), policy)
        components = SearchComponents(planner, known, known, has_gpu=True, limits=Limits(math.inf, limit))
        super().__init__(tree.programs[program].capture, "", components, Events())
        self._speedups = {self._root.id: 1.0}
        """Of kept versions over the user's code."""
        self.items: list[Transition] = []
        """What was tried, in order."""
        self.decision_seconds: list[float] = []
        """How long the choices before each of them took together, as measured now."""

    def advance(self) -> bool:
        """Choose and look up one more trial; returns whether there was one."""
        began = time.perf_counter()
        count = len(self.items)
        while count == len(self.items):
            chosen = self._choose(self._steps, math.inf) if count < self._components.limits.steps else Stop("the limit")
            if isinstance(chosen, Stop):
                return False
            self._try(chosen)
        self.decision_seconds.append(time.perf_counter() - began)
        return True

    @property
    def speedup(self) -> float:
        """Of the fastest version so far over the user's code; 1 if none is faster."""
        return max(self._speedups.values())

    @property
    def end(self) -> str:
        """Why the search ended, as :attr:`mtmc_lsp.training.replay.Replay.end`."""
        if len(self.items) >= self._components.limits.steps:
            return "limit"
        if not self._measured.choices_of(self._best.id, self._gpu):
            return "unexplored"
        if not self._untried(self._best.id, self._steps):
            return "nothing left"
        return "failures" if self._has_failed_too_often(self._steps) else "stopped"

    def _try(self, chosen: Chosen) -> None:
        choices = self._measured.choices_of(chosen.base.id, self._gpu)
        item = next(item for item in choices if item.key == chosen.action.key)
        is_known = bool(item.result) and item.result in self._known()
        if is_known and "variants" not in chosen.action.params:
            self._skip(chosen)
            return
        self.items.append(item)
        step = replace(self._looked_up(item, is_known=is_known), base=chosen.base.id, prior=chosen.prior)
        if step.status is StepStatus.ACCEPTED:
            speedup = self._speedups[chosen.base.id] * (item.ratio or 1.0)
            self._speedups[item.result] = max(speedup, self._speedups.get(item.result, 0.0))
        self._set([*self._steps, step])

    def _looked_up(self, item: Transition, *, is_known: bool) -> Step:
        """The step of a transition.

        Args:
            is_known: whether its version was tried, which is noticed only after measuring its variants.
        """
        index = len(self._steps) + 1
        if is_known:
            return Step(index, action_of(item), StepStatus.REJECTED, "the fastest variant is a version that was tried")
        candidate = self._measured.candidate(item.result) if item.result else None
        is_kept = item.outcome is Outcome.FASTER or self._measured.is_base(item)
        if is_kept and item.result in self._measured.versions:
            return replace(step_of(item, index, StepStatus.ACCEPTED, candidate), verdict=VERIFIED)
        status = StepStatus.FAILED if item.outcome in FAILURES else StepStatus.REJECTED
        return step_of(item, index, status, candidate)

    def _untried(self, version: str, history: Sequence[Step]) -> list[MacroAction]:
        """The measured actions of a version that a history does not contain, in the roofline planner's order.

        What a timed run would have done with a correct version without a time is not known, so that cannot be chosen.
        """
        tried = {step.action.key for step in history if step.base == version}
        choices = self._measured.choices_of(version, self._gpu)
        return [action_of(item) for item in choices if item.key not in tried and item.outcome is not Outcome.CORRECT]


class ReplayedGreedy(ReplayedSearch, GreedySearch):
    """The greedy search on a measured tree."""


class ReplayedBeam(ReplayedSearch, BeamSearch):
    """The beam on a measured tree."""

    def _known(self) -> Mapping[str, int]:
        return _versions(self._steps)


class ReplayedMcts(ReplayedSearch, MctsSearch):
    """Monte Carlo tree search on a measured tree."""

    def _known(self) -> Mapping[str, int]:
        return _versions(self._steps)


REPLAYED: Mapping[str, type[ReplayedSearch]] = {"greedy": ReplayedGreedy, "beam": ReplayedBeam, "mcts": ReplayedMcts}
"""By their names in the setting ``search``."""


class _Stored:
    """The coder and measurer of a replay. Only the first version and the device are needed: no trial is made."""

    verifies_beside = False

    def __init__(self, root: Candidate, device: DeviceModel) -> None:
        self._root = root
        self._device = device

    def start(self, capture: Capture, source: str) -> Candidate:
        return self._root

    def device(self) -> DeviceModel:
        return self._device

    def write(self, capture: Capture, candidate: Candidate, action: MacroAction) -> Candidate:
        raise LookupError(action.key)

    def verify(self, candidate: Candidate, is_wanted: Callable[[], bool] = lambda: True) -> Verdict:
        raise LookupError(candidate.id)

    def compile(self, candidate: Candidate) -> CompileReport:
        raise LookupError(candidate.id)

    def time(self, candidate: Candidate, previous: Candidate | None) -> Timing | None:
        raise LookupError(candidate.id)

    def close(self) -> None:
        """Nothing runs."""


class _Listed:
    """The measured, untried actions of the present version, as the planner's list of legal actions."""

    def __init__(self, untried: Callable[[str, Sequence[Step]], list[MacroAction]]) -> None:
        self._untried = untried

    def ranked(self, state: State) -> list[MacroAction]:
        return self._untried(state.candidate.id, state.history)


def _versions(steps: Sequence[Step]) -> Mapping[str, int]:
    """The numbers of the steps by their versions."""
    return {step.candidate.id: step.index for step in steps if step.candidate is not None}
