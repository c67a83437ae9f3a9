"""Convolutions with few channels: windows are split into float16 parts on load, with the accuracy of float32."""

from __future__ import annotations

from dataclasses import replace

import pytest

from mtmc_lsp.core.action import ActionKind, MacroAction
from mtmc_lsp.core.json_codec import to_json
from mtmc_lsp.core.protocols import State
from mtmc_lsp.core.run import Candidate, Step, StepStatus
from mtmc_lsp.core.workload import Capture
from mtmc_lsp.fusion.search import FusionSearch
from mtmc_lsp.ir.regions import analyse
from mtmc_lsp.planners.roofline import RooflinePlanner
from mtmc_lsp.rewrites import ir_of
from mtmc_lsp.schedule.configs import PrecisionMode, SplitOnLoad
from mtmc_lsp.schedule.matmul_configs import product_config
from mtmc_lsp.schedule.schedule import Schedule
from mtmc_lsp.schedule.tile_configs import variants
from tests.codegen.families import source
from tests.codegen.harness import compile_errors, verified
from tests.planning.situations import H200, SLOW, act, start

CASES = {
    "lines, strided": "x=F[B,7,19], w=F[5,7,3], b=F[5]: F.relu(F.conv1d(x, w, b, stride=2, padding=1))",
    "images, dilated": "x=F[B,3,7,6], w=F[6,3,2,3]: F.conv2d(x, w, padding=(1, 2), dilation=(2, 1)) * 2",
    "groups": "x=F[B,8,15,14], w=F[6,4,3,2]: F.conv2d(x, w, stride=2, groups=2) * 2",
    "volumes": "x=F[B,3,4,3,5], w=F[4,3,2,3,2], b=F[4]: F.relu(F.conv3d(x, w, b, padding=1))",
    "after a product": "x=F[B,3,7,6], s=F[B,3,1,1], w=F[6,3,3,3]: F.gelu(F.conv2d(x * s, w))",
    "transposed images": "x=F[B,4,3,5], w=F[4,6,3,3], b=F[6]: F.conv_transpose2d(x, w, b, stride=2, dilation=2) + 1",
}


def in_one_kernel(capture: Capture, text: str, **tile: int) -> Candidate:
    """The convolution with the operations around it in one kernel, with windows split on load."""
    base = Schedule()
    ir = ir_of(capture.graph, base)
    convolution = next(node.name for node in ir.graph.nodes if ".conv" in node.op)
    fusion = next(
        candidate
        for candidate in FusionSearch(ir, base, SLOW, precision=lambda node: PrecisionMode.FP16X3_PROMOTED).best()
        if convolution in candidate.nodes
    )
    assert fusion.config.split_on_load is SplitOnLoad.LEFT
    kind = ActionKind.TENSOR_CORE
    return act(capture, start(capture, text), kind, *fusion.region.nodes, config={**to_json(fusion.config), **tile})


@pytest.mark.parametrize("name", CASES)
def test_windows_split_on_load_are_as_accurate_as_float32(name: str, captured) -> None:
    text = source(CASES[name], "f32")
    capture = captured(text, "f")
    candidate = in_one_kernel(capture, text, block_m=32, block_n=16, block_k=16)
    assert candidate.source.count("tl.dot(") == 3
    verdict = verified(capture, candidate)
    assert verdict.is_correct, verdict.reason


def test_the_kernel_compiles_for_gpus(captured) -> None:
    text = source(CASES["images, dilated"], "f32")
    capture = captured(text, "f")
    assert not compile_errors(capture, in_one_kernel(capture, text), ("sm_80", "sm_90"))


def test_without_the_low_parts_it_is_not_accurate(captured) -> None:
    """The tests above can detect a missing product."""
    text = source(CASES["images, dilated"], "f32")
    capture = captured(text, "f")
    good = in_one_kernel(capture, text)
    lossy = good.source.replace("part = tl.dot(low, ", "part = 0 * tl.dot(low, ")
    assert lossy != good.source
    assert "relative L2 error" in verified(capture, replace(good, source=lossy)).reason


LARGE = "x=F[32,{channels},128,128], w=F[64,{channels},3,3], b=F[64]: F.relu(F.conv2d(x, w, b, padding=1))"


def exact(captured, channels: int) -> tuple[Capture, str]:
    """A large convolution that the library runs in float32."""
    text = source(LARGE.format(channels=channels), "f32")
    capture = captured(text, "f")
    return replace(capture, graph=replace(capture.graph, fp32_convolution="ieee")), text


def planned(capture: Capture, text: str, *history: Step) -> list[MacroAction]:
    """The planner's actions for the convolution on an H200, best first."""
    convolution = next(node.name for node in capture.graph.nodes if "conv" in node.op)
    actions = RooflinePlanner().ranked(State(capture, start(capture, text), history, H200, True))
    return [action for action in actions if convolution in action.region]


def rules(actions: list[MacroAction]) -> list[object]:
    """The rules of the rewrites among ``actions``."""
    return [action.params["rule"] for action in actions if "rule" in action.params]


@pytest.mark.parametrize("channels", [3, 8])
def test_few_channels_are_split_in_the_kernel_with_all_surrounding_operations(channels: int, captured) -> None:
    capture, text = exact(captured, channels)
    action = planned(capture, text)[0]
    assert action.kind is ActionKind.TENSOR_CORE
    assert action.params["config"]["split_on_load"] == "left"  # type: ignore[index,call-overload]
    assert len(action.region) == len(capture.graph.nodes)


def test_many_channels_are_split_in_advance(captured) -> None:
    capture, text = exact(captured, 32)
    assert rules(planned(capture, text)[:1]) == ["split-operands"]


def test_few_channels_are_split_in_advance_if_the_first_kernel_was_not_faster(captured) -> None:
    capture, text = exact(captured, 8)
    first = planned(capture, text)
    assert "split-operands" not in rules(first)
    slow = Step(1, first[0], StepStatus.REJECTED, "not faster")
    assert "split-operands" in rules(planned(capture, text, slow))


def test_few_windows_with_a_long_sum_are_not_stored(captured) -> None:
    """Program instances that share the sum load the windows directly."""
    text = source("x=F[1,15,9,9,9], w=F[32,15,5,5,5]: F.conv3d(x, w) + 1", "f32")
    capture = captured(text, "f")
    ir = ir_of(capture.graph, Schedule())
    region = analyse(ir, tuple(node.name for node in capture.graph.nodes))
    config = product_config(ir, region, H200, PrecisionMode.FP16X3_PROMOTED)
    assert (config.precision, config.split_k) == (PrecisionMode.IEEE, 4)


@pytest.mark.parametrize("n", [24, 64, 128])
def test_tiles_whose_accumulators_spill_are_not_tried(n: int, captured) -> None:
    """On sm_90 the compiler spills 248 to 320 bytes for 256 x 64 and 128 x 128 with four warps, and 256 x 128 with eight."""
    text = source(f"x=F[32,8,64,64], w=F[{n},8,3,3]: F.relu(F.conv2d(x, w, padding=1))", "f32")
    capture = captured(text, "f")
    ir = ir_of(capture.graph, Schedule())
    region = analyse(ir, tuple(node.name for node in capture.graph.nodes))
    first = product_config(ir, region, H200, PrecisionMode.FP16X3_PROMOTED)
    tried = [first, *variants(ir, region, first, H200)]
    assert len(tried) > 2
    tiles = {(c.block_m, c.block_n, c.warps) for c in tried}
    assert not tiles & {(256, 64, 4), (128, 128, 4), (256, 128, 8)}
