"""Loops in forms that people write less often: inherited ``forward``, prefilled lists, states as objects."""

from __future__ import annotations

import pytest

from mtmc_lsp.core.loop import Loop
from mtmc_lsp.core.workload import Capture
from tests.codegen.harness import verified
from tests.loops.wild_examples import NAMES, WILD
from tests.planning.situations import fully_fused, start


def loops_of(capture: Capture) -> list[Loop]:
    return [node.loop for node in capture.graph.nodes if node.loop is not None]


INHERITED = """
import torch
import torch.nn as nn


class Cells(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.inputs = nn.Linear(width, width)
        self.states = nn.Linear(width, width)

    def step(self, x, h):
        raise NotImplementedError

    def forward(self, x, h=None, *, scale=1.0):
        if h is None:
            h = x.new_zeros(x.shape[1], x.shape[2])
        outs = []
        for t in range(x.shape[0]):
            h = self.step(x[t], h)
            outs.append(h * scale)
        return torch.stack(outs), h


# mtmc: x=f32[T,B,D] T=18 B=2 D=8 init: width=D
class Rectified(Cells):
    \"\"\"An Elman network with another activation.\"\"\"

    def step(self, x, h):
        return torch.relu(self.inputs(x) + self.states(h))
"""


def test_a_class_that_inherits_forward_is_optimised(captured) -> None:
    capture = captured(INHERITED, "Rectified")
    assert len(loops_of(capture)) == 1
    candidate = fully_fused(capture, start(capture, INHERITED))
    assert "    def forward(self, x, h=None, *, scale=1.0):  # mtmc: dispatch" in candidate.source
    assert "        return super().forward(x, h, scale=scale)" in candidate.source
    assert verified(capture, candidate).reason == ""


@pytest.mark.parametrize("name", NAMES)
def test_a_loop_in_a_rarer_form_is_one_node_with_the_results_of_the_users_code(name: str, captured) -> None:
    capture = captured(WILD, name)
    assert len(loops_of(capture)) == 1
    assert "unrolled" not in " ".join(capture.workload.assumed)
    candidate = fully_fused(capture, start(capture, WILD))
    assert "for step in range(" not in candidate.code.block
    assert verified(capture, candidate).reason == ""


UNROLLED = """
import torch


# mtmc: x=f32[B,T] B=2 T=17
def returned_list(x):
    h, outs = torch.zeros_like(x[:, 0]), [None] * x.shape[1]
    for t in range(x.shape[1]):
        h = 0.5 * h + x[:, t]
        outs[t] = h
    return outs


# mtmc: x=f32[B,T] B=2 T=17
def several_items(x):
    h, outs = torch.zeros_like(x[:, 0]), []
    for t in range(x.shape[1]):
        h = 0.5 * h + x[:, t]
        outs.extend([h, -h])
    return torch.stack(outs, 1)


# mtmc: x=f32[B,T] B=2 T=17
def number_after_the_loop(x):
    h, scale = torch.zeros_like(x[:, 0]), 1.0
    for t in range(x.shape[1]):
        scale = scale * 0.9
        h = h + scale * x[:, t]
    return h * scale
"""


@pytest.mark.parametrize("name", ["returned_list", "several_items", "number_after_the_loop"])
def test_other_uses_of_lists_and_numbers_are_unrolled_with_a_note(name: str, captured) -> None:
    capture = captured(UNROLLED, name)
    assert not loops_of(capture)
    assert "is unrolled, because" in " ".join(capture.workload.assumed)
    assert verified(capture, fully_fused(capture, start(capture, UNROLLED))).reason == ""
