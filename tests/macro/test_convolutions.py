"""Convolutions on packed operands: the same values with channels last, as exact as TF32 on scaled float16 operands."""

from __future__ import annotations

import re

import pytest

from mtmc_lsp.core.action import ActionKind
from mtmc_lsp.core.protocols import CannotCode
from mtmc_lsp.core.run import Candidate
from mtmc_lsp.core.workload import Capture
from mtmc_lsp.macro.catalogue import proposals
from mtmc_lsp.macro.fusion import FusionSearch
from mtmc_lsp.macro.rewrites import program_of
from tests.macro.situations import SHEET, SLOW, act, schedule_of, situation, start
from tests.micro.families import source
from tests.micro.harness import verified

IMAGE = "x=F[B,19,6,5], w=F[17,19,3,3], b=F[17]: F.gelu(F.conv2d(x, w, b, padding=1))"
CASES = {
    "images": IMAGE,
    "groups": "x=F[B,8,5,4], w=F[6,4,3,2]: F.conv2d(x, w, stride=2, groups=2) * 2",
    "volumes": "x=F[B,3,4,3,5], w=F[4,3,2,3,2], b=F[4]: F.relu(F.conv3d(x, w, b))",
    "transposed": "x=F[B,4,3,5], w=F[4,6,3,3], b=F[6]: F.conv_transpose2d(x, w, b, stride=2) + 1",
}
NOT_PACKED = {
    "one channel per group": "x=F[B,6,5,4], w=F[6,1,3,3]: F.conv2d(x, w, groups=6) * 2",
    "lines": "x=F[B,3,9], w=F[4,3,3]: F.conv1d(x, w) * 2",
    "one place": "x=F[B,3,1,1], w=F[4,3,1,1]: F.conv2d(x, w) * 2",
}


def packed(capture: Capture, candidate: Candidate, kind: ActionKind) -> Candidate:
    """The target's convolution with its operands packed."""
    rule = {ActionKind.CHANNELS_LAST: "channels-last", ActionKind.HALF_OPERANDS: "half-operands"}[kind]
    name = next(node.name for node in capture.graph.nodes if "conv" in node.op)
    return act(capture, candidate, kind, name, rule=rule, node=name, kernels=[])


def with_kernels(capture: Capture, candidate: Candidate, *, library: bool) -> Candidate:
    """Everything that can be fused, but for the convolution where it is left to the library."""
    schedule = schedule_of(candidate)
    program = program_of(capture.graph, schedule)
    convolution = next(node.name for node in program.graph.nodes if ".conv" in node.op)
    refused = [frozenset({convolution})] if library else []
    for fusion in FusionSearch(program, schedule, SLOW, refused=refused).best():
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
@pytest.mark.parametrize("name", ["images", "transposed"])
def test_scaled_half_operands_are_as_exact_as_tf32(name: str, library: bool, captured) -> None:
    """On a CPU the user's own code is exact, so the verdict names the error; TF32's is about 3e-4."""
    text = source(CASES[name], "f32")
    capture = captured(text, "f")
    candidate = packed(capture, start(capture, text), ActionKind.HALF_OPERANDS)
    verdict = verified(capture, with_kernels(capture, candidate, library=library))
    found = re.search(r"relative L2 error (\S+), the user's own", verdict.reason)
    assert found is not None, verdict.reason
    assert 1e-5 < float(found[1]) < 1e-3


@pytest.mark.parametrize("name", NOT_PACKED)
@pytest.mark.parametrize("kind", [ActionKind.CHANNELS_LAST, ActionKind.HALF_OPERANDS])
def test_what_gains_nothing_is_not_packed(name: str, kind: ActionKind, captured) -> None:
    text = source(NOT_PACKED[name], "f32")
    capture = captured(text, "f")
    with pytest.raises(CannotCode):
        packed(capture, start(capture, text), kind)


def test_what_is_packed_is_not_packed_again(captured) -> None:
    text = source(IMAGE, "f32")
    capture = captured(text, "f")
    candidate = packed(capture, start(capture, text), ActionKind.CHANNELS_LAST)
    graph = program_of(capture.graph, schedule_of(candidate)).graph
    name = next(node.name for node in graph.nodes if ".conv" in node.op)
    with pytest.raises(CannotCode):
        act(capture, candidate, ActionKind.CHANNELS_LAST, name, rule="channels-last", node=name, kernels=[])
    narrow = act(capture, candidate, ActionKind.HALF_OPERANDS, name, rule="half-operands", node=name, kernels=[])
    assert "float16" in narrow.source


def test_half_operands_are_proposed_only_where_they_can_be_judged(captured) -> None:
    text = source("x=F[32,64,64,64], w=F[128,64,3,3]: F.relu(F.conv2d(x, w))", "f32")
    capture = captured(text, "f")

    def kinds(**state: bool) -> set[ActionKind]:
        found = proposals(situation(capture, start(capture, text), device=SHEET, **state))
        return {action.kind for action in found}

    assert ActionKind.HALF_OPERANDS in kinds(measured=True, strict=False)
    assert ActionKind.HALF_OPERANDS not in kinds(measured=True, strict=True)
    assert ActionKind.HALF_OPERANDS not in kinds(measured=False, strict=False)
