"""Convolutions in im2win layout: the same values for all arguments, and the accuracy of TF32 on float16 operands."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mtmc_lsp.actions.catalogue import proposals
from mtmc_lsp.codegen.coder import BuiltinCoder
from mtmc_lsp.core.action import ActionKind, MacroAction
from mtmc_lsp.core.graph import Argument, Graph, GraphInput, InputKind, Node, Ref
from mtmc_lsp.core.json_codec import from_json, to_json
from mtmc_lsp.core.protocols import CannotCode, State
from mtmc_lsp.core.results import Verdict, VerdictStatus
from mtmc_lsp.core.run import Candidate, Step, StepStatus
from mtmc_lsp.core.sizes import Size
from mtmc_lsp.core.workload import Capture
from mtmc_lsp.fusion.search import FusionSearch
from mtmc_lsp.planners.roofline import RooflinePlanner
from mtmc_lsp.rewrites import apply_rewrite, ir_of
from mtmc_lsp.rewrites.convolution_layout import channels_last
from mtmc_lsp.rewrites.graph_editing import CannotRewrite, contiguous_type
from mtmc_lsp.schedule.schedule import Rewrite, Schedule
from tests.codegen.families import source
from tests.codegen.harness import compile_errors, verified
from tests.planning.situations import H200, SLOW, act, situation, start

CASES = {
    "images": "x=F[B,3,13,15], w=F[6,3,5,3], b=F[6]: F.relu(F.conv2d(x, w, b, stride=(3, 2), padding=(2, 1)))",
    "one channel, rows dilated": "x=F[B,1,11,9], w=F[5,1,3,4]: F.conv2d(x, w, dilation=(3, 1)) * 2",
    "same": "x=F[B,2,6,7], w=F[4,2,4,3], b=F[4]: F.gelu(F.conv2d(x, w, b, padding='same'))",
    "patches": "x=F[B,3,8,12], w=F[7,3,4,4], b=F[7]: F.conv2d(x, w, b, stride=4) + 1",
    "lines": "x=F[B,3,23], w=F[5,3,7], b=F[5]: F.relu(F.conv1d(x, w, b, stride=2, padding=3))",
    "volumes": "x=F[B,2,5,6,7], w=F[4,2,3,2,3], b=F[4]: F.relu(F.conv3d(x, w, b, stride=(2, 1, 2), padding=1))",
}
REFUSED = {
    "groups": "x=F[B,8,5,4], w=F[6,4,3,2]: F.conv2d(x, w, groups=2) * 2",
    "columns dilated": "x=F[B,3,9,9], w=F[6,3,3,3]: F.conv2d(x, w, dilation=(1, 2)) * 2",
    "single places": "x=F[B,3,5,4], w=F[6,3,1,1]: F.conv2d(x, w) * 2",
    "transposed": "x=F[B,3,5,4], w=F[3,4,3,3]: F.conv_transpose2d(x, w) * 2",
    "no batch": "x=F[3,9,9], w=F[6,3,3,3]: F.conv2d(x, w) * 2",
}
RULES = {"f16": "im2win", "f32": "im2win-fp16"}


def with_im2win(
    capture: Capture, text: str, rule: str, *, library: bool = False, **tile: int
) -> tuple[Candidate, MacroAction]:
    """The convolution in im2win layout with a kernel for every new operation; the library runs the convolution if ``library``."""
    name = next(node.name for node in capture.graph.nodes if "conv" in node.op)
    base = Schedule(rewrites=(Rewrite(rule, name),))
    ir = ir_of(capture.graph, base)
    convolution = next(node.name for node in ir.graph.nodes if ".conv" in node.op)
    kernels: list[dict[str, object]] = []
    refused = [frozenset({convolution})] if library else []
    for fusion in FusionSearch(ir, base, SLOW, refused=refused).best():
        if library and convolution in fusion.nodes:
            continue
        changes = tile if convolution in fusion.nodes else {}
        kernels.append({"nodes": list(fusion.region.nodes), "config": {**to_json(fusion.config), **changes}})
    if not library and not any(convolution in kernel["nodes"] for kernel in kernels):  # type: ignore[operator]
        kernels.append({"nodes": [convolution], "config": {}})
    params = {"rule": rule, "node": name, "kernels": kernels}
    action = MacroAction(ActionKind.IM2WIN, (name,), (0, 0), params)
    return BuiltinCoder().write(capture, start(capture, text), action), action


TILE = {"block_m": 16, "block_n": 16, "block_k": 16}


@pytest.mark.parametrize("name", CASES)
def test_in_half_precision_the_values_are_the_same(name: str, captured) -> None:
    text = source(CASES[name], "f16")
    capture = captured(text, "f")
    candidate, _ = with_im2win(capture, text, "im2win", **TILE)
    assert candidate.source.count("tl.dot(") == 1
    verdict = verified(capture, candidate)
    assert verdict.is_correct, verdict.reason


@pytest.mark.parametrize("name", CASES)
def test_on_scaled_fp16_operands_it_is_as_exact_as_tf32(name: str, captured) -> None:
    """On a CPU the user's code is exact, so the verdict states the error; that of TF32 is about 3e-4."""
    text = source(CASES[name], "f32")
    capture = captured(text, "f")
    candidate, _ = with_im2win(capture, text, "im2win-fp16", **TILE)
    found = re.search(r"relative L2 error (\S+); your code has", verified(capture, candidate).reason)
    assert found is not None
    assert 1e-5 < float(found[1]) < 1e-3


