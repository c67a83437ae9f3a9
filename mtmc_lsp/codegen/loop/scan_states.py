"""The states of a loop that runs as scans: their updates, and their values before and after each step of a chunk."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from mtmc_lsp.codegen.kernel.formulas import render
from mtmc_lsp.codegen.kernel.snippets import LINE, TRITON_DTYPES, Code, joined
from mtmc_lsp.codegen.loop.compositions import (
    applied_texts,
    composed_texts,
    composition_of,
    neutral_texts,
    number_text,
    scan_dtype,
)
from mtmc_lsp.codegen.loop.scan_tile import ScanTile
from mtmc_lsp.core.dtypes import compute_dtype
from mtmc_lsp.core.loop import LoopInput
from mtmc_lsp.ir.loops.coefficients import Leaf, Term, Value
from mtmc_lsp.ir.loops.scan import Recurrence, ScanKind

MOST_INDENT = 16
"""Of the arguments of a call within a chunk."""


class ScanStates(ScanTile):
    """Writes the scans of a chunk, and what one chunk leaves to the next."""

    # Between chunks -------------------------------------------------------------------------------------------------

    @staticmethod
    def _key(item: Recurrence) -> tuple[str, ...]:
        return tuple(state.name for state in item.states)

    def _declare_carried(self, item: Recurrence) -> None:
        """Emit the states in front of the program's first iteration."""
        for state in item.states:
            code = self._initial(state)
            self.carried[state.name] = code
            del self.tile.held[self.form.prim(state)]

    def _initial(self, item: LoopInput) -> Code:
        code = super()._initial(item)
        if not code.cols:
            # One element, but with the dimensions of the tile.
            assert self.lines[-1].startswith(f"{code.text} = ")
            value = self.lines.pop().partition(" = ")[2]
            if not value.startswith("tl.full([1, 1]"):
                value = f"tl.full([1, 1], {value}, {TRITON_DTYPES[code.dtype]})"
            self.lines.append(f"{code.text} = {value}")
        return code

    def _apply_segments(self, item: Recurrence) -> None:
        """Emit a loop that applies the updates of the segments in front of the program's, in order."""
        if self.segments == 1:
            return
        names = [self.carried[state.name] for state in item.states]
        dtype = scan_dtype(item)
        written = {scratch: pointer for pointer, scratch in self.written}
        loaded: list[str] = []
        lines, offset = self._update_offset(self.earlier, item)
        for scratch in self.updates.get(self._key(item), ()):
            pointer = written.get(scratch) or self.parameters.names.unique(f"{scratch.name}_ptr")
            variable = self.parameters.names.unique(scratch.name)
            if scratch not in written:
                self.read.append((pointer, scratch))
            mask = self._lane_mask(item)
            other = f", other={number_text(0.0, dtype)}" if mask else ""
            lines.append(f"{variable} = tl.load({pointer} + {offset}{mask}{other})")
            loaded.append(variable)
        if not loaded:
            # The first pass, which only collects accesses.
            return
        texts = self._applied(item, loaded, names)
        lines.append(f"{', '.join(code.text for code in names)} = {', '.join(texts)}")
        self.lines.append(f"for {self.earlier} in range(0, {self.segment}):")
        self.lines += [f"    {line}" for line in lines]

    def _carry_states(self, item: Recurrence) -> None:
        """Emit the states after the last step of the chunk."""
        for state in item.states:
            code = self.following[state.name]
            carried = self.carried[state.name].text
            self.lines.append(f"{carried} = {self._last_row(code)}")

    def _last_row(self, code: Code) -> str:
        """The last row of a tile that is an iteration."""
        return self._as_state(f"_row_of({self._as_number(code)}, {self.is_last})", code.dtype)

    def _declare_update(self, item: Recurrence) -> list[str]:
        """Emit an update that changes nothing; returns the variables of its components."""
        dtype, names = scan_dtype(item), composition_of(item).names
        variables = [self.parameters.names.unique(f"{item.states[0].name}_{name}") for name in names]
        shape = self._shape(item, "1")
        for variable, text in zip(variables, neutral_texts(item), strict=True):
            self.lines.append(f"{variable} = tl.full({shape}, {text}, {TRITON_DTYPES[dtype]})")
        return variables

    def _compose_chunk(self, item: Recurrence, parts: Sequence[str], total: Sequence[str]) -> None:
        """Emit the composition of the segment's update so far with that of the chunk.

        Args:
            parts: variables of the composed updates of the chunk.
            total: variables of the segment's update.
        """
        code = Code("", scan_dtype(item), True, self._varies(item))
        last = [self._last_row(replace(code, text=name)) for name in parts]
        names = [self.parameters.names.unique(f"chunk_{name}") for name in composition_of(item).names]
        self.lines += [f"{name} = {text}" for name, text in zip(names, last, strict=True)]
        head = f"{', '.join(total)} = "
        line = head + composed_texts(item, total, names)
        arguments = joined([f"{name}," for name in (*total, *names)], " ", LINE - MOST_INDENT)
        several = [f"{head}{composition_of(item).function}(", *(f"    {text}" for text in arguments), ")"]
        self.lines += [line] if len(line) <= LINE else several

    # Within a chunk -------------------------------------------------------------------------------------------------

    def _scan_states(
        self, item: Recurrence, checked: Sequence[Recurrence], composed: Sequence[str] | None = None
    ) -> None:
        """Emit the states after each step of the chunk, and before it where the body reads them.

        Args:
            checked: recurrences whose states may not be finite.
            composed: variables of the composed updates, if they are emitted already.
        """
        codes = [self.carried[state.name] for state in item.states]
        if item.kind is ScanKind.SHIFT:
            results = [self._components_of_shift(item)]
        else:
            composed = composed or self._composed(item)
            results = self._applied(item, composed, codes)
        following = []
        for state, text, code in zip(item.states, results, codes, strict=True):
            name = text if text.isidentifier() else self._following_name(state)
            if name != text:
                self.lines.append(f"{name} = {text}")
            following.append(Code(name, code.dtype, True, code.cols))
        self.following |= {state.name: code for state, code in zip(item.states, following, strict=True)}
        for state, code in zip(item.states, following, strict=True):
            assert state.next is not None
            prim = self.ir.of(state.next).name
            self.tile.held.setdefault(prim, (self.tile.tile_index(prim), code))
        for state, code in zip(item.states, following, strict=True):
            if state.name in self.scan.previous and self.form.prim(state) not in self.tile.held:
                self._shift(state, code)
        if item in checked:
            self._check(item, [code.text for code in following], composed or ())

    def _components(self, item: Recurrence) -> list[str]:
        """Emit the coefficients of an update for all steps of the chunk; returns their variables."""
        dtype, values = scan_dtype(item), list(item.coefficients)
        names = composition_of(item).names
        if item.kind is ScanKind.SHIFT:
            values.insert(0, 0.0)
        shape = self._shape(item, "ROWS")
        variables = []
        for name, value in zip(names, values, strict=True):
            code = self._value(value, dtype)
            is_full = code.rows and (code.cols or not self._varies(item))
            if not is_full:
                has_shape = code.rows or code.cols
                text = (
                    f"tl.broadcast_to({code.text}, {shape})"
                    if has_shape
                    else f"tl.full({shape}, {code.text}, {TRITON_DTYPES[dtype]})"
                )
                code = replace(code, text=text)
            if not code.text.isidentifier():
                code = self.tile.assign(code, f"{item.states[0].name}_{name}")
            variables.append(code.text)
        return variables

    def _value(self, value: Value, dtype: str) -> Code:
        """A coefficient as an expression."""
        if isinstance(value, Leaf):
            return self.tile.cast(self.tile.value(value.prim, self.tile.tile_index(value.prim)), dtype)
        if not isinstance(value, Term):
            return Code(number_text(value, dtype), dtype)
        if value.fn == "where":
            condition, *branches = value.args
            operands = [self._value(condition, "bool"), *(self._value(item, dtype) for item in branches)]
        else:
            operands = [self._value(item, dtype) for item in value.args]
        fn = {"logical_or": "bitwise_or", "logical_and": "bitwise_and"}.get(value.fn, value.fn)
        text, precedence = render(fn, operands, {}, dtype)
        return Code(text, dtype, any(o.rows for o in operands), any(o.cols for o in operands), precedence)

    def _composed(self, item: Recurrence) -> list[str]:
        """Emit the scan of a chunk; returns the variables of the composed updates."""
        components, unique = self._components(item), self.parameters.names.unique
        form, state = composition_of(item), item.states[0].name
        names = [unique(f"{state}_{name}") for name in form.names]
        several = len(components) > 1
        operand = f"({', '.join(components)})" if several else components[0]
        self.lines.append(f"{', '.join(names)} = tl.associative_scan({operand}, 0, {form.function})")
        return names

    def _components_of_shift(self, item: Recurrence) -> str:
        (code,) = (self._value(value, scan_dtype(item)) for value in item.coefficients)
        state = item.states[0]
        if not code.rows or code.cols != self._varies(item):
            shape = self._shape(item, "ROWS")
            whole = f"tl.full({shape}, {code.text}, {TRITON_DTYPES[code.dtype]})"
            code = replace(code, text=f"tl.broadcast_to({code.text}, {shape})" if code.rows or code.cols else whole)
        return self._as_state(code.text, compute_dtype(state.type.dtype))

    def _following_name(self, state: LoopInput) -> str:
        assert state.next is not None
        node = self.ir.graph.named.get(state.next.name)
        return self.parameters.names.unique((node.variable if node is not None else "") or state.name)

    def _shift(self, state: LoopInput, code: Code) -> None:
        """Emit the state before each step: that after the step before, or the carried one."""
        name, carried = self.parameters.names.unique(f"{state.name}_before"), self.carried[state.name].text
        row = "tl.arange(0, ROWS)[:, None]"
        at = f"tl.broadcast_to(tl.maximum({row} - 1, 0), {self._shape(state, 'ROWS')})"
        value = self._as_number(code)
        shifted = self._as_state(f"tl.gather({value}, {at}, 0)", code.dtype)
        self.lines.append(f"{name} = tl.where({row} == 0, {carried}, {shifted})")
        self._hold(state, Code(name, code.dtype, True, code.cols))

    def _check(self, item: Recurrence, states: Sequence[str], composed: Sequence[str]) -> None:
        """Emit the check of a chunk: a coefficient that is not finite leaves no finite state, except in a maximum."""
        extremes = (ScanKind.MAX_PLUS, ScanKind.MIN_PLUS, ScanKind.LOG_ADD_EXP)
        texts = composed[:1] if item.kind in extremes else states
        masks = [mask.text for mask in self.masks if mask.rows or (mask.cols and self.col_groups)]
        masks = [self.chunk_mask] if self.has_chunk_mask else masks
        for text in texts:
            terms = [f'~(tl.abs({text}) < float("inf"))', *masks]
            self.lines.append(f"{self.unsafe} = {self.unsafe} | ({' & '.join(terms)})")

    # Dtypes ---------------------------------------------------------------------------------------------------------

    def _applied(self, item: Recurrence, components: Sequence[str], states: Sequence[Code]) -> list[str]:
        """The states after an update, in their dtype."""
        texts = applied_texts(item, components, [self._as_number(code) for code in states])
        if item.is_wide:
            return [f"({text}).to({TRITON_DTYPES[code.dtype]})" for text, code in zip(texts, states, strict=True)]
        return [self._as_state(text, code.dtype) for text, code in zip(texts, states, strict=True)]

    @staticmethod
    def _as_number(code: Code) -> str:
        return f"{code.text}.to(tl.int32)" if code.dtype == "bool" else code.text

    @staticmethod
    def _as_state(text: str, dtype: str) -> str:
        return f"({text}) != 0" if dtype == "bool" else text
