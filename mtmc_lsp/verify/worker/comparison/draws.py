"""With how many draws of rounding the expected results of a case begin. Runs in workers."""

from __future__ import annotations

from collections.abc import Mapping

from mtmc_lsp.core.graph import Graph
from mtmc_lsp.verify.error_limits import Draws
from mtmc_lsp.verify.sizes.case_sizes import has_long_loop, has_slow_loop, is_larger, is_network


def least_draws(graph: Graph, sizes: Mapping[str, int], *, finds_trivial: bool) -> Draws:
    """The draws with which to begin. Each runs the user's code, which may be a loop of launches or need much memory.

    Args:
        sizes: those of the case.
        finds_trivial: whether the limits must refuse answers without any computation. Draws that round each operation take 10
            times as long as the loop, and change nothing about such answers unless a few draws already show noise. A slow loop
            begins without any draw: the limits are lower then. If these refuse a candidate, draws raise them, and such answers
            are compared with the higher limits again.
    """
    if finds_trivial and is_larger(graph, {**graph.sizes, **sizes}):
        return Draws.FEW
    if finds_trivial and has_slow_loop(graph) and loops_without_indices(graph):
        return Draws.NONE
    if finds_trivial:
        is_slow = has_long_loop(graph) or is_network(graph) or (has_loops(graph) and not loops_without_indices(graph))
        return Draws.FEW if is_slow and graph.backward is None else Draws.ALL
    return Draws.NONE if keeps_runs(graph) else Draws.FEW


def keeps_runs(graph: Graph) -> bool:
    """Whether runs are kept for another attempt with more draws: each takes long, because the host launches many operations."""
    return has_loops(graph) or is_network(graph)


def has_loops(graph: Graph) -> bool:
    """Whether the user's code has loops over time that the graph keeps."""
    return any(node.loop is not None for node in graph.nodes)


def loops_without_indices(graph: Graph) -> bool:
    """Whether the graph has loops over time, and no operation computes 64-bit integers, as those do that choose elements.

    Recording choices doubles the time of a loop of small operations.
    """
    has_indices = any(kind.dtype == "int64" for node in graph.nodes_and_bodies() for kind in node.outputs)
    return has_loops(graph) and graph.backward is None and not has_indices
