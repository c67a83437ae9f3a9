"""If torch.compile is faster than our kernel for a product, the library runs the product and the rest stays fused."""

from __future__ import annotations

import pytest

from mtmc_lsp.codegen.coder import BuiltinCoder
from mtmc_lsp.core.action import ActionKind, MacroAction
from mtmc_lsp.core.protocols import CannotCode, State
from mtmc_lsp.core.results import BaselineTime, Ratio, Speed, Timing
from mtmc_lsp.core.run import Candidate, Step, StepStatus
from mtmc_lsp.core.workload import Capture
from mtmc_lsp.planners.roofline import RooflinePlanner
from tests.codegen.harness import verified
from tests.planning.situations import SLOW, act, schedule_of, start

TEXT = """import torch
import torch.nn.functional as F
# mtmc: x=f32[B,18,6,5] w=f32[17,18,3,3] b=f32[17] B=2
def f(x, w, b):
    return F.hardswish(F.relu(F.conv2d(x, w, b))) * 2.0
"""
ALONE = """import torch
import torch.nn.functional as F
# mtmc: x=f32[B,18,6,5] w=f32[17,18,3,3] B=2
def f(x, w):
    return F.conv2d(x, w)
"""


def accepted(action: MacroAction, candidate: Candidate, ratio: float) -> Step:
    """An accepted step; ``torch.compile`` takes ``ratio`` times as long."""
    compile_ratio = Ratio(ratio, ratio, ratio)
    baselines = (
        BaselineTime("eager", 200.0, Ratio(2.0, 2.0, 2.0)),
        BaselineTime("compile", 100.0 * ratio, compile_ratio, Speed.SLOWER),
    )
    timing = Timing(100.0, baselines, "compile", Ratio(1.0, 1.0, 1.0), 100, "", 0.2)
    return Step(1, action, StepStatus.ACCEPTED, "", candidate=candidate, timing=timing)


def first_step(capture: Capture, text: str, kind: ActionKind) -> tuple[MacroAction, Candidate]:
    """The convolution fused with the operations around it, or with channels last."""
    begin = start(capture, text)
    names = tuple(node.name for node in capture.graph.nodes)
    convolution = next(name for name in names if "conv" in name)
    if kind is ActionKind.FUSE:
        action = MacroAction(kind, names, (0, 0), {"config": {}})
    else:
        params = {"rule": "channels-last", "node": convolution, "kernels": []}
        action = MacroAction(kind, (convolution,), (0, 0), params)
    return action, BuiltinCoder().write(capture, begin, action)


def planned(capture: Capture, candidate: Candidate, history: tuple[Step, ...]) -> list[MacroAction]:
    ranked = RooflinePlanner().ranked(State(capture, candidate, history, SLOW, True))
    return [action for action in ranked if action.kind is ActionKind.LIBRARY]


@pytest.mark.parametrize("kind", [ActionKind.FUSE, ActionKind.CHANNELS_LAST])
def test_the_library_runs_the_convolution_and_the_rest_stays_fused(kind: ActionKind, captured) -> None:
    capture = captured(TEXT, "f")
    action, candidate = first_step(capture, TEXT, kind)
    (back,) = planned(capture, candidate, (accepted(action, candidate, 0.6),))
    assert back.expected.saved_us == pytest.approx(40.0), "what torch.compile is ahead by"
    written = BuiltinCoder().write(capture, candidate, back)
    schedule = schedule_of(written)
    assert not schedule.rewrites
    assert [len(kernel.nodes) for kernel in schedule.kernels] == [3], "relu, hardswish and the product are one kernel"
    assert "torch.conv2d(x, w, b)" in written.source or "F.conv2d(x, w, b" in written.source.split("def f_launch")[1]
    verdict = verified(capture, written)
    assert verdict.is_correct, verdict.reason


def test_it_is_proposed_once_and_only_if_the_compiler_is_faster(captured) -> None:
    capture = captured(TEXT, "f")
    action, candidate = first_step(capture, TEXT, ActionKind.FUSE)
    assert not planned(capture, candidate, ())
    assert not planned(capture, candidate, (accepted(action, candidate, 1.2),))
    step = accepted(action, candidate, 0.6)
    (back,) = planned(capture, candidate, (step,))
    refused = Step(2, back, StepStatus.REJECTED, "not faster")
    assert not planned(capture, candidate, (step, refused))


def test_a_single_product_does_not_change(captured) -> None:
    capture = captured(ALONE, "f")
    action, candidate = first_step(capture, ALONE, ActionKind.FUSE)
    assert not planned(capture, candidate, (accepted(action, candidate, 0.6),)), "nothing of ours would be left"


def test_only_products_can_move_to_the_library(captured) -> None:
    capture = captured(TEXT, "f")
    with pytest.raises(CannotCode, match="no product is called relu"):
        act(capture, start(capture, TEXT), ActionKind.LIBRARY, "relu", nodes=["relu"], kernels=[])
