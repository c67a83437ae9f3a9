"""Outputs that a kernel stores part by part instead of element by element of the output.

Two kinds exist. A concatenation of values with the same axes (such as a stack built in a loop) is stored as separate parts:
computing one element by its index would select between all parts and compute each of them. A scatter-add adds rows at
positions given by an index tensor.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

from mtmc_lsp.core.graph import Ref
from mtmc_lsp.core.sizes import Size
from mtmc_lsp.ir.primitives import VIEW_OPS, KernelIR, Prim, PrimOp


@dataclass(frozen=True)
class Part:
    """One part of an output."""

    prim: str
    dim: int
    """Dimension along which the parts are concatenated, in the output and in the part."""
    start: Size
    """First index of this part along ``dim``."""
    index: str = ""
    """Primitive with the index along ``dim`` to which each element is added; empty for a concatenated part."""


Parts = Mapping[Ref, tuple[Part, ...]]
FREE = frozenset({PrimOp.CONSTANT, PrimOp.IOTA})


def output_parts_of(ir: KernelIR, outputs: Collection[Ref], chosen: Collection[str]) -> Parts:
    """The parts of each output that is stored part by part."""
    primitives = ((ref, ir.of(ref)) for ref in outputs)
    parts_by_output = {ref: _parts(ir, ref, prim, chosen) for ref, prim in primitives if prim.origin in chosen}
    return {ref: parts for ref, parts in parts_by_output.items() if parts}


def _parts(ir: KernelIR, ref: Ref, prim: Prim, chosen: Collection[str]) -> tuple[Part, ...]:
    dim = prim.attrs.get("dim")
    if prim.op is PrimOp.SCATTER_ADD and ir.graph.type_of(ref).is_contiguous and _base_is_available(ir, ref, chosen):
        assert isinstance(dim, int)
        _, index, source = prim.inputs
        return (Part(source, dim, Size.of(0), index),)
    if prim.op is not PrimOp.CAT or ir.values_of[prim.name] != (ref,) or not _share(ir, prim.inputs, chosen):
        return ()
    assert isinstance(dim, int)
    start, parts = Size.of(0), []
    for source in prim.inputs:
        parts.append(Part(source, dim, start))
        start = start + ir.prims[source].shape[dim]
    return tuple(parts)


def _base_is_available(ir: KernelIR, ref: Ref, chosen: Collection[str]) -> bool:
    """Whether the base of a scatter-add exists before the kernel: it is all zeros or computed outside the region."""
    base = ir.of(ref).inputs[0]
    return adds_to_zeros(ir, ref) or ir.prims[base].origin not in chosen


def adds_to_zeros(ir: KernelIR, ref: Ref) -> bool:
    """Whether the base of a scatter-add is all zeros."""
    prim = ir.prims[ir.of(ref).inputs[0]]
    while prim.op in (PrimOp.EXPAND, PrimOp.RESHAPE):
        prim = ir.prims[prim.inputs[0]]
    return prim.op is PrimOp.CONSTANT and prim.attrs["value"] == 0


def _share(ir: KernelIR, parts: Collection[str], chosen: Collection[str]) -> bool:
    """Whether several parts share a computation or an input."""
    earlier: set[str] = set()
    for part in dict.fromkeys(parts):
        computed = {name for name in _ancestors(ir, part, chosen) if ir.prims[name].op not in VIEW_OPS | FREE}
        if computed & earlier:
            return True
        earlier |= computed
    return len(set(parts)) < len(parts)


def _ancestors(ir: KernelIR, part: str, chosen: Collection[str]) -> set[str]:
    ancestors: set[str] = set()
    pending = [part]
    while pending:
        name = pending.pop()
        if name not in ancestors:
            ancestors.add(name)
            if ir.prims[name].origin in chosen:
                pending += ir.prims[name].inputs
    return ancestors


def scatter_indices(parts: Parts) -> list[str]:
    """The index primitives of all scatter-add parts."""
    return [part.index for output_parts in parts.values() for part in output_parts if part.index]


def stored_primitives(ir: KernelIR, outputs: Collection[Ref], parts: Parts) -> Iterator[tuple[Ref, str]]:
    """Pairs of an output and a primitive that is stored to it: one per output, or one per part."""
    for ref in outputs:
        if ref in parts:
            yield from ((ref, part.prim) for part in parts[ref])
        else:
            yield ref, ir.of(ref).name
