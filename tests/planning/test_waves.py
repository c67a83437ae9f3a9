"""Stream-K as an action: where it is legal, and that it is proposed if the last wave of tiles is badly filled."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mtmc_lsp.actions.catalogue import proposals
from mtmc_lsp.actions.split import Split
from mtmc_lsp.codegen.coder import BuiltinCoder
from mtmc_lsp.core.action import ActionKind, MacroAction
from mtmc_lsp.core.json_codec import from_json
from mtmc_lsp.core.protocols import CannotCode
from mtmc_lsp.schedule.configs import MatmulConfig
from mtmc_lsp.tuning.kernel_cost import kernel_cost
from mtmc_lsp.tuning.waves import Waves
from tests.codegen.harness import fused, verified
from tests.codegen.test_kernels import LINEAR
from tests.planning.situations import H200, act, region_and_program, schedule_of, situation

SPLIT = ActionKind.SPLIT
PLAIN = {
    "block_m": 16, "block_n": 16, "block_k": 16, "group_m": 4, "warps": 4, "stages": 2, "precision": "ieee",
}  # fmt: skip


@settings(deadline=None, derandomize=True, max_examples=300)
@given(tiles=st.integers(1, 40), steps=st.integers(1, 20), programs=st.integers(1, 30))
def test_every_block_is_computed_once_and_every_part_has_a_separate_buffer(
    tiles: int, steps: int, programs: int
) -> None:
    """As in the docstring of the code generator: runs of equal length over the blocks of all shared tiles."""
    waves = Waves(tiles, steps, 1)
    shared, run = waves.shared(programs), waves.run(programs)
    assert 1 <= shared <= programs
    assert (tiles - shared) % programs == 0
    assert run <= steps
    places = {}
    for block in range(shared * steps):
        ir, tile = block // run, block // steps
        assert ir < programs
        assert places.setdefault(ir + tile, (ir, tile)) == (ir, tile)
    assert max(places) < 2 * programs
    assert len(places) <= waves.parts(programs)


def test_the_action_renders_verifies_and_replays(captured) -> None:
    capture = captured(LINEAR, "f")
    before = fused(capture, LINEAR, {**PLAIN, "persist": 3})
    region = schedule_of(before).kernels[0].nodes
    after = act(capture, before, SPLIT, *region, config={"stream_k": 4})
    assert schedule_of(after).kernels[0].config == from_json(MatmulConfig, {**PLAIN, "stream_k": 4})
    assert act(capture, before, SPLIT, *region, config={"stream_k": 4}).source == after.source
    verdict = verified(capture, after)
    assert verdict.is_correct, verdict.reason
    retiled = act(capture, after, ActionKind.AUTOTUNE, *region, config={"block_n": 32})
    assert "PROGRAMS=4" in retiled.source
    assert verified(capture, retiled).is_correct


ILLEGAL: dict[str, tuple[dict[str, int | str | bool], ActionKind, dict[str, object], str]] = {
    "no number": (PLAIN, SPLIT, {"stream_k": "4"}, "stream_k: expected <class 'int'>, got '4'"),
    "with other changes": (PLAIN, SPLIT, {"stream_k": 4, "split_k": 2}, "has no split_k to choose"),
    "in parts already": ({**PLAIN, "split_k": 2}, SPLIT, {"stream_k": 4}, "stream_k cannot be 4: the product is split into 2 parts of K"),
    "in parts after it": ({**PLAIN, "stream_k": 4}, SPLIT, {"split_k": 2}, "stream_k cannot be 4: the product is split into 2 parts of K"),
    "persistent after it": ({**PLAIN, "stream_k": 4}, ActionKind.AUTOTUNE, {"persist": 4}, "the programs of stream-K are persistent already"),
    "far too many": (PLAIN, SPLIT, {"stream_k": 8193}, "stream_k cannot be 8193; it must be a whole number from 0 to 8192"),
    "few rows": ({**PLAIN, "precision": "fp16x3-promoted", "split_on_load": "right"}, SPLIT, {"stream_k": 4}, "sums all of K itself"),
}  # fmt: skip


@pytest.mark.parametrize("name", ILLEGAL)
def test_an_illegal_stream_k_is_rejected_with_its_reason(name: str, captured) -> None:
    config, kind, changes, reason = ILLEGAL[name]
    capture = captured(LINEAR, "f")
    before = fused(capture, LINEAR, config)
    with pytest.raises(CannotCode, match=reason):
        act(capture, before, kind, *schedule_of(before).kernels[0].nodes, config=changes)


def test_only_products_have_tiles_to_share(captured) -> None:
    text = "import torch\n# mtmc: x=f32[N,M] N=6 M=70\ndef f(x):\n    return x.sum(-1)\n"
    capture = captured(text, "f")
    before = fused(capture, text, {"rows": 1, "block": 16, "loop": True, "warps": 4, "stages": 2})
    with pytest.raises(CannotCode, match="a reduction kernel has no stream_k to choose"):
        act(capture, before, SPLIT, *schedule_of(before).kernels[0].nodes, config={"stream_k": 4})


# When it is proposed --------------------------------------------------------------------------------------------------

PRODUCT = """import torch
# mtmc: a=bf16[M,K] b=bf16[N,K] M=64 N=64 K=64
def f(a, b):
    return torch.relu(a @ b.t())
