"""Replays of beam and MCTS: the product's searches on trees that are made by hand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from mtmc_lsp.core.action import ActionKind, MacroAction
from mtmc_lsp.core.learning.policy import Choice
from mtmc_lsp.core.learning.transitions import Outcome
from mtmc_lsp.core.protocols import State
from mtmc_lsp.policies.random import RandomPolicy
from mtmc_lsp.policies.roofline import RooflinePolicy
from mtmc_lsp.training.replay import replay
from mtmc_lsp.training.replayed_search import REPLAYED
from mtmc_lsp.training.replays import ROOFLINE, SECONDS, Entrant, replay_all
from mtmc_lsp.training.tree import MeasuredTree
from tests.policies.trees import GPU, KINDS, action, edge, learnable_tree, program, tree_of

TEMPTING, MODEST = (action(KINDS[n], saved_us=9.0 - n, number=n) for n in range(2))
AFTER = action(ActionKind.CUDA_GRAPH, saved_us=3.0)
WRONG = action(ActionKind.SPLIT, saved_us=2.0)


def trap(name: str = "p", gain: float = 2.0) -> MeasuredTree:
    """The first action gains most and leads nowhere; the second one gains less, and ``gain`` more after it."""
    ids = [f"{name}/{number}" for number in range(4)]
    return tree_of(
        [
            edge(ids[0], TEMPTING, Outcome.FASTER, 1.5, result=ids[1], rank=0, seconds=1.0, program=name),
            edge(ids[0], MODEST, Outcome.FASTER, 1.2, result=ids[2], rank=1, seconds=2.0, program=name),
            edge(ids[1], WRONG, Outcome.WRONG, rank=0, seconds=3.0, program=name),
            edge(ids[2], AFTER, Outcome.FASTER, gain, result=ids[3], rank=0, seconds=4.0, program=name),
        ],
        [program(name, f"family of {name}")],
    )


@pytest.mark.parametrize("search", ["beam", "mcts"])
def test_a_search_with_branches_leaves_a_dead_end_that_the_greedy_one_does_not(search: str) -> None:
    greedy = replay(trap(), "p", RooflinePolicy(), GPU)
    assert [point.speedup for point in greedy.points] == [1.5, 1.5]
    assert greedy.end == "nothing left"
    run = replay(trap(), "p", RooflinePolicy(), GPU, search=search)
    assert [point.speedup for point in run.points[:2]] == [1.5, 1.5]
    assert run.speedup == pytest.approx(2.4)
    assert [point.seconds for point in run.points] == [1.0, 4.0, 6.0, 10.0], "first the steps of the greedy search"
    assert run.end == "unexplored"


@pytest.mark.parametrize("search", ["beam", "mcts"])
def test_a_version_of_another_branch_is_not_tried_again_unless_its_variants_must_be_measured(search: str) -> None:
    both = [
        edge("p/0", TEMPTING, Outcome.FASTER, 1.5, result="p/1", rank=0),
        edge("p/0", MODEST, Outcome.FASTER, 1.4, result="p/2", rank=1),
        edge("p/1", MODEST, Outcome.FASTER, 1.2, result="p/3", rank=0),
        edge("p/2", TEMPTING, Outcome.FASTER, 1.3, result="p/3", rank=0),
    ]
    run = replay(tree_of(both), "p", RooflinePolicy(), GPU, search=search)
    assert len(run.points) == 3 and run.speedup == pytest.approx(1.8)
    several = replace(TEMPTING, params={"variants": [{"config": {}}]})
    tuned = [edge("p/2", several, Outcome.FASTER, 1.3, result="p/3", rank=0), *both[:3]]
    run = replay(tree_of([*both[:3], tuned[0]]), "p", RooflinePolicy(), GPU, search=search)
    assert len(run.points) == 4 and run.speedup == pytest.approx(1.8)


class Stopping:
    """Prefers STOP to everything after the first step."""

    name = "stopping"

    def choices(self, state: State, actions: Sequence[MacroAction]) -> list[Choice]:
        return [Choice(None, 0.6, "enough"), *(Choice(item, 0.4 / len(actions), "") for item in actions)]


@pytest.mark.parametrize("search", list(REPLAYED))
def test_a_policy_can_stop_each_search(search: str) -> None:
    run = replay(trap(), "p", Stopping(), GPU, search=search)
    assert len(run.points) == 1 and run.end == "stopped"


@pytest.mark.parametrize("search", list(REPLAYED))
def test_a_replay_is_the_same_each_time(search: str) -> None:
    tree = learnable_tree(3)
    first = replay(tree, "p1", RandomPolicy(5), GPU, search=search)
    assert first == replay(tree, "p1", RandomPolicy(5), GPU, search=search)
    assert first.points[-1].decided > 0


def test_entrants_are_compared_with_the_greedy_roofline_search_on_the_same_programs() -> None:
    trees = [trap(name, gain) for name, gain in (("a", 2.0), ("b", 4.0))]
    tree = MeasuredTree(
        {key: item for each in trees for key, item in each.programs.items()},
        {key: item for each in trees for key, item in each.versions.items()},
        {key: items for each in trees for key, items in each.transitions.items()},
    )
    entrants = {ROOFLINE: Entrant([RooflinePolicy()]), "beam": Entrant([RooflinePolicy()], "beam")}
    replayed = replay_all(tree, [("a", GPU), ("b", GPU)], entrants)
    usual, beam = replayed.replays[ROOFLINE], replayed.replays["beam"]
    assert (replayed.programs, replayed.families) == (2, 2)
    assert (usual.speedup, usual.relative, usual.relative_range) == (1.5, 1.0, (1.0, 1.0))
    assert beam.speedup == pytest.approx((2.4 * 4.8) ** 0.5)
    assert beam.relative == pytest.approx((1.6 * 3.2) ** 0.5)
    assert beam.relative_range == (pytest.approx(1.6), pytest.approx(3.2))
    assert beam.candidates_for(usual.speedup) == 1 and usual.candidates_for(beam.speedup) is None
    assert len(beam.by_seconds) == len(SECONDS) == len(beam.by_all_seconds)


def test_the_time_of_choices_counts_only_where_that_is_asked() -> None:
    run = replay(trap(), "p", RooflinePolicy(), GPU)
    slow = replace(run, points=tuple(replace(point, decided=5.0 * point.candidates) for point in run.points))
    assert slow.after_seconds(1.0) == 1.5
    assert slow.after_seconds(1.0, with_decisions=True) == 1.0
    assert slow.after_seconds(6.0, with_decisions=True) == 1.5
