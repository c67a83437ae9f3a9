"""Groups, labels, replays and the training itself, on trees that are made by hand."""

from __future__ import annotations

import json
import math
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mtmc_lsp.core.action import ActionKind, Stop
from mtmc_lsp.core.errors import RequestError
from mtmc_lsp.core.learning.policy import Choice
from mtmc_lsp.core.learning.transitions import Outcome, Program
from mtmc_lsp.core.protocols import State
from mtmc_lsp.core.run import StepStatus
from mtmc_lsp.policies.feature_names import FEATURES
from mtmc_lsp.policies.history import outcome_of
from mtmc_lsp.policies.random import RandomPolicy
from mtmc_lsp.policies.ranker import RankerModel, RankerPolicy
from mtmc_lsp.policies.roofline import RooflinePolicy
from mtmc_lsp.programs.fingerprints import fingerprint
from mtmc_lsp.programs.splits import Split
from mtmc_lsp.training.dataset import groups_of
from mtmc_lsp.training.evaluation import evaluate
from mtmc_lsp.training.labels import BEST, FAILED, SLOWER, SMALL_GAIN, STOP, grade_of
from mtmc_lsp.training.metrics import by_model, by_roofline, ranking_metrics
from mtmc_lsp.training.ranker import RankerOptions, best_temperature, programs_of, train_ranker
from mtmc_lsp.training.replay import Replay, best_in_tree, replay
from mtmc_lsp.training.replays import RANDOM, RANKER, ROOFLINE
from mtmc_lsp.training.tree import MeasuredTree
from tests.policies.trees import GPU, KINDS, action, edge, learnable_tree, tree_of

FIRST, SECOND, THIRD = (action(KINDS[n], saved_us=9.0 - n, number=n) for n in range(3))
AFTER = action(ActionKind.CUDA_GRAPH, saved_us=3.0)


def small_tree() -> MeasuredTree:
    """By hand: the first action is slower, the second fails, and the third gains 2.0 and leads on to 1.5 more."""
    return tree_of(
        [
            edge("p/0", FIRST, Outcome.SLOWER, 0.5, result="p/s", rank=0, seconds=3.0),
            edge("p/0", SECOND, Outcome.WRONG, rank=1, seconds=1.0),
            edge("p/0", THIRD, Outcome.FASTER, 2.0, result="p/1", rank=2, seconds=2.0),
            edge("p/1", AFTER, Outcome.FASTER, 1.5, result="p/2", rank=0, seconds=4.0),
            edge("p/2", FIRST, Outcome.SLOWER, 0.99, result="p/3", rank=0, seconds=2.0),
        ]
    )


class Fixed:
    """Prefers actions in a given order of kinds; STOP where its place is."""

    name = "fixed"

    def __init__(self, *kinds: ActionKind | None) -> None:
        self._kinds = kinds

    def choices(self, state: State, actions: Any) -> list[Choice]:
        choices = [Choice(item, 1 / (len(actions) + 1), "fixed") for item in (*actions, None)]
        return sorted(choices, key=lambda c: self._kinds.index(c.action.kind if c.action is not None else None))


# Labels and groups ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("outcome", "ratio", "grade"),
    [
        (Outcome.NOT_LEGAL, None, FAILED),
        (Outcome.COMPILE_ERROR, None, FAILED),
        (Outcome.WRONG, None, FAILED),
        (Outcome.OUT_OF_TIME, None, FAILED),
        (Outcome.SLOWER, 0.5, SLOWER),
        (Outcome.SLOWER, 1.005, SLOWER),
        (Outcome.FASTER, 1.015, SMALL_GAIN),
        (Outcome.FASTER, 1.02, STOP + 1),
        (Outcome.FASTER, 1.25, STOP + 2),
        (Outcome.FASTER, 9.0, BEST),
    ],
)
def test_failures_are_worse_than_slower_steps_and_stop_is_between_those_and_gains(
    outcome: Outcome, ratio: float | None, grade: int
) -> None:
    item = edge("p/0", FIRST, outcome, ratio)
    assert grade_of(item) == grade
    assert grade_of(item, with_failures=False) == max(grade, SLOWER)


