"""What a user decides about the steps of a run: remove one and keep the others, or replace one.

The text is never edited directly. To remove a step, the actions after it are written again on the version before it, and each
one is verified again. ``recompose.py`` writes them at once, and :func:`certify` verifies them; where a model wrote a step,
``undo`` does both. The result is a new run, which replaces the earlier one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from mtmc_lsp.app.revisions.recompose import UNDONE, first_unverified
from mtmc_lsp.app.run_recorder import Revision
from mtmc_lsp.core.action import REMARK, MacroAction, Stop
from mtmc_lsp.core.errors import RequestError
from mtmc_lsp.core.protocols import Planner, Repairer, State
from mtmc_lsp.core.results import CompileReport, Timing
from mtmc_lsp.core.run import Step, StepStatus
from mtmc_lsp.search.acceptance import Judge
from mtmc_lsp.search.components import SearchComponents
from mtmc_lsp.search.greedy import GreedySearch
from mtmc_lsp.search.loop import Search

REPLACED = "you asked for another"


@dataclass(frozen=True)
class RevisedSearch:
    """The search that carries out a decision."""

    kind: type[Search]
    components: SearchComponents
    steps: Sequence[Step]
    """Steps to take over without measuring them again; the last one is rejected if the decision is about it."""


def revise(
    steps: Sequence[Step], revision: Revision, components: SearchComponents, kind: type[Search] = GreedySearch
) -> RevisedSearch:
    """The search for a run that repeats an earlier run with one step undone or replaced.

    Args:
        components: the parts of a search that continues the earlier run.
        kind: the search that looks for another step.

    Raises:
        RequestError: the earlier run has no such step.
    """
    if not any(step.index == revision.step for step in steps):
        raise RequestError(f"run {revision.run} has no step {revision.step}", remedy="Run it again.")
    if revision.kind == "undo":
        return _undo(steps, revision.step, components)
    return _replace(steps, revision, components, kind)


def certify(steps: Sequence[Step], components: SearchComponents) -> RevisedSearch:
    """The search that verifies steps which :mod:`mtmc_lsp.app.revisions.recompose` wrote, from the first without a verdict on."""
    count = first_unverified(steps)
    actions = [step.action for step in steps[count:]]
    components = replace(components, planner=_ListPlanner(actions), limits=replace(components.limits, steps=len(steps)))
    return RevisedSearch(_RederivingSearch, components, steps[:count])


def _undo(steps: Sequence[Step], index: int, components: SearchComponents) -> RevisedSearch:
    """Undo the step numbered ``index``: the later accepted actions are written and verified again."""
    later = [step.action for step in steps if step.index > index and step.status is StepStatus.ACCEPTED]
    limits = replace(components.limits, steps=index + len(later))
    components = replace(components, planner=_ListPlanner(later), limits=limits)
    return RevisedSearch(_RederivingSearch, components, _reject(steps, index, UNDONE))


def _replace(
    steps: Sequence[Step], revision: Revision, components: SearchComponents, kind: type[Search]
) -> RevisedSearch:
    """Replace a step: the search continues from the version before it, as if the step had been rejected.

    If a model writes the code, the same action is tried first with the user's remark: the remark may be about how the code
    was written, not only about what was done.
    """
    index, remark = revision.step, revision.remark
    planner = components.planner
    if remark and isinstance(components.coder, Repairer):
        action = next(step.action for step in steps if step.index == index)
        again = replace(action, params={**action.params, REMARK: remark}, text=f"{action.text}, and {remark}")
        planner = _ListPlanner([again], then=components.planner)
    limits = replace(components.limits, steps=index + components.limits.steps)
    reason = f"{REPLACED}: {remark}" if remark else REPLACED
    components = replace(components, planner=planner, limits=limits)
    return RevisedSearch(kind, components, _reject(steps, index, reason))


def _reject(steps: Sequence[Step], index: int, reason: str) -> list[Step]:
    """The steps up to the one numbered ``index``, which is rejected: it stays in the history, so it is not proposed again."""
    before = [step for step in steps if step.index < index]
    return [*before, *(replace(s, status=StepStatus.REJECTED, reason=reason) for s in steps if s.index == index)]


class _ListPlanner:
    """Proposes each action of a list once, then what another planner proposes."""

    def __init__(self, actions: Sequence[MacroAction], then: Planner | None = None) -> None:
        self._actions = list(actions)
        self._then = then

    def propose(self, state: State) -> MacroAction | Stop:
        if self._actions:
            return self._actions.pop(0)
        return self._then.propose(state) if self._then is not None else Stop("all chosen steps were written again")


class _RederivingJudge(Judge):
    """Accepts every step: the user chose these steps, and only one of them is removed."""

    def unmeasured(self, step: Step, report: CompileReport) -> Step:
        archs = ", ".join(dict.fromkeys(kernel.arch for kernel in report.kernels))
        reason = f"written and verified again by Triton's interpreter, compiled for {archs}; not timed: no GPU"
        return replace(step, status=StepStatus.ACCEPTED, reason=reason)

    def timed(self, step: Step, timing: Timing, *, base: float) -> Step:
        judged = super().timed(step, timing, base=base)
        return replace(judged, status=StepStatus.ACCEPTED, reason=f"written and verified again: {judged.reason}")


class _RederivingSearch(GreedySearch):
    """Writes the given actions again and keeps every step that is still correct."""

    judge = _RederivingJudge()
