"""Carries a change of a file over to its current text, which may have changed elsewhere."""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from dataclasses import dataclass

CONTEXT = 3
"""Unchanged lines around a change that must be in the current text as well, as in ``patch``."""


@dataclass(frozen=True)
class _Hunk:
    before: tuple[str, ...]
    """The lines with their context."""
    after: tuple[str, ...]
    line: int
    """0-based line of the text before at which it begins."""


def rebase(before: str, after: str, current: str) -> str | None:
    """The current text with the change from ``before`` to ``after``; None if the changed lines are not as they were."""
    if current == before:
        return after
    lines = current.splitlines(keepends=True)
    distance = 0
    for hunk in _hunks(before.splitlines(keepends=True), after.splitlines(keepends=True)):
        place = _place(lines, hunk.before, hunk.line + distance)
        if place is None:
            return None
        lines[place : place + len(hunk.before)] = hunk.after
        distance = place - hunk.line + len(hunk.after) - len(hunk.before)
    return "".join(lines)


def contains(before: str, after: str, current: str) -> bool:
    """Whether the current text contains the change: it can be taken back."""
    return before != after and rebase(after, before, current) is not None


def _hunks(before: list[str], after: list[str]) -> Iterator[_Hunk]:
    matcher = difflib.SequenceMatcher(None, before, after, autojunk=False)
    for group in matcher.get_grouped_opcodes(CONTEXT):
        first, last = group[0], group[-1]
        yield _Hunk(tuple(before[first[1] : last[2]]), tuple(after[first[3] : last[4]]), first[1])


def _place(lines: list[str], wanted: tuple[str, ...], near: int) -> int | None:
    """Where lines are in a text: the nearest place to where they are expected."""
    places = [
        start
        for start in range(len(lines) - len(wanted) + 1)
        if lines[start] == wanted[0] and tuple(lines[start : start + len(wanted)]) == wanted
    ]
    return min(places, key=lambda start: abs(start - near), default=None)
