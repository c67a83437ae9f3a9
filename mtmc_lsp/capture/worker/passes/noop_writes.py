"""Writes of what is there already, left out: ``x[1:-1] += y`` reads a part, adds to it in place, and puts the part back.

In a trace without side effects the addition gives a new whole tensor, and what Python then does, ``x[1:-1] = x[1:-1]``, writes
a part of that into itself.
"""

from __future__ import annotations

from collections.abc import Hashable

from mtmc_lsp.core.graph import Argument, Graph, Node, Ref
from mtmc_lsp.core.sizes import Size

PARTS = {"slice_scatter": "slice", "select_scatter": "select"}
"""Operations that write a part of a tensor, and those that read the same part; further arguments say which, alike."""
DEFAULTS: dict[str, tuple[Argument, ...]] = {"slice": (0, 0, None, 1), "select": ()}


def without_idle_writes(graph: Graph) -> Graph:
    """The graph without writes of a tensor's own part into it."""
    same: dict[Ref, Ref] = {}
    """What is equal to an earlier value, and lies as it does."""
    parts: dict[Hashable, Ref] = {}
    """Parts of values that are read, by what they are."""
    nodes: list[Node] = []
    for node in graph.nodes:
        node, ref = node.reading(same), Ref(node.name)
        word = node.op.split(".")[1]
        if word in DEFAULTS and ref not in graph.escaping:
            same[ref] = parts.setdefault(_part(word, node.args[0], node.args[1:], graph), ref)
        elif word in PARTS:
            base, written = node.args[:2]
            own = parts.get(_part(PARTS[word], base, node.args[2:], graph))
            # What both leave the target are two tensors, of which the caller may change one.
            both_leave = {base, ref} <= graph.escaping
            assert isinstance(base, Ref)
            is_idle = written == own and base.name in graph.named and not both_leave
            if is_idle and graph.type_of(base) == graph.type_of(ref):
                same[ref] = base
        nodes.append(node)
    return graph.of_nodes(nodes, same)


def _part(word: str, source: Argument, place: tuple[Argument, ...], graph: Graph) -> Hashable:
    """What tells a part from others: the same numbers, written out in full."""
    assert isinstance(source, Ref)
    given = (*place, *DEFAULTS[word][len(place) :])
    dim = given[0]
    rank = len(graph.type_of(source).shape)
    return word, source, dim % rank if isinstance(dim, int) else dim, *(str(_number(item)) for item in given[1:])


def _number(value: Argument) -> Argument:
    return value.constant if isinstance(value, Size) and value.is_constant else value
