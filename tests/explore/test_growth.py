"""How the tree of a program grows: what is tried, what is measured, and what is stored of it."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path

from growing import ACTIONS, SOURCE, TUNING, UNLISTED, FakeMeasurer, action, grow

from mtmc_lsp.core.learning.transitions import Outcome, Transition
from mtmc_lsp.explore.choices import choose
from mtmc_lsp.explore.parquet import read_programs, read_transitions, read_versions


def by_name(transitions: list[Transition], version: str) -> dict[str, Transition]:
    """The transitions of a version by the name in their action."""
    return {str(t.action["region"][0]): t for t in transitions if t.version == version}  # type: ignore[index]


def root_of(folder: Path) -> str:
    return next(version.id for version in read_versions(folder) if not version.parent)


def test_each_action_gets_the_furthest_stage_that_it_reached(tmp_path: Path) -> None:
    grow(tmp_path, depth=1)
    tried = by_name(read_transitions(tmp_path), root_of(tmp_path))
    outcomes = {name: transition.outcome.value for name, transition in tried.items()}
    assert outcomes == {
        "fast:a": "correct",
        "slow:b": "correct",
        "wrong:c": "wrong",
        "uncompiled:d": "compile-error",
        "illegal:e": "not-legal",
        "nothing:f": "not-legal",
        "same:g": "correct",
        "fast:random": "correct",
        "wrong:random": "wrong",
    }
    assert tried["uncompiled:d"].detail == "f_kernel does not compile for sm_90: no such function"
    assert tried["nothing:f"].detail == "it changes nothing"
    assert {name for name, t in tried.items() if not t.result} == {"illegal:e", "nothing:f"}
    assert all(t.ratio is None and t.device == "" for t in tried.values()), "there is no GPU"


def test_a_kernel_that_is_not_compiled_in_time_is_no_compile_error(tmp_path: Path) -> None:
    grow(tmp_path, listed=[action("endless:x")], unlisted=(), depth=1)
    assert read_transitions(tmp_path)[0].outcome is Outcome.OUT_OF_TIME


def test_what_was_measured_is_stored_before_the_next_actions_are_tried(tmp_path: Path) -> None:
    """Without a GPU, few actions are measured together, so that the end of the time cuts off little."""
    grow(tmp_path, listed=ACTIONS[:2], unlisted=(), depth=1, measurer=FakeMeasurer(most_at_once=1), seconds=4.0)
    assert len(read_transitions(tmp_path)) == 1


def test_a_reason_is_one_line_without_a_path(tmp_path: Path) -> None:
    grow(tmp_path, depth=1)
    tried = by_name(read_transitions(tmp_path), root_of(tmp_path))
    assert tried["illegal:e"].detail == "it is not possible"
    assert tried["wrong:c"].detail == "values differ in model.py"


def test_correct_versions_are_expanded_and_failed_ones_are_not(tmp_path: Path) -> None:
    grow(tmp_path)
    transitions, versions = read_transitions(tmp_path), read_versions(tmp_path)
    depth = {version.id: version.depth for version in versions}
    good = {t.result for t in transitions if t.outcome is Outcome.CORRECT and depth[t.result] == 1}
    assert {t.version for t in transitions if depth[t.version] == 1} == good
    assert {version.depth for version in versions} == {0, 1, 2}
    assert all(version.parent and version.action for version in versions if version.depth)


def test_two_orders_of_actions_lead_to_one_version_which_is_measured_once_without_a_gpu(tmp_path: Path) -> None:
    measurer = grow(tmp_path)
    versions = Counter(frozenset(version.schedule["kernels"]) for version in read_versions(tmp_path))  # type: ignore[call-overload]
    assert set(versions.values()) == {1}
    judged = Counter(frozenset(after.split()) for _, after in measurer.judged)
    assert set(judged.values()) == {1}
    results = Counter(t.result for t in read_transitions(tmp_path) if t.result)
    assert max(results.values()) == 2, "both transitions are stored"


def test_on_a_gpu_one_version_is_compared_with_each_version_before_it(tmp_path: Path) -> None:
    measurer = grow(tmp_path, listed=ACTIONS[:2], unlisted=(), has_gpu=True)
    assert sorted(measurer.judged) == [
        ("", "fast:a"),
        ("", "slow:b"),
        ("fast:a", "fast:a slow:b"),
        ("slow:b", "slow:b fast:a"),
    ]
    tried = by_name(read_transitions(tmp_path), root_of(tmp_path))
    assert (tried["fast:a"].outcome, tried["fast:a"].ratio, tried["fast:a"].after_us) == (Outcome.FASTER, 1.25, 80.0)
    assert tried["slow:b"].outcome is Outcome.SLOWER
    assert tried["fast:a"].device == "Fake GPU"
    times = {version.id: version.median_us for version in read_versions(tmp_path)}
    assert times[root_of(tmp_path)] == 100.0
    assert times[tried["fast:a"].result] == 80.0


def test_a_gain_within_the_error_is_not_called_faster(tmp_path: Path) -> None:
    grow(tmp_path, listed=[action("same:x")], unlisted=(), has_gpu=True, depth=1)
    assert read_transitions(tmp_path)[0].outcome is Outcome.SLOWER


def test_an_action_that_measures_several_leads_to_the_fastest_and_stores_each_that_was_timed(tmp_path: Path) -> None:
    grow(tmp_path, listed=[TUNING], unlisted=(), has_gpu=True, depth=1)
    transitions = read_transitions(tmp_path)
    assert [(t.chosen_by, t.rank, t.ratio) for t in transitions] == [
        ("variant", -1, 0.5),
        ("variant", -1, 1.25),
        ("roofline", 0, 1.25),
    ]
    assert transitions[2].result == transitions[1].result
    assert transitions[2].key == TUNING.key
    assert transitions[2].seconds >= transitions[0].seconds + transitions[1].seconds


def test_the_planners_choice_comes_first_then_runner_ups_then_random_ones() -> None:
    listed = list(enumerate(action(f"fast:{number}") for number in range(20)))
    chosen = choose(listed, UNLISTED, 7, random.Random(0))
    assert [(item.rank, item.chosen_by) for item in chosen[:4]] == [
        (0, "roofline"),
        (1, "runner-up"),
        (2, "runner-up"),
        (3, "runner-up"),
    ]
    assert {item.chosen_by for item in chosen[4:]} == {"random"}
    assert len({item.action.key for item in chosen}) == 7
    assert choose(listed, UNLISTED, 7, random.Random(0)) == chosen
    assert {item.rank for seed in range(50) for item in choose(listed, UNLISTED, 7, random.Random(seed))} >= {-1, 19}


def test_at_most_so_many_actions_are_tried_on_a_version_and_one_after_the_other(tmp_path: Path) -> None:
    grow(tmp_path, width=2, depth=3)
    transitions = read_transitions(tmp_path)
    assert max(Counter(t.version for t in transitions).values()) == 2
    assert max(version.depth for version in read_versions(tmp_path)) == 3


def test_a_seed_decides_what_is_tried(tmp_path: Path) -> None:
    def keys(name: str, seed: int) -> list[str]:
        grow(tmp_path / name, width=3, seed=seed)
        return [t.key for t in read_transitions(tmp_path / name)]

    assert keys("a", 1) == keys("b", 1)
    assert any(keys(f"c{seed}", seed) != keys("a", 1) for seed in range(2, 6))


def test_time_is_divided_among_the_actions_that_shared_it(tmp_path: Path) -> None:
    grow(tmp_path, listed=ACTIONS[:2], unlisted=(), depth=1)
    seconds = [t.seconds for t in read_transitions(tmp_path)]
    # By the pretended clock each stage takes a second: one action's writing, and half of compiling and judging.
    assert seconds == [2.0, 2.0]


def test_code_of_others_is_not_in_any_file(tmp_path: Path) -> None:
    grow(tmp_path)
    assert SOURCE.split("#")[1].strip() == "SECRET"
    text = b"".join(path.read_bytes() for path in tmp_path.iterdir())
    assert b"SECRET" not in text
    assert b"/project" not in text
    assert [item.source for item in read_programs(tmp_path)] == [""]
    assert read_programs(tmp_path)[0].capture.workload.target.path == "model.py"


def test_the_source_of_a_generated_program_is_stored(tmp_path: Path) -> None:
    grow(tmp_path, source=SOURCE)
    assert [item.source for item in read_programs(tmp_path)] == [SOURCE]
