"""Convolutions on packed operands: the same values with channels last, the accuracy of TF32 on scaled float16 operands, and
the accuracy of float32 on operands split into two float16 parts."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from mtmc_lsp.actions.catalogue import proposals
from mtmc_lsp.codegen.coder import BuiltinCoder
from mtmc_lsp.core.action import ActionKind, MacroAction
from mtmc_lsp.core.json_codec import to_json
from mtmc_lsp.core.protocols import CannotCode, State
from mtmc_lsp.core.results import Verdict, VerdictStatus
from mtmc_lsp.core.run import Candidate, Step, StepStatus
from mtmc_lsp.core.workload import Capture
from mtmc_lsp.fusion.search import FusionSearch
from mtmc_lsp.planners.roofline import RooflinePlanner
from mtmc_lsp.rewrites import ir_of
from mtmc_lsp.schedule.precision_modes import as_run
from mtmc_lsp.schedule.schedule import Rewrite, Schedule
from tests.codegen.families import source
from tests.codegen.harness import compile_errors, verified
from tests.planning.situations import H200, SLOW, act, schedule_of, situation, start

IMAGE = "x=F[B,19,6,5], w=F[17,19,3,3], b=F[17]: F.gelu(F.conv2d(x, w, b, padding=1))"
CASES = {
    "images": IMAGE,
    "groups": "x=F[B,8,5,4], w=F[6,4,3,2]: F.conv2d(x, w, stride=2, groups=2) * 2",
    "volumes": "x=F[B,3,4,3,5], w=F[4,3,2,3,2], b=F[4]: F.relu(F.conv3d(x, w, b))",
    "transposed": "x=F[B,4,3,5], w=F[4,6,3,3], b=F[6]: F.conv_transpose2d(x, w, b, stride=2) + 1",
    "lines": "x=F[B,18,9], w=F[4,18,3], b=F[4]: F.gelu(F.conv1d(x, w, b, stride=2, padding=1, dilation=2))",
    "lines of groups": "x=F[B,6,9], w=F[4,3,3]: F.conv1d(x, w, padding='same', groups=2) * 2",
    "transposed lines": "x=F[B,5,6], w=F[5,4,4], b=F[4]: F.conv_transpose1d(x, w, b, stride=2, padding=1) + 1",
}
NOT_PACKED = {
    "one channel per group": "x=F[B,6,5,4], w=F[6,1,3,3]: F.conv2d(x, w, groups=6) * 2",
    "one place": "x=F[B,3,1,1], w=F[4,3,1,1]: F.conv2d(x, w) * 2",
}


def packed(capture: Capture, candidate: Candidate, kind: ActionKind) -> Candidate:
    """The candidate with the operands of its convolution packed."""
    rule = {ActionKind.CHANNELS_LAST: "channels-last", ActionKind.FP16_OPERANDS: "fp16-operands"}[kind]
    name = next(node.name for node in capture.graph.nodes if "conv" in node.op)
    return act(capture, candidate, kind, name, rule=rule, node=name, kernels=[])


def with_kernels(capture: Capture, candidate: Candidate, *, library: bool) -> Candidate:
    """The candidate with all proposed fusions; the library runs the convolution if ``library``."""
    schedule = schedule_of(candidate)
    ir = ir_of(capture.graph, schedule)
    convolution = next(node.name for node in ir.graph.nodes if ".conv" in node.op)
    refused = [frozenset({convolution})] if library else []
    for fusion in FusionSearch(ir, schedule, SLOW, refused=refused).best():
        if not library or convolution not in fusion.nodes:
            config = {} if convolution in fusion.nodes else fusion.config
            candidate = act(capture, candidate, ActionKind.FUSE, *fusion.region.nodes, config=config)
    if not library and schedule_of(candidate).kernel_of(convolution) is None:
        candidate = act(capture, candidate, ActionKind.FUSE, convolution, config={})
    return candidate


@pytest.mark.parametrize("library", [True, False], ids=["library", "own"])
@pytest.mark.parametrize("name", CASES)
def test_with_channels_last_the_values_are_the_same(name: str, library: bool, captured) -> None:
    text = source(CASES[name], "f32")
    capture = captured(text, "f")
    candidate = packed(capture, start(capture, text), ActionKind.CHANNELS_LAST)
    assert "memory_format=torch.channels_last" in candidate.source
    candidate = with_kernels(capture, candidate, library=library)
    assert candidate.launches
    verdict = verified(capture, candidate)
    assert verdict.is_correct, verdict.reason


@pytest.mark.parametrize("library", [True, False], ids=["library", "own"])
@pytest.mark.parametrize("name", ["images", "transposed", "lines", "transposed lines"])
def test_scaled_fp16_operands_are_as_exact_as_tf32(name: str, library: bool, captured) -> None:
    """On a CPU the user's code is exact, so the verdict states the error; that of TF32 is about 3e-4."""
    text = source(CASES[name], "f32")
    capture = captured(text, "f")
    candidate = packed(capture, start(capture, text), ActionKind.FP16_OPERANDS)
    verdict = verified(capture, with_kernels(capture, candidate, library=library))
    found = re.search(r"relative L2 error (\S+); your code has", verdict.reason)
    assert found is not None, verdict.reason
    assert 1e-5 < float(found[1]) < 1e-3


