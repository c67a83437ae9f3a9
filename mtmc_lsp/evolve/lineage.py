"""The lineage of an evolution as values: versions with their parents and scores, generations, and decisions about the search."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum

from mtmc_lsp.core.action import MacroAction
from mtmc_lsp.core.learning.transitions import Outcome
from mtmc_lsp.core.run import Candidate

TOLERANCE = 0.01
"""Relative difference below which two versions are called equal: repeated timings differ by about this much."""


class Operator(Enum):
    """What made a version."""

    START = "start"
    """The run that the evolution starts from, or the user."""
    CATALOGUE = "catalogue"
    """A sequence of macro actions and configurations, drawn by the policy."""
    AGENT = "agent"
    """A language model with tools."""


class VersionStatus(Enum):
    """What became of a version."""

    KEPT = "kept"
    """Correct, and not slower than its parent on any workload."""
    NICHE = "niche"
    """Correct, slower than its parent somewhere, and the best of a niche."""
    REJECTED = "rejected"
    """Correct, slower than its parent somewhere, and the best of no niche."""
    FAILED = "failed"
    """Not written, not compiled or not correct."""


ALIVE = (VersionStatus.KEPT, VersionStatus.NICHE)
"""Statuses of versions that may become parents."""


@dataclass(frozen=True)
class Score:
    """The speed of a version on one workload."""

    us: float
    """Microseconds a call: measured on a GPU, else estimated by the cost model."""
    gain: float
    """Speedup over the user's code. On a GPU, the paired ratios of the path are multiplied."""
    ratio: float = 1.0
    """Speedup over the parent."""
    error: float = 0.0
    """Standard error of ``ratio``; 0 for estimates."""


@dataclass(frozen=True)
class Spent:
    """What a version or a generation cost."""

    seconds: float = 0.0
    tokens: int = 0
    """Tokens of a language model: prompts and answers."""
    money: float = 0.0
    """In the currency of the prices in ``[tool.mtmc.llm]``; 0 if no price is set."""

    def __add__(self, other: Spent) -> Spent:
        return Spent(self.seconds + other.seconds, self.tokens + other.tokens, self.money + other.money)


@dataclass(frozen=True)
class Version:
    """One version in the lineage."""

    number: int
    """0 is the user's code."""
    generation: int
    """0 for the start."""
    island: int
    """0-based; versions of the start belong to every island."""
    parent: int | None
    """Number of the version that it was made from; ``None`` for the user's code."""
    operator: Operator
    status: VersionStatus
    reason: str
    """Why it has this status, one sentence."""
    outcome: Outcome
    actions: tuple[MacroAction, ...] = ()
    """What turns the parent into it, in order."""
    diff: str = ""
    """Unified diff against the parent."""
    candidate: Candidate | None = None
    """``None`` if it was not written."""
    key: str = ""
    """Equal for versions that compute the same in the same way."""
    scores: tuple[Score, ...] = ()
    """One for each workload; empty unless it is correct."""
    memory: float = 0.0
    """Device memory in bytes that a call allocates, estimated; 0 if unknown."""
    launches: int = 0
    """Kernels and torch calls of one call of the launcher."""
    niches: tuple[str, ...] = ()
    """Niches of its island that it became the best of."""
    spent: Spent = Spent()
    remark: str = ""
    """What the operator says about it: the chosen actions, or the model's reason."""

    @property
    def is_alive(self) -> bool:
        """Whether it may become a parent."""
        return self.status in ALIVE and self.candidate is not None

    @property
    def gain(self) -> float:
        """Geometric mean of its gains over all workloads; 0 if it has no score."""
        return geometric_mean([score.gain for score in self.scores])

    @property
    def title(self) -> str:
        """Its actions as one line."""
        if self.parent is None:
            return "your code"
        return "; then ".join(action.text for action in self.actions) or "no version"


class EventKind(Enum):
    """Kinds of decisions about the search."""

    DIRECTION = "direction"
    """The supervisor sets a new direction for an island."""
    MIGRATION = "migration"
    """A version joins the archive of another island."""
    EXHAUSTED = "exhausted"
    """No draw on an island gave a version that is new."""
    REFUSED = "refused"
    """The whole verification refused a version at the end."""
    ENDED = "ended"