def test_a_version_gives_one_group_for_each_number_of_failures_before() -> None:
    groups, experience = groups_of(small_tree(), ["p"])
    root = [group for group in groups if group.version == "p/0"]
    assert [len(group.rows) for group in root] == [4, 3, 2]
    assert [group.labels for group in root] == [
        (SLOWER, FAILED, STOP + 4, STOP),
        (FAILED, STOP + 4, STOP),
        (STOP + 4, STOP),
    ]
    assert [group.weight for group in root] == [pytest.approx(1 / 3)] * 3
    steps = FEATURES.index("history.steps")
    assert [group.rows[0][steps] for group in root] == [0.0, 1.0, 2.0]
    first, later = ("fuse, launches, first", "autotune, launches, first")
    assert experience.counts()[first] == (0, 1) and experience.counts()[later] == (0, 1)
    assert experience.counts()["cuda-graph, launches, later"] == (1, 1)


def test_the_history_of_a_version_is_its_path_with_what_failed_before() -> None:
    tree = small_tree()
    path = tree.path_of(tree.versions["p/2"], GPU)
    assert [item.key for item in path] == [FIRST.key, SECOND.key, THIRD.key, AFTER.key]
    history = tree.state(tree.versions["p/2"], path, GPU).history
    assert [step.status.value for step in history] == ["rejected", "failed", "accepted", "accepted"]
    assert [outcome_of(step) for step in history] == [item.outcome for item in path]
    assert history[-1].timing is not None and history[-1].status is StepStatus.ACCEPTED


def test_a_slower_first_version_has_the_grade_of_what_later_steps_reach_from_it() -> None:
    def grades(ratio: float, later: float) -> list[int]:
        tree = tree_of(
            [
                edge("p/0", FIRST, Outcome.SLOWER, ratio, result="p/1"),
                edge("p/0", SECOND, Outcome.WRONG, rank=1),
                edge("p/1", AFTER, Outcome.FASTER, later, result="p/2"),
                edge("p/2", FIRST, Outcome.SLOWER, 0.95, result="p/3"),
                edge("p/3", SECOND, Outcome.FASTER, 3.0, result="p/4"),
            ]
        )
        groups, _ = groups_of(tree, ["p"])
        assert next(group.labels[0] for group in groups if group.version == "p/2") == SLOWER
        return list(next(group.labels for group in groups if group.version == "p/0"))

    assert grades(0.95, 2.0) == [STOP + 3, FAILED, STOP]
    assert grades(0.95, 1.04) == [SLOWER, FAILED, STOP]
    assert grades(0.8, 2.0) == [SLOWER, FAILED, STOP]


def test_without_a_gpu_only_failures_are_ranked_and_stop_is_no_choice() -> None:
    tree = tree_of(
        [
            edge("p/0", FIRST, Outcome.CORRECT, result="p/1", device=""),
            edge("p/0", SECOND, Outcome.COMPILE_ERROR, rank=1, device=""),
        ]
    )
    ((group,), _) = groups_of(tree, ["p"])
    assert (group.labels, group.has_stop) == ((SLOWER, FAILED), False)
    assert groups_of(tree, ["p"], with_failures=False)[0] == []
    assert not tree.state(tree.versions["p/0"], [], "").has_gpu


def test_single_configurations_of_a_tuning_are_no_choices() -> None:
    tuning = action(ActionKind.AUTOTUNE, variants=[{"config": {"warps": 4}}, {"config": {"warps": 8}}])
    variant = action(ActionKind.AUTOTUNE, config={"warps": 8})
    tree = tree_of(
        [
            replace(edge("p/0", variant, Outcome.FASTER, 1.2, result="p/1", rank=-1), chosen_by="variant"),
            edge("p/0", tuning, Outcome.FASTER, 1.2, result="p/1"),
            edge("p/1", AFTER, Outcome.SLOWER, 0.9, result="p/2"),
        ]
    )
    groups, _ = groups_of(tree, ["p"])
    assert [len(group.rows) for group in groups if group.version == "p/0"] == [2]
    assert [item.key for item in tree.path_of(tree.versions["p/1"], GPU)] == [tuning.key]


