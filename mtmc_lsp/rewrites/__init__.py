"""Graph rewrites that preserve the result: exact algebra, and memory layouts of images.

A rewrite is data (:class:`~mtmc_lsp.schedule.schedule.Rewrite`) in the schedule, so the captured graph never changes and a run
is reproducible. The kernels of a schedule refer to nodes of the rewritten graph.
"""

from __future__ import annotations

from functools import lru_cache

from mtmc_lsp.core.graph import Graph
from mtmc_lsp.ir.lower import GraphBox, lower
from mtmc_lsp.ir.primitives import KernelIR
from mtmc_lsp.rewrites import (
    affine,
    attention,
    attention_gradients,
    constants,
    convolution_layout,
    early_gradients,
    identities,
    im2win,
    layout_propagation,
    pooling,
    reduction_hoisting,
    row_loops,
    spatial_reductions,
    split_full_reduction,
)
from mtmc_lsp.rewrites.chunked_rows import early_slices, row_forms
from mtmc_lsp.rewrites.graph_editing import CannotRewrite, Edit, apply_edit
from mtmc_lsp.rewrites.saved_values import computing_again
from mtmc_lsp.rewrites.whole_graph import convolution_biases, one_position
from mtmc_lsp.schedule.schedule import Rewrite, Schedule

ALGEBRA = (
    *identities.REWRITES,
    *constants.REWRITES,
    *reduction_hoisting.REWRITES,
    *spatial_reductions.REWRITES,
    *affine.REWRITES,
    *split_full_reduction.REWRITES,
    *attention.REWRITES,
    *pooling.REWRITES,
)
"""The exact rewrites, in the order in which they are tried."""
_BY_NAME = {
    rule.name: rule
    for rule in (*ALGEBRA, *convolution_layout.LAYOUTS, *convolution_layout.REDUCED_PRECISION, *im2win.REWRITES)
}


def algebra_edit(graph: Graph, rewrite: Rewrite) -> Edit:
    """The edit of an algebraic rewrite.

    Raises:
        CannotRewrite: the rule does not match the node.
    """
    if rewrite.rule not in _BY_NAME:
        raise CannotRewrite(f"there is no rule {rewrite.rule}")
    node = next((node for node in graph.nodes if node.name == rewrite.node), None)
    edit = _BY_NAME[rewrite.rule].match(graph, node) if node is not None else None
    if edit is None:
        raise CannotRewrite(f"{rewrite.rule} does not apply to {rewrite.node}")
    return edit


def apply_rewrite(graph: Graph, rewrite: Rewrite) -> Graph:
    """``graph`` after one rewrite.

    Raises:
        CannotRewrite: the rewrite does not apply.
    """
    if rewrite.rule == layout_propagation.RULE:
        return layout_propagation.in_channels_last(graph)
    if rewrite.rule == convolution_biases.RULE:
        return convolution_biases.without_biases(graph)
    if rewrite.rule == one_position.RULE:
        return one_position.with_linear_layers(graph)
    if rewrite.rule == row_loops.RULE:
        rows, *early = rewrite.detail
        graph = row_forms.with_gathers(early_slices.with_early_slices(graph, rewrite.node))
        graph = early_gradients.with_early_gradients(graph) if any(early) else graph
        return row_loops.in_chunks(graph, rewrite.node, rows)
    if rewrite.rule == attention_gradients.RULE:
        return attention_gradients.recomputing(graph, rewrite.node)
    return apply_edit(graph, algebra_edit(graph, rewrite))


@lru_cache(maxsize=64)
def _apply_rewrites(box: GraphBox, rewrites: tuple[Rewrite, ...]) -> Graph:
    if not rewrites:
        return computing_again(box.graph)
    return apply_rewrite(_apply_rewrites(box, rewrites[:-1]), rewrites[-1])


def ir_of(graph: Graph, schedule: Schedule) -> KernelIR:
    """The kernel IR of the captured graph after the schedule's rewrites.

    Raises:
        CannotRewrite: a rewrite does not apply.
    """
    return lower(_apply_rewrites(GraphBox(graph), schedule.rewrites))