def test_the_library_can_run_it_too(captured) -> None:
    text = source(CASES["images"], "f16")
    capture = captured(text, "f")
    candidate, _ = with_im2win(capture, text, "im2win", library=True)
    assert "tl.dot(" not in candidate.source
    assert "torch.conv2d(" in candidate.source.partition("f_launch")[2]
    verdict = verified(capture, candidate)
    assert verdict.is_correct, verdict.reason


def test_the_im2win_copy_must_be_part_of_a_kernel(captured) -> None:
    text = source(CASES["images"], "f16")
    capture = captured(text, "f")
    node = next(node.name for node in capture.graph.nodes if "conv" in node.op)
    with pytest.raises(CannotCode, match="must be part of a kernel"):
        act(capture, start(capture, text), ActionKind.IM2WIN, node, rule="im2win", node=node, kernels=[])


@pytest.mark.parametrize("dtype", RULES)
def test_the_same_action_gives_the_same_bytes(dtype: str, captured) -> None:
    text = source(CASES["images"], dtype)
    capture = captured(text, "f")
    candidate, action = with_im2win(capture, text, RULES[dtype])
    stored = from_json(MacroAction, json.loads(json.dumps(to_json(action))))
    assert BuiltinCoder().write(capture, start(capture, text), stored) == candidate
    assert not compile_errors(capture, candidate, ("sm_80", "sm_90"))


@pytest.mark.parametrize("dtype", RULES)
def test_each_window_is_loaded_as_one_contiguous_run(dtype: str, captured) -> None:
    """The address of an element of the left operand is that of its row plus its index; the buffer is stored before."""
    text = source(CASES["images"], dtype)
    candidate, _ = with_im2win(captured(text, "f"), text, RULES[dtype])
    loop = re.sub(r"\s+", " ", candidate.source.partition("for start in")[2].partition("tl.dot(")[0])
    addresses = [load.partition(", mask")[0] for load in loop.split(" = tl.load(")[1:]]
    of_windows = next(address for address in addresses if "k[None, :]" in address)
    assert "+ k[None, :] +" in of_windows
    assert "//" not in of_windows and "%" not in of_windows


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.parametrize("dtype", RULES)
def test_convolutions_without_contiguous_windows_are_rejected(name: str, dtype: str, captured) -> None:
    text = source(REFUSED[name], dtype)
    capture = captured(text, "f")
    node = next(node.name for node in capture.graph.nodes if "conv" in node.op)
    with pytest.raises(CannotCode, match="does not apply"):
        act(capture, start(capture, text), ActionKind.IM2WIN, node, rule=RULES[dtype], node=node, kernels=[])


def test_im2win_does_not_apply_twice(captured) -> None:
    text = source(CASES["images"], "f16")
    capture = captured(text, "f")
    name = next(node.name for node in capture.graph.nodes if "conv" in node.op)
    graph = apply_rewrite(capture.graph, Rewrite("im2win", name))
    again = next(node.name for node in graph.nodes if ".conv" in node.op)
    with pytest.raises(CannotRewrite):
        apply_rewrite(graph, Rewrite("im2win", again))


# Random arguments ---------------------------------------------------------------------------------------------------------


