"""A loop over experts is refused with the line of the expert, which is a target."""

import pytest

from mtmc_lsp.core.errors import TargetUnsupported

TEXT = """\
import torch
from torch import nn


class Expert(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 16, bias=False), nn.Linear(16, 8, bias=False)

    # mtmc: x=f32[N,8] N=6
    def forward(self, x):
        return self.down(torch.relu(self.up(x)))


class Mixture(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(8, 3, bias=False)
        self.experts = nn.ModuleList([Expert() for _ in range(3)])

    # mtmc: x=f32[10,8]
    def forward(self, x):
        weight, chosen = torch.topk(self.gate(x).softmax(-1), 2, dim=-1)
        out = torch.zeros_like(x)
        for e in range(3):
            token, slot = torch.where(chosen == e)
            out.index_add_(0, token, self.experts[e](x[token]) * weight[token, slot, None])
        return out
"""


def test_the_refusal_names_the_line_of_the_expert(captured) -> None:
    with pytest.raises(TargetUnsupported) as refusal:
        captured(TEXT, "Mixture.forward")
    assert "Line 12 of model.py multiplies the selected rows by a matrix" in refusal.value.remedy


def test_the_number_of_rows_of_an_expert_varies(captured) -> None:
    graph = captured(TEXT, "Expert.forward").graph
    assert str(next(item for item in graph.inputs if item.name == "x").type.shape[0]) == "N"
