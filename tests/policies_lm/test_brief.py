"""Texts without names: the same in training and in a run, short, and different for each choice."""

from __future__ import annotations

from mtmc_lsp.core.action import ActionKind, MacroAction
from mtmc_lsp.core.json_codec import from_json
from mtmc_lsp.core.protocols import State
from mtmc_lsp.planners.roofline import RooflinePlanner
from mtmc_lsp.policies.lm.brief import brief_action, brief_action_texts, brief_schedule, brief_task
from mtmc_lsp.policies.lm.client import choice_texts, describe
from mtmc_lsp.policies.lm.policy_folder import LmPolicyDescription
from mtmc_lsp.policies.lm.prompt import estimated_tokens
from mtmc_lsp.policies.state_features import version_of
from mtmc_lsp.programs.splits import Split
from mtmc_lsp.schedule.schedule import Schedule
from mtmc_lsp.training.lm.building import build_trees
from mtmc_lsp.training.lm.environment import edge_texts, tree_state
from mtmc_lsp.training.lm.parameters import Ablation
from mtmc_lsp.training.tree import device_of
from tests.golden.pairs import FOLDER, Pair, pairs
from tests.planning.situations import H200, schedule_of
from tests.policies.trees import learnable_tree


def test_classes_stand_for_names() -> None:
    fuse = MacroAction(ActionKind.FUSE, ("mul_3", "add", "sum_1"), (1, 2), {"config": {"kind": "tile", "rows": 8}})
    assert brief_action(fuse) == "fuse pointwise 2, reduction 1: tile."
    cores = MacroAction(
        ActionKind.TENSOR_CORE, ("linear_2",), (1, 1), {"config": {"kind": "matmul", "precision": "tf32"}}
    )
    assert brief_action(cores) == "use tensor cores for product 1: matmul, tf32."
    tune = MacroAction(ActionKind.AUTOTUNE, ("softmax",), (1, 1), {"variants": [{}, {}]})
    assert brief_action(tune) == "tune softmax 1: 2 variants."


def test_task_and_schedule_are_told_by_counts() -> None:
    pair = Pair(FOLDER / "cuda-graph")
    capture = pair.stored_capture()
    assert brief_task(capture).startswith("Task: 2 operations, pointwise 1, softmax 1; f32; ")
    assert brief_schedule(schedule_of(pair.versions(capture)[-1])) == "Kernels: 1, tile 1; CUDA graph"
    assert brief_schedule(from_json(Schedule, {})) == "Kernels: none"


def test_choices_of_real_versions_are_short_and_all_different() -> None:
    for pair in pairs():
        capture = pair.stored_capture()
        for candidate in pair.versions(capture):
            state = State(capture, candidate, (), H200, has_gpu=True)
            actions = RooflinePlanner().ranked(state)
            texts = choice_texts(actions, version_of(state), names=False)
            assert len(set(texts)) == len(texts) and len(set(brief_action_texts(actions))) == len(actions)
            assert all(estimated_tokens(text) < 80 for text in texts)


def test_a_run_writes_the_texts_that_the_policy_was_trained_with() -> None:
    measured = learnable_tree(3)
    transitions = [item for several in measured.transitions.values() for item in several]
    for names in (True, False):
        trees = build_trees(
            measured.programs.values(),
            measured.versions.values(),
            transitions,
            lambda program: Split.TRAIN,
            names=names,
        )
        for tree in trees:
            edges = tree.nodes[tree.root].edges
            items = {item.key: item for item in measured.choices_of(tree.root, tree.gpu)}
            actions = [from_json(MacroAction, dict(items[edge.key].action)) for edge in edges]
            state = State(
                measured.programs[tree.program].capture, measured.candidate(tree.root), (), device_of(tree.gpu), True
            )
            description = LmPolicyDescription("", names=names)
            assert choice_texts(actions, version_of(state), names=names) == edge_texts(tree.nodes[tree.root], edges)
            told = tree_state(tree, tree.root, [], edges, Ablation(), tokens=description.state_tokens)
            assert describe(state, actions, description) == told
