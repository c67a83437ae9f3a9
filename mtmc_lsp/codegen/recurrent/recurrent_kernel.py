"""The kernel of recurrent layers: one launch makes the steps that do not wait for one another.

Why these may run at once, and where states lie, is said in :mod:`mtmc_lsp.ir.recurrence`. A program makes all gates of a
block of units for a block of the batch: the part of the input (for the first layer that of the whole sequence was computed
before), the part of the last state, and what the cell makes of them. Its tile has the gates of one unit side by side, so that
one product serves all of them. A GRU's tile has four columns for each unit too: what its new state takes of the input, and what
of the last state, which is reset before the two are added.
"""

from __future__ import annotations

from dataclasses import dataclass

from mtmc_lsp.codegen.kernel.snippets import TRITON_DTYPES
from mtmc_lsp.core.dtypes import is_half
from mtmc_lsp.ir.recurrence import Recurrence
from mtmc_lsp.schedule.configs import RecurrentConfig
from mtmc_lsp.schedule.recurrent_configs import is_added_up, units_of

OF_STATE, OF_INPUT = "gate != 2", "gate != 3"
"""The columns of a GRU's tile that take of the last state, and those that take of the input."""


@dataclass(frozen=True)
class RecurrentKernel:
    """What decides a kernel's text."""

    form: Recurrence
    dtype: str
    config: RecurrentConfig
    gives_sequence: bool
    """Whether somebody reads what the last layer gives at each step."""

    @property
    def climbs(self) -> bool:
        """Whether a launch holds layers above the first."""
        return self.form.directions == 1 and self.form.layers > 1

    @property
    def writes_sequence(self) -> bool:
        """Whether the result of each step is written beside the states."""
        return self.gives_sequence or self.form.directions == 2

    def pointers(self) -> list[str]:
        """Parameters that are pointers, in order."""
        biases = self.form.has_biases
        named = {
            "gates_ptr": True,
            "weight_ih_ptr": self.climbs,
            "weight_hh_ptr": True,
            "bias_ih_ptr": biases,
            "bias_hh_ptr": biases,
            "hidden_ptr": True,
            "memory_ptr": self.form.cell == "lstm",
            "steps_ptr": self.writes_sequence,
        }
        return [name for name, is_there in named.items() if is_there]

    def constexprs(self) -> dict[str, int]:
        """Constants of the kernel."""
        config = self.config
        return {
            "LINES": self.form.parallel_layers,
            "HIDDEN": self.form.hidden,
            "BLOCK_B": config.block_m,
            "BLOCK_H": units_of(self.form, config),
            "BLOCK_K": config.block_k,
        }

    def body(self) -> list[str]:
        """Statements."""
        wide = TRITON_DTYPES["float32" if is_half(self.dtype) else self.dtype]
        shape = f"(BLOCK_B, {self._width}, BLOCK_K)" if self._adds_up else f"(BLOCK_B, {self._width})"
        lines = [*self._place(), "", f"acc = tl.zeros({shape}, {wide})"]
        lines.append("previous_ptr = hidden_ptr + (step % 2 * LINES + line) * state")
        lines += self._product("previous", "weight_hh_ptr", "line", OF_STATE)
        if self.climbs:
            above = ["below_ptr = hidden_ptr + ((step + 1) % 2 * LINES + line - 1) * state"]
            above += self._product("below", "weight_ih_ptr", "(line - 1)", OF_INPUT)
            lines += ["if line > 0:", *(f"    {text}" for text in above)]
        if self._adds_up:
            lines.append("acc = tl.sum(acc, 2)")
        return [*lines, *self._added(), "", *self._cell(), "", *self._stores()]

    # Parts -------------------------------------------------------------------------------------------------------

    @property
    def _is_gru(self) -> bool:
        return self.form.cell == "gru"

    @property
    def _width(self) -> str:
        """The tile's columns."""
        return "BLOCK_H" if self.form.gates == 1 else "4 * BLOCK_H"

    @property
    def _adds_up(self) -> bool:
        """Whether products are made by units of plain arithmetic, in registers, and added up at the end."""
        return is_added_up(self.dtype, self.config.precision)

    @property
    def _fills_units(self) -> bool:
        """Whether blocks of units end with the units."""
        return self.form.hidden % units_of(self.form, self.config) == 0

    def _column_mask(self, part: str) -> str:
        """Which columns of the tile take part; empty for all."""
        found = [*([] if self._fills_units else ["unit < HIDDEN"]), *([part] if self._is_gru else [])]
        return found[0] if len(found) == 1 else " & ".join(f"({text})" for text in found)

    def _place(self) -> list[str]:
        """Which step of which line a program makes, and which part of it."""
        form = self.form
        lines = ["line = tl.program_id(1)"]
        if self.climbs:
            # Layers start one after another.
            lines += ["step = diagonal - line", "if (step < 0) | (step >= n_steps):", "    return"]
        units = "tl.program_id(0) * BLOCK_H + tl.arange(0, BLOCK_H)"
        if form.gates == 1:
            lines += [f"units = {units}", "unit = units", "row = units"]
        else:
            row = "tl.minimum(gate, 2)" if self._is_gru else "gate"
            lines += [
                "# The gates of a unit are side by side in a tile.",
                "gate = tl.arange(0, 4 * BLOCK_H) % 4",
                "unit = tl.program_id(0) * BLOCK_H + tl.arange(0, 4 * BLOCK_H) // 4",
                f"row = {row} * HIDDEN + unit",
                f"units = {units}",
            ]
        return [
            *lines,
            "batch = tl.program_id(2) * BLOCK_B + tl.arange(0, BLOCK_B)",
            "batch_mask = (batch < n_batch)[:, None]",
            f"mask = batch_mask{'' if self._fills_units else ' & (units < HIDDEN)[None, :]'}",
            "# One line's state, and this program's part of it.",
            "state = n_batch * HIDDEN",
            "own = batch[:, None] * HIDDEN + units[None, :]",
        ]

    def _product(self, source: str, weights: str, line: str, part: str) -> list[str]:
        """``acc += source @ weights.T`` over the units of a state."""
        # Dimensions of a tile of the state, and of one of the weights.
        rows, row_k, columns, column_k = "[:, None]", "[None, :]", "[None, :]", "[:, None]"
        batch_mask = "batch_mask"
        if self._adds_up:
            rows, row_k, columns, column_k = "[:, None, None]", "[None, None, :]", "[None, :, None]", "[None, None, :]"
            batch_mask = "batch_mask[:, :, None]"
        exact = self.form.hidden % self.config.block_k == 0
        own = self._column_mask(part)
        masks = [*([f"({own}){columns}"] if own else []), *([] if exact else [f"(k < HIDDEN){column_k}"])]
        weight_mask = f", mask={' & '.join(masks)}, other=0.0" if masks else ""
        source_mask = batch_mask if exact else f"{batch_mask} & (k < HIDDEN){row_k}"
        precision = f', input_precision="{self.config.precision.value}"' if self.dtype == "float32" else ""
        product = f"acc += {source} * weight" if self._adds_up else f"acc = tl.dot({source}, weight, acc{precision})"
        return [
            f"rows_ptr = {weights} + {line}.to(tl.int64) * ({self.form.gates} * HIDDEN * HIDDEN) + row * HIDDEN",
            "for start in range(0, HIDDEN, BLOCK_K):",
            "    k = start + tl.arange(0, BLOCK_K)",
            f"    {source} = tl.load({source}_ptr + batch{rows} * HIDDEN + k{row_k}, mask={source_mask}, other=0.0)",
            f"    weight = tl.load(rows_ptr{columns} + k{column_k}{weight_mask})",
            f"    {product}",
        ]

    def _added(self) -> list[str]:
        """The first layer's part of the input, and the biases."""
        of_input, of_state = self._column_mask(OF_INPUT), self._column_mask(OF_STATE)
        place = "step"
        lines: list[str] = []
        if self.form.directions == 2:
            place = "place"
            lines.append("place = tl.where(line == 0, step, n_steps - 1 - step)")
        mask = (
            "batch_mask" + (f" & ({of_input})[None, :]" if of_input else "") + (" & (line == 0)" if self.climbs else "")
        )
        shift = "" if self.form.directions == 1 else f" + line * ({self.form.gates} * HIDDEN)"
        lines += [
            f"gates_ptr += {place}.to(tl.int64) * step_stride{shift}",
            f"acc += tl.load(gates_ptr + batch[:, None] * batch_stride + row[None, :], mask={mask}, other=0.0)",
        ]
        if self.form.has_biases:
            lines.append(f"row += line * ({self.form.gates} * HIDDEN)")
            for name, part in (("bias_ih_ptr", of_input), ("bias_hh_ptr", of_state)):
                lines.append(f"acc += tl.load({name} + row{f', mask={part}, other=0.0' if part else ''})[None, :]")
        return lines

    def _cell(self) -> list[str]:
        """The new state out of the gates."""
        tanh = "_tanh64" if self.dtype == "float64" else "_tanh"
        pairs = "even, odd = tl.split(tl.reshape(acc, (BLOCK_B, BLOCK_H, 2, 2)))"
        if self.form.cell == "lstm":
            return [
                pairs,
                "acc_in, acc_cell = tl.split(even)",
                "acc_forget, acc_out = tl.split(odd)",
                "memory = tl.load(memory_ptr + (step % 2 * LINES + line) * state + own, mask=mask, other=0.0)",
                f"memory = tl.sigmoid(acc_forget) * memory + tl.sigmoid(acc_in) * {tanh}(acc_cell)",
                f"hidden = tl.sigmoid(acc_out) * {tanh}(memory)",
            ]
        if self._is_gru:
            return [
                pairs,
                "acc_reset, acc_new = tl.split(even)",
                "acc_update, acc_kept = tl.split(odd)",
                "kept = tl.load(previous_ptr + own, mask=mask, other=0.0)",
                f"new = {tanh}(acc_new + tl.sigmoid(acc_reset) * acc_kept)",
                "hidden = new + tl.sigmoid(acc_update) * (kept - new)",
            ]
        # A comparison with NaN is false, so that NaN stays what it is.
        return [f"hidden = {tanh}(acc)" if self.form.cell == "rnn_tanh" else "hidden = tl.where(acc < 0, 0.0, acc)"]

    def _stores(self) -> list[str]:
        lines = ["next_state = ((step + 1) % 2 * LINES + line) * state"]
        if self.form.cell == "lstm":
            lines.append("tl.store(memory_ptr + next_state + own, memory, mask=mask)")
        lines.append("tl.store(hidden_ptr + next_state + own, hidden, mask=mask)")
        if not self.writes_sequence:
            return lines
        if self.form.directions == 2:
            lines.append("steps_ptr += place.to(tl.int64) * (2 * state) + line * HIDDEN")
            store = "tl.store(steps_ptr + batch[:, None] * (2 * HIDDEN) + units[None, :], hidden, mask=mask)"
        else:
            store = "tl.store(steps_ptr + step.to(tl.int64) * state + own, hidden, mask=mask)"
        return [*lines, *(["if line == LINES - 1:", f"    {store}"] if self.climbs else [store])]
