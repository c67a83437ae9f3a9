"""Loops over time steps that are scans: each state's update is an associative function of the state.

A state is solved once its update has one of these forms, where the coefficients depend on no state or on solved ones alone:

- ``a * state + b``, also with ``where`` and for booleans with *and* and *or*;
- ``max(state + d, k)`` or the same with ``min`` or ``logaddexp``;
- two coupled states: a 2x2 matrix times the states, plus a vector.

The form is read from the primitives of the body. The composition of two updates of a form has that form, so programs may combine
the updates of any range of iterations before they know the state in front of it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache, partial
from itertools import combinations

from mtmc_lsp.core.dtypes import compute_dtype, is_float
from mtmc_lsp.core.loop import LoopInput
from mtmc_lsp.ir.loops.coefficients import (
    Leaf,
    Term,
    Value,
    add,
    both,
    divide,
    leaves,
    multiply,
    subtract,
    union,
    where,
)
from mtmc_lsp.ir.loops.form import LoopForm
from mtmc_lsp.ir.loops.log_add_exp import log_add_exp_operands
from mtmc_lsp.ir.primitives import Prim, PrimOp
from mtmc_lsp.ir.regions import CannotFuse, RegionKind

PASSED_THROUGH = frozenset({PrimOp.RESHAPE, PrimOp.PERMUTE, PrimOp.EXPAND, PrimOp.ALIAS})
"""Views: a program reads the element at its position."""


class ScanKind(Enum):
    """The form of an update, which decides how two updates are composed."""

    SHIFT = "shift"
    """``b``: the update does not read the state."""
    SUM = "sum"
    """``state + b``."""
    PRODUCT = "product"
    """``a * state``."""
    AFFINE = "affine"
    """``a * state + b``."""
    LOGIC = "logic"
    """``(a & state) | b``."""
    MAX = "max"
    """``max(state, k)``."""
    MIN = "min"
    MAX_PLUS = "max-plus"
    """``max(state + d, k)``."""
    MIN_PLUS = "min-plus"
    LOG_ADD_EXP = "log-add-exp"
    """``log(exp(state + d) + exp(k))``."""
    MATRIX = "matrix"
    """``a11 * x + a12 * y + b1`` and ``a21 * x + a22 * y + b2``, in this order of coefficients."""


@dataclass(frozen=True)
class Recurrence:
    """One state, or two coupled states, with the coefficients of an iteration."""

    kind: ScanKind
    states: tuple[LoopInput, ...]
    coefficients: tuple[Value, ...]
    level: int
    """1 plus the number of scans that must be complete before this one: its coefficients read their states."""

    @property
    def is_wide(self) -> bool:
        """Whether updates are composed in float64.

        Products of float32 factors near one have rounding errors of one sign, and ``state + w * (x - state)`` has the factor
        ``1 - w``, which the user's code does not round. Both errors grow with the memory of the state.
        """
        is_scaled = self.kind in (ScanKind.PRODUCT, ScanKind.AFFINE, ScanKind.MATRIX)
        return is_scaled and self.states[0].type.dtype == "float32"


@dataclass(frozen=True)
class ScanForm:
    """A loop as scans, in the order in which they are computed."""

    recurrences: tuple[Recurrence, ...]
    previous: frozenset[str]
    """Names of the states whose value before an iteration is read, besides by their scan."""

    @property
    def levels(self) -> int:
        """Scans that depend on one another, one after another."""
        return max(item.level for item in self.recurrences)


def scan_form(form: LoopForm) -> ScanForm:
    """The scans of a loop.

    Raises:
        CannotFuse: an update has none of the forms; the message says which one.
    """
    result = _solved(ById(form))
    if isinstance(result, str):
        raise CannotFuse(result)
    return result


def scan_or_none(form: LoopForm) -> ScanForm | None:
    """The scans of a loop; ``None`` if it has other updates."""
    if form.region.kind is RegionKind.LOOP:
        # A program instance holds rows or blocks, whose elements depend on one another.
        return None
    result = _solved(ById(form))
    return result if isinstance(result, ScanForm) else None


@dataclass(frozen=True, eq=False)
class ById:
    """A loop as a key of a cache: fused loops are cached themselves, so equal ones are the same object."""

    form: LoopForm

    def __hash__(self) -> int:
        return id(self.form)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ById) and other.form is self.form


@lru_cache(maxsize=256)
def _solved(key: ById) -> ScanForm | str:
    try:
        return UpdateSolver(key.form).result()
    except CannotFuse as reason:
        return str(reason)


class OtherForm(Exception):
    """An update does not have the form in question."""


@dataclass(frozen=True)
class Linear:
    """``sum(factors[state] * state) + constant``."""

    factors: Mapping[str, Value]
    constant: Value


@dataclass(frozen=True)
class _Extreme:
    """``extreme(state + distance, constant)``; ``None`` where that operand is missing."""

    distance: Value | None
    constant: Value | None


class UpdateSolver:
    """Solves the states of a loop one after another."""

    def __init__(self, form: LoopForm) -> None:
        self.form, self.prims = form, form.ir.prims
        self.level: dict[str, int] = {}
        """Primitives of solved states to the level of their scan."""
        self.states = {form.prim(item): item for item in form.loop.states}
        self._reached: dict[str, frozenset[str]] = {}

    def result(self) -> ScanForm:
        """All states, in an order in which each can be computed.

        Raises:
            CannotFuse: a state has none of the forms.
        """
        if not self.states:
            raise CannotFuse("the loop has no state")
        if any(self.prims[name].op is PrimOp.MATMUL for name in self.form.region.prims):
            raise CannotFuse("the body of the loop has a matrix product")
        found: list[Recurrence] = []
        while remaining := [prim for prim in self.states if prim not in self.level]:
            solved = self._first(remaining)
            if solved is None:
                names = ", ".join(self.states[prim].name for prim in remaining)
                raise CannotFuse(
                    f"the update of {names} is neither affine in the state nor a running maximum or minimum"
                )
            found.append(solved)
            self.level |= {self.form.prim(item): solved.level for item in solved.states}
        return ScanForm(tuple(found), self._previous(found))

    def _first(self, remaining: Sequence[str]) -> Recurrence | None:
        singles: list[Callable[[str], Recurrence]] = [self._affine]
        singles += [partial(self._extreme, fn=fn) for fn in EXTREMES]
        for prim in remaining:
            for solve in singles:
                try:
                    return solve(prim)
                except OtherForm:
                    continue
        for pair in combinations(remaining, 2):
            try:
                return self._matrix(pair)
            except OtherForm:
                continue
        return None

    # Dependencies ------------------------------------------------------------------------------------------------

    def reached(self, name: str) -> frozenset[str]:
        """The states that a primitive depends on within an iteration."""
        if name not in self._reached:
            here = frozenset({name}) if name in self.states else frozenset()
            inputs = () if name in self.form.region.inputs else self.prims[name].inputs
            self._reached[name] = here.union(*(self.reached(source) for source in inputs))
        return self._reached[name]

    def next(self, prim: str) -> str:
        ref = self.states[prim].next
        assert ref is not None
        return self.form.ir.of(ref).name

    def leaf(self, name: str) -> Value:
        """A coefficient.

        Raises:
            OtherForm: it depends on a state that is not solved.
        """
        if self.reached(name) - set(self.level):
            raise OtherForm
        prim = self.prims[name]
        while prim.op in PASSED_THROUGH and prim.name not in self.form.region.inputs:
            prim = self.prims[prim.inputs[0]]
        value = prim.attrs.get("value")
        if prim.op is PrimOp.CONSTANT and isinstance(value, (bool, int, float)):
            return value
        return Leaf(name)

    def _level(self, coefficients: Sequence[Value]) -> int:
        below = [self.level[state] for value in coefficients for prim in leaves(value) for state in self.reached(prim)]
        return 1 + max(below, default=0)

    def _previous(self, found: Sequence[Recurrence]) -> frozenset[str]:
        """The states that are read at their value before the iteration."""
        loop = self.form.loop
        pending = [prim for item in found for value in item.coefficients for prim in leaves(value)]
        pending += [self.form.ir.of(output.value).name for output in loop.outputs if output.position is not None]
        complete = {self.next(prim) for prim in self.states}
        seen: set[str] = set()
        while pending:
            name = pending.pop()
            if name not in seen:
                seen.add(name)
                if name not in complete and name not in self.form.region.inputs:
                    pending += self.prims[name].inputs
        return frozenset(item.name for prim, item in self.states.items() if prim in seen)

    # Affine updates ----------------------------------------------------------------------------------------------

    def _affine(self, prim: str) -> Recurrence:
        update = self.linear(self.next(prim), (prim,))
        factor, constant = update.factors.get(prim, 0.0), update.constant
        item = self.states[prim]
        coefficients: tuple[Value, ...] = (factor, constant)
        if factor == 0:
            kind, coefficients = ScanKind.SHIFT, (constant,)
        elif item.type.dtype == "bool":
            kind = ScanKind.LOGIC
        elif factor == 1:
            kind, coefficients = ScanKind.SUM, (constant,)
        elif constant == 0:
            kind, coefficients = ScanKind.PRODUCT, (factor,)
        else:
            kind = ScanKind.AFFINE
        return Recurrence(kind, (item,), coefficients, self._level(coefficients))

    def _matrix(self, pair: tuple[str, str]) -> Recurrence:
        items = tuple(self.states[prim] for prim in pair)
        if any(not is_float(item.type.dtype) for item in items) or items[0].type.dtype != items[1].type.dtype:
            raise OtherForm
        if any(prim not in self.form.region.table for prim in pair):
            # No iteration reads the state: only its last value matters.
            raise OtherForm
        axes = {self.form.region.table.all_axes(prim) for prim in pair}
        if len(axes) > 1:
            raise OtherForm
        updates = [self.linear(self.next(prim), pair) for prim in pair]
        factors = [update.factors.get(prim, 0.0) for update in updates for prim in pair]
        coefficients = (*factors, *(update.constant for update in updates))
        return Recurrence(ScanKind.MATRIX, items, coefficients, self._level(coefficients))

    def linear(self, name: str, group: tuple[str, ...]) -> Linear:
        """A primitive as a linear function of the states ``group``."""
        if name in group:
            return Linear({name: 1.0}, 0.0)
        if not self.reached(name) & set(group):
            return Linear({}, self.leaf(name))
        prim = self.prims[name]
        if prim.op in PASSED_THROUGH:
            return self.linear(prim.inputs[0], group)
        if prim.op is not PrimOp.POINTWISE:
            raise OtherForm
        fn = BOOLEAN.get(prim.fn, "") if prim.dtype == "bool" else prim.fn
        if (fn == "cast" and self.keeps_dtype(prim)) or fn == "rounded":
            return self.linear(prim.inputs[0], group)
        if fn == "where" and not self.reached(prim.inputs[0]) & set(group):
            condition = self.leaf(prim.inputs[0])
            return self._combined(
                lambda x, y: where(condition, x, y), *(self.linear(source, group) for source in prim.inputs[1:])
            )
        if fn in ("or", "add", "sub"):
            function = {"or": union, "add": add, "sub": subtract}[fn]
            return self._combined(function, *(self.linear(source, group) for source in prim.inputs))
        if fn == "neg":
            return self._scaled(self.linear(prim.inputs[0], group), lambda value: subtract(0.0, value))
        if fn == "times_reciprocal":
            number = float(str(prim.attrs["reciprocal"]))
            return self._scaled(self.linear(prim.inputs[0], group), lambda value: multiply(value, number))
        if fn in ("mul", "and"):
            return self._product(prim.inputs, group, multiply if fn == "mul" else both)
        if fn == "div" and is_float(prim.dtype) and not self.reached(prim.inputs[1]) & set(group):
            divisor = self.leaf(prim.inputs[1])
            return self._scaled(self.linear(prim.inputs[0], group), lambda value: divide(value, divisor))
        raise OtherForm

    def _product(
        self, sources: Sequence[str], group: tuple[str, ...], times: Callable[[Value, Value], Value]
    ) -> Linear:
        dependent = [source for source in sources if self.reached(source) & set(group)]
        if len(dependent) != 1 or len(sources) != 2:
            raise OtherForm
        (other,) = [source for source in sources if source != dependent[0]]
        factor = self.leaf(other)
        return self._scaled(self.linear(dependent[0], group), lambda value: times(value, factor))

    @staticmethod
    def _combined(function: Callable[[Value, Value], Value], left: Linear, right: Linear) -> Linear:
        names = dict.fromkeys((*left.factors, *right.factors))
        factors = {name: function(left.factors.get(name, 0.0), right.factors.get(name, 0.0)) for name in names}
        return Linear(factors, function(left.constant, right.constant))

    @staticmethod
    def _scaled(update: Linear, function: Callable[[Value], Value]) -> Linear:
        return Linear({name: function(value) for name, value in update.factors.items()}, function(update.constant))

    def keeps_dtype(self, prim: Prim) -> bool:
        """Whether a cast changes nothing in a kernel: 16-bit floats are computed in float32."""
        source = self.prims[prim.inputs[0]].dtype
        rounds = source != prim.dtype and prim.dtype in ("float16", "bfloat16")
        return compute_dtype(source) == compute_dtype(prim.dtype) and not rounds

    # Running maxima and minima -----------------------------------------------------------------------------------

    def _extreme(self, prim: str, fn: str) -> Recurrence:
        item = self.states[prim]
        if item.type.dtype == "bool":
            raise OtherForm
        update = self._extremum(self.next(prim), prim, fn)
        if update.distance is None or update.constant is None:
            raise OtherForm
        plain, shifted = EXTREMES[fn]
        if update.distance == 0 and plain is not None:
            return Recurrence(plain, (item,), (update.constant,), self._level((update.constant,)))
        if not is_float(item.type.dtype):
            raise OtherForm
        pair = (update.distance, update.constant)
        return Recurrence(shifted, (item,), pair, self._level(pair))

    def _extremum(self, name: str, state: str, fn: str) -> _Extreme:
        if name == state:
            return _Extreme(0.0, None)
        if state not in self.reached(name):
            return _Extreme(None, self.leaf(name))
        prim = self.prims[name]
        if prim.op in PASSED_THROUGH or (prim.fn == "cast" and self.keeps_dtype(prim)) or prim.fn == "rounded":
            return self._extremum(prim.inputs[0], state, fn)
        if prim.op is not PrimOp.POINTWISE:
            raise OtherForm
        operands = log_add_exp_operands(self.prims, prim) if fn == LOG_ADD_EXP else prim.inputs
        if operands is not None and (fn == LOG_ADD_EXP or prim.fn == fn):
            left, right = (self._extremum(source, state, fn) for source in operands)
            if fn == LOG_ADD_EXP and (left.distance is None) == (right.distance is None):
                raise OtherForm
            return _Extreme(_either(fn, left.distance, right.distance), _either(fn, left.constant, right.constant))
        if prim.fn == "relu" and fn == "maximum":
            inner = self._extremum(prim.inputs[0], state, fn)
            return _Extreme(inner.distance, _either(fn, inner.constant, 0.0))
        if prim.fn in ("add", "sub"):
            first, second = prim.inputs
            if prim.fn == "add" and state in self.reached(second):
                first, second = second, first
            if state in self.reached(second):
                raise OtherForm
            step, move = self.leaf(second), add if prim.fn == "add" else subtract
            inner = self._extremum(first, state, fn)
            return _Extreme(
                *(None if value is None else move(value, step) for value in (inner.distance, inner.constant))
            )
        raise OtherForm


LOG_ADD_EXP = "logaddexp"
EXTREMES = {
    "maximum": (ScanKind.MAX, ScanKind.MAX_PLUS),
    "minimum": (ScanKind.MIN, ScanKind.MIN_PLUS),
    LOG_ADD_EXP: (None, ScanKind.LOG_ADD_EXP),
}
"""For each function of two operands over which addition distributes, the kinds of its updates without and with an addition."""
BOOLEAN = {
    "where": "where", "cast": "cast", "logical_or": "or", "bitwise_or": "or", "logical_and": "and", "bitwise_and": "and",
}  # fmt: skip
"""Functions of booleans that are linear in each operand, with *or* as the sum and *and* as the product."""


def _either(fn: str, left: Value | None, right: Value | None) -> Value | None:
    if left is None or right is None:
        return right if left is None else left
    return Term(fn, (left, right))
