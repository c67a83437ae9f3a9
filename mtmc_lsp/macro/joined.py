"""Results that are put together of values with the same axes, as the stack of what a loop gives: each is written to its place.

An element of such a result read by its index would be a choice between all parts, each of them computed for it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

from mtmc_lsp.core.graph import Ref
from mtmc_lsp.core.sizes import Size
from mtmc_lsp.macro.prims import VIEW_OPS, PrimOp, Program


@dataclass(frozen=True)
class Part:
    """A part of a result."""

    prim: str
    dim: int
    """Of the result and of the part: along it the parts lie one after another."""
    start: Size
    """Where this one begins."""


Parts = Mapping[Ref, tuple[Part, ...]]
NOTHING = frozenset({PrimOp.CONSTANT, PrimOp.IOTA})


def parts_of(program: Program, outputs: Collection[Ref], chosen: Collection[str]) -> Parts:
    """The parts of those results that are made of several, which share what they are computed from.

    Args:
        program: what the nodes are of.
        outputs: results of a region.
        chosen: its nodes.
    """
    found: dict[Ref, tuple[Part, ...]] = {}
    for ref in outputs:
        prim = program.of(ref)
        if prim.op is not PrimOp.CAT or prim.origin not in chosen or program.values_of[prim.name] != (ref,):
            continue
        dim = prim.attrs["dim"]
        assert isinstance(dim, int)
        start, parts = Size.of(0), []
        for source in prim.inputs:
            parts.append(Part(source, dim, start))
            start = start + program.prims[source].shape[dim]
        if _share(program, [part.prim for part in parts], chosen):
            found[ref] = tuple(parts)
    return found


def _share(program: Program, parts: Collection[str], chosen: Collection[str]) -> bool:
    """Whether something is computed, or read, for several parts."""
    seen: set[str] = set()
    for part in dict.fromkeys(parts):
        own = {name for name in _behind(program, part, chosen) if program.prims[name].op not in VIEW_OPS | NOTHING}
        if own & seen:
            return True
        seen |= own
    return len(set(parts)) < len(parts)


def _behind(program: Program, part: str, chosen: Collection[str]) -> set[str]:
    found: set[str] = set()
    pending = [part]
    while pending:
        name = pending.pop()
        if name not in found:
            found.add(name)
            if program.prims[name].origin in chosen:
                pending += program.prims[name].inputs
    return found


def stored(program: Program, outputs: Collection[Ref], parts: Parts) -> Iterator[tuple[Ref, str]]:
    """What a region writes: each result with the primitive that it is, or with those that are its parts."""
    for ref in outputs:
        if ref in parts:
            yield from ((ref, part.prim) for part in parts[ref])
        else:
            yield ref, program.of(ref).name
