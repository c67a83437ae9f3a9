"""Every kind of action: where it is legal, how it changes the schedule, and that its code is correct and reproducible."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from mtmc_lsp.actions.catalogue import BY_KIND, proposals
from mtmc_lsp.actions.tuning import refinements
from mtmc_lsp.codegen.coder import BuiltinCoder
from mtmc_lsp.core.action import GRAPH_KINDS, ActionKind, MacroAction
from mtmc_lsp.core.json_codec import from_json, to_json
from mtmc_lsp.core.protocols import CannotCode
from mtmc_lsp.core.run import Candidate, Step, StepStatus
from mtmc_lsp.core.workload import Capture
from mtmc_lsp.schedule.configs import PrecisionMode
from mtmc_lsp.schedule.schedule import Schedule
from tests.codegen.harness import fused, verified
from tests.codegen.test_kernels import ATTENTION, LINEAR, NORM, ROTARY, SCAN, SOFTMAX
from tests.planning import programs
from tests.planning.situations import (
    H200,
    SLOW,
    act,
    fully_fused,
    proposed,
    schedule_of,
    situation,
    start,
    timing,
)

K = ActionKind
PRODUCT = {
    "block_m": 16,
    "block_n": 16,
    "block_k": 16,
    "group_m": 4,
    "warps": 4,
    "stages": 2,
    "precision": "ieee",
}
ROWS = {"rows": 1, "block": 64, "loop": False, "warps": 4, "stages": 2}
LOOPED = {"rows": 1, "block": 16, "loop": True, "warps": 4, "stages": 2}
TILES = {"rows": 4, "block": 16, "warps": 4, "stages": 2}

LEGAL = {
    "tile a reduction": (NORM, ROWS, K.AUTOTUNE, {"rows": 2, "block": 32, "loop": True}),
    "tile a product": (LINEAR, PRODUCT, K.AUTOTUNE, {"block_m": 32, "block_k": 32}),
    "order of an elementwise kernel": (ROTARY, TILES, K.AUTOTUNE, {"order": "columns"}),
    "order of a product": (LINEAR, PRODUCT, K.AUTOTUNE, {"group_m": 1}),
    "stages of a loop": (NORM, LOOPED, K.AUTOTUNE, {"stages": 3}),
    "warps": (SOFTMAX, ROWS, K.AUTOTUNE, {"warps": 2}),
    "a reduction in parts": (SOFTMAX, LOOPED, K.SPLIT, {"split": 2}),
    "a product in parts": (LINEAR, PRODUCT, K.SPLIT, {"split_k": 2}),
    "a persistent reduction": (NORM, ROWS, K.AUTOTUNE, {"persist": 3}),
    "any of them, measured together": (NORM, LOOPED, K.AUTOTUNE, {"block": 32, "warps": 2}),
}


@pytest.mark.parametrize("name", LEGAL)
def test_a_legal_action_changes_the_schedule_and_the_kernel_stays_correct(name: str, captured) -> None:
    text, config, kind, changes = LEGAL[name]
    capture = captured(text, "f")
    before = fused(capture, text, config)
    region = schedule_of(before).kernels[0].nodes
    after = act(capture, before, kind, *region, config=changes)
    chosen = schedule_of(after).kernels[0].config
    assert chosen == from_json(type(chosen), {**config, **changes})
    assert after.source != before.source
    verdict = verified(capture, after)
    assert verdict.is_correct, verdict.reason


ILLEGAL = {
    "a tile that is no power of two": (NORM, ROWS, K.AUTOTUNE, {"block": 48}, "must be a power of two from 1 to 65536"),
    "a tile too large": (
        NORM,
        LOOPED,
        K.AUTOTUNE,
        {"rows": 64, "block": 4096},
        "rows and block cannot be 64 rows x 4096 columns: a tile has at most 65536 elements",
    ),
    "a product's tile too small for tensor cores": (
        LINEAR,
        PRODUCT,
        K.AUTOTUNE,
        {"block_k": 8},
        "block_k cannot be 8; it must be a power of two from 16 to 256",
    ),
    "a choice that the kernel has not": (NORM, ROWS, K.AUTOTUNE, {"block_m": 32}, "has no block_m to choose"),
    "no stages": (NORM, LOOPED, K.AUTOTUNE, {"stages": 0}, "stages cannot be 0"),
    "half a warp": (NORM, ROWS, K.AUTOTUNE, {"warps": 0}, "warps cannot be 0"),
    "too many warps": (
        NORM,
        ROWS,
        K.AUTOTUNE,
        {"warps": 64},
        "warps cannot be 64; it must be a power of two from 1 to 32",
    ),
    "an order of rows": (
        NORM,
        ROWS,
        K.AUTOTUNE,
        {"order": "columns"},
        "a reduction kernel over these axes has rows alone",
    ),
    "an unknown order": (
        ROTARY,
        TILES,
        K.AUTOTUNE,
        {"order": "diagonal"},
        "order: 'diagonal' is none of 'rows', 'columns'",
    ),
    "parts of a scan": (SCAN, {"rows": 2, "block": 16}, K.SPLIT, {"split": 2}, "a scan kernel cannot be split"),
    "parts that are empty": (SOFTMAX, LOOPED, K.SPLIT, {"split": 64}, "would leave some empty"),
    "three parts": (SOFTMAX, LOOPED, K.SPLIT, {"split": 3}, "must be a power of two from 1 to 65536"),
    "persistent attention": (
        ATTENTION,
        {"block_m": 16, "block_n": 16, "warps": 4, "stages": 2},
        K.AUTOTUNE,
        {"persist": 4},
        "an attention kernel has no persist to choose",
    ),
    "a persistent split kernel": (
        SOFTMAX,
        {**LOOPED, "split": 2},
        K.AUTOTUNE,
        {"persist": 4},
        "a split kernel has too few tiles for persistent programs",
    ),
    "nothing to change": (NORM, ROWS, K.AUTOTUNE, {}, "has no configuration"),
}


@pytest.mark.parametrize("name", ILLEGAL)
def test_an_illegal_action_is_rejected_with_its_reason(name: str, captured) -> None:
    text, config, kind, changes, reason = ILLEGAL[name]
    capture = captured(text, "f")
    before = fused(capture, text, config)
    with pytest.raises(CannotCode, match=reason):
        act(capture, before, kind, *schedule_of(before).kernels[0].nodes, config=changes)


def test_only_kernels_have_configurations(captured) -> None:
    capture = captured(NORM, "f")
    with pytest.raises(CannotCode, match="no kernel computes"):
        act(capture, start(capture, NORM), K.AUTOTUNE, "mul", config={"rows": 2})


def test_tensor_cores_are_for_float32_products(captured) -> None:
    capture = captured(NORM, "f")
    nodes = [node.name for node in capture.graph.nodes]
    with pytest.raises(CannotCode, match="no float32 matrix product"):
        act(capture, start(capture, NORM), K.TENSOR_CORE, *nodes, config=ROWS)


def test_a_shared_value_is_recomputed_by_both_reductions(captured) -> None:
    capture = captured(programs.SHARED, "f")
    nodes = [node.name for node in capture.graph.nodes]
    first = act(capture, start(capture, programs.SHARED), K.FUSE, *nodes[:2], nodes[3], config={})
    second = act(capture, first, K.FUSE, nodes[2], config={})
    assert "mul_ptr" in second.source or "g_ptr" in second.source
    action = proposed(capture, second, K.RECOMPUTE)[0]
    assert action.expected.saved_us > 0
    after = BuiltinCoder().write(capture, second, action)
    assert [plan.recomputed for plan in schedule_of(after).kernels] == [tuple(nodes[:2])] * 2
    assert "g_ptr" not in after.source
    verdict = verified(capture, after)
    assert verdict.is_correct, verdict.reason


def test_a_product_that_computes_a_value_for_itself_can_be_fused_further(captured) -> None:
    text = """import torch
