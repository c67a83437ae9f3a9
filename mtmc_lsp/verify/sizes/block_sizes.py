"""The largest sizes at which kernels of loops run: those that a program instance holds whole blocks of."""

from __future__ import annotations

from mtmc_lsp.core.graph import Graph
from mtmc_lsp.ir.loops.blocks import BlockForm
from mtmc_lsp.ir.loops.cells import CellForm
from mtmc_lsp.ir.loops.form import loop_form
from mtmc_lsp.ir.regions import CannotFuse

LEAST_COLUMNS = 16
"""Kernels of loops with products hold more columns than this in several blocks, each of a multiple of it."""


def largest_sizes(graph: Graph) -> dict[str, int]:
    """By name: the size up to which the kernels of all loops take it. Larger ones are left to the user's code by the guard.

    A block has a power of two elements of each axis, and the kernel is written for blocks that hold the workload's sizes.
    """
    largest: dict[str, int] = {}
    for node in graph.nodes:
        if node.loop is None:
            continue
        try:
            form = loop_form(node, graph, ())
        except CannotFuse:
            continue
        axes = form.inside if isinstance(form, BlockForm) else form.columns if isinstance(form, CellForm) else ()
        for name in (name for axis in axes for name in axis.size.symbols()):
            value = graph.sizes[name]
            limit = 1 << max(0, value - 1).bit_length()
            if isinstance(form, CellForm) and value > LEAST_COLUMNS:
                limit = -(-value // LEAST_COLUMNS) * LEAST_COLUMNS
            largest[name] = min(largest.get(name, limit), limit)
    return largest
