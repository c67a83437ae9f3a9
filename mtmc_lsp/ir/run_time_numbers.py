"""The numbers that a graph's nodes take at run time."""

from __future__ import annotations

from collections.abc import Iterator

from mtmc_lsp.core.graph import Argument, Graph
from mtmc_lsp.core.sizes import Number


def numbers_of(graph: Graph) -> tuple[Number, ...]:
    """The run-time numbers that the graph's nodes take, without repeats."""
    arguments = (argument for node in graph.nodes for argument in (*node.args, *node.kwargs.values()))
    return tuple(dict.fromkeys(number for argument in arguments for number in _numbers_in(argument)))


def _numbers_in(argument: Argument) -> Iterator[Number]:
    if isinstance(argument, Number):
        yield argument
    elif isinstance(argument, tuple):
        for item in argument:
            yield from _numbers_in(item)
