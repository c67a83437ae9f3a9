"""Rewrites of a graph that keep what it computes: exact algebra, layouts of intermediate values, sizes as constants.

A rewrite is data (:class:`~mtmc_lsp.schedule.schedule.Rewrite`) in the schedule, so the captured graph never changes and a run
replays. Kernels of the schedule speak of the nodes of the rewritten graph.
"""

from __future__ import annotations

from functools import lru_cache

from mtmc_lsp.core.graph import Graph
from mtmc_lsp.ir.lower import GraphBox, lower
from mtmc_lsp.ir.primitives import KernelIR
from mtmc_lsp.rewrites import affine, attention, constants, identities, im2win, layouts, pooling
from mtmc_lsp.rewrites import convolution_layout as convolutions
from mtmc_lsp.rewrites import layout_propagation as propagation
from mtmc_lsp.rewrites import reduction_hoisting as hoisting
from mtmc_lsp.rewrites import spatial_reductions as places
from mtmc_lsp.rewrites import specialised_sizes as sizes
from mtmc_lsp.rewrites import split_full_reduction as totals
from mtmc_lsp.rewrites.graph_editing import CannotRewrite, Edit, edited
from mtmc_lsp.schedule.schedule import Rewrite, Schedule

ALGEBRA = (
    *identities.RULES,
    *constants.RULES,
    *hoisting.RULES,
    *places.RULES,
    *affine.RULES,
    *totals.RULES,
    *attention.RULES,
    *pooling.RULES,
)
"""The exact rewrites, in the order in which they are looked for."""
_BY_NAME = {rule.name: rule for rule in (*ALGEBRA, *convolutions.LAYOUTS, *convolutions.NARROW, *im2win.RULES)}


def algebra_edit(graph: Graph, rewrite: Rewrite) -> Edit:
    """What an algebraic rewrite changes.

    Raises:
        CannotRewrite: its rule does not match there.
    """
    if rewrite.rule not in _BY_NAME:
        raise CannotRewrite(f"there is no rule {rewrite.rule}")
    node = next((node for node in graph.nodes if node.name == rewrite.node), None)
    edit = _BY_NAME[rewrite.rule].match(graph, node) if node is not None else None
    if edit is None:
        raise CannotRewrite(f"{rewrite.rule} does not apply to {rewrite.node}")
    return edit


def rewritten(graph: Graph, rewrite: Rewrite) -> Graph:
    """``graph`` after one rewrite.

    Raises:
        CannotRewrite: it does not apply.
    """
    if rewrite.rule == propagation.RULE:
        return propagation.in_channels_last(graph)
    if rewrite.rule == layouts.RULE:
        return layouts.with_layout(graph, rewrite)
    if rewrite.rule in sizes.RULES:
        return sizes.with_size(graph, rewrite)
    return edited(graph, algebra_edit(graph, rewrite))


@lru_cache(maxsize=64)
def _rewritten_by(box: GraphBox, rewrites: tuple[Rewrite, ...]) -> Graph:
    if not rewrites:
        return box.graph
    return rewritten(_rewritten_by(box, rewrites[:-1]), rewrites[-1])


def ir_of(graph: Graph, schedule: Schedule) -> KernelIR:
    """The primitive form of the captured graph after the schedule's rewrites.

    Raises:
        CannotRewrite: one of them does not apply.
    """
    return lower(_rewritten_by(GraphBox(graph), schedule.rewrites))
