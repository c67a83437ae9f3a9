"""Searches over landscapes: each set of actions has a time and an outcome, whatever order leads to it."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from fakes import EAGER_US, ENVIRONMENT, SOURCE, FakeMeasurer, action, capture

from mtmc_lsp.core.action import Expected, MacroAction, Stop
from mtmc_lsp.core.protocols import CannotCode, State
from mtmc_lsp.core.run import Candidate, RunResult, Step
from mtmc_lsp.core.workload import Capture
from mtmc_lsp.search.components import Events, Limits, SearchComponents
from mtmc_lsp.search.kinds import SEARCHES

FAILURES = ("uncoded", "uncompiled", "wrong", "wrong elsewhere", "crash")
"""Outcomes of which ``wrong elsewhere`` and ``crash`` are noticed by the verification alone."""


@dataclass(frozen=True)
class Landscape:
    """What becomes of sets of actions; ``+`` joins their numbers."""

    times: Mapping[str, float]
    """Microseconds; sets without a time are not legal."""
    outcomes: Mapping[str, str] = field(default_factory=dict)
    """Outcomes other than a correct version."""
    savings: Mapping[int, float] = field(default_factory=dict)
    """What the planner expects of an action: 10 us by default."""

    def actions(self, name: str) -> list[MacroAction]:
        """The legal actions on a set, in the order of their numbers."""
        numbers = sorted({int(part) for key in self.times for part in key.split("+")})
        done = {int(part) for part in name.split("+") if part}
        legal = [number for number in numbers if number not in done and joined({*done, number}) in self.times]
        return [replace(action(n, "step"), expected=Expected(self.savings.get(n, 10.0))) for n in legal]


def joined(numbers: set[int]) -> str:
    """The name of a set."""
    return "+".join(str(number) for number in sorted(numbers))


def random_landscape(seed: int, actions: int) -> Landscape:
    """A landscape in which most sets are correct, and faster or slower at random."""
    chance = random.Random(seed)
    times, outcomes = {}, {}
    for mask in range(1, 2**actions):
        name = joined({number for number in range(actions) if mask >> number & 1})
        if chance.random() < 0.85:
            times[name] = EAGER_US * chance.uniform(0.75, 1.1) ** len(name.split("+"))
            if chance.random() < 0.3:
                outcomes[name] = chance.choice(FAILURES)
    return Landscape(times, outcomes, {number: chance.uniform(1.0, 20.0) for number in range(actions)})


class LandscapePlanner:
    """Ranks the legal actions by the expected saving."""

    def __init__(self, landscape: Landscape) -> None:
        self._landscape = landscape
        self.seen: list[State] = []

    def ranked(self, state: State) -> list[MacroAction]:
        self.seen.append(state)
        tried = {step.action.key for step in state.history}
        actions = self._landscape.actions(_set(state.candidate))
        return sorted((a for a in actions if a.key not in tried), key=lambda a: -a.expected.saved_us)

    def propose(self, state: State) -> MacroAction | Stop:
        return next(iter(self.ranked(state)), Stop("no action is left"))


class LandscapeCoder:
    """Writes the names of the actions in the order of their numbers, so the order of the steps does not matter."""

    def __init__(self, landscape: Landscape) -> None:
        self._landscape = landscape

    def start(self, capture: Capture, source: str) -> Candidate:
        return Candidate("root", None, None, source, None, {"set": "", "us": EAGER_US, "outcome": "root"})

    def write(self, capture: Capture, candidate: Candidate, action: MacroAction) -> Candidate:
        done = {int(part) for part in _set(candidate).split("+") if part}
        name = joined({*done, int(action.region[0].removeprefix("n"))})
        outcome = self._landscape.outcomes.get(name, "correct")
        if outcome == "uncoded":
            raise CannotCode("there is no such thing")
        us = self._landscape.times[name]
        schedule = {"set": name, "us": us, "outcome": outcome}
        return Candidate(f"v{name}", candidate.id, action, f"{SOURCE}# {name}\n", None, schedule)


def _set(candidate: Candidate) -> str:
    return str(candidate.schedule["set"])  # type: ignore[index]


class Recorder:
    """A store, and what was told; ``on_change`` is called after each change of the store."""

    def __init__(self, on_change: Callable[[], None] = lambda: None) -> None:
        self.stored: dict[int, Step] = {}
        self.told: list[str] = []
        self._on_change = on_change

    def events(self) -> Events:
        return Events(
            on_step=lambda step: self._add("step", step),
            on_replayed=lambda step: self._add("replayed", step),
            on_withdrawn=lambda step: self._add("withdrawn", step),
            on_retimed=lambda step: self._add("retimed", step),
            on_switched=lambda step: self._add("switched", step),
        )

    def _add(self, word: str, step: Step) -> None:
        self.told.append(f"{word} {step.index} {step.status.value}")
        self.stored[step.index] = step
        self._on_change()

    @property
    def steps(self) -> list[Step]:
        return [self.stored[index] for index in sorted(self.stored)]


def explore(
    kind: str,
    landscape: Landscape,
    *,
    done: Sequence[Step] = (),
    steps: int = 24,
    measurer: FakeMeasurer | None = None,
    has_gpu: bool = True,
    recorder: Recorder | None = None,
    planner: LandscapePlanner | None = None,
) -> RunResult:
    """One run of the search ``kind``."""
    environment = ENVIRONMENT if has_gpu else replace(ENVIRONMENT, gpu="", capability="")
    components = SearchComponents(
        planner or LandscapePlanner(landscape),
        LandscapeCoder(landscape),
        measurer or FakeMeasurer(has_gpu=has_gpu),
        has_gpu,
        Limits(60.0, steps),
    )
    run = SEARCHES[kind](capture(environment=environment), SOURCE, components, (recorder or Recorder()).events())
    return run.run("run", "hash", done)