"""
LARGE: dict[str, int | str | bool] = {
    "block_m": 128, "block_n": 256, "block_k": 64, "group_m": 8, "warps": 8, "stages": 3, "precision": "native", "tma": True,
}  # fmt: skip


def shares(
    captured, m: int, n: int, k: int, *, has_gpu: bool = True, more: Mapping[str, int | str | bool] | None = None
) -> list[MacroAction]:
    """The stream-K actions that are proposed for a product of these sizes on an H200."""
    capture = captured(PRODUCT, "f")
    capture = replace(capture, graph=replace(capture.graph, sizes={"M": m, "N": n, "K": k}))
    candidate = fused(capture, PRODUCT, {**LARGE, **(more or {})})
    actions = proposals(situation(capture, candidate, has_gpu=has_gpu, device=H200))
    shared = [action for action in actions if action.kind is SPLIT and "variants" in action.params]
    for action in shared:
        for choice in action.params["variants"]:
            BuiltinCoder().write(capture, candidate, MacroAction(SPLIT, action.region, action.lines, choice))
    return shared


def test_stream_k_is_proposed_for_a_badly_filled_last_wave_if_steps_are_timed(captured) -> None:
    (action,) = shares(captured, 3072, 3072, 3072)
    assert action.params["variants"][0] == {"config": {"stream_k": H200.sm_count}}
    assert action.expected.saved_us > 0
    assert action.rationale.startswith(f"288 tiles on {H200.sm_count} multiprocessors")
    assert not shares(captured, 3072, 3072, 3072, has_gpu=False)


@pytest.mark.parametrize(
    ("m", "n", "k", "more"),
    [
        (4096, 4096, 4096, {}),
        (3072, 3072, 192, {}),
        (128 * 12, 256 * 11, 3072, {}),
        (8192 + 128, 8192, 4096, {}),
        (3072, 3072, 3072, {"stream_k": 132}),
        (3072, 3072, 3072, {"split_k": 2}),
    ],
    ids=["a full last wave", "a short K", "whole waves", "many waves", "done already", "in parts of K"],
)
def test_stream_k_is_not_proposed_without_a_gain(
    captured, m: int, n: int, k: int, more: dict[str, int | str | bool]
) -> None:
    assert not shares(captured, m, n, k, more=more)


def test_stream_k_is_not_proposed_in_a_launch_that_runs_other_kernels(captured) -> None:
    """Stream-K is proposed for the product alone, but not if it shares its launch with another kernel."""
    text = PRODUCT.replace("N=64", "N=64 c=f32[M]").replace("f(a, b)", "f(a, b, c)").replace("())", "()), c * 2.0")
    capture = captured(text, "f")
    capture = replace(capture, graph=replace(capture.graph, sizes={"M": 3072, "N": 3072, "K": 3072}))
    last = next(node.name for node in capture.graph.nodes if node.word == "mul")
    others = [node.name for node in capture.graph.nodes if node.name != last]
    alone = act(capture, fused(capture, text, LARGE, others), ActionKind.FUSE, last)
    keys = [plan.key for plan in schedule_of(alone).kernels]
    together = replace(schedule_of(alone), side_by_side=(tuple(keys),))
    for schedule, count in ((schedule_of(alone), 1), (together, 0)):
        state = replace(situation(capture, alone, has_gpu=True, device=H200), schedule=schedule)
        assert len([action for action in Split().propose(state) if "variants" in action.params]) == count


def test_the_model_knows_waves(captured) -> None:
    """With 288 tiles on 132 multiprocessors some compute three; with stream-K each computes about 288 / 132."""
    capture = captured(PRODUCT, "f")
    capture = replace(capture, graph=replace(capture.graph, sizes={"M": 3072, "N": 3072, "K": 16384}))
    ir, region = region_and_program(capture)
    plain, waves, shared = (
        kernel_cost(ir, region, from_json(MatmulConfig, {**LARGE, **more}), H200, waves=counted).us
        for more, counted in (({}, False), ({}, True), ({"stream_k": H200.sm_count}, True))
    )
    ideal = 288 / H200.sm_count
    assert waves / plain == pytest.approx(3 / ideal, rel=0.02)
    assert 1.0 < shared / plain < 1.1
