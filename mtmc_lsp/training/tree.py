"""The measured trees of programs, and the states that a run would have been in at each version."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from mtmc_lsp.core.action import MacroAction
from mtmc_lsp.core.device_model import DeviceModel
from mtmc_lsp.core.errors import FailureKind
from mtmc_lsp.core.json_codec import from_json
from mtmc_lsp.core.learning.transitions import Outcome, Program, Transition, Version
from mtmc_lsp.core.protocols import State
from mtmc_lsp.core.results import (
    BaselineTime,
    CompileReport,
    KernelReport,
    Ratio,
    Speed,
    Timing,
    Verdict,
    VerdictStatus,
)
from mtmc_lsp.core.run import Candidate, Step, StepStatus
from mtmc_lsp.device.choice import default_model
from mtmc_lsp.device.data_files import data_files
from mtmc_lsp.explore.tree import VARIANT
from mtmc_lsp.policies.history import FAILURES
from mtmc_lsp.search.acceptance import base_ratio

MOST_FAILED = 3
"""Most failed siblings in the history of an ancestor: a run ends after four steps in a row that are not accepted."""
STANDARD_ERRORS = 1.96
"""Half of a 95 % interval, in standard errors."""


@dataclass(frozen=True)
class MeasuredTree:
    """Programs with their versions and transitions."""

    programs: Mapping[str, Program]
    versions: Mapping[str, Version]
    transitions: Mapping[str, Sequence[Transition]]
    """By the version that they change, in the order in which they were tried."""
    _candidates: dict[str, Candidate] = field(default_factory=dict, repr=False, compare=False)
    _best: dict[tuple[str, str], float] = field(default_factory=dict, repr=False, compare=False)

    @classmethod
    def of(
        cls, programs: Iterable[Program], versions: Iterable[Version], transitions: Iterable[Transition]
    ) -> MeasuredTree:
        """Group the transitions by version. Of several results for one action on one GPU, the last one counts."""
        by_version: dict[str, dict[tuple[str, str], Transition]] = {}
        for item in transitions:
            by_version.setdefault(item.version, {})[item.key, item.device] = item
        return cls(
            {program.id: program for program in programs},
            {version.id: version for version in versions},
            {version: tuple(items.values()) for version, items in by_version.items()},
        )

    @cached_property
    def roots(self) -> Mapping[str, Version]:
        """The user's code of each program, by the program's id."""
        return {version.program: version for version in self.versions.values() if not version.parent}

    @cached_property
    def by_program(self) -> Mapping[str, Sequence[Version]]:
        """The versions of each program, by the program's id."""
        grouped: dict[str, list[Version]] = {program: [] for program in self.programs}
        for version in self.versions.values():
            grouped.setdefault(version.program, []).append(version)
        return grouped

    def of_version(self, version: str) -> Sequence[Transition]:
        """The transitions from a version, in the order in which they were tried."""
        return self.transitions.get(version, ())

    def devices_of(self, program: str) -> list[str]:
        """Names of the GPUs that timed transitions of a program."""
        versions = self.by_program.get(program, ())
        names = (item.device for version in versions for item in self.of_version(version.id) if item.ratio is not None)
        return sorted({name for name in names if name})

    def path_of(self, version: Version, device: str) -> list[Transition]:
        """The history of a run that reached a version: the actions from the user's code on, each after failed siblings.

        Args:
            device: the GPU whose measurements count, where there are several.
        """
        path: list[Transition] = []
        seen = {version.id}
        while version.parent and version.parent in self.versions and version.parent not in seen:
            edge, before = self._edge_to(version, device)
            if edge is None:
                break
            failed = [item for item in before if item.outcome is not Outcome.FASTER]
            path = [*failed[-MOST_FAILED:], edge, *path]
            version = self.versions[version.parent]
            seen.add(version.id)
        return path

    def _edge_to(self, version: Version, device: str) -> tuple[Transition | None, list[Transition]]:
        """The transition that a version was first reached by, and the choices that were tried before it."""
        tried = [item for item in self.of_version(version.parent) if item.device in ("", device)]
        edges = [item for item in tried if version.id == item.result or item.key == version.action]
        # An action that measures several configurations has a transition beside those of its configurations.
        edge = next((item for item in edges if is_choice(item)), edges[0] if edges else None)
        before = tried[: tried.index(edge)] if edge is not None else []
        return edge, [item for item in before if is_choice(item)]

    def choices_of(self, version: str, device: str) -> list[Transition]:
        """What a planner could have chosen at a version, in its order: transitions on a GPU, without single configurations."""
        items = [item for item in self.of_version(version) if item.device in ("", device) and is_choice(item)]
        return sorted(items, key=lambda item: (item.rank < 0, item.rank, item.key))

    def best_from(self, version: str, device: str) -> float:
        """The largest speedup over a version that steps which each gain reach in its tree; 1 if there is none."""
        key = (version, device)
        if key not in self._best:
            # Set before its children, so that a cycle of versions ends.
            self._best[key] = 1.0
            gains = [
                (item.ratio or 1.0) * self.best_from(item.result, device)
                for item in self.of_version(version)
                if item.outcome is Outcome.FASTER and item.device == device and item.result
            ]
            self._best[key] = max([1.0, *gains])
        return self._best[key]

    def is_base(self, item: Transition) -> bool:
        """Whether a run accepts a slower first version as a base for later steps (:mod:`mtmc_lsp.search.acceptance`)."""
        version = self.versions[item.version]
        if version.parent or item.outcome is not Outcome.SLOWER or item.ratio is None:
            return False
        return item.ratio >= base_ratio(self.programs[item.program].capture.graph, action_of(item).region)

    def state(self, version: Version, history: Sequence[Transition], device: str) -> State:
        """The state of a run at a version after ``history``; without a GPU if ``device`` is empty."""
        continued = {item.version for item in history} | {version.id}
        steps = tuple(
            self._step(index, item, is_on_path=bool(item.result) and item.result in continued)
            for index, item in enumerate(history, 1)
        )
        capture = self.programs[version.program].capture
        return State(capture, self.candidate(version.id), steps, device_of(device), bool(device))

    def candidate(self, version: str) -> Candidate:
        """A version as searches see it: one object for each, so that features are computed once."""
        if version not in self._candidates:
            known = self.versions.get(version)
            schedule = known.schedule if known is not None else {}
            self._candidates[version] = Candidate(version, None, None, "", None, schedule)
        return self._candidates[version]

    def _step(self, index: int, item: Transition, *, is_on_path: bool) -> Step:
        status = StepStatus.FAILED if item.outcome in FAILURES else StepStatus.REJECTED
        if is_on_path:
            status = StepStatus.ACCEPTED
        return step_of(item, index, status, self.candidate(item.result) if item.result else None)


