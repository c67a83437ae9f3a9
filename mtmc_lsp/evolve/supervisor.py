"""The supervisor: detects stagnation and cycles on an island, reviews its lineage, and sets a new direction.

All decisions follow from the lineage and are stored in it as events, so a resumed run decides the same.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from mtmc_lsp.evolve.archive import LEAST_GAIN, Archive
from mtmc_lsp.evolve.lineage import Event, EventKind, Lineage, Version, VersionStatus
from mtmc_lsp.evolve.operators.base import FREE, Direction

PATIENCE = 6
"""Versions of an island without a faster one after which it stagnates."""
WINDOW = 6
"""Last versions whose diffs are compared."""
NEAR = 0.8
"""Share of common changed lines from which two diffs are near-duplicates."""
CYCLE = 3
"""Near-duplicate diffs among the last versions that make a cycle."""
ROTATION = ("untried", "tune", "restart", "longer")
"""Directions in the order in which an island gets them."""
MOST_FOCUS = 3
"""Most kinds of actions that a direction prefers."""


@dataclass(frozen=True)
class Review:
    """What the supervisor observes on an island since its last direction."""

    tried: int
    """Versions since the last gain or direction."""
    duplicates: int
    """Near-duplicates among the last diffs."""

    @property
    def problem(self) -> str:
        """Why a new direction is needed, one clause; empty if none is."""
        if self.duplicates >= CYCLE:
            return f"{self.duplicates} of the last {WINDOW} versions repeat the diff of another one"
        if self.tried >= PATIENCE:
            return f"{self.tried} versions brought no gain"
        return ""


class Supervisor:
    """Watches the islands of one evolution."""

    def __init__(self, kinds: Sequence[str]) -> None:
        """Watch.

        Args:
            kinds: kinds of actions that are legal, those that paid in earlier runs first.
        """
        self._kinds = list(kinds)

    def direction(self, lineage: Lineage, island: int) -> Direction:
        """The present direction of an island."""
        events = _directions(lineage, island)
        if not events:
            return FREE
        _, event = events[-1]
        return Direction(event.direction, event.text, event.focus)

    def review(self, lineage: Lineage, island: int) -> Review:
        """What happened on an island since its last direction."""
        events = _directions(lineage, island)
        since = events[-1][0] if events else 1
        made = [item for item in lineage.versions if item.generation >= 1 and item.island == island]
        best, last_gain = max((item.gain for item in lineage.versions if item.generation == 0), default=0.0), 0
        for number, version in enumerate(made):
            if version.is_alive and version.gain > best * (1.0 + LEAST_GAIN):
                best, last_gain = version.gain, number + 1
        recent = [item for number, item in enumerate(made) if number >= last_gain and item.generation >= since]
        exhausted = sum(
            event.kind is EventKind.EXHAUSTED and event.island == island and generation >= since
            for generation, event in lineage.events
        )
        return Review(len(recent) + exhausted, near_duplicates(recent[-WINDOW:]))

    def decide(self, lineage: Lineage, island: int, archive: Archive) -> Event | None:
        """A new direction if the island stagnates or goes in circles; ``None`` if it goes on as it is."""
        problem = self.review(lineage, island).problem
        if not problem:
            return None
        name = ROTATION[len(_directions(lineage, island)) % len(ROTATION)]
        made = [item for item in lineage.versions if item.generation >= 1 and item.island == island]
        if name == "untried":
            focus = self._least_tried(made)
            what = f"prefer kinds of actions that were tried least here: {', '.join(focus)}"
            return Event(EventKind.DIRECTION, f"{problem}: {what}", island, None, name, focus)
        if name == "restart":
            version = _least_used(lineage, archive, island)
            niche = ", ".join(sorted(niche for niche, item in archive.best.items() if item.number == version.number))
            what = f"restart from version {version.number}, the best of the niche {niche}"
            return Event(EventKind.DIRECTION, f"{problem}: {what}", island, version.number, name)
        focus = _successful(made)
        after = f"; kept so far were mostly {', '.join(focus)}" if focus else ""
        what = "try configurations of the present kernels" if name == "tune" else "try longer sequences of actions"
        return Event(EventKind.DIRECTION, f"{problem}: {what}{after}", island, None, name, focus)

    def _least_tried(self, made: Sequence[Version]) -> tuple[str, ...]:
        """The kinds that were tried least; of equal ones those that paid in earlier runs."""
        count = Counter(action.kind.value for version in made for action in version.actions)
        return tuple(sorted(self._kinds, key=lambda kind: (count[kind], self._kinds.index(kind)))[:MOST_FOCUS])


def restart_from(lineage: Lineage, island: int) -> int | None:
    """The version that the present direction of an island restarts from, until a version was made from it; else ``None``."""
    events = _directions(lineage, island)
    if not events or events[-1][1].direction != "restart":
        return None
    since, event = events[-1]
    used = any(
        item.generation >= since and item.island == island and item.parent == event.version for item in lineage.versions
    )
    return None if used else event.version


def near_duplicates(versions: Sequence[Version]) -> int:
    """How many versions change nearly the same lines in the same way as another one."""
    changes = [
        {line for line in version.diff.splitlines() if line[:1] in "+-" and line[:3] not in ("+++", "---")}
        for version in versions
    ]
    repeated = set()
    for (i, one), (j, other) in itertools.combinations(enumerate(changes), 2):
        if one and other and len(one & other) >= NEAR * len(one | other):
            repeated |= {i, j}
    return len(repeated)


def _directions(lineage: Lineage, island: int) -> list[tuple[int, Event]]:
    """The directions of an island with the numbers of their generations."""
    return [
        (number, event)
        for number, event in lineage.events
        if event.kind is EventKind.DIRECTION and event.island == island
    ]


def _successful(made: Sequence[Version]) -> tuple[str, ...]:
    """The kinds of actions in versions that were kept, the most frequent first."""
    kept = [item for item in made if item.status is VersionStatus.KEPT]
    count = Counter(action.kind.value for version in kept for action in version.actions)
    return tuple(kind for kind, _ in sorted(count.items(), key=lambda item: (-item[1], item[0]))[:MOST_FOCUS])


def _least_used(lineage: Lineage, archive: Archive, island: int) -> Version:
    """The elite that was a parent least often on an island; of equal ones the fastest."""
    used = Counter(item.parent for item in lineage.versions if item.island == island and item.generation >= 1)
    fastest = archive.fastest().number
    others = [item for item in archive.elites if item.number != fastest] or archive.elites
    return min(others, key=lambda version: (used[version.number], -version.gain, version.number))
