"""Specialises sizes to constants or to multiples of a number: fewer masks and known bounds, but a stricter guard."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

from mtmc_lsp.core.graph import Argument, Graph, Node, Ref, TensorType
from mtmc_lsp.core.sizes import Size
from mtmc_lsp.rewrites.graph_editing import CannotRewrite
from mtmc_lsp.schedule.schedule import Rewrite

CONSTANT, MULTIPLE = "constant-size", "multiple-size"
REWRITES = (CONSTANT, MULTIPLE)


def blocks_name(symbol: str, multiple: int) -> str:
    """The name of ``symbol // multiple``."""
    return f"{symbol}_by_{multiple}"


def with_size(graph: Graph, rewrite: Rewrite) -> Graph:
    """``graph`` with the size ``rewrite.node`` equal to the number ``rewrite.detail``, or a multiple of it.

    Raises:
        CannotRewrite: the size does not exist, or the workload's value does not match.
    """
    symbol, number = rewrite.node, rewrite.detail[0]
    if symbol not in graph.sizes:
        raise CannotRewrite(f"there is no size {symbol}")
    value = graph.sizes[symbol]
    sizes = dict(graph.sizes)
    del sizes[symbol]
    if rewrite.rule == CONSTANT:
        if value != number:
            raise CannotRewrite(f"{symbol} is {value} here, not {number}")
        swap = {symbol: Size.of(number)}
    else:
        if number < 2 or value % number:
            raise CannotRewrite(f"{symbol} is {value} here, not a multiple of {number}")
        swap = {symbol: Size.symbol(blocks_name(symbol, number)) * number}
        sizes[blocks_name(symbol, number)] = value // number
    inputs = tuple(replace(item, type=_type(item.type, swap)) for item in graph.inputs)
    nodes = tuple(_node(node, swap) for node in graph.nodes)
    return replace(graph, inputs=inputs, nodes=nodes, sizes=sizes)


def _type(kind: TensorType, swap: dict[str, Size]) -> TensorType:
    shape, stride = (tuple(size.substitute(swap) for size in sizes) for sizes in (kind.shape, kind.stride))
    return TensorType(shape, kind.dtype, stride)


def _node(node: Node, swap: dict[str, Size]) -> Node:
    args = tuple(_argument(item, swap) for item in node.args)
    kwargs = {key: _argument(item, swap) for key, item in node.kwargs.items()}
    return replace(node, args=args, kwargs=kwargs, outputs=tuple(_type(kind, swap) for kind in node.outputs))


def _argument(value: Argument, swap: dict[str, Size]) -> Argument:
    if isinstance(value, Size):
        return value.substitute(swap)
    if isinstance(value, tuple) and not isinstance(value, Ref):
        return tuple(_argument(item, swap) for item in value)
    return value


def guard_conditions(rewrites: Sequence[Rewrite]) -> tuple[str, ...]:
    """Conditions on the captured graph's sizes that the guard must check."""
    conditions = []
    for rewrite in rewrites:
        if rewrite.rule == CONSTANT:
            conditions.append(f"{rewrite.node} == {rewrite.detail[0]}")
        elif rewrite.rule == MULTIPLE:
            conditions.append(f"{rewrite.node} % {rewrite.detail[0]} == 0")
    return tuple(conditions)


def in_captured_sizes(condition: str, rewrites: Sequence[Rewrite]) -> str:
    """A condition on the rewritten graph's sizes, expressed in sizes of the captured graph."""
    for rewrite in reversed(rewrites):
        if rewrite.rule == MULTIPLE:
            name = blocks_name(rewrite.node, rewrite.detail[0])
            condition = re.sub(rf"\b{re.escape(name)}\b", f"({rewrite.node} // {rewrite.detail[0]})", condition)
    return condition