@dataclass(frozen=True)
class Event:
    """A decision about the search that is not a version."""

    kind: EventKind
    text: str
    """What was decided and why, for people."""
    island: int = 0
    version: int | None = None
    """The version that it is about: the migrant, the parent to restart from, the refused one."""
    direction: str = ""
    """Name of the new direction."""
    focus: tuple[str, ...] = ()
    """Kinds of actions that the direction prefers."""


@dataclass(frozen=True)
class Generation:
    """One generation: what was decided in it and what it cost. Its versions are stored with it."""

    number: int
    events: tuple[Event, ...] = ()
    spent: Spent = Spent()


@dataclass(frozen=True)
class Setup:
    """How an evolution runs; a resumed run keeps all of it but the limits."""

    operator: str
    """``catalogue``, ``agent`` or ``both``."""
    islands: int
    seed: int
    workloads: tuple[tuple[str, dict[str, int]], ...]
    """Name of each workload, and its values of the named sizes."""
    has_gpu: bool
    """Whether times are measured. Otherwise they are estimates of the cost model."""
    device: str
    model: str = ""
    """The language model; empty if none is used."""
    plain_hash: str = ""
    """SHA-256 of the file without generated code."""
    started_from: str = ""
    """Id of the run whose best version is the start; empty if that is the user's code."""
    kinds: tuple[str, ...] = ()
    """Kinds of actions that are legal at the start. Those that were kept in earlier runs on this GPU are first."""
    notes: tuple[str, ...] = ()
    """What the user should know, as sentences: calls that are no part of the workloads."""


@dataclass(frozen=True)
class Lineage:
    """All versions and generations of an evolution so far."""

    versions: tuple[Version, ...] = ()
    generations: tuple[Generation, ...] = ()

    def with_generation(self, generation: Generation, versions: Sequence[Version]) -> Lineage:
        """The lineage after one more generation; a generation of the same number is replaced."""
        kept = [item for item in self.generations if item.number != generation.number]
        return Lineage((*self.versions, *versions), (*kept, generation))

    def version(self, number: int) -> Version:
        """The version with this number."""
        return self.versions[number]

    def path(self, number: int) -> list[Version]:
        """The versions from the user's code, left out, to a version."""
        path, version = list[Version](), self.versions[number]
        while version.parent is not None:
            path.insert(0, version)
            version = self.versions[version.parent]
        return path

    @property
    def events(self) -> Iterator[tuple[int, Event]]:
        """All events with the number of their generation, in order."""
        return ((item.number, event) for item in self.generations for event in item.events)

    @property
    def spent(self) -> Spent:
        """The cost of all generations."""
        total = Spent()
        for item in self.generations:
            total = total + item.spent
        return total

    @property
    def refused(self) -> set[int]:
        """The versions that the whole verification refused, with all versions that were made from them."""
        wrong = {event.version for _, event in self.events if event.kind is EventKind.REFUSED}
        for version in self.versions:
            if version.parent in wrong:
                wrong.add(version.number)
        return {number for number in wrong if number is not None}

    @property
    def end_reason(self) -> str:
        """Why no further generation is made; empty while the evolution goes on."""
        return next((event.text for _, event in self.events if event.kind is EventKind.ENDED), "")

    def best(self) -> Version:
        """The fastest version on all workloads together that was not refused, and is not slower than the start on any of them.

        Of equal ones the first.
        """
        refused = self.refused
        alive = [item for item in self.versions if item.is_alive and item.number not in refused]
        start = [item for item in alive if item.generation == 0][-1]
        least = [score.gain * (1.0 - TOLERANCE) for score in start.scores]
        chosen = [
            item
            for item in alive
            if item.number == start.number
            or all(score.gain >= gain for score, gain in zip(item.scores, least, strict=True))
        ]
        return max(chosen, key=lambda version: (version.gain, -version.number))


def geometric_mean(values: Sequence[float]) -> float:
    """The geometric mean; 0 if there are no values or one of them is 0."""
    if not values or min(values) <= 0:
        return 0.0
    return math.exp(math.fsum(map(math.log, values)) / len(values))
