"""Which modes and arguments leave the graph as it is, and for which of them no second trace is needed."""

from __future__ import annotations

import pytest
import torch

from mtmc_lsp.capture.worker.calls import Call
from mtmc_lsp.capture.worker.side_effects import AttributeUses
from mtmc_lsp.capture.worker.tracing.free_flags import free_flags
from mtmc_lsp.capture.worker.tracing.random_draws import RandomDraws
from mtmc_lsp.core.graph import Graph

BLOCK = """\
import torch
from torch import nn


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.p = {p}
        self.eval()

    # mtmc: x=f32[6,5]
    def forward(self, x):
        return torch.dropout(torch.relu(x), self.p, self.training) + 1.0
"""


@pytest.mark.parametrize(("p", "is_free"), [(0.0, True), (0.5, False)])
def test_the_mode_is_free_unless_the_other_one_drops_elements(captured, p: float, is_free: bool) -> None:
    graph = captured(BLOCK.format(p=p), "Block").graph
    assert ("self.training" not in graph.constants) is is_free
    assert [node.word for node in graph.nodes] == ["relu", "add"]


@pytest.mark.parametrize(("p", "draws"), [(0.0, False), (0.5, True)])
def test_a_run_that_draws_is_noticed(p: float, draws: bool) -> None:
    with RandomDraws() as seen:
        torch.dropout(torch.ones(4), p, True)
    assert seen.any is draws


@pytest.mark.parametrize(("draws", "traces"), [(False, 1), (True, 0)])
def test_a_mode_that_draws_is_not_traced(draws: bool, traces: int) -> None:
    graph = Graph((), (), (), "", {})
    traced = []

    def trace(call: Call) -> Graph:
        traced.append(call)
        return graph

    call = Call(lambda flag: None, None, ("flag",), (True,), frozenset())
    flags = free_flags(call, AttributeUses(), lambda: graph, [], "model.py", trace, lambda of: ([], draws))
    assert len(traced) == traces
    assert flags.arguments == (() if draws else ("flag",))


def test_a_network_is_not_traced_again_for_its_mode(captured) -> None:
    """Each trace takes seconds; the guard then asks for the mode of the workload."""
    text = BLOCK.format(p=0.0).replace(" + 1.0", "".join(f" + {i}.5" for i in range(50)))
    graph = captured(text, "Block").graph
    assert graph.constants["self.training"] is False
