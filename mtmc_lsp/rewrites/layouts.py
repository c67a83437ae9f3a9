"""Memory layouts of intermediate values: the order of a value's dimensions in memory."""

from __future__ import annotations

from dataclasses import replace

from mtmc_lsp.core.graph import Graph
from mtmc_lsp.core.sizes import Size, product
from mtmc_lsp.rewrites.graph_editing import CannotRewrite, escapes
from mtmc_lsp.schedule.schedule import Rewrite

RULE = "layout"


def with_layout(graph: Graph, rewrite: Rewrite) -> Graph:
    """``graph`` with the node's value stored densely in the dimension order ``rewrite.detail``, outermost first.

    Raises:
        CannotRewrite: the node or its dimensions do not exist, or the caller can access the value.
    """
    node = next((node for node in graph.nodes if node.name == rewrite.node), None)
    if node is None or sorted(rewrite.detail) != list(range(len(node.type.shape))):
        raise CannotRewrite(f"{rewrite.node} has no such dimensions")
    if escapes(graph, node.name):
        raise CannotRewrite("the caller can observe the memory layout of the value")
    shape = node.type.shape
    stride = [Size.of(1)] * len(shape)
    for position, dim in enumerate(rewrite.detail):
        stride[dim] = product([shape[inner] for inner in rewrite.detail[position + 1 :]])
    kind = replace(node.type, stride=tuple(stride))
    changed = replace(node, outputs=(kind, *node.outputs[1:]))
    return replace(graph, nodes=tuple(changed if other is node else other for other in graph.nodes))
