"""Grows the tree of one program: chooses a version, tries actions on it, and stores each transition."""

from __future__ import annotations

import random
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Protocol

from mtmc_lsp.core.action import MacroAction
from mtmc_lsp.core.json_codec import to_json
from mtmc_lsp.core.learning.transitions import Outcome, Transition, Version
from mtmc_lsp.core.protocols import CannotCode, State
from mtmc_lsp.core.results import CompileReport
from mtmc_lsp.core.run import Candidate
from mtmc_lsp.core.workload import Capture
from mtmc_lsp.explore.choices import Actions, Chosen, choose, variants_of
from mtmc_lsp.explore.identity import one_line, version_id
from mtmc_lsp.explore.judgement import Judgement, SiblingMeasurer
from mtmc_lsp.explore.tree import VARIANT, Node, Tree
from mtmc_lsp.search.trial import with_fewer_stages
from mtmc_lsp.tuning.schedule_cost import estimated_us

PLANNING_SECONDS = 10.0
"""Time limit for the list of a version's actions: of large networks, the first ones in the order of the search."""
NO_CHANGE = "it changes nothing"
PLANNING, WRITING, COMPILING, JUDGING, STORING = "planning", "writing", "compiling", "judging", "storing"
"""Names of the stages whose seconds are added up; judging is verifying, and timing on a GPU."""


class ScheduleCoder(Protocol):
    """Writes actions, and versions of earlier processes by their schedule."""

    def start(self, capture: Capture, source: str) -> Candidate:
        """As in :class:`~mtmc_lsp.core.protocols.Coder`."""

    def write(self, capture: Capture, candidate: Candidate, action: MacroAction) -> Candidate:
        """As in :class:`~mtmc_lsp.core.protocols.Coder`."""

    def rewrite(self, capture: Capture, source: str, schedule: object) -> Candidate:
        """The version with a schedule."""


class Rows(Protocol):
    """Stores versions and transitions."""

    def add(self, versions: Sequence[Version], transitions: Sequence[Transition]) -> None:
        """Add rows, so that they survive a kill after this call."""


@dataclass(frozen=True)
class Growth:
    """How a tree grows."""

    depth: int
    """Most actions since the user's code."""
    width: int
    """Most actions tried on one version."""
    deadline: float
    """Time of the clock after which no further version is expanded."""
    seed: int
    environment: str
    """As in :class:`~mtmc_lsp.core.learning.transitions.Transition`."""


@dataclass
class _Trial:
    """One version to try: an action, or one configuration of an action that measures several."""

    chosen: Chosen
    action: MacroAction
    seconds: float = 0.0
    """Time spent on it, with its share of common stages."""
    candidate: Candidate | None = None
    version: str = ""
    """Id of the written version."""
    judgement: Judgement | None = None


