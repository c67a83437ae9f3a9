"""Softmax over the scores of an attention and a sink: a further logit of each row, whose weight is dropped.

Models with attention sinks write ``torch.cat([scores, sink], -1).softmax(-1)[..., :-1]``. Here the statistics of each row are
those of the scores, combined with the sink, so that neither the concatenated logits nor their weights are in memory.
"""

from __future__ import annotations

from mtmc_lsp.core.sizes import Size
from mtmc_lsp.ir.primitives import ONE, Builder, PrimOp, broadcast

_Parts = tuple[str, str]
"""A value's elements before its last column, and its last column."""


def weights_without_sink(b: Builder, name: str, length: Size) -> str | None:
    """The weights of all columns but the last one, of a softmax over concatenated logits; ``None`` for other values."""
    mark = len(b.prims)
    halves = _Halves(b, length)
    parts = halves.of(name)
    if parts is not None and halves.has_reduced:
        return parts[0]
    for extra in list(b.prims)[mark:]:
        del b.prims[extra]
    return None


class _Halves:
    def __init__(self, b: Builder, length: Size) -> None:
        self._b = b
        self._length = length
        self._known: dict[str, _Parts | None] = {}
        self._rows: dict[str, str] = {}
        self.has_reduced = False
        """Whether a reduction reads the concatenated logits."""

    def of(self, name: str) -> _Parts | None:
        """The two parts of a value; ``None`` if it is no elementwise function of concatenated logits and values of their rows."""
        if name not in self._known:
            self._known[name] = self._parts(name)
        return self._known[name]

    def _parts(self, name: str) -> _Parts | None:
        prim = self._b.prims[name]
        if prim.op is PrimOp.CAT and prim.attrs["dim"] == len(prim.shape) - 1 and len(prim.inputs) == 2:
            first, second = prim.inputs
            is_sink = self._b.shape(second)[-1] == ONE and self._b.shape(first)[-1] == self._length
            return (first, second) if is_sink else None
        if prim.op is not PrimOp.POINTWISE:
            return None
        parts = [(row, row) if (row := self._row(each)) else self.of(each) for each in prim.inputs]
        if any(each is None for each in parts):
            return None
        first, second = (self._again(name, [each[side] for each in parts if each is not None]) for side in (0, 1))
        return first, second

    def _again(self, name: str, inputs: list[str]) -> str:
        prim = self._b.prims[name]
        return self._b.add(
            prim.op, inputs, broadcast([self._b.shape(each) for each in inputs]), prim.dtype, **prim.attrs
        )

    def _row(self, name: str) -> str:
        """A value that all columns of a row share, computed from the two parts; empty for other values."""
        shape = self._b.shape(name)
        if shape and shape[-1] != ONE:
            return ""
        if name not in self._rows:
            self._rows[name] = self._reduced(name) or name
        return self._rows[name]

    def _reduced(self, name: str) -> str:
        b, prim = self._b, self._b.prims[name]
        is_over_rows = prim.op is PrimOp.REDUCE and prim.attrs["dims"] == (len(prim.shape) - 1,)
        if not is_over_rows or prim.fn not in ("max", "sum", "sum_exp") or (parts := self.of(prim.inputs[0])) is None:
            return ""
        self.has_reduced = True
        first, last = parts
        others = [self._row(each) for each in prim.inputs[1:]]
        reduced = b.add(PrimOp.REDUCE, (first, *others), prim.shape, prim.dtype, **prim.attrs)
        if prim.fn == "sum_exp":
            last = b.pointwise("exp", b.pointwise("sub", last, *others, dtype=prim.dtype), dtype=prim.dtype)
        return b.pointwise(
            "maximum" if prim.fn == "max" else "add", reduced, b.cast(last, prim.dtype), dtype=prim.dtype
        )