@pytest.mark.parametrize("name", NOT_PACKED)
@pytest.mark.parametrize("kind", [ActionKind.CHANNELS_LAST, ActionKind.FP16_OPERANDS])
def test_convolutions_without_gain_are_not_packed(name: str, kind: ActionKind, captured) -> None:
    text = source(NOT_PACKED[name], "f32")
    capture = captured(text, "f")
    with pytest.raises(CannotCode):
        packed(capture, start(capture, text), kind)


def test_packed_operands_are_not_packed_again(captured) -> None:
    text = source(IMAGE, "f32")
    capture = captured(text, "f")
    candidate = packed(capture, start(capture, text), ActionKind.CHANNELS_LAST)
    graph = ir_of(capture.graph, schedule_of(candidate)).graph
    name = next(node.name for node in graph.nodes if ".conv" in node.op)
    with pytest.raises(CannotCode):
        act(capture, candidate, ActionKind.CHANNELS_LAST, name, rule="channels-last", node=name, kernels=[])
    narrow = act(capture, candidate, ActionKind.FP16_OPERANDS, name, rule="fp16-operands", node=name, kernels=[])
    assert "float16" in narrow.source


def test_fp16_operands_are_proposed_only_if_a_gpu_can_measure_them(captured) -> None:
    text = source("x=F[32,64,64,64], w=F[128,64,3,3]: F.relu(F.conv2d(x, w))", "f32")
    capture = captured(text, "f")

    def kinds(**state: bool) -> set[ActionKind]:
        found = proposals(situation(capture, start(capture, text), device=H200, **state))
        return {action.kind for action in found}

    assert ActionKind.FP16_OPERANDS in kinds(has_gpu=True, strict=False)
    assert ActionKind.FP16_OPERANDS not in kinds(has_gpu=True, strict=True)
    assert ActionKind.FP16_OPERANDS not in kinds(has_gpu=False, strict=False)


SPLIT_CASES = {
    "lines, strided": "x=F[B,7,19], w=F[5,7,3], b=F[5]: F.relu(F.conv1d(x, w, b, stride=2, padding=1))",
    "images, dilated": "x=F[B,18,7,6], w=F[6,18,2,3]: F.conv2d(x, w, padding=(1, 2), dilation=(2, 1)) * 2",
    "images, same": "x=F[B,18,5,6], w=F[6,18,3,3], b=F[6]: F.gelu(F.conv2d(x, w, b, padding='same'))",
    "groups": "x=F[B,8,5,4], w=F[6,4,3,2]: F.conv2d(x, w, stride=2, groups=2) * 2",
    "one place": "x=F[B,18,5,4], w=F[6,18,1,1], b=F[6]: F.relu(F.conv2d(x, w, b))",
    "volumes": "x=F[B,3,4,3,5], w=F[4,3,2,3,2], b=F[4]: F.relu(F.conv3d(x, w, b, padding=1))",
    "transposed lines": "x=F[B,5,6], w=F[5,4,4], b=F[4]: F.conv_transpose1d(x, w, b, stride=2, padding=1) + 1",
    "transposed images": "x=F[B,4,3,5], w=F[4,6,3,3], b=F[6]: F.conv_transpose2d(x, w, b, stride=2, dilation=2) + 1",
    "transposed volumes": "x=F[B,3,2,3,2], w=F[3,4,2,3,2]: F.conv_transpose3d(x, w, stride=(2, 1, 2), output_padding=(1, 0, 0)) * 2",
}


