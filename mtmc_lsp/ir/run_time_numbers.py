"""The numbers that a graph's nodes take at run time."""

from __future__ import annotations

from collections.abc import Iterator

from mtmc_lsp.core.graph import Argument, Graph, Node
from mtmc_lsp.core.sizes import Number


def numbers_of(graph: Graph) -> tuple[Number, ...]:
    """The run-time numbers that the graph's nodes take, without repeats."""
    return tuple(dict.fromkeys(number for node in graph.nodes for number in numbers_of_node(node)))


def numbers_of_node(node: Node) -> Iterator[Number]:
    """The run-time numbers that a node takes."""
    for argument in (*node.args, *node.kwargs.values()):
        yield from _numbers_in(argument)
    for inner in node.row_loop.body.nodes if node.row_loop is not None else ():
        yield from numbers_of_node(inner)
    if node.loop is not None:
        yield from node.loop.numbers()


def _numbers_in(argument: Argument) -> Iterator[Number]:
    if isinstance(argument, Number):
        yield argument
    elif isinstance(argument, tuple):
        for item in argument:
            yield from _numbers_in(item)
