"""Texts of states and actions: stable, bounded, and each action's text is its own."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mtmc_lsp.core.action import GRAPH_KINDS, ActionKind, MacroAction
from mtmc_lsp.core.graph import Graph
from mtmc_lsp.core.json_codec import from_json
from mtmc_lsp.core.learning.transitions import Outcome
from mtmc_lsp.core.protocols import State
from mtmc_lsp.planners.roofline import RooflinePlanner
from mtmc_lsp.policies.lm.action_text import VERBS, action_text, action_texts
from mtmc_lsp.policies.lm.prompt import (
    STATE_TOKENS,
    Tried,
    device_text,
    estimated_tokens,
    schedule_text,
    state_text,
    task_text,
)
from mtmc_lsp.schedule.schedule import KernelPlan, Schedule
from tests.golden.pairs import FOLDER, Pair, pairs
from tests.planning.situations import H200, schedule_of


def complete_text(pair: Pair, tokens: int = STATE_TOKENS) -> str:
    capture = pair.stored_capture()
    schedule = schedule_of(pair.versions(capture)[-1])
    steps = [Tried(text, Outcome.FASTER, 1.25) for text in action_texts(pair.steps)]
    return state_text(
        device_text(H200),
        task_text(capture.graph, tokens=tokens),
        schedule_text(schedule, tokens=tokens),
        steps,
        "Choices: 1",
        tokens=tokens,
    )


def long_graph(count: int) -> Graph:
    """A graph of many operations on tensors of four dimensions."""
    graph = Pair(FOLDER / "channels-last").stored_capture().graph
    nodes = tuple(replace(graph.nodes[index % 3], name=f"operation_{index}") for index in range(count))
    inputs = tuple(replace(graph.inputs[0], name=f"parameter_{index}") for index in range(count))
    return replace(graph, nodes=nodes, inputs=inputs)


def test_the_text_of_a_state_is_stable() -> None:
    assert complete_text(Pair(FOLDER / "autotune")) == (
        "GPU: NVIDIA H200 sm_90, 132 SMs, 4.3 TB/s, fp16 780 TFLOP/s, launch 4.0 us\n"
        "Task: 6 operations on x f32[16,96], weight f32[96]\n"
        "pow_1(x) f32[16,96]\n"
        "mean(pow_1) f32[16,1]\n"
        "add_6(mean) f32[16,1]\n"
        "rsqrt(add_6) f32[16,1]\n"
        "mul_5(x, rsqrt) f32[16,96]\n"
        "mul_8(mul_5, weight) f32[16,96]\n"
        "Kernels: 1\n"
        "pow_1, mean to mul_8 (6): tile 2x128 warps 2 stages 2\n"
        "Tried:\n"
        "fuse pow_1, mean to mul_8 (6) -> faster 1.25x\n"
        "tune pow_1, mean to mul_8 (6): 2 warps 2 -> faster 1.25x\n"
        "Choices: 1\n"
        "Next:"
    )


def test_the_beginning_of_the_text_stays_while_a_run_goes_on() -> None:
    """The model reuses what it computed for it."""
    device, task = device_text(H200), task_text(long_graph(50))
    start = state_text(device, task, "Kernels: none", [], "Choices: 3")
    steps = [Tried("fuse everything.", Outcome.WRONG)] * 40
    later = state_text(device, task, "Kernels: none", steps, "Choices: 2")
    assert start.startswith(f"{device}\n{task}\nKernels: none\nTried:")
    assert later.startswith(f"{device}\n{task}\nKernels: none\nTried:")


@pytest.mark.parametrize("tokens", [100, STATE_TOKENS, 1000])
def test_states_keep_within_the_budget(tokens: int) -> None:
    graph = long_graph(300)
    kernels = tuple(
        KernelPlan((f"operation_{index}",), schedule_of(_fused()).kernels[0].config) for index in range(100)
    )
    steps = [Tried(f"tune operation_{index}.", Outcome.SLOWER, 0.5) for index in range(100)]
    text = state_text(
        device_text(H200),
        task_text(graph, tokens=tokens),
        schedule_text(Schedule(kernels), tokens=tokens),
        steps,
        "Choices: 8, best saves 45%",
        tokens=tokens,
    )
    # The device's line and the headings are not cut; they have at most 100 tokens.
    assert 0.5 * tokens < estimated_tokens(text) <= 0.9 * tokens + 100
    assert "tune operation_99 -> not faster 0.50x\nChoices: 8, best saves 45%\nNext:" in text, (
        "the last step is told first"
    )
    assert f"{300 - text.count(') f32[')} more" in text


def _fused():  # type: ignore[no-untyped-def]
    pair = Pair(FOLDER / "fuse")
    return pair.versions(pair.stored_capture())[-1]


def test_a_long_graph_keeps_its_first_and_last_operations() -> None:
    text = task_text(long_graph(100))
    assert "operation_0 conv2d(" in text and "operation_99 conv2d(" in text and " more\n" in text


def test_every_kind_of_action_has_a_text() -> None:
    assert set(VERBS) == set(GRAPH_KINDS)


def test_texts_of_real_actions_are_short_sentences_and_all_different() -> None:
    for pair in pairs():
        capture = pair.stored_capture()
        for candidate in pair.versions(capture):
            actions = RooflinePlanner().ranked(State(capture, candidate, (), H200, has_gpu=True))
            texts = action_texts(actions)
            assert len(set(texts)) == len(texts)
            for text in texts:
                assert text.endswith(".") and "\n" not in text and estimated_tokens(text) < 60


def test_the_text_of_an_action_names_kind_region_and_configuration() -> None:
    config = {"kind": "matmul", "block_m": 64, "block_n": 32, "block_k": 16, "warps": 4, "stages": 3, "precision": "tf32",
              "tma": True, "split_k": 4, "persist": 0, "split_on_load": None}  # fmt: skip
    fuse = MacroAction(ActionKind.FUSE, ("linear", "gelu"), (1, 2), {"config": config})
    assert action_text(fuse) == "fuse linear, gelu: matmul 64x32x16 warps 4 stages 3 tf32 tma split_k 4."
    tune = MacroAction(
        ActionKind.AUTOTUNE, ("a",), (1, 1), {"variants": [{"config": {"warps": 2}}, {"config": {"warps": 8}}]}
    )
    assert action_text(tune) == "tune a: 2 variants from warps 2."
    algebra = MacroAction(ActionKind.ALGEBRA, ("a", "b"), (1, 1), {"rule": "hoist", "node": "b"})
    assert action_text(algebra) == "rewrite a, b: hoist."


def test_user_texts_and_lines_do_not_change_an_action_text() -> None:
    action = MacroAction(ActionKind.RECOMPUTE, ("tanh",), (3, 4), {"node": "tanh"}, "reason", text="Recompute y")
    assert action_text(action) == action_text(replace(action, lines=(9, 9), rationale="", text="other"))


names = st.lists(st.text("abc_1", min_size=1, max_size=4), min_size=1, max_size=8).map(tuple)
actions = st.builds(
    MacroAction,
    st.sampled_from(GRAPH_KINDS),
    names,
    st.just((0, 0)),
    st.dictionaries(
        st.sampled_from(["config", "rule", "node", "other"]), st.integers() | st.text(max_size=60), max_size=2
    ),
)


@given(st.lists(actions, max_size=6, unique_by=lambda action: action.key), st.randoms())
def test_any_actions_have_different_texts_that_do_not_depend_on_their_order(several: list[MacroAction], random) -> None:  # type: ignore[no-untyped-def]
    texts = dict(zip((action.key for action in several), action_texts(several), strict=True))
    assert len(set(texts.values())) == len(several)
    random.shuffle(several)
    assert dict(zip((action.key for action in several), action_texts(several), strict=True)) == texts


def test_schedules_are_told_with_their_rewrites_and_modes() -> None:
    pair = Pair(FOLDER / "cuda-graph")
    schedule = schedule_of(pair.versions(pair.stored_capture())[-1])
    assert schedule_text(schedule) == "Kernels: 1\nadd, softmax: tile 32x32 warps 2 stages 2\nCUDA graph"
    assert schedule_text(from_json(Schedule, {})) == "Kernels: none"