def test_times_of_several_gpus_are_different_states() -> None:
    tree = tree_of(
        [
            edge("p/0", FIRST, Outcome.FASTER, 1.5, result="p/1"),
            edge("p/0", FIRST, Outcome.SLOWER, 0.9, result="p/1", device="NVIDIA A100-SXM4-80GB"),
        ]
    )
    groups, _ = groups_of(tree, ["p"])
    assert sorted(group.labels for group in groups) == [(SLOWER, STOP), (STOP + 3, STOP)]
    bandwidth = FEATURES.index("device.bandwidth")
    assert len({group.rows[0][bandwidth] for group in groups}) == 2


# Replays ----------------------------------------------------------------------------------------------------------


def points(run: Replay) -> list[tuple[int, float, float]]:
    return [(point.candidates, point.seconds, point.speedup) for point in run.points]


def test_a_replay_takes_the_measured_steps_in_the_order_of_the_policy() -> None:
    run = replay(small_tree(), "p", RooflinePolicy(), GPU)
    assert points(run) == [(1, 3.0, 1.0), (2, 4.0, 1.0), (3, 6.0, 2.0), (4, 10.0, 3.0), (5, 12.0, 3.0)]
    assert run.end == "nothing left"
    assert [run.after(count) for count in (0, 2, 3, 24)] == [1.0, 1.0, 2.0, 3.0]
    assert [run.after_seconds(seconds) for seconds in (5.9, 6.0, 60.0)] == [1.0, 2.0, 3.0]
    assert replay(small_tree(), "p", RooflinePolicy(), GPU, limit=3).end == "limit"


def test_a_better_order_reaches_the_same_with_fewer_candidates() -> None:
    best_first = Fixed(ActionKind.ALGEBRA, ActionKind.CUDA_GRAPH, None, *KINDS[:2])
    run = replay(small_tree(), "p", best_first, GPU)
    assert points(run) == [(1, 2.0, 2.0), (2, 6.0, 3.0)]
    assert (run.end, run.speedup) == ("stopped", 3.0)


def test_a_run_ends_at_versions_that_were_not_explored_and_after_failures() -> None:
    unexplored = tree_of([edge("p/0", FIRST, Outcome.FASTER, 1.3, result="p/1")])
    assert replay(unexplored, "p", RooflinePolicy(), GPU).end == "unexplored"
    failing = tree_of([edge("p/0", action(number=n), Outcome.WRONG, rank=n) for n in range(6)])
    failed = replay(failing, "p", RooflinePolicy(), GPU)
    assert (failed.end, len(failed.points), failed.speedup) == ("failures", 4, 1.0)
    refusing = tree_of([edge("p/0", action(number=n), Outcome.NOT_LEGAL, rank=n) for n in range(14)])
    refused = replay(refusing, "p", RooflinePolicy(), GPU)
    assert (refused.end, len(refused.points)) == ("failures", 12)


def test_a_first_version_that_is_hardly_slower_is_a_base_for_later_steps() -> None:
    tree = tree_of(
        [
            edge("p/0", FIRST, Outcome.SLOWER, 0.95, result="p/1"),
            edge("p/1", AFTER, Outcome.FASTER, 2.0, result="p/2"),
        ]
    )
    run = replay(tree, "p", RooflinePolicy(), GPU)
    assert [point.speedup for point in run.points] == [1.0, pytest.approx(1.9)]


def test_the_best_of_a_tree_is_the_best_path_of_gains() -> None:
    assert best_in_tree(small_tree(), "p", GPU) == 3.0
    assert best_in_tree(small_tree(), "p", "NVIDIA A100") == 1.0


def test_a_replay_is_the_same_each_time() -> None:
    tree = learnable_tree(3)
    assert replay(tree, "p0", RandomPolicy(5), GPU) == replay(tree, "p0", RandomPolicy(5), GPU)


# Training ---------------------------------------------------------------------------------------------------------