@st.composite
def convolutions(draw: st.DrawFn) -> Graph:
    """A 1D, 2D or 3D convolution in float16, with or without channels last."""
    spatial = draw(st.integers(1, 3))

    def each(low: int, high: int) -> tuple[int, ...]:
        return tuple(draw(st.lists(st.integers(low, high), min_size=spatial, max_size=spatial)))

    kernel_sizes, steps, paddings = each(1, 5), each(1, 4), each(0, 2)
    dilations = (*each(1, 3)[:-1], 1)
    kernel_sizes = (*kernel_sizes[:-1], max(kernel_sizes[-1], 2))
    batch, channels, out_channels = draw(st.integers(1, 2)), draw(st.integers(1, 5)), draw(st.integers(2, 4))
    # With a single output position, both layouts have the same strides.
    outputs = (*each(1, 3)[:-1], 2)
    dimensions = zip(outputs, steps, dilations, kernel_sizes, paddings, each(0, 3), strict=True)
    lengths = tuple(
        max(2, (p - 1) * s + d * (t - 1) + 1 - 2 * m + min(extra, s - 1)) for p, s, d, t, m, extra in dimensions
    )
    output_sizes = tuple(
        (n + 2 * m - d * (t - 1) - 1) // s + 1
        for n, m, d, t, s in zip(lengths, paddings, dilations, kernel_sizes, steps, strict=True)
    )
    shapes = [
        (batch, channels, *lengths),
        (out_channels, channels, *kernel_sizes),
        (batch, out_channels, *output_sizes),
    ]
    symbolic_shapes = [tuple(Size.of(size) for size in shape) for shape in shapes]
    # With channels last, windows of a single row are contiguous already.
    packed = channels > 1 and any(kernel_size > 1 for kernel_size in kernel_sizes[:-1]) and draw(st.booleans())
    x, w, y = (
        channels_last(shape, "float16") if packed and i != 1 else contiguous_type(shape, "float16")
        for i, shape in enumerate(symbolic_shapes)
    )
    args = (Ref("x"), Ref("w"), None, steps, paddings, dilations, 1)
    node = Node("y", f"aten.conv{spatial}d.default", args, {}, (y,), 1, "y")
    inputs = tuple(GraphInput(name, name, InputKind.ARGUMENT, kind) for name, kind in (("x", x), ("w", w)))
    return Graph(inputs, (node,), (Ref("y"),), "tuple", {})


