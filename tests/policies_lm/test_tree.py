"""Trees as the environment: best actions, walks, masking, rewards, splits."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest

from mtmc_lsp.core.errors import RequestError
from mtmc_lsp.core.learning.transitions import Outcome
from mtmc_lsp.training.lm.best_paths import best_actions, best_path, examples
from mtmc_lsp.training.lm.environment import Walk
from mtmc_lsp.training.lm.parameters import Ablation, Rewards
from mtmc_lsp.training.lm.tree import Edge, read_trees, share_of, write_trees
from tests.policies_lm.trees import COPIED, FUSED, ROOT, TUNED, parameters, tree


def take(walk: Walk, text: str) -> float:
    return walk.act(next(i for i, each in enumerate(walk.texts) if each.startswith(text)))


def test_the_best_actions_follow_the_fastest_path_and_stop_at_its_end() -> None:
    best = best_actions(tree(), 8)
    assert {name: edge and edge.key for name, edge in best.items()} == {ROOT: "fuse", FUSED: "tune", TUNED: None}
    assert COPIED not in best, "nothing was timed there"


def test_a_larger_gain_later_beats_a_smaller_one_now() -> None:
    whole = tree()
    root = replace(whole.nodes[ROOT], edges=tuple(_faster(edge) for edge in whole.nodes[ROOT].edges))
    changed = replace(whole, nodes={**whole.nodes, ROOT: root})
    assert [edge.key for edge in best_path(changed, 8)] == ["fuse", "tune"], "2.0 * 1.5 is more than 2.5"
    assert [edge.key for edge in best_path(changed, 1)] == ["copy"]


def _faster(edge: Edge) -> Edge:
    return replace(edge, ratio=2.5) if edge.key == "copy" else edge


def test_a_first_version_that_is_nearly_as_fast_is_a_base_for_later_steps() -> None:
    whole = tree()
    edges = (Edge("fuse", "fuse.", Outcome.SLOWER, 0.95, FUSED), Edge("copy", "copy.", Outcome.SLOWER, 0.85, COPIED))
    changed = replace(whole, nodes={**whole.nodes, ROOT: replace(whole.nodes[ROOT], edges=edges)})
    assert [edge.key for edge in best_path(changed, 8)] == ["fuse", "tune"], "0.95 * 1.5 is more than 1"
    walk = Walk(changed, parameters())
    take(walk, "copy")
    assert "Kernels: none" in walk.state
    take(walk, "fuse")
    assert "Kernels: 1\nfused" in walk.state


def test_paths_in_circles_end() -> None:
    whole = tree()
    back = Edge("back", "back.", Outcome.FASTER, 1.01, ROOT)
    tuned = replace(whole.nodes[TUNED], edges=(*whole.nodes[TUNED].edges, back))
    assert len(best_path(replace(whole, nodes={**whole.nodes, TUNED: tuned}), 8)) == 8


def test_a_walk_goes_on_from_faster_versions_and_stays_after_failures() -> None:
    walk = Walk(tree(), parameters())
    assert walk.texts == ["use tf32.", "copy.", "fuse.", "split."], "a run tries at least one step"
    assert take(walk, "split") == pytest.approx(-1.0 - 0.1)
    assert walk.texts == ["use tf32.", "copy.", "fuse.", "stop, nothing else will pay."]
    assert take(walk, "use tf32") == pytest.approx(0.1 - 0.5 - 0.2)
    assert take(walk, "fuse") == pytest.approx(0.1 + 0.5 + 1.0 - 0.3)
    assert walk.texts == ["graph.", "tune.", "stop, nothing else will pay."], "what was tried is not offered again"
    assert take(walk, "graph") == pytest.approx(0.1 + 0.5 - 0.4)
    assert "Kernels: 1\nfused" in walk.state, "a version that is not faster is dropped"
    assert take(walk, "tune") == pytest.approx(0.1 + 0.5 + 1.0 - 0.5)
    assert walk.is_done, "nothing is left to try"
    assert walk.total == pytest.approx(-1.1 - 0.6 + 1.3 + 0.2 + 1.1)


def test_stop_ends_a_walk_and_earns_nothing() -> None:
    walk = Walk(tree(), parameters())
    take(walk, "split")
    assert not walk.is_done
    assert take(walk, "stop") == 0.0
    assert walk.is_done and walk.total == pytest.approx(-1.1)


def test_a_walk_ends_at_its_longest_length() -> None:
    walk = Walk(tree(), parameters(most_steps=1))
    take(walk, "fuse")
    assert walk.is_done


def test_the_state_tells_the_steps_so_far() -> None:
    walk = Walk(tree(), parameters())
    take(walk, "split")
    take(walk, "fuse")
    assert walk.state == (
        "GPU: test\nTask: p\nKernels: 1\nfused\nTried:\nsplit -> does not compile\nfuse -> faster 2.00x\n"
        "Choices: 3\nNext:"
    )


def test_ablations_leave_out_history_hardware_and_staged_rewards() -> None:
    walk = Walk(tree(), parameters(ablation=Ablation(history=False, hardware=False, staged_rewards=False)))
    assert take(walk, "split") == pytest.approx(-0.1)
    assert take(walk, "fuse") == pytest.approx(1.0 - 0.2)
    assert walk.state == "Task: p\nKernels: 1\nfused\nTried: nothing\nChoices: 3\nNext:"


@pytest.mark.parametrize(
    ("outcome", "reward"),
    [
        (Outcome.NOT_LEGAL, -1.0),
        (Outcome.COMPILE_ERROR, -1.0),
        (Outcome.OUT_OF_TIME, -1.0),
        (Outcome.WRONG, -0.4),
        (Outcome.CORRECT, 0.6),
        (Outcome.SLOWER, 0.6),
        (Outcome.FASTER, 1.6),
    ],
)
def test_rewards_are_those_of_the_paper(outcome: Outcome, reward: float) -> None:
    assert Rewards(step_cost=0.0).of(outcome, 3, staged=True) == pytest.approx(reward)


def test_examples_contain_histories_with_failures() -> None:
    options = parameters()
    plain = examples([tree()], options, with_failures=False)
    assert [each.texts[each.best] for each in plain] == ["fuse.", "tune.", "stop, nothing else will pay."]
    assert plain[1].state.endswith("Tried:\nfuse -> faster 2.00x\nChoices: 3\nNext:"), "the path to the version"
    more = examples([tree()], options, with_failures=True)
    added = [each for each in more if each not in plain]
    assert added and [each for each in more if each in plain] == plain
    for each in added:
        # Fewer actions are left, the best one is among them, and the history tells the others.
        assert len(each.texts) > 1 and " -> " in each.state
        assert any(
            each.texts[each.best] == few.texts[few.best]
            and set(each.texts) - {"stop, nothing else will pay."} < set(few.texts)
            and len(each.state) > len(few.state)
            for few in plain
        )
    assert more == examples([tree()], options, with_failures=True), "the same each time"


def test_at_the_beginning_stop_is_no_example() -> None:
    whole = tree()
    failing = tuple(replace(edge, outcome=Outcome.SLOWER, ratio=0.5, result="") for edge in whole.nodes[ROOT].edges)
    changed = replace(whole, nodes={ROOT: replace(whole.nodes[ROOT], edges=failing)})
    assert examples([changed], parameters(), with_failures=False) == []
    (one,) = examples([changed], parameters(), with_failures=True)
    assert one.texts[one.best].startswith("stop") and "-> not faster 0.50x" in one.state


def test_trees_survive_the_file_and_damage_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "trees.jsonl"
    write_trees(path, [tree("a"), tree("b")])
    assert read_trees(path) == [tree("a"), tree("b")]
    path.write_text(path.read_text()[:-20])
    with pytest.raises(RequestError, match=r"trees\.jsonl: the trees are damaged"):
        read_trees(path)


def test_a_smaller_share_of_the_data_is_part_of_a_larger_one() -> None:
    trees = [tree(str(number)) for number in range(20)]
    tenth, half = share_of(trees, 0.1, 1), share_of(trees, 0.5, 1)
    assert (len(tenth), len(half)) == (2, 10)
    assert {each.program for each in tenth} < {each.program for each in half}
    assert len(share_of(trees, 0.0, 1)) == 1


def test_choices_share_the_target_of_the_supervised_start_by_what_they_reach() -> None:
    first, second, last = examples([tree()], parameters(), with_failures=False)
    # 2.0 * 1.5 against 1.2, at a temperature of 0.1: (3 / 1.2) ** 10. Actions that fail have no share.
    assert first.targets[2] / first.targets[1] == pytest.approx((3.0 / 1.2) ** 10)
    assert first.targets[0] == first.targets[3] == 0.0
    # Tuning gains 1.5x; STOP counts as a gain of exp(0.02).
    assert second.targets[1] / second.targets[3] == pytest.approx((1.5 / math.exp(0.02)) ** 10)
    assert last.targets == (0.0, 0.0, 1.0), "nothing gains, so only STOP is right"
    assert all(sum(each.targets) == pytest.approx(1.0) for each in (first, second, last))
    assert first.regrets == pytest.approx((math.log(3), math.log(3 / 1.2), 0.0, math.log(3)))
    assert last.regrets == pytest.approx((0.02, 0.02, 0.0)), "trying in vain costs what STOP is worth"


def test_a_walk_knows_the_best_speedup_so_far() -> None:
    walk = Walk(tree(), parameters())
    take(walk, "split")
    assert walk.best_gain == 0.0
    take(walk, "fuse")
    take(walk, "graph")
    assert walk.best_gain == pytest.approx(math.log(2.0))
    take(walk, "tune")
    assert walk.best_gain == pytest.approx(math.log(3.0))
