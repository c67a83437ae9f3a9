"""Finds the regions of a target that cannot be captured as a whole.

A run of statements is captured. If that fails, the statement that fails is cut out, and the runs before, after and inside it are
tried in the same way, the longest first.
"""

from __future__ import annotations

import ast
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from mtmc_lsp.capture.messages import LocalValues
from mtmc_lsp.capture.regions.runs import Cut, Run, Runs
from mtmc_lsp.core.errors import (
    EnvironmentNotAble,
    FailureKind,
    Location,
    MtmcError,
    TargetRaises,
    TargetUnsupported,
    WorkerFailed,
)
from mtmc_lsp.core.workload import ArgumentSpec, Capture, CodeRegion, Workload

MOST_CAPTURES = 40
"""Captures of one target; each takes about a second."""
ENDED = (FailureKind.CANCELLED, FailureKind.DEADLINE)
REFUSALS = (TargetUnsupported, TargetRaises, EnvironmentNotAble, WorkerFailed)
"""Errors that say something about the code of a run."""


@dataclass(frozen=True)
class Regions:
    """The regions of a target, and what is between them."""

    captures: tuple[Capture, ...]
    """One for each region, in source order."""
    cuts: tuple[Cut, ...]
    """In source order."""
    is_complete: bool = True
    """Whether every run was tried before the time ended."""


