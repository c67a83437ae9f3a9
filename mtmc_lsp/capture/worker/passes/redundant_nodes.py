"""Removes nodes that return their argument, and nodes that compute the same as an earlier one. Both are exact."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import replace

import torch

from mtmc_lsp.capture.neutral_operations import is_neutral
from mtmc_lsp.capture.worker.side_effects import is_random
from mtmc_lsp.core.graph import Graph, Node, Ref


def remove_redundant_nodes(graph: Graph) -> Graph:
    """Remove redundant nodes; their readers read the equal value.

    A returned tensor stays a tensor of its own: neither an input, nor another result, nor a view of these.
    """
    replacements: dict[Ref, Ref] = {}
    first_with: dict[Hashable, str] = {}
    escaping = set(graph.escaping)
    nodes: dict[str, Node] = {}

    def removes(node: Node, equal: Mapping[Ref, Ref]) -> bool:
        """Let all read the equal values instead of the node's; false if the caller could observe that."""
        returned = {ref: other for ref, other in equal.items() if ref in escaping}
        if any(
            other in escaping or other.name not in nodes or _may_share(nodes[other.name]) for other in returned.values()
        ):
            return False
        replacements.update(equal)
        escaping.difference_update(returned)
        escaping.update(returned.values())
        name = next(iter(equal.values())).name
        if name in nodes and node.variable and not nodes[name].variable:
            nodes[name] = replace(nodes[name], variable=node.variable)
        return True

    for original in graph.nodes:
        node = original.reading(replacements)
        if is_neutral(graph, node) and len(node.outputs) == 1:
            source = node.args[0]
            assert isinstance(source, Ref)
            if removes(node, {Ref(node.name): source}):
                continue
        key = (node.op, repr(node.args), repr(sorted(node.kwargs.items())), node.outputs)
        known = None if is_random(node.op) or "empty" in node.op else first_with.setdefault(key, node.name)
        if known not in (None, node.name):
            same = {Ref(node.name, i): Ref(str(known), i) for i in range(len(node.outputs))}
            if removes(node, same):
                continue
        nodes[node.name] = node
    return graph.of_nodes(nodes.values(), replacements)


def _may_share(node: Node) -> bool:
    """Whether the node's result may share memory with its argument."""
    namespace, name, overload = node.op.split(".")
    if namespace != "aten" or name == "_unsafe_view":
        return True
    return bool(getattr(getattr(torch.ops.aten, name), overload).is_view)