def split(capture: Capture, text: str, tile: int = 16) -> Candidate:
    """The convolution on split operands with a kernel for every new operation, in one step as planned."""
    name = next(node.name for node in capture.graph.nodes if "conv" in node.op)
    base = Schedule(rewrites=(Rewrite("split-operands", name),))
    ir = ir_of(capture.graph, base)
    kernels = []
    for fusion in FusionSearch(ir, base, SLOW).best():
        has_split = any("split_conv" in ir.graph.node(node).op for node in fusion.nodes)
        tile_changes = {"block_m": tile, "block_n": tile, "block_k": 16} if has_split else {}
        kernels.append({"nodes": list(fusion.region.nodes), "config": {**to_json(fusion.config), **tile_changes}})
    params = {"rule": "split-operands", "node": name, "kernels": kernels}
    return act(capture, start(capture, text), ActionKind.FP16_OPERANDS, name, **params)


@pytest.mark.parametrize("name", SPLIT_CASES)
def test_split_operands_are_as_exact_as_float32(name: str, captured) -> None:
    """On a CPU the user's code runs in float32, and eight times its error is allowed: the high parts alone exceed that."""
    text = source(SPLIT_CASES[name], "f32")
    capture = captured(text, "f")
    candidate = split(capture, text)
    assert candidate.source.count("tl.dot(") == 3
    verdict = verified(capture, candidate)
    assert verdict.is_correct, verdict.reason


def test_without_the_low_parts_it_is_not_accurate(captured) -> None:
    """The test above can detect a missing product."""
    text = source(IMAGE, "f32")
    capture = captured(text, "f")
    good = split(capture, text)
    lossy = good.source.replace(
        "part = tl.dot(input_low, weight_high)", "part = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)"
    )
    assert lossy != good.source
    assert "relative L2 error" in verified(capture, replace(good, source=lossy)).reason


def test_split_parts_take_as_much_memory_as_the_operand(captured) -> None:
    text = source(IMAGE, "f32")
    capture = captured(text, "f")
    buffers = re.findall(r"(\w+) = torch.empty_strided\(.*dtype=torch.float16", split(capture, text).source)
    assert sorted(buffers) == ["input_high", "input_low", "weight_high", "weight_low"]


def test_split_operands_must_be_multiplied_by_a_kernel(captured) -> None:
    """PyTorch has no convolution of float16 tensors with a float32 result."""
    text = source(IMAGE, "f32")
    capture = captured(text, "f")
    name = next(node.name for node in capture.graph.nodes if "conv" in node.op)
    with pytest.raises(CannotCode, match="must be part of a kernel"):
        act(capture, start(capture, text), ActionKind.FP16_OPERANDS, name, rule="split-operands", node=name, kernels=[])


LARGE = "x=F[32,64,64,64], w=F[128,64,3,3], b=F[128]: F.relu(F.conv2d(x, w, b, padding=1))"


def with_precision(capture: Capture, precision: str) -> Capture:
    """The capture with cuDNN's TF32 enabled or disabled."""
    return replace(capture, graph=replace(capture.graph, fp32_convolution=precision))


def planned(capture: Capture, text: str, history: tuple[Step, ...]) -> list[MacroAction]:
    """The planner's actions for the convolution on an H200: fuse it or pack its operands."""
    state = State(capture, start(capture, text), history, H200, True)
    kinds = (ActionKind.FUSE, ActionKind.TENSOR_CORE, ActionKind.FP16_OPERANDS)
    actions = [action for action in RooflinePlanner().ranked(state) if action.kind in kinds]
    convolutions = {node.name for node in capture.graph.nodes if "conv" in node.op}
    return [action for action in actions if convolutions & set(action.region)]


def modes(action: MacroAction) -> set[str]:
    """The rule of a rewrite, or the precision of a kernel, as a set."""
    config = action.params.get("config")
    return {str(action.params["rule"])} if "rule" in action.params else {str(dict(config or {}).get("precision"))}


def test_a_convolution_that_turns_out_to_be_exact_gets_split_operands(captured) -> None:
    """cuDNN may use TF32 but often does not: candidates rounded like TF32 then fail, and are not tried again."""
    text = source(LARGE, "f32")
    capture = with_precision(captured(text, "f"), "tf32")
    first = planned(capture, text, ())
    assert modes(first[0]) == {"fp16-operands"}
    assert {mode for action in first for mode in modes(action)} <= {"fp16-operands", "tf32"}
    verdict = Verdict(VerdictStatus.INCORRECT, (), "gpu", 2.8e-4, 2.6e-7, "too inexact")
    for failed in first:
        history = (Step(1, failed, StepStatus.FAILED, verdict.reason, verdict=verdict),)
        after = planned(capture, text, history)
        assert modes(after[0]) == {"split-operands"}
        assert {mode for action in after for mode in modes(action)} <= {"split-operands", "ieee"}
        history += (Step(2, after[0], StepStatus.FAILED, verdict.reason, verdict=verdict),)
        assert {mode for action in planned(capture, text, history) for mode in modes(action)} <= {"ieee"}