def by_number(item: Program) -> Split:
    """Families 0 to 5 are trained on, 6 and 7 decide the end of training, 8 and 9 are for the test."""
    number = int(item.family.removeprefix("family"))
    return Split.TRAIN if number < 6 else Split.VALIDATION if number < 8 else Split.TEST


@pytest.fixture(scope="module")
def tree() -> MeasuredTree:
    return learnable_tree(50, seed=1)


def test_a_ranker_learns_the_feature_that_decides_within_a_minute(tree: MeasuredTree) -> None:
    began = time.monotonic()
    trained = train_ranker(tree, by_number, RankerOptions())
    model = RankerModel(trained.model)
    assert time.monotonic() - began < 60
    held_out, _ = groups_of(tree, programs_of(tree, by_number, Split.TEST))
    ranked, usual = ranking_metrics(held_out, by_model(model)), ranking_metrics(held_out, by_roofline)
    assert ranked is not None and usual is not None
    assert ranked.top_1 > 0.95 and usual.top_1 < 0.4
    assert ranked.ndcg > 0.95 > usual.ndcg
    assert ranked.stop_precision is not None and ranked.stop_precision > 0.95
    test = next(part for part in evaluate(tree, model, by_number) if part.part == Split.TEST)
    assert (test.programs, test.families, test.timed.programs) == (10, 2, 10)
    replays = test.timed.replays
    assert replays[RANKER].by_candidates[1] == pytest.approx(1.5)
    assert replays[RANKER].by_candidates[1] > replays[ROOFLINE].by_candidates[2]
    assert replays[RANKER].by_candidates[1] > replays[RANDOM].by_candidates[2]
    assert replays[RANKER].candidates < replays[ROOFLINE].candidates
    assert replays[RANKER].ends == {"stopped": 10}


def test_a_ranker_sees_nothing_of_held_out_families(tree: MeasuredTree) -> None:
    trained = train_ranker(tree, by_number, RankerOptions(trees=5))
    assert {by_number(tree.programs[name]) for name in trained.programs} == {Split.TRAIN}
    changed = {
        version: tuple(replace(item, outcome=Outcome.WRONG, ratio=None, device="") for item in items)
        if by_number(tree.programs[tree.versions[version].program]) == Split.TEST
        else items
        for version, items in tree.transitions.items()
    }
    again = train_ranker(replace(tree, transitions=changed), by_number, RankerOptions(trees=5))
    assert again.model.to_bytes() == trained.model.to_bytes()


