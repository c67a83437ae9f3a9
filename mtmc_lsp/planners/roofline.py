"""The roofline planner: proposes the legal action with the largest predicted saving."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace

from mtmc_lsp.actions.base import SITES, Situation
from mtmc_lsp.actions.catalogue import opening, proposals
from mtmc_lsp.actions.networks.first_version import rules_of
from mtmc_lsp.core.action import ActionKind, MacroAction, Stop
from mtmc_lsp.core.json_codec import from_json
from mtmc_lsp.core.protocols import State
from mtmc_lsp.core.settings import Settings
from mtmc_lsp.rewrites import layout_propagation as propagation
from mtmc_lsp.schedule.precision_modes import as_run
from mtmc_lsp.schedule.schedule import Schedule
from mtmc_lsp.tuning.loop_forms import form_of

NOTHING_LEFT = Stop("no other legal action is expected to save time")
CUT_SHORT = "Planning stopped at the run's time limit; with a larger budget it may find a better step."


class RooflinePlanner:
    """Ranks legal actions by predicted time saved, from bytes and operations over the device's peak rates."""

    def __init__(self, *, strict: bool = False, exclude: Collection[str] = ()) -> None:
        """Create a planner.

        Args:
            strict: whether to leave out actions that change rounding.
            exclude: action kinds and rewrite rules that are never proposed.
        """
        self._strict = strict
        self._exclude = frozenset(exclude)

    @classmethod
    def of(cls, settings: Settings) -> RooflinePlanner:
        """The planner that the settings describe."""
        return cls(strict=settings.precision == "strict", exclude=settings.exclude_actions)

    def propose(self, state: State) -> MacroAction | Stop:
        """The best untried action."""
        return self._opening(state) or next(iter(self.ranked(state)), NOTHING_LEFT)

    def _opening(self, state: State) -> MacroAction | None:
        """The best action of a run's first step, if it is known without a search for all others, which may take seconds."""
        first = None if state.history else opening(self.situation(state))
        return first if first is not None and not self._is_excluded(first) else None

    def ranked(self, state: State) -> list[MacroAction]:
        """All untried legal actions worth trying, best first."""
        return self.ranked_in(self.situation(state))

    def situation(self, state: State) -> Situation:
        """The state as actions see it."""
        schedule = from_json(Schedule, state.candidate.schedule)
        return Situation(
            as_run(state.capture.graph, schedule, state.history),
            schedule,
            state.device,
            target=state.capture.workload.target.qualname,
            has_gpu=state.has_gpu,
            strict=self._strict,
            history=state.history,
            deadline=state.deadline,
        )

    def ranked_in(self, situation: Situation) -> list[MacroAction]:
        """As :meth:`ranked`, in a situation of this planner."""
        tried = {step.action.key for step in situation.history}
        actions = [a for a in proposals(situation) if a.key not in tried and not self._is_excluded(a)]
        if situation.is_late:
            return [replace(action, rationale=f"{action.rationale} {CUT_SHORT}") for action in actions]
        return actions

    def _is_excluded(self, action: MacroAction) -> bool:
        parts = {action.kind.value, str(action.params.get("rule", ""))}
        if action.kind is ActionKind.CUDA_GRAPH and action.params.get("kernels"):
            # The first version of a network contains fusions, and perhaps another layout.
            parts |= {ActionKind.FUSE.value, *map(str, rules_of(action))}
            parts |= {ActionKind.CHANNELS_LAST.value} if propagation.RULE in parts else set()
        # Several kernels in one step may contain loops in other forms.
        kernels = action.params.get("kernels") or action.params.get(SITES)
        if isinstance(kernels, (list, tuple)):
            forms = (form_of(kernel.get("config")) for kernel in kernels if isinstance(kernel, Mapping))
            parts |= {form.value for form in forms if form is not None}
        return not self._exclude.isdisjoint(parts)
