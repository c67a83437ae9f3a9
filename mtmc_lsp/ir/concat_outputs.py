"""Results that are written by the places of what they are made of, and not by their own.

One is put together of values with the same axes, as the stack of what a loop gives: an element of it, read by its index, would
be a choice between all parts, each of them computed for it. Another has rows added to it at places that are looked up.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

from mtmc_lsp.core.graph import Ref
from mtmc_lsp.core.sizes import Size
from mtmc_lsp.ir.primitives import VIEW_OPS, KernelIR, Prim, PrimOp


@dataclass(frozen=True)
class Part:
    """A part of a result."""

    prim: str
    dim: int
    """Of the result and of the part: along it the parts lie one after another."""
    start: Size
    """Where this one begins."""
    index: str = ""
    """A primitive that says where along ``dim`` each element of the part is added to what is there; empty for a plain part."""


Parts = Mapping[Ref, tuple[Part, ...]]
NOTHING = frozenset({PrimOp.CONSTANT, PrimOp.IOTA})


def parts_of(ir: KernelIR, outputs: Collection[Ref], chosen: Collection[str]) -> Parts:
    """The parts of those results that are made of several, which share what they are computed from.

    Args:
        program: what the nodes are of.
        outputs: results of a region.
        chosen: its nodes.
    """
    made = ((ref, ir.of(ref)) for ref in outputs)
    found = {ref: _parts(ir, ref, prim, chosen) for ref, prim in made if prim.origin in chosen}
    return {ref: parts for ref, parts in found.items() if parts}


def _parts(ir: KernelIR, ref: Ref, prim: Prim, chosen: Collection[str]) -> tuple[Part, ...]:
    dim = prim.attrs.get("dim")
    if prim.op is PrimOp.ADD_AT and ir.graph.type_of(ref).is_contiguous and _may_begin(ir, ref, chosen):
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


def _may_begin(ir: KernelIR, ref: Ref, chosen: Collection[str]) -> bool:
    """Whether what rows are added to is there before: it is zeros, or no value of the region."""
    base = ir.of(ref).inputs[0]
    return begins_empty(ir, ref) or ir.prims[base].origin not in chosen


def begins_empty(ir: KernelIR, ref: Ref) -> bool:
    """Whether rows are added to zeros."""
    prim = ir.prims[ir.of(ref).inputs[0]]
    while prim.op in (PrimOp.EXPAND, PrimOp.RESHAPE):
        prim = ir.prims[prim.inputs[0]]
    return prim.op is PrimOp.CONSTANT and prim.attrs["value"] == 0


def _share(ir: KernelIR, parts: Collection[str], chosen: Collection[str]) -> bool:
    """Whether something is computed, or read, for several parts."""
    seen: set[str] = set()
    for part in dict.fromkeys(parts):
        own = {name for name in _behind(ir, part, chosen) if ir.prims[name].op not in VIEW_OPS | NOTHING}
        if own & seen:
            return True
        seen |= own
    return len(set(parts)) < len(parts)


def _behind(ir: KernelIR, part: str, chosen: Collection[str]) -> set[str]:
    found: set[str] = set()
    pending = [part]
    while pending:
        name = pending.pop()
        if name not in found:
            found.add(name)
            if ir.prims[name].origin in chosen:
                pending += ir.prims[name].inputs
    return found


def indices(parts: Parts) -> list[str]:
    """The primitives that say where rows are added."""
    return [part.index for own in parts.values() for part in own if part.index]


def stored(ir: KernelIR, outputs: Collection[Ref], parts: Parts) -> Iterator[tuple[Ref, str]]:
    """What a region writes: each result with the primitive that it is, or with those that are its parts."""
    for ref in outputs:
        if ref in parts:
            yield from ((ref, part.prim) for part in parts[ref])
        else:
            yield ref, ir.of(ref).name
