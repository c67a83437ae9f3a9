"""Stored transitions become trees of texts; families of the test part stay out."""

from __future__ import annotations

from dataclasses import replace

from mtmc_lsp.core.action import ActionKind
from mtmc_lsp.core.learning.transitions import Outcome, Program
from mtmc_lsp.programs.splits import Split
from mtmc_lsp.training.lm.best_paths import best_path
from mtmc_lsp.training.lm.building import build_trees
from mtmc_lsp.training.lm.tree import DecisionTree
from tests.policies.trees import NODES, action, edge, program, tree_of

FUSE, TUNE = action(), action(ActionKind.AUTOTUNE, NODES[:1])
PARTS = {"norm": Split.TRAIN, "loss": Split.VALIDATION, "attention": Split.TEST}


def part_of(item: Program) -> str:
    return PARTS[item.family]


def built(transitions, programs=()) -> list[DecisionTree]:  # type: ignore[no-untyped-def]
    tree = tree_of(transitions, programs)
    return build_trees(tree.programs.values(), tree.versions.values(), transitions, part_of)


def test_a_tree_holds_the_texts_of_versions_and_actions() -> None:
    (tree,) = built(
        [
            edge("p/0", TUNE, Outcome.WRONG),
            edge("p/0", FUSE, Outcome.FASTER, 1.5, result="p/1"),
            edge("p/1", TUNE, Outcome.FASTER, 1.2, result="p/2"),
        ]
    )
    assert tree.device.startswith("GPU: NVIDIA H200") and tree.gpu == "NVIDIA H200"
    assert tree.task.startswith("Task: 4 operations on x f32[40,48]\ntanh(x) f32[40,48]")
    root = tree.nodes[tree.root]
    assert root.schedule.startswith("Kernels: none\nPredicted: ") and root.predicted_us > 0
    assert [(each.text, each.outcome, each.ratio, each.result) for each in root.edges] == [
        ("tune tanh.", Outcome.WRONG, None, ""),
        ("fuse tanh, mul_2.", Outcome.FASTER, 1.5, "p/1"),
    ]
    assert tree.nodes["p/2"].path == (("p/0", FUSE.key), ("p/1", TUNE.key))
    assert [each.key for each in best_path(tree, 8)] == [FUSE.key, TUNE.key]


def test_validation_families_are_marked_and_test_families_left_out() -> None:
    programs = [program("a", "norm"), program("b", "loss"), program("c", "attention")]
    trees = built([edge(f"{each.id}/0", FUSE, Outcome.SLOWER, 0.9, program=each.id) for each in programs], programs)
    assert [(tree.program, tree.is_held_out) for tree in trees] == [("a", False), ("b", True)]


def test_times_of_the_gpu_with_most_transitions_count() -> None:
    other = edge("p/0", FUSE, Outcome.SLOWER, 0.5, device="NVIDIA A10")
    (tree,) = built([other, edge("p/0", FUSE, Outcome.FASTER, 1.5), edge("p/0", TUNE, Outcome.SLOWER, 0.9)])
    assert {each.text: each.ratio for each in tree.nodes["p/0"].edges} == {"fuse tanh, mul_2.": 1.5, "tune tanh.": 0.9}
    assert "A10" not in tree.device


def test_single_configurations_of_a_tuning_action_are_left_out() -> None:
    variant = replace(edge("p/0", TUNE, Outcome.FASTER, 1.5), chosen_by="variant")
    (tree,) = built([variant, edge("p/0", FUSE, Outcome.SLOWER, 0.9)])
    assert [each.key for each in tree.nodes["p/0"].edges] == [FUSE.key]


def test_a_program_without_transitions_has_no_tree() -> None:
    assert built([edge("a/0", FUSE, Outcome.WRONG, program="a")], [program("a"), program("b")])[0].program == "a"
    assert len(built([edge("a/0", FUSE, Outcome.WRONG, program="a")], [program("a"), program("b")])) == 1