@dataclass
class RegionSearch:
    """The search for the regions of one target."""

    workload: Workload
    """Of the whole target."""
    runs: Runs
    values: LocalValues
    capture: Callable[[Workload], Capture]
    """Captures a region.

    Raises:
        MtmcError: it cannot be captured.
    """
    deadline: float
    """Time of the monotonic clock after which nothing more is captured."""
    _captured: dict[tuple[int, int], Capture] = field(default_factory=dict)
    _cuts: dict[int, Cut] = field(default_factory=dict)
    _attempts: int = 0
    _is_over: bool = False
    """Whether the time ended."""

    def find(self) -> Regions:
        """Capture the longest runs that can be captured."""
        waiting = [self.runs.whole()]
        while waiting and self._attempts < MOST_CAPTURES and not self._has_ended():
            waiting.sort(key=lambda run: len(run.statements))
            run = self.runs.trimmed(waiting.pop(), self._is_plain)
            cut = self._try(run) if run is not None else None
            if run is not None and cut is not None:
                self._cuts.setdefault(cut.line, cut)
                waiting += self.runs.parts(run, cut.statement)
        captures = []
        for number, key in enumerate(sorted(self._captured), 1):
            capture = self._captured[key]
            target = capture.workload.target
            assert target.region is not None
            numbered = replace(target, region=replace(target.region, number=number))
            captures.append(replace(capture, workload=replace(capture.workload, target=numbered)))
        return Regions(tuple(captures), tuple(self._cuts[line] for line in sorted(self._cuts)), not self._is_over)

    def _has_ended(self) -> bool:
        """Whether no time is left for a capture."""
        self._is_over = self._is_over or time.monotonic() >= self.deadline
        return self._is_over

    def _try(self, run: Run) -> Cut | None:
        """Capture a run; the statement to cut if that fails."""
        if not self.runs.is_worthwhile(run):
            return None
        cut = self.runs.obvious_cut(run)
        if cut is not None:
            return cut
        prepared = self._prepared(run)
        if not isinstance(prepared, Workload):
            return prepared
        outcome = self._attempt(prepared)
        if isinstance(outcome, Capture):
            assert prepared.target.region is not None
            self._captured[prepared.target.region.first, prepared.target.region.last] = outcome
        return self._failing(run, outcome) if isinstance(outcome, MtmcError) else None

    def _prepared(self, run: Run) -> Workload | Cut | None:
        """The workload of a run; ``None`` if it did not run in the calls."""
        region = self.runs.region(run)
        unset = self.runs.unset_input(run, region)
        if unset is not None:
            return unset
        values = {value.name: value for value in self.values.statements.get(region.first, ())}
        if region.first not in self.values.statements or not values.keys() >= {*region.inputs}:
            return None
        turns = self.runs.changes_in_loop(run)
        for name in region.inputs:
            spec = values[name].spec
            is_number = spec is not None and spec.tensor is None and type(spec.constant) in (int, float)
            if name in turns and is_number:
                # The guard compares numbers, so the kernels would run in the first turn only.
                return self.runs.reader_of(run, frozenset({name}), f"uses {name}, a number that the loop changes")
            if spec is None:
                return self.runs.reader_of(run, frozenset({name}), f"uses {name}, a {values[name].kind}")
        return self._workload(region, [spec for name in region.inputs if (spec := values[name].spec) is not None])

    def _is_plain(self, statement: ast.stmt, name: str) -> bool:
        """Whether a variable, where a statement runs, holds a constant."""
        values = self.values.statements.get(self.runs.statements.numbers[statement], ())
        spec = next((value.spec for value in values if value.name == name), None)
        return spec is not None and spec.tensor is None and spec.container is None

    def _workload(self, region: CodeRegion, arguments: Sequence[ArgumentSpec]) -> Workload:
        target = replace(self.workload.target, region=region)
        return replace(self.workload, target=target, arguments=tuple(arguments), sizes=self.values.sizes)

    def _attempt(self, workload: Workload) -> Capture | MtmcError | None:
        """Capture a region. Returns why it cannot be captured if it cannot; ``None`` if it computes nothing."""
        self._attempts += 1
        try:
            return self.capture(workload)
        except REFUSALS as error:
            if error.kind is FailureKind.NO_TENSORS:
                return None
            if error.kind is FailureKind.TIMEOUT and self._has_ended():
                # A capture gets all the time that is left: this says nothing about the code.
                return None
            if error.kind.is_out_of_memory or error.kind in ENDED:
                raise
            return error

    def _failing(self, run: Run, error: MtmcError) -> Cut | None:
        """The first statement that cannot be captured. The error names its line; otherwise bisection finds it.

        ``None`` if the time ends before.
        """
        line = error.where.line if error.where is not None else 0
        for statement in run.statements:
            if statement.lineno <= line <= (statement.end_lineno or statement.lineno):
                return Cut(statement, line, self._reason(error))
        # The error is in a function that the run calls: find the shortest prefix that fails.
        good, bad = 0, len(run.statements)
        while bad - good > 1 and self._attempts < MOST_CAPTURES and not self._has_ended():
            middle = (good + bad) // 2
            failure = self._failure(Run(run.statements[:middle], False))
            if failure is None:
                good = middle
            else:
                bad, error = middle, failure
        if self._is_over:
            return None
        return Cut(run.statements[bad - 1], run.statements[bad - 1].lineno, self._reason(error))

    def _failure(self, run: Run) -> MtmcError | None:
        """Why a prefix of a run cannot be captured; ``None`` if it can, or computes nothing."""
        if not self.runs.is_worthwhile(run) or self.runs.obvious_cut(run) is not None:
            return None
        prepared = self._prepared(run)
        outcome = self._attempt(prepared) if isinstance(prepared, Workload) else None
        return outcome if isinstance(outcome, MtmcError) else None

    def _reason(self, error: MtmcError) -> str:
        reason = error.message.removeprefix(f"{self.workload.target.qualname} ")
        # The whole target ran, so the statement needs what other statements do, such as an attribute that they assign.
        return f"without the lines before it {reason}" if isinstance(error, TargetRaises) else reason


def no_region(workload: Workload, regions: Regions, error: MtmcError) -> MtmcError:
    """The error for a target without a region: it names each line that cuts it.

    Args:
        regions: what the search returned.
        error: why the whole target cannot be captured.
    """
    target, cuts = workload.target, regions.cuts
    lines = "".join(f"\n    line {cut.line} {cut.reason}" for cut in cuts)
    if not regions.is_complete:
        return TargetUnsupported(
            f"the time ended before the parts of {target.qualname} were captured; it cannot be captured as a whole:"
            + (lines or f" {error.message}"),
            where=Location(target.path, cuts[0].line if cuts else target.start_line),
            remedy="Give more time, for example with --budget 300.",
        )
    if len(cuts) < 2:
        return error
    return TargetUnsupported(
        f"{target.qualname} cannot be captured, and no part of it computes enough for a kernel:{lines}",
        where=Location(target.path, cuts[0].line),
        remedy=error.remedy,
    )