def is_choice(item: Transition) -> bool:
    """Whether a planner could choose the action: not a single configuration of an action that measures several."""
    return item.chosen_by != VARIANT


def step_of(item: Transition, index: int, status: StepStatus, candidate: Candidate | None) -> Step:
    """A transition as the step of a run; :func:`mtmc_lsp.policies.history.outcome_of` gives its outcome again."""
    step = Step(index, action_of(item), status, item.detail, candidate=candidate)
    if item.outcome is Outcome.NOT_LEGAL:
        return replace(step, candidate=None)
    step = replace(step, candidate=candidate or Candidate(f"{item.version}/{index}", item.version, None, "", None, {}))
    if item.outcome is Outcome.COMPILE_ERROR:
        kernel = KernelReport("", "", error=item.detail or "it does not compile")
        return replace(step, report=CompileReport((kernel,)), failure=FailureKind.COMPILE_ERROR)
    if item.outcome is Outcome.WRONG:
        return replace(step, verdict=Verdict(VerdictStatus.INCORRECT, (), "", reason=item.detail))
    if item.outcome is Outcome.OUT_OF_TIME:
        return replace(step, failure=FailureKind.TIMEOUT)
    return replace(step, timing=_timing_of(item))


def _timing_of(item: Transition) -> Timing | None:
    if item.ratio is None or item.after_us is None:
        return None
    error = STANDARD_ERRORS * (item.ratio_error or 0.0)
    speed = Speed.FASTER if item.outcome is Outcome.FASTER else Speed.SLOWER
    before_us = item.before_us if item.before_us is not None else item.after_us * item.ratio
    previous = BaselineTime("previous", before_us, Ratio(item.ratio, item.ratio - error, item.ratio + error), speed)
    return Timing(item.after_us, (previous,), "previous", Ratio(1.0, 1.0, 1.0), 0, "stored transition", 0.0)


def action_of(item: Transition) -> MacroAction:
    """The action of a transition."""
    return from_json(MacroAction, dict(item.action))


def device_of(name: str) -> DeviceModel:
    """The model of a GPU by its name; the representative one for an unknown or empty name."""
    known = (file.model for file in data_files() if name and file.matches(name))
    model = next(known, default_model())
    return replace(model, name=name) if name else model
