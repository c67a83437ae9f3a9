"""Derives which keys an attention query may see from the mask in the user's code.

Causal and sliding-window masks allow each query a band of keys around its own position. Blocks of keys outside the band of a
whole block of queries need not be read: their logits are minus infinity for all scores, so their weights are exactly 0, and
the running maximum and sum do not change. The values in those blocks are then ignored. A product written out by hand would
give NaN for 0 * inf or 0 * nan; PyTorch's fused attention kernels skip those blocks too.

Only masks of minus infinity count. With a large negative number, a query without any key gets the mean of all values, which
depends on every key.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

from mtmc_lsp.core.sizes import Size
from mtmc_lsp.ir.attention_pattern import AttentionForm, GradientForm, attention_form, gradient_form
from mtmc_lsp.ir.axes import Axis, AxisTable
from mtmc_lsp.ir.primitives import CHEAP, ONE, KernelIR, Prim, PrimOp
from mtmc_lsp.ir.regions import Region, RegionKind

MASKED = float("-inf")
COMPARE: Mapping[str, Callable[[float, float], bool]] = {
    "lt": operator.lt, "le": operator.le, "gt": operator.gt, "ge": operator.ge, "eq": operator.eq, "ne": operator.ne,
}  # fmt: skip
OPPOSITE = {"lt": "ge", "ge": "lt", "le": "gt", "gt": "le", "eq": "ne", "ne": "eq"}
MIRRORED = {"lt": "gt", "gt": "lt", "le": "ge", "ge": "le", "eq": "eq", "ne": "ne"}


@dataclass(frozen=True)
class Band:
    """Query ``m`` may see keys ``m + first`` to ``m + last``, both included; ``None`` means no limit."""

    first: Size | None = None
    last: Size | None = None

    def __and__(self, other: Band) -> Band:
        return Band(_tighter_limit(self.first, other.first, max), _tighter_limit(self.last, other.last, min))

    @property
    def limits(self) -> bool:
        """Whether the band has a limit."""
        return self.first is not None or self.last is not None

    def share(self, queries: int, keys: int, sizes: Mapping[str, int]) -> float:
        """Fraction of all (query, key) pairs inside the band."""
        total = 0
        for query in range(queries):
            low = 0 if self.first is None else max(0, query + self.first.value(sizes))
            high = keys - 1 if self.last is None else min(keys - 1, query + self.last.value(sizes))
            total += max(0, high - low + 1)
        return total / (queries * keys) if queries and keys else 1.0


def _tighter_limit(left: Size | None, right: Size | None, choose: Callable[[int, int], int]) -> Size | None:
    """The tighter of two limits; either one is correct if symbolic sizes cannot be compared."""
    if left is None or right is None:
        return right if left is None else left
    if left.is_constant and right.is_constant:
        return Size.of(choose(left.constant, right.constant))
    return left


def attention_band(ir: KernelIR, region: Region, form: AttentionForm | GradientForm) -> Band:
    """The band of keys that an attention mask allows; without limits if the mask has none that can be derived."""
    reader = _reader(ir, region, form)
    return Band() if reader is None else reader.finite(form.logits)


def limited_attention_band(ir: KernelIR, region: Region) -> tuple[AttentionForm | GradientForm, Band] | None:
    """The region's attention and its mask's band; ``None`` without attention, or if every query may see every key."""
    members = [ir.prims[name] for name in region.prims]
    form = gradient_form(members) if region.kind is RegionKind.ATTENTION_GRADIENT else attention_form(members)
    band = attention_band(ir, region, form) if form is not None else None
    return (form, band) if form is not None and band is not None and band.limits else None


def hides_keys(ir: KernelIR) -> bool:
    """Whether a graph contains an attention whose mask limits the keys of each query, as one kernel may have it."""
    behind_products: set[str] = set()
    positions: set[str] = set()
    for prim in ir.prims.values():
        if prim.op is PrimOp.MATMUL or behind_products & set(prim.inputs):
            behind_products.add(prim.name)
        elif prim.op in CHEAP and all(name in positions for name in prim.inputs):
            positions.add(prim.name)
    products = [prim for prim in ir.prims.values() if prim.op is PrimOp.MATMUL and len(prim.inputs) == 2]
    return any(_is_limited(ir, each, behind_products | positions) for each in products)


def _is_limited(ir: KernelIR, result: Prim, computed: Collection[str]) -> bool:
    """Whether a product, with what its weights are computed from, is such an attention.

    Args:
        computed: values that depend on products, and those that are made of positions. The kernel reads views of all others.
    """
    pending, members = [result.inputs[0]], {result.name}
    while pending:
        prim = ir.prims[pending.pop()]
        if prim.name not in members and (prim.name in computed or prim.op is PrimOp.POINTWISE):
            members.add(prim.name)
            pending += prim.inputs if prim.op is not PrimOp.MATMUL else ()
    names = tuple(name for name in ir.prims if name in members)
    form = attention_form([ir.prims[name] for name in names])
    if form is None:
        return False
    table = AxisTable(ir.prims, names, ir.graph.sizes)
    region = Region((), names, (), (), RegionKind.ATTENTION, table, (), ())
    return attention_band(ir, region, form).limits


def condition_holds_before(
    ir: KernelIR, region: Region, form: AttentionForm, condition: str, truth: bool
) -> Size | None:
    """The limit below which keys satisfy a condition: keys before ``m + result`` for query ``m``; ``None`` if unknown.

    Keys that violate the condition are inside the band of its negation, so keys before that band satisfy it.
    """
    reader = _reader(ir, region, form)
    return None if reader is None else reader.holds(condition, not truth).first


def _reader(ir: KernelIR, region: Region, form: AttentionForm | GradientForm) -> _Reader | None:
    """The mask reader of an attention; ``None`` if its queries or its keys are not a single axis."""
    table, rank = region.table, len(form.scores.shape)
    queries, keys = (table.axes(form.scores.name, rank - 2), table.axes(form.scores.name, rank - 1))
    return _Reader(ir, region, queries[0], keys[0]) if len(queries) == len(keys) == 1 else None


@dataclass(frozen=True)
class _Affine:
    """``key * key index + query * query index + constant``."""

    key: int
    query: int
    constant: Size

    def __sub__(self, other: _Affine) -> _Affine:
        return _Affine(self.key - other.key, self.query - other.query, self.constant - other.constant)


def _comparison(fn: str, number: float) -> Callable[[float], bool]:
    return lambda value: COMPARE[fn](value, number)


class _Reader:
    def __init__(self, ir: KernelIR, region: Region, query: Axis, key: Axis) -> None:
        self._prims = ir.prims
        self._members = frozenset(region.prims)
        self._table = region.table
        self._query, self._key = query, key

    def finite(self, name: str) -> Band:
        """The band in which a value may differ from minus infinity."""
        prim = self._producer(name)
        if prim is None:
            return Band()
        if prim.fn == "where":
            condition, yes, no = prim.inputs
            if self._value(no) == MASKED:
                return self.holds(condition, True) & self.finite(yes)
            return self.holds(condition, False) & self.finite(no) if self._value(yes) == MASKED else Band()
        if prim.fn == "add":
            return self.finite(prim.inputs[0]) & self.finite(prim.inputs[1])
        if prim.fn in ("cast", "rounded", "sub"):
            return self.finite(prim.inputs[0])
        if prim.fn in ("mul", "div"):
            sides = prim.inputs if prim.fn == "div" or self._value(prim.inputs[0]) is None else prim.inputs[::-1]
            factor = self._value(sides[1])
            return self.finite(sides[0]) if factor is not None and 0 < factor < float("inf") else Band()
        return Band()

    def holds(self, name: str, truth: bool) -> Band:
        """The band in which a condition may have the truth value ``truth``."""
        prim = self._producer(name)
        if prim is None:
            return Band()
        if prim.fn in ("logical_not", "bitwise_not"):
            return self.holds(prim.inputs[0], not truth)
        if prim.fn in (("logical_and", "bitwise_and") if truth else ("logical_or", "bitwise_or")):
            return self.holds(prim.inputs[0], truth) & self.holds(prim.inputs[1], truth)
        if prim.fn in COMPARE:
            return self._comparison_band(prim.fn if truth else OPPOSITE[prim.fn], *prim.inputs)
        if prim.fn == "cast":
            return self.holds(prim.inputs[0], truth)
        # Any other value is a condition through comparison with 0.
        return self._where_band(prim, lambda value: bool(value) is truth)

    def _comparison_band(self, fn: str, left: str, right: str) -> Band:
        for source, constant, comparison in ((left, right, fn), (right, left, MIRRORED[fn])):
            number, chosen = self._value(constant), self._producer(source)
            while chosen is not None and chosen.fn == "cast":
                chosen = self._producer(chosen.inputs[0])
            if number is not None and chosen is not None and chosen.fn == "where":
                return self._where_band(chosen, _comparison(comparison, number))
        sides = self._affine(left), self._affine(right)
        if sides[0] is None or sides[1] is None:
            return Band()
        offset = sides[0] - sides[1]
        if (offset.key, offset.query) == (-1, 1):
            offset, fn = _Affine(1, -1, offset.constant * -1), MIRRORED[fn]
        if (offset.key, offset.query) != (1, -1):
            return Band()
        # key - query + constant compared with 0.
        limit = offset.constant * -1
        lowest = {"ge": limit, "gt": limit + 1, "eq": limit}.get(fn)
        highest = {"le": limit, "lt": limit - 1, "eq": limit}.get(fn)
        return Band(lowest, highest)

    def _where_band(self, prim: Prim, wanted: Callable[[float], bool]) -> Band:
        """The band in which ``where(condition, number, number)`` may be a number that satisfies ``wanted``."""
        if prim.fn != "where":
            return Band()
        yes, no = (self._value(source) for source in prim.inputs[1:])
        if yes is None or no is None or wanted(yes) == wanted(no):
            return Band()
        return self.holds(prim.inputs[0], wanted(yes))

    def _producer(self, name: str) -> Prim | None:
        """The primitive that computes a value, looking through shape changes that keep every axis intact."""
        prim = self._prims[name]
        while prim.name in self._members and prim.op in (PrimOp.EXPAND, PrimOp.RESHAPE, PrimOp.PERMUTE):
            prim = self._prims[prim.inputs[0]]
        return prim if prim.name in self._members else None

    def _value(self, name: str) -> float | None:
        prim = self._producer(name)
        while prim is not None and prim.fn == "cast":
            prim = self._producer(prim.inputs[0])
        value = prim.attrs.get("value") if prim is not None and prim.op is PrimOp.CONSTANT else None
        return float(value) if isinstance(value, (bool, int, float)) else None

    def _affine(self, name: str) -> _Affine | None:
        prim = self._producer(name)
        if prim is None or not prim.dtype.startswith("int"):
            return None
        if prim.op is PrimOp.CONSTANT:
            value = prim.attrs["value"]
            return _Affine(0, 0, Size.of(value)) if isinstance(value, (int, Size)) else None
        if prim.op is PrimOp.IOTA:
            return self._position(prim)
        if prim.fn == "cast":
            return self._affine(prim.inputs[0])
        if prim.fn not in ("add", "sub"):
            return None
        left, right = (self._affine(source) for source in prim.inputs)
        if left is None or right is None:
            return None
        nothing = _Affine(0, 0, Size.of(0))
        return left - right if prim.fn == "sub" else left - (nothing - right)

    def _position(self, prim: Prim) -> _Affine | None:
        dim, start, step = prim.attrs["dim"], prim.attrs["start"], prim.attrs["step"]
        if not isinstance(dim, int) or not isinstance(start, (int, Size)) or not isinstance(step, int):
            return None
        if prim.shape[dim] == ONE:
            return _Affine(0, 0, Size.of(start))
        axes = self._table.axes(prim.name, dim)
        if axes == (self._key,):
            return _Affine(step, 0, Size.of(start))
        return _Affine(0, step, Size.of(start)) if axes == (self._query,) else None