def test_programs_with_the_graph_of_a_benchmark_are_only_tested_on(
    tree: MeasuredTree, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared = fingerprint(tree.programs["p0"].capture.graph)
    monkeypatch.setattr("mtmc_lsp.programs.fingerprints.forbidden_fingerprints", lambda: frozenset({shared}))
    assert programs_of(tree, by_number, Split.TRAIN) == programs_of(tree, by_number, Split.VALIDATION) == []
    assert len(programs_of(tree, by_number, Split.TEST)) == 10
    with pytest.raises(RequestError, match=r"0 programs for training"):
        train_ranker(tree, by_number, RankerOptions())


def test_the_same_seed_gives_the_same_file_and_time_limits_end_the_training(tree: MeasuredTree) -> None:
    first, again = (train_ranker(tree, by_number, RankerOptions(seed=7, trees=8)) for _ in range(2))
    assert first.model.to_bytes() == again.model.to_bytes()
    short = train_ranker(tree, by_number, RankerOptions(seconds=1e-9))
    assert len(short.curve) == 1


def test_ablations_leave_out_what_they_name(tree: MeasuredTree) -> None:
    blind = train_ranker(tree, by_number, RankerOptions(without=("history", "device"), trees=5)).model.header.features
    assert blind and not [name for name in blind if name.startswith(("history.", "device."))]
    everything = train_ranker(tree, by_number, RankerOptions(trees=5)).model.header
    assert everything.features == FEATURES
    tenth = train_ranker(tree, by_number, RankerOptions(share=0.1, trees=5)).model.header
    assert (everything.counts["programs"], tenth.counts["programs"]) == (30, 3)
    half = programs_of(tree, by_number, Split.TRAIN, share=0.5, seed=2)
    assert set(programs_of(tree, by_number, Split.TRAIN, share=0.1, seed=2)) < set(half)
    rewarded = train_ranker(tree, by_number, RankerOptions(without=("compile-reward",), trees=5))
    assert rewarded.model.trees != train_ranker(tree, by_number, RankerOptions(trees=5)).model.trees


def test_options_that_do_not_exist_are_refused() -> None:
    with pytest.raises(RequestError, match="--without luck does not exist"):
        RankerOptions(without=("luck",))
    with pytest.raises(RequestError, match="--share 0 is not possible"):
        RankerOptions(share=0)


def test_data_without_times_is_refused_with_a_remedy() -> None:
    tree = tree_of([edge("p/0", FIRST, Outcome.WRONG), edge("p/0", SECOND, Outcome.CORRECT, result="p/1", device="")])
    with pytest.raises(RequestError, match="no timed version with several outcomes") as raised:
        train_ranker(tree, lambda item: Split.TRAIN, RankerOptions())
    assert raised.value.remedy == "Collect more: mtmc explore on a machine with a GPU."


def test_the_temperature_makes_the_best_choices_the_most_probable(tree: MeasuredTree) -> None:
    trained = train_ranker(tree, by_number, RankerOptions(trees=20))
    model = RankerModel(trained.model)
    groups, _ = groups_of(tree, programs_of(tree, by_number, Split.VALIDATION))
    assert best_temperature(model, groups, FEATURES) == trained.model.header.temperature
    flat = replace(trained.model, header=replace(trained.model.header, temperature=100.0))
    state = tree.state(tree.roots["p0"], [], GPU)
    offered = [action(KINDS[n], number=n, changes_rounding=n == 2) for n in range(3)]
    sharp = RankerPolicy(model).choices(state, offered)[0]
    assert sharp.probability > RankerPolicy(RankerModel(flat)).choices(state, offered)[0].probability
    assert math.isclose(sum(choice.probability for choice in RankerPolicy(model).choices(state, offered)), 1.0)


def test_the_report_is_valid_json(tree: MeasuredTree, tmp_path: Path) -> None:
    from mtmc_lsp.training.page import TrainingReport, markdown, page

    trained = train_ranker(tree, by_number, RankerOptions(trees=12))
    parts = tuple(evaluate(tree, RankerModel(trained.model), by_number))
    report = TrainingReport(trained, RankerOptions(trees=12), parts)
    document = json.loads(json.dumps(report.to_document()))
    assert document["header"]["device"] == GPU and len(document["curve"]) == len(trained.curve)
    assert {part["part"] for part in document["parts"]} == {"validation", "test"}
    text = markdown(report)
    assert "## Test families: 10 programs of 2 families" in text
    assert "| ranker-greedy | 1.500x |" in text
    assert "The best of the trees is 1.500x on 10 timed programs. ranker-greedy reaches the" in text
    charts = page(report).charts
    assert set(charts) == {
        *("training", "test-candidates", "test-seconds", "validation-candidates", "validation-seconds"),
    }
    curves = charts["test-candidates"]["layer"][1]["data"]["values"]
    assert {row["curve"] for row in curves} == set(parts[1].timed.replays) and len(curves) == 7 * 25


def test_the_planner_of_a_trained_model_stops(tree: MeasuredTree) -> None:
    """The whole chain once: training, file, planner, and the decision to stop where nothing gains."""
    from mtmc_lsp.policies.planner import PolicyPlanner
    from mtmc_lsp.training.tree import action_of

    model = RankerModel(train_ranker(tree, by_number, RankerOptions()).model)
    version = tree.versions["p8/1"]
    state = tree.state(version, tree.path_of(version, GPU), GPU)

    class Ranking:
        def ranked(self, state: State) -> list[Any]:
            return [action_of(item) for item in tree.of_version("p8/1")]

    assert isinstance(PolicyPlanner(Ranking(), RankerPolicy(model)).propose(state), Stop)
