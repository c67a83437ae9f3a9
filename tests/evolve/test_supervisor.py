"""The supervisor sets a new direction after stagnation and cycles, and none while versions get faster."""

from __future__ import annotations

from dataclasses import replace

from evolving import CAPTURE, SOURCE, FakeCoder, Landscape

from mtmc_lsp.core.learning.transitions import Outcome
from mtmc_lsp.evolve.archive import archives
from mtmc_lsp.evolve.lineage import (
    Event,
    EventKind,
    Generation,
    Lineage,
    Operator,
    Score,
    Version,
    VersionStatus,
)
from mtmc_lsp.evolve.supervisor import CYCLE, PATIENCE, Supervisor, near_duplicates, restart_from
from tests.search.fakes import action

ROOT = FakeCoder(Landscape()).start(CAPTURE, SOURCE)


def version(
    number: int, gain: float, *, diff: str = "", parent: int = 0, kind: VersionStatus = VersionStatus.KEPT
) -> Version:
    diff = diff or f"--- a\n+++ b\n+line {number}\n+other {number}\n"
    return Version(
        number, number, 0, parent, Operator.CATALOGUE, kind, "because", Outcome.FASTER, (action(number, "step"),), diff,
        candidate=replace(ROOT, id=f"v{number}"), key=str(number), scores=(Score(100.0 / gain, gain),), launches=number % 3,
    )  # fmt: skip


def lineage(*gains: float, diffs: dict[int, str] | None = None, events: dict[int, Event] | None = None) -> Lineage:
    root = replace(version(0, 1.0), generation=0, parent=None, operator=Operator.START, actions=())
    made = [version(number, gain, diff=(diffs or {}).get(number, "")) for number, gain in enumerate(gains, 1)]
    generations = [
        Generation(number, (events[number],) if events and number in events else ()) for number in range(len(gains) + 1)
    ]
    return Lineage((root, *made), tuple(generations))


def decide(value: Lineage) -> Event | None:
    return Supervisor(("fuse", "split", "autotune")).decide(value, 0, archives(value, ["w"], 1)[0])


def test_an_island_that_gets_faster_keeps_its_direction() -> None:
    assert decide(lineage(*(1.0 + 0.1 * number for number in range(1, 20)))) is None


def test_versions_without_a_gain_lead_to_a_new_direction_with_the_reason() -> None:
    assert decide(lineage(2.0, *[1.5] * (PATIENCE - 1))) is None
    event = decide(lineage(2.0, *[1.5] * PATIENCE))
    assert event is not None
    assert event.direction == "untried"
    assert event.text.startswith(
        f"{PATIENCE} versions brought no gain: prefer kinds of actions that were tried least here"
    )
    # All versions so far are fusions.
    assert event.focus[:2] == ("split", "autotune")


def test_a_direction_gets_its_time_before_the_next_one() -> None:
    direction = Event(EventKind.DIRECTION, "because", 0, None, "untried")
    gains = [1.5] * (2 * PATIENCE)
    early = lineage(*gains[: PATIENCE + 2], events={PATIENCE: direction})
    assert decide(early) is None
    late = lineage(*gains, events={PATIENCE: direction})
    event = decide(late)
    assert event is not None
    assert event.direction == "tune"


def test_near_duplicates_are_a_cycle_before_the_patience_is_over() -> None:
    same = {number: f"--- a\n+++ b\n-old\n+new\n+again\n+more {number % 2}\n" for number in (1, 3, 5)}
    value = lineage(*[1.0] * 5, diffs=same)
    assert near_duplicates(value.versions[1:]) == CYCLE == 3
    event = decide(value)
    assert event is not None
    assert "repeat the diff of another one" in event.text


def test_different_changes_are_no_near_duplicates() -> None:
    assert near_duplicates(lineage(*[1.0] * 6).versions[1:]) == 0


def test_a_restart_names_a_niche_and_lasts_until_a_version_was_made_from_it() -> None:
    directions = {
        number: Event(EventKind.DIRECTION, "because", 0, None, name)
        for number, name in ((PATIENCE, "untried"), (2 * PATIENCE, "tune"))
    }
    value = lineage(2.0, 1.5, *[1.2] * (3 * PATIENCE), events=directions)
    event = decide(value)
    assert event is not None
    assert event.direction == "restart"
    assert event.version is not None
    assert f"restart from version {event.version}, the best of the niche" in event.text
    assert event.version != value.best().number
    number = value.generations[-1].number + 1
    directed = value.with_generation(Generation(number, (event,)), ())
    assert restart_from(directed, 0) == event.version
    child = replace(version(len(value.versions), 1.0, parent=event.version), generation=number)
    assert restart_from(directed.with_generation(Generation(number, (event,)), (child,)), 0) is None


def test_kinds_that_paid_in_earlier_runs_come_first_among_untried_ones() -> None:
    value = lineage(2.0, *[1.5] * PATIENCE)
    event = Supervisor(("autotune", "split", "fuse")).decide(value, 0, archives(value, ["w"], 1)[0])
    assert event is not None
    assert event.focus == ("autotune", "split", "fuse")
