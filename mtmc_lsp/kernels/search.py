"""Finds the repairs of a file: candidates are observed on small cases, and what shows no fault is verified."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from mtmc_lsp.core.results import Verdict
from mtmc_lsp.kernels.messages import CaseTrace, Fault, FaultKind, TraceCase
from mtmc_lsp.kernels.repairs.catalogue import repairs_for
from mtmc_lsp.kernels.repairs.site import MOST_LINES, Repair, sites_of
from mtmc_lsp.kernels.repairs.static import StaticFinding, static_findings, static_repairs
from mtmc_lsp.source.syntax import first_error, parse

MOST_ROUNDS = 3
"""Faults that are repaired one after the other."""
MOST_STATIC = 6
"""Repairs of static checks."""
MOST_VERIFIED = 6
"""Candidates of one round that are verified."""

Trace = Callable[[bytes, Sequence[TraceCase]], Sequence[CaseTrace]]
Verify = Callable[[bytes], Verdict]


@dataclass(frozen=True)
class Repaired:
    """The outcome of a search."""

    text: bytes
    """The file with all repairs."""
    repairs: tuple[Repair, ...]
    """In the order in which they were made; positions refer to the text before each."""
    verdict: Verdict | None
    """On the text; None without a reference."""
    traces: tuple[CaseTrace, ...]
    """Of the text."""
    tried: int
    """Candidates that were observed."""

    @property
    def is_sound(self) -> bool:
        """Whether the text shows no fault."""
        return all(trace.is_sound for trace in self.traces) and (self.verdict is None or self.verdict.is_correct)


class RepairSearch:
    """Repairs the kernels of one file."""

    def __init__(
        self,
        path: str,
        names: Sequence[str],
        cases: Sequence[TraceCase],
        trace: Trace,
        verify: Verify | None,
        seconds: float,
    ) -> None:
        """Prepare.

        Args:
            names: the kernels to repair.
            cases: those on which candidates are observed, the smallest first.
            trace: observes a text on cases.
            verify: compares a text with the reference; None without a reference.
            seconds: time for candidates.
        """
        self._path, self._names, self._cases = path, names, tuple(cases)
        self._trace, self._verify, self._seconds = trace, verify, seconds
        self._tried = 0

    def run(self, text: bytes, traces: Sequence[CaseTrace], verdict: Verdict | None) -> Repaired:
        """Repair a text.

        Args:
            traces: of the text, on all cases.
            verdict: on the text, if it was verified.
        """
        deadline = time.monotonic() + self._seconds
        # The repairs of static checks come first, so that one verification covers all repairs.
        current = self._with_static_repairs(Repaired(text, (), verdict, tuple(traces), 0))
        for _ in range(MOST_ROUNDS):
            if current.is_sound:
                break
            following = self._round(current, deadline)
            if following is None:
                break
            current = following
        return replace(current, tried=self._tried)

    def findings(self, text: bytes) -> list[StaticFinding]:
        """What the static checks report for the kernels and their launchers."""
        return static_findings(self._path, text, self._names)

    # Parts -----------------------------------------------------------------------------------------------------------

    def _round(self, current: Repaired, deadline: float) -> Repaired | None:
        """The text with one more repair; None if none helps."""
        best: Repaired | None = None
        verified = 0
        for repaired in self._improvements(current, deadline):
            if all(trace.is_sound for trace in repaired.traces):
                if self._verify is None:
                    return repaired
                verdict = self._verify(repaired.text)
                verified += 1
                if verdict.is_correct:
                    return Repaired(repaired.text, repaired.repairs, verdict, repaired.traces, 0)
                if verified == MOST_VERIFIED:
                    break
            elif best is None or _badness(repaired) < _badness(best):
                best = repaired
        return best

    def _improvements(self, current: Repaired, deadline: float) -> Iterator[Repaired]:
        """Texts with one more repair that show fewer faults, or no fault where only verification shows one."""
        failing = [trace for trace in current.traces if trace.faults]
        witness = failing[0] if failing else None
        for candidate, text in self._candidates(current, witness):
            if time.monotonic() > deadline:
                return
            self._tried += 1
            if witness is not None:
                traced = self._trace(text, [witness.case])
                if not traced or not _is_better(traced[0], witness):
                    continue
            traces = self._trace(text, self._cases)
            repaired = Repaired(text, (*current.repairs, candidate), None, tuple(traces), 0)
            if traces and _breaks_nothing(traces, current.traces):
                yield repaired

    def _candidates(self, current: Repaired, witness: CaseTrace | None) -> Iterator[tuple[Repair, bytes]]:
        sites = sites_of(self._path, current.text, self._names)
        faults = witness.faults if witness is not None else (Fault(FaultKind.WRONG_VALUES, 0),)
        static = static_repairs(sites, self.findings(current.text))
        seen = {current.text}
        for candidate in [*static, *repairs_for(sites, faults)]:
            text = candidate.applied(current.text)
            if text in seen or changed_lines(current.text, text) > MOST_LINES or _is_broken(text):
                continue
            seen.add(text)
            yield candidate, text

    def _with_static_repairs(self, current: Repaired) -> Repaired:
        """The text with the repairs that static checks suggest, as far as no case shows a new fault."""
        for _ in range(MOST_STATIC):
            sites = sites_of(self._path, current.text, self._names)
            for candidate in static_repairs(sites, self.findings(current.text)):
                text = candidate.applied(current.text)
                if _is_broken(text) or changed_lines(current.text, text) > MOST_LINES:
                    continue
                self._tried += 1
                traces = self._trace(text, self._cases)
                if traces and _breaks_nothing(traces, current.traces):
                    current = Repaired(text, (*current.repairs, candidate), None, tuple(traces), 0)
                    break
            else:
                break
        if not current.repairs or self._verify is None or not all(trace.is_sound for trace in current.traces):
            return current
        return replace(current, verdict=self._verify(current.text))


def changed_lines(before: bytes, after: bytes) -> int:
    """The number of lines of a text that differ from another one, counted on the side where they are more."""
    import difflib

    old, new = before.split(b"\n"), after.split(b"\n")
    matcher = difflib.SequenceMatcher(None, old, new, autojunk=False)
    return sum(max(b - a, d - c) for tag, a, b, c, d in matcher.get_opcodes() if tag != "equal")


def _keys(trace: CaseTrace) -> set[tuple[FaultKind, str, int]]:
    return {(fault.kind, fault.kernel, fault.line) for fault in trace.faults}


def _is_better(now: CaseTrace, before: CaseTrace) -> bool:
    """Whether a case shows fewer faults, and no refusal in their place."""
    if now.refusal:
        return False
    if now.is_sound:
        return True
    if any(fault.kind is FaultKind.RAISES for fault in now.faults):
        return False
    memory = {FaultKind.READ_OUTSIDE, FaultKind.WRITE_OUTSIDE, FaultKind.RACE, FaultKind.RAISES}
    kinds = {key for key in _keys(now) if key[0] in memory}
    earlier = {key for key in _keys(before) if key[0] in memory}
    return kinds < earlier


def _breaks_nothing(now: Sequence[CaseTrace], before: Sequence[CaseTrace]) -> bool:
    """Whether each case that was sound still is, and ran."""
    return all(
        (later.is_sound and (not later.refusal or bool(earlier.refusal))) or not earlier.is_sound
        for later, earlier in zip(now, before, strict=True)
    )


def _badness(repaired: Repaired) -> tuple[int, int]:
    return sum(not trace.is_sound for trace in repaired.traces), sum(len(trace.faults) for trace in repaired.traces)


def _is_broken(text: bytes) -> bool:
    return first_error(parse(text)) is not None
