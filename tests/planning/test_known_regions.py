"""Regions that were analysed are not analysed again: not by another search, nor for another action."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from mtmc_lsp.core.graph import Graph
from mtmc_lsp.core.workload import Capture
from mtmc_lsp.fusion.search import FusionSearch
from mtmc_lsp.ir import known_regions
from mtmc_lsp.ir.known_regions import known_region
from mtmc_lsp.ir.lower import lower
from mtmc_lsp.ir.regions import CannotFuse, analyse
from mtmc_lsp.schedule.schedule import Schedule
from tests.planning.situations import H200

TEXT = """import torch
# mtmc: x=f32[B,64] w=f32[64,64] B=256
def f(x, w):
    h = torch.relu(x @ w) + 1.0
    return torch.softmax(h, -1) * x, h.sum(-1)
"""


@pytest.fixture
def graph(captured: Callable[[str, str], Capture]) -> Graph:
    return captured(TEXT, "f").graph


@pytest.fixture
def analysed(monkeypatch: pytest.MonkeyPatch) -> list[frozenset[str]]:
    """The sets of nodes that are analysed; none is known at first."""
    sets: list[frozenset[str]] = []
    monkeypatch.setattr(known_regions, "_known", {})
    monkeypatch.setattr(known_regions, "_kept_nodes", 0)

    def counted(ir, nodes, recomputed=()):
        sets.append(frozenset(nodes))
        return analyse(ir, nodes, recomputed)

    monkeypatch.setattr(known_regions, "analyse", counted)
    return sets


def test_a_second_search_finds_the_same_fusions_without_analysing_a_set_again(graph, analysed) -> None:
    ir = lower(graph)
    first = FusionSearch(ir, Schedule(), H200).best()
    assert len(analysed) == len(set(analysed)) > len(graph.nodes)
    count = len(analysed)
    second = FusionSearch(ir, Schedule(), H200).best()
    assert [fusion.nodes for fusion in second] == [fusion.nodes for fusion in first] != []
    assert len(analysed) == count


def test_a_set_that_cannot_be_one_kernel_is_refused_with_the_same_reason_again(graph, analysed) -> None:
    ir, everything = lower(graph), [node.name for node in graph.nodes]
    reasons = []
    for _ in range(2):
        with pytest.raises(CannotFuse) as refusal:
            known_region(ir, everything)
        reasons.append(str(refusal.value))
    assert reasons[0] == reasons[1] != ""
    assert len(analysed) == 1


def test_nodes_of_another_graph_with_the_same_names_are_analysed_for_it(captured, analysed) -> None:
    narrow, wide = (captured(TEXT.replace("64", size), "f").graph for size in ("64", "128"))
    names = [narrow.nodes[0].name]
    regions = [known_region(lower(graph), names) for graph in (narrow, wide)]
    assert regions[0].columns != regions[1].columns


def test_only_the_latest_regions_are_kept(graph, analysed, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(known_regions, "MAX_NODES", 3)
    ir = lower(graph)
    for node in graph.nodes[:4]:
        known_region(ir, [node.name])
    known_region(ir, [graph.nodes[3].name])
    assert len(analysed) == 4
    known_region(ir, [graph.nodes[0].name])
    assert len(analysed) == 5
    assert len(known_regions._known) == 3
