"""The loop of an evolution: in each generation, every island draws a parent, varies it, and keeps what is not slower.

The random state of an island in a generation derives from the seed and both numbers, and a generation is stored in one
transaction. So a killed run continues with the lineage of an unbroken one.
"""

from __future__ import annotations

import hashlib
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from mtmc_lsp.core.chat import BudgetSpent
from mtmc_lsp.core.errors import FailureKind, MtmcError
from mtmc_lsp.core.learning.transitions import Outcome
from mtmc_lsp.core.run import Author, Candidate
from mtmc_lsp.evolve.archive import Archive, archives
from mtmc_lsp.evolve.fitness import is_faster, ratio_text, scores_of, slower_on
from mtmc_lsp.evolve.lineage import (
    Event,
    EventKind,
    Generation,
    Lineage,
    Operator,
    Setup,
    Spent,
    Version,
    VersionStatus,
)
from mtmc_lsp.evolve.operators.base import Draft, Task, VaryingOperator
from mtmc_lsp.evolve.supervisor import Supervisor, restart_from
from mtmc_lsp.evolve.trials import TrialRequest, TrialResult, TrialRunner
from mtmc_lsp.explore.judgement import GOOD
from mtmc_lsp.search.trial import version_key
from mtmc_lsp.source.compose import unified_diff

BEST_SHARE = 0.5
"""How often the fastest version of an island is the parent; otherwise a random one of its archive."""
MIGRATION_INTERVAL = 5
"""Generations between two exchanges of islands."""
MOST_EXHAUSTED = 12
"""Generations in a row without a new version, after which the evolution ends. The supervisor sets new directions before."""
TIME_OVER = "the time is over"


@dataclass(frozen=True)
class Limits:
    """When an evolution ends, even if more can be tried."""

    seconds: float
    """Of all generations together, also those before the run was resumed."""
    generations: int = 0
    """0 for no limit."""


@dataclass(frozen=True)
class Progress:
    """Callbacks. A generation is stored before it is reported."""

    on_stage: Callable[[str], None] = lambda stage: None
    on_generation: Callable[[Generation, Sequence[Version]], None] = lambda generation, versions: None


@dataclass(frozen=True)
class Parts:
    """What an evolution works with."""

    setup: Setup
    operators: Mapping[Operator, VaryingOperator]
    runner: TrialRunner
    supervisor: Supervisor
    store: Callable[[Generation, Sequence[Version]], None]
    """Stores a generation with its versions, in one transaction."""
    limits: Limits
    progress: Progress = Progress()
    clock: Callable[[], float] = time.monotonic


