"""Evolutions keep what is correct and not slower on any workload, and the archive keeps the best of each niche."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path

import pytest
from evolving import MOST_ACTIONS, WORKLOADS, Landscape, World, evolve, numbers_of

from mtmc_lsp.evolve.archive import archives
from mtmc_lsp.evolve.lineage import EventKind, Lineage, VersionStatus, geometric_mean
from mtmc_lsp.search.store import Store

NAMES = [name for name, _ in WORKLOADS]


def best_possible(landscape: Landscape) -> float:
    """The gain of the fastest correct set, whichever sets lead to it."""
    sets = itertools.chain.from_iterable(
        itertools.combinations(range(1, MOST_ACTIONS + 1), size) for size in range(MOST_ACTIONS + 1)
    )
    gains = [
        geometric_mean([100.0 / us for us in landscape.times(numbers)])
        for numbers in sets
        if landscape.outcome(numbers) == "correct"
    ]
    return max(gains)


@pytest.mark.parametrize("seed", range(4))
def test_an_evolution_comes_near_the_fastest_version_there_is(tmp_path: Path, seed: int) -> None:
    landscape = Landscape(seed)
    lineage = evolve(tmp_path, landscape=landscape, generations=60)
    assert lineage.best().gain >= 0.85 * best_possible(landscape)
    assert lineage.best().gain > 1.2


def test_kept_versions_are_correct_and_not_slower_than_their_parent_on_any_workload(tmp_path: Path) -> None:
    landscape = Landscape(2, wrong=0.4)
    lineage = evolve(tmp_path, landscape=landscape, generations=40)
    statuses = {version.status for version in lineage.versions}
    assert statuses == set(VersionStatus)
    for version in lineage.versions[1:]:
        assert version.reason
        assert version.parent is not None
        if version.candidate is not None and version.is_alive:
            assert landscape.outcome(numbers_of(version.candidate)) == "correct"
        if version.status is VersionStatus.KEPT:
            parent = lineage.version(version.parent)
            assert parent.candidate is not None and version.candidate is not None
            before, after = (landscape.times(numbers_of(v.candidate)) for v in (parent, version) if v.candidate)
            assert all(new <= old * 1.02 for new, old in zip(after, before, strict=True))
        if version.status is VersionStatus.NICHE:
            assert version.niches


def test_the_best_version_is_not_slower_than_the_start_on_any_workload(tmp_path: Path) -> None:
    class Trade(Landscape):
        """Each action makes one workload much faster and the other one slower."""

        def times(self, numbers: Sequence[int]) -> tuple[float, float]:
            first, second = super().times(numbers)
            return first * 0.5 ** len(numbers), second * 1.2 ** len(numbers)

    traded = 0
    for seed in range(4):
        lineage = evolve(tmp_path / str(seed), landscape=Trade(seed), generations=20)
        best = lineage.best()
        assert all(score.gain >= 0.99 for score in best.scores)
        faster = [item for item in lineage.versions if item.is_alive and item.gain > best.gain]
        assert all(min(score.gain for score in item.scores) < 0.99 for item in faster)
        traded += len(faster)
    assert traded, "no version trades one workload for another"


def test_the_score_of_a_version_is_its_speed_over_the_users_code(tmp_path: Path) -> None:
    landscape = Landscape(3)
    lineage = evolve(tmp_path, landscape=landscape, generations=30)
    for version in lineage.versions:
        if version.scores and version.candidate is not None:
            expected = [100.0 / us for us in landscape.times(numbers_of(version.candidate))]
            assert [score.gain for score in version.scores] == pytest.approx(expected)


def test_no_version_is_tried_twice(tmp_path: Path) -> None:
    with Store(tmp_path) as store:
        world = World(store, generations=40)
        lineage = world.go(world.begin())
    assert len(world.told) == len(set(world.told))
    keys = [version.key for version in lineage.versions if version.key]
    assert len(keys) == len(set(keys))


def test_each_niche_holds_its_fastest_version(tmp_path: Path) -> None:
    lineage = evolve(tmp_path, islands=1, generations=40)
    (archive,) = archives(lineage, NAMES, 1)
    alive = [version for version in lineage.versions if version.is_alive]
    for number, name in enumerate(NAMES):
        best = max(version.scores[number].gain for version in alive)
        assert archive.best[f"fastest: {name}"].scores[number].gain == pytest.approx(best, rel=2e-3)
    for launches in {version.launches for version in alive}:
        best = max(version.gain for version in alive if version.launches == launches)
        assert archive.best[f"launches: {launches}"].gain == pytest.approx(best, rel=2e-3)
    assert any(name.startswith("memory: ") for name in archive.best)
    # What was slower than its parent is kept only as the best of a niche.
    assert any(version.status is VersionStatus.NICHE for version in lineage.versions)


def test_islands_differ_and_exchange_their_best_versions(tmp_path: Path) -> None:
    lineage = evolve(tmp_path, islands=3, generations=20)
    migrations = [(number, event) for number, event in lineage.events if event.kind is EventKind.MIGRATION]
    assert migrations
    assert all(number % 5 == 0 for number, _ in migrations)
    for _, event in migrations:
        assert event.version is not None
        source = lineage.version(event.version)
        assert source.island != event.island or source.generation == 0
        assert f"island {event.island + 1}" in event.text
    children = [
        version
        for version in lineage.versions
        if version.parent and lineage.version(version.parent).island != version.island
    ]
    assert children, "no version was made from a migrant"
    made = {
        version.island: [v.key for v in lineage.versions if v.island == version.island] for version in lineage.versions
    }
    assert made[0] != made[1]


def test_a_stagnating_island_gets_directions_that_the_lineage_explains(tmp_path: Path) -> None:
    lineage = evolve(tmp_path, islands=1, generations=60)
    directions = [event for _, event in lineage.events if event.kind is EventKind.DIRECTION]
    assert [event.direction for event in directions[:3]] == ["untried", "tune", "restart"]
    assert all("no gain" in event.text or "repeat the diff" in event.text for event in directions)
    restart = next((number, event) for number, event in lineage.events if event.direction == "restart")
    assert restart[1].version is not None
    following = [version for version in lineage.versions if version.generation >= restart[0]]
    assert following[0].parent == restart[1].version


def test_the_same_seed_gives_the_same_lineage_and_another_seed_another(tmp_path: Path) -> None:
    first, again, other = (evolve(tmp_path / str(number), seed=seed) for number, seed in enumerate((0, 0, 1)))
    assert first == again
    assert [version.key for version in first.versions] != [version.key for version in other.versions]


def test_an_evolution_ends_at_its_limits_and_says_which(tmp_path: Path) -> None:
    by_count = evolve(tmp_path / "count", generations=3)
    assert by_count.end_reason == "the limit of 3 generations is reached"
    assert by_count.generations[-1].number == 3
    # Each generation takes one second by the fake clock.
    by_time = evolve(tmp_path / "time", generations=0, limit=5.0)
    assert by_time.end_reason == "the time is over"
    assert by_time.generations[-1].number == 5


def test_an_evolution_ends_where_nothing_new_is_left(tmp_path: Path) -> None:
    lineage = evolve(tmp_path, landscape=Landscape(1, wrong=1.0), generations=0, islands=1)
    assert lineage.end_reason.endswith("gave no version that is new")
    assert lineage.best().number == 0


def test_the_start_alone_is_the_best_version_if_nothing_is_faster(tmp_path: Path) -> None:
    class Slow(Landscape):
        def times(self, numbers: object) -> tuple[float, float]:
            return (100.0, 100.0) if not numbers else (150.0, 150.0)

    lineage: Lineage = evolve(tmp_path, landscape=Slow(), generations=6)
    assert lineage.best().number == 0
    assert len(lineage.versions) > 5
    assert all(version.gain <= 1.0 for version in lineage.versions)
