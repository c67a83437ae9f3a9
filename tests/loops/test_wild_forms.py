"""Loops in forms that people write less often: inherited ``forward``, prefilled lists, states as objects."""

from __future__ import annotations

from mtmc_lsp.core.loop import Loop
from mtmc_lsp.core.workload import Capture
from tests.codegen.harness import verified
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
