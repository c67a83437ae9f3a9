"""Computes positions again where they are compared along another axis, as in ``i[:, None] >= i[None, :]``.

Both sides are views of one ``torch.arange``, but belong to different axes of a kernel, which has one index for each. Positions
are index arithmetic, so a second computation of them is free, and a mask of positions becomes part of the kernel that applies it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from mtmc_lsp.ir.primitives import ONE, Prim, PrimOp

_Source = tuple[str, int]
"""A primitive that creates positions, and its dimension."""
_Sources = tuple[frozenset[_Source], ...]
"""For each dimension of a value, the positions that run along it."""
REPEATED = frozenset({PrimOp.IOTA, PrimOp.POINTWISE, PrimOp.RESHAPE, PrimOp.EXPAND, PrimOp.PERMUTE})
"""Operations that are computed again."""
NOTHING: frozenset[_Source] = frozenset()


def with_separate_positions(prims: Mapping[str, Prim]) -> dict[str, Prim]:
    """``prims`` in execution order, where no value uses one position along two of its dimensions."""
    if not any(prim.op is PrimOp.IOTA for prim in prims.values()):
        return dict(prims)
    separated = _Separated()
    for prim in prims.values():
        separated.add(prim)
    return separated.prims


class _Separated:
    def __init__(self) -> None:
        self.prims: dict[str, Prim] = {}
        self._sources: dict[str, _Sources] = {}

    def add(self, prim: Prim) -> None:
        """Append a primitive, and before it the operands that need other positions."""
        if prim.op is PrimOp.POINTWISE and len(prim.inputs) > 1:
            prim = replace(prim, inputs=self._separate(prim))
        self.prims[prim.name] = prim
        self._sources[prim.name] = self._sources_of(prim)

    def _separate(self, prim: Prim) -> tuple[str, ...]:
        rank, inputs = len(prim.shape), list[str]()
        used: dict[_Source, int] = {}
        for name in prim.inputs:
            sources = self._sources[name]
            along = [(source, dim + rank - len(sources)) for dim, each in enumerate(sources) for source in each]
            if any(used.get(source, dim) != dim for source, dim in along):
                name = self._again(name, prim.origin, {})
                sources = self._sources[name]
                along = [(source, dim + rank - len(sources)) for dim, each in enumerate(sources) for source in each]
            used.update(along)
            inputs.append(name)
        return tuple(inputs)

    def _again(self, name: str, origin: str, copies: dict[str, str]) -> str:
        """A value with all positions that it is computed from as new primitives of the node ``origin``."""
        prim = self.prims[name]
        if name in copies or prim.op not in REPEATED or not any(self._sources[name]):
            return copies.get(name, name)
        inputs = tuple(self._again(source, origin, copies) for source in prim.inputs)
        number = 2
        while (copy := f"{name}_{number}") in self.prims:
            number += 1
        copies[name] = copy
        self.add(replace(prim, name=copy, inputs=inputs, origin=origin))
        return copy

    def _sources_of(self, prim: Prim) -> _Sources:
        rank = len(prim.shape)
        if prim.op is PrimOp.IOTA:
            dim = prim.attrs["dim"]
            return tuple(frozenset({(prim.name, i)}) if i == dim else NOTHING for i in range(rank))
        if prim.op in (PrimOp.POINTWISE, PrimOp.EXPAND):
            inputs = [((NOTHING,) * rank + self._sources[name])[-rank:] if rank else () for name in prim.inputs]
            return tuple(NOTHING.union(*(each[dim] for each in inputs)) for dim in range(rank))
        if prim.op is PrimOp.PERMUTE:
            dims, sources = prim.attrs["dims"], self._sources[prim.inputs[0]]
            assert isinstance(dims, tuple)
            return tuple(sources[dim] for dim in dims)
        if prim.op is PrimOp.RESHAPE:
            before = self.prims[prim.inputs[0]]
            sizes = [size for size in before.shape if size != ONE]
            if sizes == [size for size in prim.shape if size != ONE]:
                kept = iter(
                    [each for each, size in zip(self._sources[before.name], before.shape, strict=True) if size != ONE]
                )
                return tuple(NOTHING if size == ONE else next(kept) for size in prim.shape)
        # The elements of other results are read from memory, or computed at other indices.
        return (NOTHING,) * rank
