"""What a folder of transitions holds, in numbers."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from mtmc_lsp.core.learning.transitions import Outcome
from mtmc_lsp.explore.parquet import read_rows
from mtmc_lsp.explore.rows import PROGRAMS, TRANSITIONS, VERSIONS, Row

TIMED = (Outcome.SLOWER.value, Outcome.FASTER.value)


@dataclass(frozen=True)
class Group:
    """The transitions of one kind of action, or of all."""

    name: str
    outcomes: dict[str, int]
    """Number of transitions by outcome; every outcome is a key."""
    seconds: float
    """Sum of the seconds of all transitions."""

    @property
    def count(self) -> int:
        """Number of transitions."""
        return sum(self.outcomes.values())


@dataclass(frozen=True)
class StoreSummary:
    """The numbers of one folder."""

    programs: int
    families: dict[str, int]
    """Number of programs by family."""
    versions: int
    timed: int
    """Number of transitions with a time."""
    total: Group
    kinds: tuple[Group, ...]
    """By kind of action, the most frequent first."""
    chosen_by: tuple[Group, ...]
    devices: dict[str, int] = field(default_factory=dict)
    """Number of transitions by GPU; the empty name is for those without one."""
    environments: dict[str, int] = field(default_factory=dict)
    """Number of transitions by versions."""


def summarise(folder: Path) -> StoreSummary:
    """The numbers of a folder.

    Raises:
        RequestError: it is no folder of transitions.
    """
    programs = read_rows(folder, PROGRAMS, columns=["family"])
    columns = ["kind", "chosen_by", "outcome", "seconds", "environment"]
    transitions = read_rows(folder, TRANSITIONS, columns=columns)
    return StoreSummary(
        programs=len(programs),
        families=dict(sorted(Counter(row["family"] for row in programs).items())),
        versions=len(read_rows(folder, VERSIONS, columns=["program", "median_us"])),
        timed=sum(row["outcome"] in TIMED for row in transitions),
        total=_group("all", transitions),
        kinds=_groups(transitions, lambda row: str(row["kind"])),
        chosen_by=_groups(transitions, lambda row: str(row["chosen_by"])),
        devices=dict(Counter(row["device"] for row in transitions).most_common()),
        environments=dict(Counter(row["environment"] for row in transitions).most_common()),
    )


def _groups(rows: Sequence[Row], name_of: Callable[[Row], str]) -> tuple[Group, ...]:
    members: defaultdict[str, list[Row]] = defaultdict(list)
    for row in rows:
        members[name_of(row)].append(row)
    groups = [_group(name, group) for name, group in members.items()]
    return tuple(sorted(groups, key=lambda group: (-group.count, group.name)))


def _group(name: str, rows: Sequence[Row]) -> Group:
    counts = Counter(row["outcome"] for row in rows)
    return Group(
        name,
        {outcome.value: counts[outcome.value] for outcome in Outcome},
        round(sum(row["seconds"] for row in rows), 3),
    )
