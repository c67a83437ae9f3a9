"""The products of a chunk of iterations: decays, scores of queries and keys, corrected values, and reads of the states."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from mtmc_lsp.codegen.kernel.snippets import PRODUCT, Code, literal
from mtmc_lsp.codegen.loop.chunks.chunk_tiles import ChunkTiles
from mtmc_lsp.core.graph import TensorType
from mtmc_lsp.ir.axes import Axis
from mtmc_lsp.ir.loops.chunks import ChunkForm, Correction, GateKind, Memory, Read
from mtmc_lsp.ir.loops.coefficients import Leaf, Value
from mtmc_lsp.ir.loops.form import LoopForm
from mtmc_lsp.ir.primitives import PrimOp
from mtmc_lsp.schedule.configs import LoopConfig

ZERO_LOG = -1e5
"""The logarithm that stands for a gate of zero: its exponential is exactly zero, and sums of it stay precise in float64."""
MOST_DECAY = 60.0
"""Most distance of the logarithms of decays per channel of the key from the middle of their range: the exponentials of both
signs, times an operand, are normal float32 numbers."""


@dataclass(frozen=True)
class _Decay:
    """Variables of a gate in a chunk; all are empty for a gate of one."""

    kind: GateKind
    log: str = ""
    """Logarithm of the gate."""
    sum: str = ""
    """Its sum over the iterations of the chunk up to each one."""
    total: str = ""
    """Its sum over the chunk."""
    row: str = ""
    """``sum`` of a scalar gate along the second dimension."""

    def at(self, is_after: bool) -> str:
        """The sum up to each iteration, or up to the one before."""
        return self.sum if is_after else f"{self.sum} - {self.log}"


class ChunkProducts(ChunkTiles):
    """Writes the statements of a chunk."""

    def __init__(
        self,
        form: LoopForm,
        chunk: ChunkForm,
        types: Sequence[TensorType],
        config: LoopConfig,
        wide: frozenset[Axis],
        precision: str,
    ) -> None:
        super().__init__(form, chunk, types, config, wide)
        unique = self.parameters.names.unique
        self.unsafe, self.far, self.flag, self.flags_pointer, self.order = (
            unique(name) for name in ("unsafe", "far", "flag", "flags_ptr", "order")
        )
        self.precision = precision
        self.states: dict[str, str] = {}
        """Primitives of states to their variables."""
        self._memories = {item.prim: item for item in chunk.memories}
        self._decays: dict[Value, _Decay] = {}
        self._tiles: dict[tuple[str, Value], str] = {}
        self._variables: dict[str, str] = {}
        """Variables by their expressions, so that reads share them."""
        self._values: dict[str, str] = {}
        """Primitives of states to the variables of the values that the chunk adds."""

    def write_chunk(self) -> None:
        """Emit the reads of a chunk."""
        for memory in self.chunk.memories:
            self._decay(memory)
        for read in self.chunk.reads:
            memory = self._memories[read.state]
            is_correction = memory.correction is not None and memory.correction.read == read.prim
            if is_correction:
                self._value_of(memory)
            else:
                self._hold_read(read, self._read(read, memory))

    def carry(self) -> None:
        """Emit the states after the chunk."""
        for memory in self.chunk.memories:
            state, decay = self.states[memory.prim], self._decay(memory)
            key, kept = self._key_of(memory), state
            if decay.kind is not GateKind.NONE:
                key = f"{key} * {_exp(f'{decay.total} - {decay.sum}')}"
                total = decay.total
                if decay.kind is GateKind.KEY and memory.has_values:
                    total = f"tl.trans({total})"
                kept = f"{state} * {_exp(total)}"
            if memory.has_values:
                added = self._dot(f"tl.trans({key})", self._value_of(memory))
            else:
                added = f"tl.sum({key}, axis=0, keep_dims=True)"
            self.lines.append(f"{state} = {kept} + {added}")

    # Operands -------------------------------------------------------------------------------------------------------

    def _variable(self, text: str, name: str) -> str:
        """A variable for an expression, the same one each time."""
        if text.isidentifier():
            return text
        if text not in self._variables:
            self._variables[text] = self.parameters.names.unique(name)
            self.lines.append(f"{self._variables[text]} = {text}")
        return self._variables[text]

    def _tile(self, value: Value, word: str) -> str:
        """A whole tile of keys, queries or values, with zeros outside of the chunk."""
        if (word, value) not in self._tiles:
            is_value = word in ("value", "constant")
            block, mask = ("BLOCK", self.value_mask) if is_value else ("KEYS", self.key_mask)
            code = self.of(value)
            text = code.text
            if not (code.rows and code.cols and self.is_loaded(value)):
                if not code.cols:
                    shape = f"[{'ROWS' if code.rows else 1}, {block}]"
                    has_shape = code.rows or code.cols
                    text = f"tl.broadcast_to({text}, {shape})" if has_shape else f"tl.full({shape}, {text}, tl.float32)"
                text = f"tl.where(row_mask{f' & {mask}' if mask else ''}, {text}, 0.0)"
            self._tiles[word, value] = self._variable(text, word)
        return self._tiles[word, value]

    def _key_of(self, memory: Memory) -> str:
        return self._tile(memory.key, "key")

    def _value_of(self, memory: Memory) -> str:
        """The values that the chunk adds to a state."""
        if memory.prim not in self._values:
            correction = memory.correction
            text = self._tile(memory.value, "value") if correction is None else self._corrected(memory, correction)
            self._values[memory.prim] = text
        return self._values[memory.prim]

    def _dot(self, left: str, right: str) -> str:
        return f'tl.dot({left}, {right}, input_precision="{self.precision}")'

    # Decays ---------------------------------------------------------------------------------------------------------

    def _decay(self, memory: Memory) -> _Decay:
        """Emit the decays of a memory's gate."""
        if memory.gate not in self._decays:
            self._decays[memory.gate] = self._new_decay(memory)
        return self._decays[memory.gate]

    def _new_decay(self, memory: Memory) -> _Decay:
        if memory.gate_kind is GateKind.NONE:
            return _Decay(GateKind.NONE)
        unique, is_key = self.parameters.names.unique, memory.gate_kind is GateKind.KEY
        log, total, whole = unique("log_gate"), unique("log_decay"), unique("log_total")
        mask = f"row_mask & {self.key_mask}" if is_key and self.key_mask else "row_mask"
        self.lines.append(f"{log} = tl.where({mask}, {self._log(memory.gate)}, 0.0)")
        if is_key:
            self.lines.append(f"{total} = tl.cumsum({log}, axis=0)")
        else:
            # Triton 3.6 does not compile scans of a column whose transpose is read.
            sums = unique("decays")
            self.lines += [f"{sums} = tl.cumsum(tl.reshape({log}, [ROWS]), axis=0)", f"{total} = {sums}[:, None]"]
        self.lines.append(f"{whole} = tl.sum({log}, axis=0, keep_dims=True)")
        if is_key:
            self.lines.append(f"{self.far} = {self.far} | (tl.abs({total} - {whole} / 2) > {MOST_DECAY})")
        return _Decay(memory.gate_kind, log, total, whole, "" if is_key else f"{sums}[None, :]")

    def _log(self, gate: Value) -> str:
        """The logarithm of a gate in float64."""
        if isinstance(gate, (int, float)):
            return literal(math.log(gate))
        if isinstance(gate, Leaf):
            prim = self.stripped(gate.prim)
            if prim.op is PrimOp.POINTWISE and prim.fn == "exp":
                # The operand of the exponential is more precise than its logarithm.
                name = self._variable(self._as_float64(self.leaf(prim.inputs[0])), "exponent")
                return f"tl.where({name} < {ZERO_LOG}, {ZERO_LOG}, {name})"
        name = self._variable(self._as_float64(self.of(gate)), "gate")
        return f"tl.where({name} == 0.0, {ZERO_LOG}, tl.log({name}))"

    def _as_float64(self, code: Code) -> str:
        return self.step.cast(self.step.cast(code, "float32"), "float64").text

    # Reads ----------------------------------------------------------------------------------------------------------

    def _scores(self, query: str, key: str, decay: _Decay, is_after: bool) -> str:
        """The products of queries and keys within the chunk, with the decays between their iterations."""
        if decay.kind is GateKind.KEY:
            query = f"{query} * {_exp(f'{decay.at(is_after)} - {decay.total} / 2')}"
            key = f"{key} * {_exp(f'{decay.total} / 2 - {decay.sum}')}"
        text = self._dot(query, f"tl.trans({key})")
        if decay.kind is GateKind.SCALAR:
            text = f"{text} * {_exp(f'{decay.at(is_after)} - {decay.row}')}"
        comparison, name = (">=", "is_past") if is_after else (">", "is_before")
        mask = self._order(f"{self.order}[:, None] {comparison} {self.order}[None, :]", name)
        return self._variable(f"tl.where({mask}, {text}, 0.0)", "scores")

    def _order(self, text: str, name: str) -> str:
        """A condition on two iterations of the chunk, in front of the loop."""
        if text not in self._variables:
            if self.order not in self._variables:
                self._variables[self.order] = self.order
                self.before.append(f"{self.order} = tl.arange(0, ROWS)")
            self._variables[text] = self.parameters.names.unique(name)
            self.before.append(f"{self._variables[text]} = {text}")
        return self._variables[text]

    def _entering(self, query: str, state: str, decay: _Decay, is_after: bool, has_values: bool) -> str:
        """What the queries read of the state in front of the chunk."""
        if decay.kind is not GateKind.NONE:
            query = f"{query} * {_exp(decay.at(is_after))}"
        return self._dot(query, state) if has_values else f"tl.sum({query} * {state}, axis=1, keep_dims=True)"

    def _read(self, read: Read, memory: Memory) -> str:
        """A read of all iterations of the chunk, as an expression."""
        query, decay, state = self._tile(read.query, "query"), self._decay(memory), self.states[memory.prim]
        value = self._value_of(memory) if memory.has_values else ""
        scores = self._scores(query, self._key_of(memory), decay, read.is_after)
        within = self._dot(scores, value) if value else f"tl.sum({scores}, axis=1, keep_dims=True)"
        terms = [within, self._entering(query, state, decay, read.is_after, memory.has_values)]
        key, extra = read.extra
        if key != 0:
            products = f"tl.sum({self._tile(key, 'products')}, axis=1, keep_dims=True)"
            factor = self.of(extra)
            terms.append(products if extra == 1 else f"{products} * {factor.at(PRODUCT)}")
        return " + ".join(terms)

    def _hold_read(self, read: Read, text: str) -> str:
        """Emit a read and its check, and set its primitive; returns its variable."""
        name = self.parameters.names.unique("read")
        self.lines.append(f"{name} = {text}")
        self.lines.append(f'{self.unsafe} = {self.unsafe} | (~(tl.abs({name}) < float("inf")) & row_mask)')
        side = self.side_of(read.prim)
        has_values = self.chunk.values in self.region.table.all_axes(read.prim)
        side.held[read.prim] = side.tile_index(read.prim), Code(name, "float32", True, has_values)
        return name

    # Delta rules ----------------------------------------------------------------------------------------------------

    def _corrected(self, memory: Memory, correction: Correction) -> str:
        """Emit the values of a delta rule: the solution of a triangular system, by forward substitution.

        The value of an iteration is ``constant + weight * (read of the entering state + sum of factors * earlier values)``.
        """
        (read,) = [item for item in self.chunk.reads if item.prim == correction.read]
        decay, key = self._decay(memory), self._key_of(memory)
        query = self._tile(read.query, "query")
        scores = self._scores(query, key, decay, is_after=False)
        weight = self.of(correction.weight)
        constant = self._tile(correction.constant, "constant")
        entering = self._entering(query, self.states[memory.prim], decay, is_after=False, has_values=True)
        unique = self.parameters.names.unique
        entered, value, factors, row, at = (unique(n) for n in ("entered", "value", "factors", "row", "at"))
        self.lines += [
            f"{entered} = {entering}",
            f"{value} = {constant} + {weight.at(PRODUCT)} * {entered}",
            f"{factors} = tl.trans({weight.at(PRODUCT)} * {scores})",
            f"for {at} in range(1, ROWS):",
            f"    {row} = tl.sum(tl.where({self.order}[None, :] == {at}, {factors}, 0.0), axis=1, keep_dims=True)",
            f"    {row} = tl.sum({row} * {value}, axis=0, keep_dims=True)",
            f"    {value} = tl.where({self.order}[:, None] == {at}, {value} + {row}, {value})",
        ]
        self._hold_read(read, f"{entered} + {self._dot(scores, value)}")
        return value


def _exp(text: str) -> str:
    """The exponential of an expression in float64, in float32."""
    return f"tl.exp(({text}).to(tl.float32))" if not text.isidentifier() else f"tl.exp({text}.to(tl.float32))"
