"""Loops whose state is a sum of outer products: linear attention, retention, state space duality, delta rules.

An iteration computes ``S = gate * S + key outer value`` and reads ``query @ S``. A chunk of iterations is then a few matrix
products: the reads inside a chunk are ``(query @ key^T, masked and scaled by the decays) @ value``, and the state enters a chunk
once (Yang et al., *Gated Linear Attention Transformers with Hardware-Efficient Training*, arXiv 2312.06635). In a delta rule, the
value also contains a read of the state. The values of a chunk then solve a triangular system (Yang et al., *Parallelizing Linear
Transformers with the Delta Rule over Sequence Length*, arXiv 2406.06484).

The form is read from the primitives of the body, not from names.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from functools import lru_cache

from mtmc_lsp.core.dtypes import compute_dtype
from mtmc_lsp.core.loop import LoopInput
from mtmc_lsp.ir.axes import Axis
from mtmc_lsp.ir.loops.coefficients import Leaf, Term, Value, divide, leaves, multiply, subtract, where
from mtmc_lsp.ir.loops.form import LoopForm
from mtmc_lsp.ir.loops.scan import PASSED_THROUGH, ById, OtherForm, UpdateSolver
from mtmc_lsp.ir.primitives import PrimOp
from mtmc_lsp.ir.regions import CannotFuse, RegionKind


class GateKind(Enum):
    """What the gate of a memory varies along, besides the batch and time."""

    NONE = "none"
    """The gate is 1."""
    SCALAR = "scalar"
    KEY = "key"
    """It has one element for each channel of the key."""


@dataclass(frozen=True)
class Read:
    """``sum(query * S)`` over the key, of the state before or after the iteration."""

    prim: str
    """The sum."""
    state: str
    """The primitive of the state."""
    query: Value
    is_after: bool
    """Whether it reads the state after the iteration."""
    extra: tuple[Value, Value]
    """Key and value of a further outer product, which is summed over the key and added; zero for none."""


@dataclass(frozen=True)
class Correction:
    """A value that contains a read of its state before the iteration: ``constant + weight * read``."""

    read: str
    weight: Value
    constant: Value


@dataclass(frozen=True)
class Memory:
    """A state ``S = gate * S + key outer value``; ``S = gate * S + key`` for a state without values."""

    state: LoopInput
    prim: str
    gate: Value
    gate_kind: GateKind
    key: Value
    value: Value
    has_values: bool
    """Whether the state varies along the axis of the values."""
    correction: Correction | None


@dataclass(frozen=True)
class ChunkForm:
    """A loop whose states are sums of outer products."""

    keys: Axis
    """The axis that keys and queries vary along, and that reads sum over."""
    values: Axis
    memories: tuple[Memory, ...]
    reads: tuple[Read, ...]

    @property
    def has_key_gates(self) -> bool:
        """Whether a gate has an element for each channel of the key."""
        return any(item.gate_kind is GateKind.KEY for item in self.memories)


def chunk_form(form: LoopForm) -> ChunkForm:
    """The outer products of a loop.

    Raises:
        CannotFuse: the loop is of another form; the message says why.
    """
    result = _solved(ById(form))
    if isinstance(result, str):
        raise CannotFuse(result)
    return result


def chunks_or_none(form: LoopForm) -> ChunkForm | None:
    """The outer products of a loop; ``None`` if it has another form."""
    result = _solved(ById(form))
    return result if isinstance(result, ChunkForm) else None


@lru_cache(maxsize=256)
def _solved(key: ById) -> ChunkForm | str:
    form = key.form
    if form.region.kind is not RegionKind.REDUCE or len(form.region.reduced_axes) != 1:
        return "an iteration does not read its state by sums over one axis"
    (keys,) = form.region.reduced_axes
    reason = ""
    for values in reversed(form.region.parallel_axes):
        try:
            return _ChunkSolver(form, keys, values).chunks()
        except CannotFuse as other:
            reason = reason or str(other)
    return reason or "the state has no axis of values"


class _ChunkSolver(UpdateSolver):
    """Solves the updates and reads of a loop's states."""

    def __init__(self, form: LoopForm, keys: Axis, values: Axis) -> None:
        super().__init__(form)
        self.keys, self.values = keys, values
        following = {self.next(prim) for prim in self.states}
        sums = {name for name in form.region.prims if self.prims[name].op is PrimOp.REDUCE}
        self.sums = {name for name in sums if self._depends(self.prims[name].inputs[0], set(self.states))}
        """Reads of states."""
        self.targets = {*self.states, *following, *self.sums}
        self.level = dict.fromkeys(self.sums, 0)

    def reached(self, name: str) -> frozenset[str]:
        """The states, next states and reads that a primitive depends on. The operands of a read count as the read alone."""
        if name not in self._reached:
            here = frozenset({name}) if name in self.targets else frozenset()
            is_end = name in self.form.region.inputs or name in self.sums
            inputs = () if is_end else self.prims[name].inputs
            self._reached[name] = here.union(*(self.reached(source) for source in inputs))
        return self._reached[name]

    def chunks(self) -> ChunkForm:
        """The form of the loop.

        Raises:
            CannotFuse: the loop has another one.
        """
        self._check_body()
        reads = tuple(self._read(name) for name in self.form.region.prims if name in self.sums)
        memories = tuple(self._memory(prim, item, reads) for prim, item in self.states.items())
        if not any(item.has_values for item in memories):
            raise CannotFuse("no state is a sum of outer products")
        for output in self.form.loop.outputs:
            if output.position is not None:
                name = self.form.ir.of(output.value).name
                if self.reached(name) - self.sums or {self.keys, self.values} <= self._axes(name):
                    raise CannotFuse("an iteration writes its state")
        return ChunkForm(self.keys, self.values, memories, reads)

    def _check_body(self) -> None:
        for name in self.form.region.prims:
            prim = self.prims[name]
            if prim.op is PrimOp.REDUCE and prim.fn != "sum":
                raise CannotFuse(f"an iteration contains a reduction by {prim.fn}")
            is_other = prim.op is PrimOp.REDUCE and name not in self.sums
            if is_other and (self.reached(prim.inputs[0]) or self.values in self._axes(prim.inputs[0])):
                raise CannotFuse("an iteration sums other values than reads of its state")
            if prim.op in (PrimOp.MATMUL, PrimOp.SCAN, PrimOp.RANDOM):
                raise CannotFuse(f"an iteration contains {prim.op.value}")

    # Reads ----------------------------------------------------------------------------------------------------------

    def _read(self, name: str) -> Read:
        operand = self.prims[name].inputs[0]
        states = self.reached(operand) & set(self.states)
        if len(states) != 1:
            raise CannotFuse("an iteration sums several states at once")
        (state,) = states
        for target in (self.next(state), state):
            try:
                update = self.linear(operand, (target,))
            except OtherForm:
                continue
            query = update.factors.get(target, 0.0)
            extra = (0.0, 0.0) if update.constant == 0 else self._split(update.constant)
            self._check_key(query, "query")
            self._check_key(extra[0], "query")
            return Read(name, state, query, target != state, extra)
        raise CannotFuse(f"a sum is not linear in {self.states[state].name}")

    # Updates --------------------------------------------------------------------------------------------------------

    def _memory(self, prim: str, item: LoopInput, reads: tuple[Read, ...]) -> Memory:
        if compute_dtype(item.type.dtype) != "float32":
            raise CannotFuse(f"{item.name} is {item.type.dtype}; chunks are computed in float32")
        try:
            update = self.linear(self.next(prim), (prim,))
        except OtherForm:
            raise CannotFuse(f"the update of {item.name} is not affine in it") from None
        gate = update.factors.get(prim, 0.0)
        if isinstance(gate, (int, float)) and gate < 0:
            raise CannotFuse(f"the gate of {item.name} is negative")
        if gate == 0 or update.constant == 0:
            raise CannotFuse(f"the update of {item.name} adds no outer product")
        axes = set(self.form.region.table.all_axes(self.next(prim)))
        if self.keys not in axes:
            raise CannotFuse(f"{item.name} has no axis that reads sum over")
        self._check_key(gate, "gate")
        key, value = self._split(update.constant)
        self._check_key(key, "key")
        kind = GateKind.KEY if self.keys in self._varies(gate) else GateKind.SCALAR
        return Memory(
            item,
            prim,
            gate,
            GateKind.NONE if gate == 1 else kind,
            key,
            value,
            self.values in axes,
            self._correction(prim, value, reads),
        )

    def _correction(self, prim: str, value: Value, reads: tuple[Read, ...]) -> Correction | None:
        inside = {read for name in leaves(value) for read in self.reached(name)}
        if not inside:
            return None
        ours = [read for read in reads if read.prim in inside and read.state == prim and not read.is_after]
        if len(inside) != 1 or len(ours) != 1 or not isinstance(value, Leaf) or ours[0].extra != (0.0, 0.0):
            raise CannotFuse("the update reads several states, or a state in another way than a delta rule")
        try:
            update = self.linear(value.prim, (ours[0].prim,))
        except OtherForm:
            raise CannotFuse("the update is not linear in what it reads of the state") from None
        weight = update.factors.get(ours[0].prim, 0.0)
        if self._varies(weight) & {self.keys, self.values}:
            raise CannotFuse("the update weighs each element that it reads of the state")
        return Correction(ours[0].prim, weight, update.constant)

    # Outer products -------------------------------------------------------------------------------------------------

    def _split(self, value: Value) -> tuple[Value, Value]:
        """A product as a factor without the axis of the values, and one without that of the keys."""
        axes = self._varies(value)
        if self.values not in axes and not any(self.reached(name) for name in leaves(value)):
            return value, 1.0
        if self.keys not in axes:
            return 1.0, value
        fn, args, number = self._parts(value)
        if fn == "mul":
            (left_key, left), (right_key, right) = (self._split(item) for item in args)
            return multiply(left_key, right_key), multiply(left, right)
        if fn in ("neg", "cast", "times_reciprocal"):
            key, inner = self._split(args[0])
            return (subtract(0.0, key) if fn == "neg" else multiply(key, number)), inner
        if fn == "div":
            key, inner = self._split(args[0])
            if self.values not in self._varies(args[1]):
                return divide(key, args[1]), inner
            if self.keys not in self._varies(args[1]):
                return key, divide(inner, args[1])
        if fn == "where" and args[2] == 0:
            key, inner = self._split(args[1])
            if self.values not in self._varies(args[0]):
                return where(args[0], key, 0.0), inner
            if self.keys not in self._varies(args[0]):
                return key, where(args[0], inner, 0.0)
        raise CannotFuse("the update adds no outer product to the state")

    def _parts(self, value: Value) -> tuple[str, tuple[Value, ...], float]:
        """The function of a product, its operands, and the number that it multiplies by."""
        if isinstance(value, Term):
            return value.fn, value.args, 1.0
        assert isinstance(value, Leaf)
        prim = self.prims[value.prim]
        while prim.op in PASSED_THROUGH and prim.name not in self.form.region.inputs:
            prim = self.prims[prim.inputs[0]]
        if prim.op is not PrimOp.POINTWISE or prim.name in self.form.region.inputs:
            raise CannotFuse("the update adds no outer product to the state")
        if prim.fn == "cast" and not self.keeps_dtype(prim):
            raise CannotFuse("the update rounds the outer product that it adds to the state")
        fn = "cast" if prim.fn == "rounded" else prim.fn
        number = float(str(prim.attrs["reciprocal"])) if fn == "times_reciprocal" else 1.0
        try:
            return fn, tuple(self.leaf(source) for source in prim.inputs), number
        except OtherForm:
            raise CannotFuse("the update adds no outer product to the state") from None

    def _check_key(self, value: Value, word: str) -> None:
        """Reject a key, query or gate that varies along the values or depends on a state."""
        names = list(leaves(value))
        if self.values in self._varies(value):
            raise CannotFuse(f"the {word} varies along the values")
        if any(self.reached(name) for name in names):
            raise CannotFuse(f"the {word} depends on the state")

    # Axes -----------------------------------------------------------------------------------------------------------

    def _varies(self, value: Value) -> frozenset[Axis]:
        return frozenset(axis for name in leaves(value) for axis in self._axes(name))

    def _axes(self, name: str) -> frozenset[Axis]:
        """The axes of a primitive, without those of an expanded view."""
        prim = self.prims[name]
        while prim.op in PASSED_THROUGH and prim.name not in self.form.region.inputs:
            prim = self.prims[prim.inputs[0]]
        return frozenset(self.form.region.table.all_axes(prim.name))

    def _depends(self, name: str, on: set[str]) -> bool:
        """Whether a primitive depends on others, also through reads."""
        pending, seen = [name], set()
        while pending:
            current = pending.pop()
            if current in on:
                return True
            if current not in seen and current not in self.form.region.inputs:
                seen.add(current)
                pending += self.prims[current].inputs
        return False