# mtmc: x=f32[N,K] w=f32[K,M] N=20 K=24 M=16
def f(x, w):
    g = torch.tanh(x)
    return torch.relu(g @ w), g.sum(1)
"""
    capture = captured(text, "f")
    tanh, product, relu, total = (node.name for node in capture.graph.nodes)
    separate = act(capture, start(capture, text), K.FUSE, tanh, total, config={})
    after = act(capture, separate, K.RECOMPUTE, tanh, node=tanh)
    assert schedule_of(after).kernel_of(product).config.precision is PrecisionMode.IEEE
    further = [action for action in proposed(capture, after, K.FUSE) if {product, relu} <= set(action.region)]
    verdict = verified(capture, BuiltinCoder().write(capture, after, further[0]))
    assert verdict.is_correct, verdict.reason


NOT_RECOMPUTED = {
    "a returned value": ("g = torch.tanh(x)\n    return g, g.sum(0)", "tanh", "it is written anyway"),
    "a reduction": ("g = x.sum(1, keepdim=True)\n    return (g * 2).sum(0), g + x", "sum_1", "only elementwise"),
    "a value for a torch call": (
        "g = torch.tanh(x)\n    return g.sort()[0], g.sum(0)",
        "tanh",
        "a torch call reads the value",
    ),
    "random numbers": (
        "g = torch.nn.functional.dropout(x, 0.5)\n    return g.sum(0), g.sum(1)",
        "dropout",
        "only elementwise",
    ),
}


@pytest.mark.parametrize("name", NOT_RECOMPUTED)
def test_expensive_or_visible_values_are_not_recomputed(name: str, captured) -> None:
    body, node, reason = NOT_RECOMPUTED[name]
    text = f"import torch\n# mtmc: x=f32[N,M] N=12 M=16\ndef f(x):\n    {body}\n"
    capture = captured(text, "f")
    name = next(node_of.name for node_of in capture.graph.nodes if node in node_of.name)
    with pytest.raises(CannotCode, match=f"recompute: .*{reason}"):
        act(capture, start(capture, text), K.RECOMPUTE, name, node=name)


# Proposals -----------------------------------------------------------------------------------------------------------


def test_few_long_rows_are_split_at_once_and_a_whole_kernel_may_be_split_later(captured) -> None:
    capture = captured(programs.LONG, "f")
    # On two multiprocessors the rows are enough programs; on 132 the parts of these rows would leave most idle.
    first = proposed(capture, start(capture, programs.LONG), K.FUSE, device=replace(SLOW, sm_count=16))[0]
    assert first.params["config"]["split"] == 8
    assert "programs share each of its few long rows" in first.rationale
    whole = fused(capture, programs.LONG, {"rows": 1, "block": 4096, "loop": True, "warps": 8, "stages": 2})
    action = proposed(capture, whole, K.SPLIT, device=H200)[0]
    assert action.expected.saved_us > 0
    assert action.text.startswith("Split the kernel for the result into ")
    assert "PARTS" in BuiltinCoder().write(capture, whole, action).source


def test_a_product_of_few_tiles_is_split_along_k(captured) -> None:
    capture = captured(programs.DEEP, "f")
    whole = fused(capture, programs.DEEP, {**PRODUCT, "block_m": 64, "block_n": 64, "block_k": 32})
    action = proposed(capture, whole, K.SPLIT, device=H200)[0]
    assert action.params["config"] == {"split_k": 128}
    assert action.expected.saved_us > 0


def test_tuning_is_proposed_if_steps_are_timed(captured) -> None:
    capture = captured(NORM.replace("B=6 D=50", "B=4096 D=4096"), "f")
    candidate = fused(capture, NORM, {"rows": 1, "block": 4096, "loop": False, "warps": 8, "stages": 2})
    assert K.AUTOTUNE not in {action.kind for action in proposals(situation(capture, candidate))}
    actions = proposals(situation(capture, candidate, has_gpu=True))
    assert K.AUTOTUNE in {action.kind for action in actions}
    assert [a.expected.saved_us for a in actions] == sorted((a.expected.saved_us for a in actions), reverse=True)
    for action in actions:
        assert action.text
        assert action.rationale.endswith(".")
        assert_every_variant_changes_the_schedule(capture, candidate, action)


def assert_every_variant_changes_the_schedule(capture: Capture, candidate: Candidate, action: MacroAction) -> None:
    before = schedule_of(candidate)
    for params in action.params.get("variants", []):
        changed = MacroAction(action.kind, action.region, action.lines, params)
        assert BY_KIND[action.kind].apply(capture.graph, before, changed) != before


@pytest.mark.parametrize(("status", "count"), [(StepStatus.ACCEPTED, 2), (StepStatus.REJECTED, 1)])
def test_a_kernel_is_tuned_and_if_that_pays_fine_tuned_once(status: StepStatus, count: int, captured) -> None:
    capture = captured(NORM.replace("B=6 D=50", "B=4096 D=4096"), "f")
    candidate = fused(capture, NORM, {"rows": 1, "block": 4096, "loop": False, "warps": 8, "stages": 2})
    history: list[Step] = []
    rounds = []
    while tuning := proposed(capture, candidate, K.AUTOTUNE, has_gpu=True, history=tuple(history)):
        assert_every_variant_changes_the_schedule(capture, candidate, tuning[0])
        rounds.append({name for params in tuning[0].params["variants"] for name in params["config"]})
        history.append(Step(len(history) + 1, tuning[0], status, ""))
    assert len(rounds) == count
    assert {"rows", "block"} <= rounds[0]
    assert rounds[1:] == [{"warps", "persist"}][: count - 1]


def test_a_kernel_that_takes_a_small_part_of_the_call_is_not_tuned(captured) -> None:
    capture = captured(NORM.replace("B=6 D=50", "B=4096 D=4096"), "f")
    candidate = fused(capture, NORM, {"rows": 1, "block": 4096, "loop": False, "warps": 8, "stages": 2})
    (action,) = proposed(capture, candidate, K.AUTOTUNE, has_gpu=True)

    def tuned(call_us: float) -> list[MacroAction]:
        first = MacroAction(K.FUSE, action.region, (0, 0))
        step = Step(1, first, StepStatus.ACCEPTED, "", candidate=candidate, timing=timing(call_us, 2.0, None))
        return proposed(capture, candidate, K.AUTOTUNE, has_gpu=True, history=(step,))

    assert tuned(100 * action.expected.saved_us) == [action]
    assert tuned(300 * action.expected.saved_us) == []


FINE_TUNED = {
    "a loop": (NORM, LOOPED, {"warps", "stages", "persist"}),
    "a product": (LINEAR, PRODUCT, {"warps", "stages", "group_m", "persist", "flatten"}),
    "an elementwise kernel": (ROTARY, {**TILES, "block": 4}, {"warps", "order", "persist"}),
    "a scan": (SCAN, {"rows": 2, "block": 16}, {"warps", "stages", "persist"}),
    "attention": (ATTENTION, {"block_m": 16, "block_n": 16, "warps": 4, "stages": 2}, {"warps", "stages"}),
}


@pytest.mark.parametrize("name", FINE_TUNED)
def test_fine_tuning_measures_what_the_kernel_has(name: str, captured) -> None:
    text, config, choices = FINE_TUNED[name]
    capture = captured(text, "f")
    candidate = fused(capture, text, config)
    # Few multiprocessors have many programs each, so that persistence is worth trying.
    state = situation(capture, candidate, has_gpu=True, device=replace(H200, sm_count=1))
    [(plan, region)] = state.kernels()
    before = to_json(plan.config)
    changes = [
        {field for field, value in to_json(config).items() if value != before[field]}
        for config in refinements(state, plan, region)
    ]
    assert all(len(change) == 1 or change == {"persist", "flatten"} for change in changes)
    assert set.union(*changes) <= choices
    assert set.union(*changes) >= choices - {"persist", "flatten"}


def test_strict_runs_exclude_actions_that_change_rounding(captured) -> None:
    capture = captured(LINEAR, "f")
    capture = replace(capture, graph=replace(capture.graph, sizes={"B": 2, "S": 512, "K": 512, "N": 512}))
    root = start(capture, LINEAR)
    assert any(a.changes_rounding for a in proposals(situation(capture, root, strict=False)))
    assert not any(a.changes_rounding for a in proposals(situation(capture, root, strict=True)))


def test_actions_and_schedules_survive_the_store(captured) -> None:
    capture = captured(programs.LINEAR_SUM, "f")
    root = start(capture, programs.LINEAR_SUM)
    for action in proposals(situation(capture, root)):
        again = from_json(MacroAction, json.loads(json.dumps(to_json(action))))
        first, second = (BuiltinCoder().write(capture, root, item) for item in (action, again))
        assert first.source == second.source
        assert again.key == action.key
        schedule = schedule_of(first)
        assert from_json(Schedule, json.loads(json.dumps(to_json(schedule)))) == schedule


def test_every_kind_of_action_has_a_rule() -> None:
    assert set(BY_KIND) == set(GRAPH_KINDS)


def test_nothing_is_proposed_for_a_fully_fused_target(captured) -> None:
    capture = captured(NORM, "f")
    done = fully_fused(capture, start(capture, NORM))
    assert [action.text for action in proposals(situation(capture, done))] == []
