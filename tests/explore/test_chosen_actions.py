"""The actions of a real graph: those of the roofline planner, and legal ones beside them."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from mtmc_lsp.codegen.coder import BuiltinCoder
from mtmc_lsp.core.action import ActionKind
from mtmc_lsp.core.protocols import State
from mtmc_lsp.core.run import Candidate
from mtmc_lsp.core.workload import Capture
from mtmc_lsp.device.choice import model_of_arch
from mtmc_lsp.explore.choices import RooflineActions, variants_of
from mtmc_lsp.explore.identity import version_id
from mtmc_lsp.planners.roofline import RooflinePlanner

TEXT = """
import torch


# mtmc: x=f32[N,4096] w=f32[4096] N=4096
def norm(x, w):
    y = torch.relu(x) * w
    return y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-6)
"""
CODER = BuiltinCoder(model_of_arch("sm_90"))


@pytest.fixture
def capture(captured: Callable[[str, str], Capture]) -> Capture:
    return captured(TEXT, "norm")


def state_of(capture: Capture, candidate: Candidate) -> State:
    return State(capture, candidate, (), model_of_arch("sm_90"), True)


def test_random_actions_can_be_written_are_new_and_have_a_predicted_saving(capture: Capture) -> None:
    actions = RooflineActions(RooflinePlanner(), has_gpu=False)
    root = CODER.start(capture, TEXT)
    listed, unlisted = actions.legal(state_of(capture, root), (), 6, random.Random(1))
    assert [rank for rank, _ in listed] == list(range(len(listed)))
    assert len(unlisted) == 6
    keys = {action.key for action in unlisted}
    assert len(keys | {action.key for _, action in listed}) == len(listed) + 6
    for action in unlisted:
        assert action.kind is ActionKind.FUSE
        assert CODER.write(capture, root, action).launches
    assert all(action.expected.bytes_before > 0 for action in unlisted)
    again = actions.legal(state_of(capture, root), keys, 6, random.Random(1))[1]
    assert not keys & {action.key for action in again}, "what was tried is not drawn again"


def test_single_configurations_stand_in_for_tuning_where_nothing_is_timed(capture: Capture) -> None:
    root = CODER.start(capture, TEXT)
    planner = RooflinePlanner()
    first = RooflineActions(planner, has_gpu=True).legal(state_of(capture, root), (), 0, random.Random(0))[0][0][1]
    version = CODER.write(capture, root, first)
    state = state_of(capture, version)
    with_gpu, _ = RooflineActions(planner, has_gpu=True).legal(state, (), 4, random.Random(0))
    tuning = [action for _, action in with_gpu if variants_of(action)]
    assert tuning
    without, unlisted = RooflineActions(planner, has_gpu=False).legal(state, (), 4, random.Random(0))
    assert not any(variants_of(action) for _, action in without)
    single = [action for action in unlisted if action.kind is ActionKind.AUTOTUNE]
    assert {action.key for action in single} <= {item.key for item in variants_of(tuning[0])}
    assert single
    assert all(CODER.write(capture, version, action).schedule != version.schedule for action in single)


def test_rewrites_that_round_as_a_gpu_does_are_not_tried_without_one(captured: Callable[[str, str], Capture]) -> None:
    """On the CPU the reference of a convolution is exact, so a version on float16 operands would be called wrong."""
    text = (
        "import torch\n\n\n# mtmc: x=f32[16,64,56,56] w=f32[64,64,3,3]\n"
        "def f(x, w):\n    return torch.relu(torch.nn.functional.conv2d(x, w, padding=1))\n"
    )
    capture = captured(text, "f")
    state, planner = state_of(capture, CODER.start(capture, text)), RooflinePlanner()

    def kinds(has_gpu: bool) -> set[ActionKind]:
        listed, _ = RooflineActions(planner, has_gpu=has_gpu).legal(state, (), 0, random.Random(0))
        return {action.kind for _, action in listed}

    assert ActionKind.FP16_OPERANDS in kinds(True)
    assert ActionKind.FP16_OPERANDS not in kinds(False)


def test_a_version_is_written_again_from_its_schedule_alone(capture: Capture) -> None:
    """As a resumed process does; the names of kernels stay."""
    root = CODER.start(capture, TEXT)
    action = RooflinePlanner().ranked(state_of(capture, root))[0]
    version = CODER.write(capture, root, action)
    again = CODER.rewrite(capture, TEXT, version.schedule)
    assert again.source == version.source
    assert again.launches == version.launches
    assert version_id("p", again.schedule) == version_id("p", version.schedule)
    assert CODER.rewrite(capture, TEXT, root.schedule).source == root.source