def test_without_tf32_operands_are_split_at_once(captured) -> None:
    text = source(LARGE, "f32")
    capture = with_precision(captured(text, "f"), "ieee")
    action = planned(capture, text, ())[0]
    assert modes(action) == {"split-operands"}
    products = [item["config"] for item in action.params["kernels"] if item["config"].get("precision")]  # type: ignore[union-attr,attr-defined]
    assert [config["precision"] for config in products] == ["fp16x3-promoted"]
    candidate = BuiltinCoder().write(capture, start(capture, text), action)
    assert not compile_errors(capture, candidate, ("sm_80", "sm_90"))


@pytest.mark.parametrize(
    "text", [LARGE, LARGE.replace("128,64,3,3", "64,128,3,3").replace("conv2d", "conv_transpose2d")]
)
def test_kernels_compute_the_scales_of_both_operands_in_the_first_step(text: str, captured) -> None:
    """The weights' scales are read by the packing kernel and by the convolution's kernel, which gains far more."""
    text = source(text, "f32")
    capture = with_precision(captured(text, "f"), "tf32")
    action = planned(capture, text, ())[0]
    assert modes(action) == {"fp16-operands"}
    candidate = BuiltinCoder().write(capture, start(capture, text), action)
    assert "torch.log2" not in candidate.source
    assert not compile_errors(capture, candidate, ("sm_90",))


def test_a_convolution_observed_to_be_exact_gets_split_operands_at_once(captured) -> None:
    """It does not run in another layout either, for which the library may choose TF32."""
    text = source(LARGE, "f32")
    capture = with_precision(captured(text, "f"), "tf32")
    name = next(node.name for node in capture.graph.nodes if "conv" in node.op)
    seen = {
        mode: replace(capture, graph=replace(capture.graph, observed_convolution_modes={name: mode}))
        for mode in ("ieee", "tf32")
    }
    assert modes(planned(seen["tf32"], text, ())[0]) == {"fp16-operands"}
    found = planned(seen["ieee"], text, ())
    assert modes(found[0]) == {"split-operands"}
    assert {mode for action in found for mode in modes(action)} <= {"split-operands", "ieee"}
    for mode, offered in (("tf32", True), ("ieee", False)):
        state = State(seen[mode], start(seen[mode], text), (), H200, True)
        assert any(a.kind is ActionKind.CHANNELS_LAST for a in RooflinePlanner().ranked(state)) is offered


def test_the_observed_mode_outweighs_the_errors_of_results(captured) -> None:
    """A sum of activations may hide the rounding of the products before it."""
    text = source(LARGE, "f32")
    capture = with_precision(captured(text, "f"), "tf32")
    name = next(node.name for node in capture.graph.nodes if "conv" in node.op)
    failed = planned(capture, text, ())[0]
    verdict = Verdict(VerdictStatus.INCORRECT, (), "gpu", 2.8e-4, 2.6e-7, "too inexact")
    history = (Step(1, failed, StepStatus.FAILED, verdict.reason, verdict=verdict),)
    assert as_run(capture.graph, Schedule(), history).convolution_mode(name) == "ieee"
    seen = replace(capture.graph, observed_convolution_modes={name: "tf32"})
    assert as_run(seen, Schedule(), history).convolution_mode(name) == "tf32"


@pytest.mark.parametrize("precision", ["tf32", "ieee"])
@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_a_patch_embedding_of_any_image_size_gets_a_faster_convolution(captured, dtype: str, precision: str) -> None:
    text = source("x=F[16,3,H,W], w=F[768,3,16,16], b=F[768]: F.conv2d(x, w, b, stride=16).flatten(2).mT", dtype)
    text = text.replace("# mtmc:", "# mtmc: H=224 W=224")
    capture = with_precision(captured(text, "f"), precision)
    assert [str(size) for size in capture.graph.inputs[0].type.shape[2:]] == ["16 * H_div_16", "16 * W_div_16"]
    state = State(capture, start(capture, text), (), H200, True)
    action = RooflinePlanner().ranked(state)[0]
    assert "conv2d" in "".join(action.region)
    assert action.expected.saved_us > 20
