"""How long a kernel of a region would be as code: what a compiler, and whoever reads it, can still take."""

from __future__ import annotations

from mtmc_lsp.ir.primitives import KernelIR, PrimOp
from mtmc_lsp.ir.regions import Region

DEEPEST = 128
"""Operations that wait for one another: the coder writes a value inside what reads it."""
MOST_VALUES = 2_000
"""Values that are written out, those of one operation at different places each counted: a layer's kernel has some hundred."""
MOVES = frozenset({PrimOp.SLICE, PrimOp.FLIP, PrimOp.CAT, PrimOp.PAD, PrimOp.WINDOW, PrimOp.GATHER})
"""Primitives whose result at one place is their input's at another."""
ONCE = frozenset({PrimOp.REDUCE, PrimOp.SCAN, PrimOp.UNROLLED_REDUCE, PrimOp.MATMUL})
"""Primitives that have a loop of their own, in which their input is written once."""


def is_too_long(ir: KernelIR, region: Region) -> bool:
    """Whether a region's kernel is more code than is worth writing."""
    if len(region.prims) <= DEEPEST and not _moves(ir, region):
        return False
    return _depth(ir, region) > DEEPEST or _values_pass(ir, region, MOST_VALUES)


def _moves(ir: KernelIR, region: Region) -> bool:
    return any(ir.prims[name].op in MOVES for name in region.prims)


def _depth(ir: KernelIR, region: Region) -> int:
    depths: dict[str, int] = {}
    for name in region.prims:
        depths[name] = 1 + max((depths.get(source, 0) for source in ir.prims[name].inputs), default=0)
    return max(depths.values(), default=0)


def _values_pass(ir: KernelIR, region: Region, most: int) -> bool:
    """Whether more values than ``most`` are written out.

    What is read at several places is written once for each: where each step of a loop stacks what the next one takes apart, each
    element needs all elements of the step before, and so their number grows with every step by a factor.
    """
    places: dict[str, set[int]] = {name: {0} for name in region.roots(ir)}
    count = 0
    for name in reversed(region.prims):
        prim, own = ir.prims[name], places.pop(name, set())
        count += len(own)
        if count > most:
            return True
        for number, source in enumerate(prim.inputs):
            asked = places.setdefault(source, set())
            if prim.op in MOVES:
                asked.update(hash((place, name, number)) for place in own)
            elif prim.op in ONCE:
                asked.add(0)
            else:
                asked |= own
    return False
