"""Limits the code size of a kernel, for the compiler and for readers."""

from __future__ import annotations

from mtmc_lsp.ir.primitives import KernelIR, PrimOp
from mtmc_lsp.ir.regions import Region

DEEPEST = 128
"""Longest chain of dependent operations: the coder writes a value inside the expression that reads it."""
MOST_VALUES = 600
"""Most values in the code; one operation at several indices counts several times. A layer's kernel has a few hundred, and one of
600 values has about 300 lines."""
MOVES = frozenset({PrimOp.SLICE, PrimOp.FLIP, PrimOp.CAT, PrimOp.PAD, PrimOp.WINDOW, PrimOp.GATHER})
"""Primitives that read their input at other indices."""
ONCE = frozenset({PrimOp.REDUCE, PrimOp.SCAN, PrimOp.UNROLLED_REDUCE, PrimOp.MATMUL})
"""Primitives with a separate loop, which contains their input once."""


def is_too_long(ir: KernelIR, region: Region) -> bool:
    """Whether a region's kernel would be too much code."""
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
    """Whether the code has more than ``most`` values.

    A value that is read at several indices is written once for each. In an unrolled loop whose steps stack what the next step
    unpacks, each element needs all elements of the previous step, so the number of values grows exponentially.
    """
    indices_of: dict[str, set[int]] = {name: {0} for name in region.roots(ir)}
    count = 0
    for name in reversed(region.prims):
        prim, indices = ir.prims[name], indices_of.pop(name, set())
        count += len(indices)
        if count > most:
            return True
        for number, source in enumerate(prim.inputs):
            source_indices = indices_of.setdefault(source, set())
            if prim.op in MOVES:
                source_indices.update(hash((index, name, number)) for index in indices)
            elif prim.op in ONCE:
                source_indices.add(0)
            else:
                source_indices |= indices
    return False