class Grower:
    """Grows the tree of one program until the time is over or nothing is left to try."""

    def __init__(
        self,
        program: str,
        capture: Capture,
        source: str,
        *,
        actions: Actions,
        coder: ScheduleCoder,
        measurer: SiblingMeasurer,
        rows: Rows,
        growth: Growth,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Prepare.

        Args:
            program: the program's id.
            capture: with the paths of this machine.
            source: the user's file without generated code.
            rows: stores what is measured.
            clock: in seconds.
        """
        self._program, self._capture, self._source = program, capture, source
        self._actions, self._coder, self._measurer, self._rows = actions, coder, measurer, rows
        self._growth, self._clock = growth, clock
        self._device = measurer.device()
        self._device_name = self._device.name if measurer.has_gpu else ""
        root = coder.start(capture, source)
        root_version = self._version(version_id(program, root.schedule), root, "", "", 0, None)
        self._tree = Tree(root_version, self._device_name, depth=growth.depth, width=growth.width)
        self.seconds: defaultdict[str, float] = defaultdict(float)
        """Seconds of each stage."""
        self._has_root = False
        """Whether the user's code is stored."""
        self.added: list[Transition] = []
        """The transitions that were added."""

    def load(self, versions: Iterable[Version], transitions: Sequence[Transition]) -> None:
        """Take over what earlier processes measured of this program."""
        stored = {version.id: version for version in versions}
        root = self._tree.root
        self._has_root = root.version.id in stored
        root.version = stored.get(root.version.id, root.version)
        self._tree.load(stored.values(), transitions)

    def run(self) -> None:
        """Grow the tree."""
        # What was tried so far decides what is drawn next, so a resumed process does not repeat the draws.
        rng = random.Random(f"{self._growth.seed} {self._program} {sum(n.count for n in self._tree.nodes.values())}")
        while self._clock() < self._growth.deadline:
            node = self._tree.next(rng)
            if node is None:
                return
            self.expand(node, rng)

    def expand(self, node: Node, rng: random.Random) -> None:
        """Try actions on a version, up to the limit of actions on one version."""
        with self._stage(PLANNING):
            try:
                before = self._coder.rewrite(self._capture, self._source, node.version.schedule)
            except (CannotCode, TypeError):
                # Another version of this tool wrote the schedule.
                node.is_exhausted = True
                return
            deadline = time.monotonic() + PLANNING_SECONDS
            state = State(self._capture, before, node.history, self._device, True, deadline=deadline)
            room = self._tree.room(node)
            listed, unlisted = self._actions.legal(state, node.keys, room, rng)
            chosen = choose(listed, unlisted, room, rng)
        node.is_exhausted = not chosen
        for first in range(0, len(chosen), self._measurer.most_at_once):
            if first and self._clock() >= self._growth.deadline:
                return
            self._try(node, before, chosen[first : first + self._measurer.most_at_once])

    def _try(self, node: Node, before: Candidate, chosen: Sequence[Chosen]) -> None:
        """Try some actions together, and store what came of them."""
        groups = [self._written(node, before, item) for item in chosen]
        trials = self._open_trials(groups)
        self._compile(before, trials)
        self._judge(before, groups, [trial for trial in trials if trial.judgement is None])
        with self._stage(STORING):
            self._store(node, groups)

    # Stages ------------------------------------------------------------------------------------------------------

    @contextmanager
    def _stage(self, name: str, trials: Sequence[_Trial] = ()) -> Iterator[None]:
        """Add the time to a stage, and an equal share of it to each trial."""
        began = self._clock()
        try:
            yield
        finally:
            taken = self._clock() - began
            self.seconds[name] += taken
            for trial in trials:
                trial.seconds += taken / len(trials)

    def _written(self, node: Node, before: Candidate, chosen: Chosen) -> list[_Trial]:
        """The versions of an action. Those that need no measurement have a judgement."""
        trials = [_Trial(chosen, action) for action in variants_of(chosen.action) or [chosen.action]]
        for trial in trials:
            with self._stage(WRITING, [trial]):
                try:
                    candidate = self._coder.write(self._capture, before, trial.action)
                except CannotCode as reason:
                    trial.judgement = Judgement(Outcome.NOT_LEGAL, one_line(str(reason)))
                    continue
                version = version_id(self._program, candidate.schedule)
                if version == node.version.id:
                    trial.judgement = Judgement(Outcome.NOT_LEGAL, NO_CHANGE)
                    continue
                trial.candidate, trial.version = candidate, version
                known = self._tree.known(node, version)
                trial.judgement = _judgement_of(known) if known is not None else None
        return trials

    @staticmethod
    def _open_trials(groups: Sequence[Sequence[_Trial]]) -> list[_Trial]:
        """The trials that need a measurement: the first one of each version."""
        trials = [trial for group in groups for trial in group if trial.judgement is None]
        return list({trial.version: trial for trial in reversed(trials)}.values())[::-1]

    def _compile(self, before: Candidate, trials: Sequence[_Trial]) -> None:
        """Compile all versions at once; those that need too much shared memory again with fewer stages, as a search does."""
        actions = {id(trial): trial.action for trial in trials}
        while trials:
            with self._stage(COMPILING, trials):
                reports = self._measurer.compile([trial.candidate for trial in trials if trial.candidate is not None])
            again = []
            for trial, report in zip(trials, reports, strict=True):
                if report.ok:
                    continue
                smaller = with_fewer_stages(actions[id(trial)]) if report.exceeds_shared else None
                candidate = self._rewritten(before, smaller, trial) if smaller is not None else None
                if smaller is None or candidate is None:
                    outcome = Outcome.OUT_OF_TIME if report.ran_out_of_time else Outcome.COMPILE_ERROR
                    trial.judgement = Judgement(outcome, _compile_error(report))
                else:
                    trial.candidate, actions[id(trial)] = candidate, smaller
                    trial.version = version_id(self._program, candidate.schedule)
                    again.append(trial)
            trials = again

    def _rewritten(self, before: Candidate, action: MacroAction, trial: _Trial) -> Candidate | None:
        with self._stage(WRITING, [trial]):
            try:
                return self._coder.write(self._capture, before, action)
            except CannotCode:
                return None

    def _judge(self, before: Candidate, groups: Sequence[Sequence[_Trial]], trials: Sequence[_Trial]) -> None:
        """Verify and time what compiles, then copy the judgements to further trials of the same versions."""
        waiting = {id(trial) for trial in trials}
        judged = [[trial for trial in group if id(trial) in waiting] for group in groups]
        judged = [group for group in judged if group]
        if judged:
            with self._stage(JUDGING, trials):
                versions = [[t.candidate for t in group if t.candidate is not None] for group in judged]
                results = self._measurer.judge(before, versions)
            for group, judgements in zip(judged, results, strict=True):
                for trial, judgement in zip(group, judgements, strict=True):
                    trial.judgement = replace(judgement, detail=one_line(judgement.detail))
        known = {trial.version: trial.judgement for group in groups for trial in group if trial.judgement is not None}
        for trial in (trial for group in groups for trial in group if trial.judgement is None):
            # Fewer stages changed the version of the trial that was compiled instead of this one.
            trial.judgement = known.get(
                trial.version, Judgement(Outcome.COMPILE_ERROR, "it needs too much shared memory")
            )

    # Storing -----------------------------------------------------------------------------------------------------

    def _store(self, node: Node, groups: Sequence[Sequence[_Trial]]) -> None:
        """Store the transitions of a version, and the versions that they lead to."""
        tried = [item for group in groups for item in self._results(node, group)]
        versions = {v.id: v for _, v, _ in tried if v is not None and v.id not in self._tree.versions}
        versions |= self._root_row(node, [transition for transition, _, _ in tried])
        self._rows.add(list(versions.values()), [transition for transition, _, _ in tried])
        self.added += [transition for transition, _, _ in tried]
        for transition, version, judgement in tried:
            self._tree.add(node, transition, version, judgement.timing, judgement.verdict)

    def _root_row(self, node: Node, transitions: Sequence[Transition]) -> dict[str, Version]:
        """The user's code, before the first transition and once more when it has a time."""
        times = [item.before_us for item in transitions if item.before_us is not None]
        root = self._tree.root
        if node is root and times and root.version.median_us is None:
            root.version = replace(root.version, median_us=times[0])
        elif self._has_root:
            return {}
        self._has_root = True
        return {root.version.id: root.version}

    def _results(self, node: Node, group: Sequence[_Trial]) -> list[tuple[Transition, Version | None, Judgement]]:
        """The transition of an action, after those of its configurations if it measured several."""
        best = max(group, key=_merit)
        results = []
        if best.action is not best.chosen.action:
            timed = [trial for trial in group if trial.judgement is not None and trial.judgement.ratio is not None]
            results = [self._result(node, trial, trial.action, trial.seconds, -1, VARIANT) for trial in timed]
        seconds = sum(trial.seconds for trial in group)
        chosen = best.chosen
        return [*results, self._result(node, best, chosen.action, seconds, chosen.rank, chosen.chosen_by)]

    def _result(
        self, node: Node, trial: _Trial, action: MacroAction, seconds: float, rank: int, chosen_by: str
    ) -> tuple[Transition, Version | None, Judgement]:
        judgement, version = trial.judgement, None
        assert judgement is not None
        if trial.candidate is not None:
            depth = node.version.depth + 1
            version = self._version(
                trial.version, trial.candidate, node.version.id, action.key, depth, judgement.after_us
            )
        transition = Transition(
            program=self._program,
            version=node.version.id,
            action=to_json(action),
            key=action.key,
            rank=rank,
            chosen_by=chosen_by,
            outcome=judgement.outcome,
            result=trial.version,
            before_us=judgement.before_us,
            after_us=judgement.after_us,
            ratio=judgement.ratio,
            ratio_error=judgement.ratio_error,
            seconds=round(seconds, 4),
            detail=judgement.detail,
            device=self._device_name,
            environment=self._growth.environment,
        )
        return transition, version, judgement

    def _version(
        self, identity: str, candidate: Candidate, parent: str, action: str, depth: int, median_us: float | None
    ) -> Version:
        schedule = candidate.schedule
        assert isinstance(schedule, Mapping)
        predicted = estimated_us(self._capture.graph, schedule, self._device)
        return Version(identity, self._program, parent, action, depth, schedule, median_us, predicted)


def _judgement_of(transition: Transition) -> Judgement:
    """The judgement that an earlier transition to the same version had."""
    return Judgement(
        transition.outcome,
        transition.detail,
        transition.before_us,
        transition.after_us,
        transition.ratio,
        transition.ratio_error,
    )


def _compile_error(report: CompileReport) -> str:
    broken = next(kernel for kernel in report.kernels if kernel.error)
    return one_line(f"{broken.kernel} does not compile for {broken.arch}: {broken.error}")


def _merit(trial: _Trial) -> tuple[float, int]:
    """Orders configurations by speed, and without times by the number of passed stages."""
    assert trial.judgement is not None
    return trial.judgement.ratio or 0.0, list(Outcome).index(trial.judgement.outcome)
