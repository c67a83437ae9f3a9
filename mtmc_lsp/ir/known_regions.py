"""Keeps the regions that were analysed last.

Each fusion search of a graph, and each action, asks for mostly the same sets of nodes, whatever the precision modes and the
kernels so far.
"""

from __future__ import annotations

from collections.abc import Iterable

from mtmc_lsp.ir.primitives import KernelIR
from mtmc_lsp.ir.regions import CannotFuse, Region, analyse

MAX_NODES = 100_000
"""How many nodes all kept regions have together: a region takes about 1 KB for each of its nodes."""
_Key = tuple[int, frozenset[str], frozenset[str]]
_known: dict[_Key, tuple[KernelIR, Region | str]] = {}
"""By the identity of the IR, which is kept with each result so that no other gets its identity."""
_kept_nodes = 0


def known_region(ir: KernelIR, nodes: Iterable[str], recomputed: Iterable[str] = ()) -> Region:
    """Like :func:`analyse`, and as fast as a lookup for nodes that were analysed before.

    Raises:
        CannotFuse: the nodes cannot form one kernel.
    """
    global _kept_nodes
    key = (id(ir), frozenset(nodes), frozenset(recomputed))
    if key not in _known:
        _known[key] = (ir, _analysed(ir, key[1], key[2]))
        _kept_nodes += len(key[1])
    result = _known[key][1]
    while _kept_nodes > MAX_NODES:
        oldest = next(iter(_known))
        del _known[oldest]
        _kept_nodes -= len(oldest[1])
    if isinstance(result, str):
        raise CannotFuse(result)
    return result


def region_or_none(ir: KernelIR, nodes: frozenset[str], recomputed: Iterable[str] = ()) -> Region | None:
    """The nodes as one kernel; None if they cannot be one."""
    try:
        return known_region(ir, nodes, recomputed)
    except CannotFuse:
        return None


def _analysed(ir: KernelIR, nodes: frozenset[str], recomputed: frozenset[str]) -> Region | str:
    try:
        return analyse(ir, nodes, recomputed)
    except CannotFuse as reason:
        return str(reason)