def run(graph: Graph, inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Run the graph's operations in PyTorch and check the strides of each tensor."""
    values = dict(inputs)

    def argument(value: Argument) -> object:
        if isinstance(value, Ref):
            return values[value.name]
        if isinstance(value, tuple):
            return [argument(item) for item in value]
        if isinstance(value, str) and value.startswith("torch."):
            return getattr(torch, value.removeprefix("torch."))
        return value.constant if isinstance(value, Size) else value

    for node in graph.nodes:
        namespace, name, overload = node.op.split(".")
        if namespace == "mtmc":
            # A copy that only kernels implement.
            values[node.name] = values[next(iter(node.inputs())).name]
            continue
        kwargs = {key: getattr(torch, str(v)) if key == "dtype" else argument(v) for key, v in node.kwargs.items()}
        result = getattr(getattr(torch.ops.aten, name), overload)(*(argument(item) for item in node.args), **kwargs)
        assert tuple(result.shape) == tuple(size.constant for size in node.type.shape), node.op
        if "conv" not in name:
            steps = [
                (actual, size, step.constant)
                for actual, size, step in zip(result.stride(), result.shape, node.type.stride, strict=True)
            ]
            assert all(actual == step for actual, size, step in steps if size != 1), node.op
        values[node.name] = result
    assert graph.outputs[0] is not None
    return values[graph.outputs[0].name]


def tensors(graph: Graph, seed: int) -> dict[str, torch.Tensor]:
    """Small integers, so that float16 represents every sum of products exactly."""
    generator = torch.Generator().manual_seed(seed)
    tensors_by_name = {}
    for item in graph.inputs:
        shape, stride = ([size.constant for size in sizes] for sizes in (item.type.shape, item.type.stride))
        values = torch.randint(-3, 4, shape, generator=generator).to(getattr(torch, item.type.dtype))
        tensors_by_name[item.name] = torch.empty_strided(shape, stride, dtype=values.dtype).copy_(values)
    return tensors_by_name


def eager(graph: Graph, inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """The user's convolution in float64, which does not multiply with padding."""
    return run(graph, {name: value.double() for name, value in inputs.items()}).to(inputs["x"].dtype)


@settings(max_examples=100, deadline=None)
@given(convolutions(), st.integers(0, 99))
def test_the_values_are_the_same_for_all_arguments(graph: Graph, seed: int) -> None:
    inputs = tensors(graph, seed)
    assert torch.equal(run(apply_rewrite(graph, Rewrite("im2win", "y")), inputs), eager(graph, inputs))


def as_float32(graph: Graph) -> Graph:
    """The same convolution in float32, with TF32 enabled."""
    inputs = tuple(replace(item, type=replace(item.type, dtype="float32")) for item in graph.inputs)
    node = graph.nodes[0]
    return replace(
        graph,
        inputs=inputs,
        nodes=(replace(node, outputs=(replace(node.type, dtype="float32"),)),),
        fp32_convolution="tf32",
    )


@settings(max_examples=40, deadline=None)
@given(convolutions(), st.integers(0, 99), st.sampled_from([float("nan"), float("inf"), -float("inf")]))
def test_infinities_and_nan_reach_no_other_results(graph: Graph, seed: int, special: float) -> None:
    for convolution, rule in ((graph, "im2win"), (as_float32(graph), "im2win-fp16")):
        inputs = tensors(convolution, seed)
        inputs["w"] = inputs["w"].abs() + 1
        position = tuple(seed % size for size in inputs["x"].shape)
        inputs["x"][position] = special
        result, expected = run(apply_rewrite(convolution, Rewrite(rule, "y")), inputs), eager(convolution, inputs)
        assert torch.allclose(result, expected, rtol=1e-3, atol=1e-3, equal_nan=True)


def test_kernels_keep_infinities_and_nan_where_they_are(captured) -> None:
    """A run may end inside a block of K: the memory behind it is masked, not multiplied by 0."""
    text = """import torch
import torch.nn.functional as F

# mtmc: a=f16[B,3,9,11] i=i64[B,3,9,11]@0..150 w=f16[4,3,3,3] B=5
def f(a, i, w):
    x = a.masked_fill(i == 0, float("nan")).masked_fill(i == 1, float("inf")).masked_fill(i == 2, -float("inf"))
    return F.conv2d(x, w, padding=1)
"""
    capture = captured(text, "f")
    candidate, _ = with_im2win(capture, text, "im2win", **TILE)
    verdict = verified(capture, candidate)
    assert verdict.is_correct, verdict.reason


# Proposals ----------------------------------------------------------------------------------------------------

LARGE = "x=F[64,{channels},112,112], w=F[64,{channels},7,7], b=F[64]: F.relu(F.conv2d(x, w, b, stride=2, padding=1))"


def large(captured, channels: int, dtype: str) -> tuple[Capture, str]:
    """A large convolution with TF32 enabled."""
    text = source(LARGE.format(channels=channels), dtype)
    capture = captured(text, "f")
    return replace(capture, graph=replace(capture.graph, fp32_convolution="tf32")), text


def planned(capture: Capture, text: str, *history: Step) -> list[MacroAction]:
    """The planner's actions on an H200, best first."""
    return RooflinePlanner().ranked(State(capture, start(capture, text), history, H200, True))


@pytest.mark.parametrize("dtype", RULES)
def test_it_is_proposed_for_three_channels(dtype: str, captured) -> None:
    capture, text = large(captured, 3, dtype)
    action = planned(capture, text)[0]
    assert (action.kind, action.params["rule"]) == (ActionKind.IM2WIN, RULES[dtype])
    assert action.changes_rounding is (dtype == "f32")
    candidate = BuiltinCoder().write(capture, start(capture, text), action)
    assert candidate.source.count("tl.dot(") == 1
    assert not compile_errors(capture, candidate, ("sm_90",))


@pytest.mark.parametrize("dtype", RULES)
def test_it_is_not_proposed_for_64_channels(dtype: str, captured) -> None:
    actions = planned(*large(captured, 64, dtype))
    assert actions
    assert all(action.kind is not ActionKind.IM2WIN for action in actions)


def test_the_outcome_decides_which_actions_follow(captured) -> None:
    """After an accuracy failure nothing is rounded like TF32; after a slow result other rewrites are tried."""
    capture, text = large(captured, 3, "f32")
    first = planned(capture, text)[0]
    verdict = Verdict(VerdictStatus.INCORRECT, (), "gpu", 2.8e-4, 2.6e-7, "too inexact")
    for step, excluded in (
        (Step(1, first, StepStatus.FAILED, verdict.reason, verdict=verdict), {"im2win-fp16", "fp16-operands"}),
        (Step(1, first, StepStatus.REJECTED, "not faster"), {"im2win-fp16"}),
    ):
        after = planned(capture, text, step)
        assert after
        assert not excluded & {str(action.params.get("rule")) for action in after}


def test_operands_are_rounded_only_if_a_gpu_can_measure_them(captured) -> None:
    capture, text = large(captured, 3, "f32")

    def kinds(**state: bool) -> set[ActionKind]:
        found = proposals(situation(capture, start(capture, text), device=H200, **state))
        return {action.kind for action in found}

    assert ActionKind.IM2WIN in kinds(has_gpu=True, strict=False)
    assert ActionKind.IM2WIN not in kinds(has_gpu=True, strict=True)
    assert ActionKind.IM2WIN not in kinds(has_gpu=False, strict=False)