class Evolution:
    """Evolves versions from a lineage that holds at least the user's code."""

    def __init__(self, parts: Parts, lineage: Lineage) -> None:
        self._parts, self.lineage = parts, lineage
        self._names = [name for name, _ in parts.setup.workloads]

    def run(self) -> Lineage:
        """Make generations until a limit is reached or nothing new is left.

        Raises:
            ModelNotUsable: a language model must be asked and none can be reached. The run can be resumed.
            MtmcError: nothing can be tried any more.
        """
        while not self.lineage.end_reason:
            reason = self._limit_reached()
            try:
                generation, versions = (None, []) if reason else self._generation()
            except BudgetSpent as spent:
                reason, generation, versions = spent.message, None, []
            except MtmcError as error:
                if error.kind is not FailureKind.DEADLINE:
                    raise
                reason, generation, versions = TIME_OVER, None, []
            if generation is None:
                last = self.lineage.generations[-1]
                generation = replace(last, events=(*last.events, Event(EventKind.ENDED, reason)))
            self._parts.store(generation, versions)
            self.lineage = self.lineage.with_generation(generation, versions)
            self._parts.progress.on_generation(generation, versions)
        return self.lineage

    def _limit_reached(self) -> str:
        """Why no further generation begins; empty if one does."""
        limits, done = self._parts.limits, self.lineage.generations
        if limits.generations and done[-1].number >= limits.generations:
            return f"the limit of {limits.generations} generations is reached"
        if self.lineage.spent.seconds >= limits.seconds:
            return TIME_OVER
        written = {version.generation for version in self.lineage.versions if version.key}
        tail = [item.number for item in done[-MOST_EXHAUSTED:]]
        if len(tail) == MOST_EXHAUSTED and not written & set(tail):
            return f"{MOST_EXHAUSTED} generations in a row gave no version that is new"
        return ""

    # One generation ----------------------------------------------------------------------------------------------

    def _generation(self) -> tuple[Generation, list[Version]]:
        began, parts = self._parts.clock(), self._parts
        number = self.lineage.generations[-1].number + 1
        held = archives(self.lineage, self._names, parts.setup.islands)
        events = self._events(number, held)
        directed = self.lineage.with_generation(Generation(number, tuple(events)), ())
        if any(event.kind is EventKind.MIGRATION for event in events):
            held = archives(directed, self._names, parts.setup.islands)
        drafts: list[tuple[Task, Draft]] = []
        keys = {version.key for version in self.lineage.versions if version.key}
        for island in range(parts.setup.islands):
            parts.progress.on_stage(f"generation {number}, island {island + 1}: writing a version")
            operator = self._operator(number, island)
            task = self._task(directed, number, island, self._parents(held[island], operator), frozenset(keys))
            draft = parts.operators[operator].vary(task)
            drafts.append((task, draft))
            if draft.candidate is not None:
                keys.add(key_of(draft.candidate))
        results = self._tried(number, drafts)
        versions: list[Version] = []
        for (task, draft), result in zip(drafts, results, strict=True):
            if draft.candidate is None and draft.operator is Operator.CATALOGUE:
                events.append(Event(EventKind.EXHAUSTED, draft.remark, task.island))
                continue
            index = len(self.lineage.versions) + len(versions)
            version = self._judged(index, number, task, draft, result)
            # A version that is slower everywhere was not verified.
            if version.scores and version.outcome is not Outcome.SLOWER:
                version = _placed(version, held[task.island])
            versions.append(version)
        spent = Spent(parts.clock() - began)
        for _, draft in drafts:
            spent = spent + replace(draft.spent, seconds=0.0)
        return Generation(number, tuple(events), spent), versions

    def _events(self, number: int, held: Sequence[Archive]) -> list[Event]:
        """New directions, and exchanges between the islands."""
        events = [
            event
            for island, archive in enumerate(held)
            if (event := self._parts.supervisor.decide(self.lineage, island, archive)) is not None
        ]
        if len(held) > 1 and number % MIGRATION_INTERVAL == 0:
            for island, archive in enumerate(held):
                best, target = archive.fastest(), (island + 1) % len(held)
                if best.number not in {version.number for version in held[target].elites}:
                    text = f"version {best.number} of island {island + 1} joins island {target + 1}"
                    events.append(Event(EventKind.MIGRATION, text, target, best.number))
        return events

    def _parents(self, archive: Archive, operator: Operator) -> list[Version]:
        """The versions that an operator may change, the fastest first.

        Actions of the catalogue write all kernels again, so they would remove the edits of a model.
        """
        elites = sorted(archive.elites, key=lambda version: (-version.gain, version.number))
        if operator is Operator.AGENT:
            return elites
        return [item for item in elites if _is_builtin(item)] or [
            max((item for item in self.lineage.versions if _is_builtin(item)), key=lambda version: version.gain)
        ]

    def _task(
        self, lineage: Lineage, number: int, island: int, parents: Sequence[Version], known: frozenset[str]
    ) -> Task:
        rng = random.Random(f"{self._parts.setup.seed} {number} {island}")
        restart = restart_from(lineage, island)
        chosen = next((item for item in parents if item.number == restart), None)
        if chosen is None:
            chosen = parents[0] if rng.random() < BEST_SHARE else rng.choice(parents)
        direction = self._parts.supervisor.direction(lineage, island)
        return Task(chosen, island, lineage, direction, rng, lambda key: digest(key) in known)

    def _operator(self, number: int, island: int) -> Operator:
        """The operator of an island: in turn, if there are two."""
        operators = list(self._parts.operators)
        return operators[(number + island) % len(operators)]

    def _tried(self, number: int, drafts: Sequence[tuple[Task, Draft]]) -> list[TrialResult | None]:
        """The results of all versions that were written; the runner gets them together."""
        requests, places = [], []
        for place, (task, draft) in enumerate(drafts):
            if draft.candidate is not None and task.parent.candidate is not None:
                requests.append(TrialRequest(task.parent.candidate, draft.candidate))
                places.append(place)
        self._parts.progress.on_stage(f"generation {number}: trying {len(requests)} versions")
        results: list[TrialResult | None] = [None] * len(drafts)
        for place, result in zip(places, self._parts.runner.run(requests), strict=True):
            results[place] = result
        return results

    def _judged(self, index: int, number: int, task: Task, draft: Draft, result: TrialResult | None) -> Version:
        """The version with its scores and status, before it is placed in the archive."""
        version = Version(
            index,
            number,
            task.island,
            task.parent.number,
            draft.operator,
            VersionStatus.FAILED,
            draft.remark,
            Outcome.NOT_LEGAL,
            draft.actions,
            candidate=draft.candidate,
            spent=draft.spent,
            remark=draft.remark,
        )
        if result is None or draft.candidate is None:
            return version
        assert task.parent.candidate is not None
        version = replace(
            version,
            outcome=result.outcome,
            diff=unified_diff(task.parent.candidate.source, draft.candidate.source, "version"),
            key=key_of(draft.candidate),
            memory=result.memory,
            launches=result.launches,
            spent=draft.spent + Spent(result.seconds),
        )
        if result.outcome not in GOOD:
            return replace(version, reason=result.detail)
        if len(result.workloads) != len(self._names):
            reason = result.detail or "it was not timed on every workload"
            return replace(version, status=VersionStatus.REJECTED, reason=reason)
        scores = scores_of(result, task.parent)
        return self._compared(replace(version, scores=scores), task.parent)

    def _compared(self, version: Version, parent: Version) -> Version:
        """The version with its status beside its parent."""
        estimated = "" if self._parts.setup.has_gpu else ", estimated"
        over = f"{ratio_text(version.scores)} the speed of version {parent.number}{estimated}"
        worse = slower_on(version.scores)
        if worse:
            where = "; ".join(f"{version.scores[i].ratio:.2f}x on {self._names[i]}" for i in worse)
            return replace(version, status=VersionStatus.REJECTED, reason=f"slower: {where}{estimated}")
        if is_faster(version.scores):
            return replace(version, status=VersionStatus.KEPT, reason=over)
        return replace(version, status=VersionStatus.KEPT, reason=f"as fast: {over}")


def _placed(version: Version, archive: Archive) -> Version:
    """The version with the niches that it takes; a slower version that takes one is kept for it."""
    niches = archive.add(version)
    if version.status is VersionStatus.REJECTED and niches:
        reason = f"{version.reason}; kept as the best of {', '.join(niches)}"
        return replace(version, status=VersionStatus.NICHE, niches=niches, reason=reason)
    return replace(version, niches=niches)


def _is_builtin(version: Version) -> bool:
    """Whether the built-in coder wrote a version that may become a parent."""
    return version.is_alive and version.candidate is not None and version.candidate.author is Author.BUILTIN


def key_of(candidate: Candidate) -> str:
    """A short key that is equal for versions that compute the same in the same way."""
    return digest(version_key(candidate))


def digest(text: str) -> str:
    """A short hash."""
    return hashlib.sha256(text.encode()).hexdigest()[:20]
