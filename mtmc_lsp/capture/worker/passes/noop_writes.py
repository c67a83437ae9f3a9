"""Removes writes that change nothing: ``x[1:-1] += y`` reads a slice, adds to it in place, and writes the slice back.

In a functional trace, the addition already returns a new full tensor. Python's ``x[1:-1] = x[1:-1]`` then writes a slice of it
into itself.
"""

from __future__ import annotations

from collections.abc import Hashable

from mtmc_lsp.core.graph import Argument, Graph, Node, Ref
from mtmc_lsp.core.sizes import Size

PARTS = {"slice_scatter": "slice", "select_scatter": "select"}
"""Operations that write a part of a tensor, and the operations that read the same part with the same further arguments."""
DEFAULTS: dict[str, tuple[Argument, ...]] = {"slice": (0, 0, None, 1), "select": ()}


def remove_noop_writes(graph: Graph) -> Graph:
    """Remove writes of a tensor's part into the same part."""
    replacements: dict[Ref, Ref] = {}
    """Tensor to an earlier tensor with equal values and strides."""
    parts: dict[Hashable, Ref] = {}
    """Parts that are read, by their key."""
    nodes: list[Node] = []
    for node in graph.nodes:
        node, ref = node.reading(replacements), Ref(node.name)
        name = node.op.split(".")[1]
        if name in DEFAULTS and ref not in graph.escaping:
            replacements[ref] = parts.setdefault(_part(name, node.args[0], node.args[1:], graph), ref)
        elif name in PARTS:
            base, written = node.args[:2]
            same_part = parts.get(_part(PARTS[name], base, node.args[2:], graph))
            # If both escape, they are two tensors, and the caller may modify one.
            both_escape = {base, ref} <= graph.escaping
            assert isinstance(base, Ref)
            is_noop = written == same_part and base.name in graph.named and not both_escape
            if is_noop and graph.type_of(base) == graph.type_of(ref):
                replacements[ref] = base
        nodes.append(node)
    return graph.of_nodes(nodes, replacements)


def _part(name: str, source: Argument, arguments: tuple[Argument, ...], graph: Graph) -> Hashable:
    """The key of a part: operation, source and all arguments including defaults."""
    assert isinstance(source, Ref)
    filled = (*arguments, *DEFAULTS[name][len(arguments) :])
    dim = filled[0]
    rank = len(graph.type_of(source).shape)
    return name, source, dim % rank if isinstance(dim, int) else dim, *(str(_number(item)) for item in filled[1:])


def _number(value: Argument) -> Argument:
    return value.constant if isinstance(value, Size) and value.is_constant else value
