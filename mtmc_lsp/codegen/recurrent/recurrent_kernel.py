"""The kernel of recurrent layers: one launch computes all steps that do not depend on one another.

:mod:`mtmc_lsp.ir.recurrence` explains why these are independent, and the layout of the states. A program instance computes all
gates of a block of units for a block of the batch: the input term (computed beforehand for the first layer and the whole
sequence), the state term, and the cell function. The gates of a unit are neighbouring columns of its tile, so that one matrix
product computes all of them. A GRU's tile has four columns per unit as well, because its new gate keeps the input term and the
state term separate: the reset gate scales only the latter.
"""

from __future__ import annotations

from dataclasses import dataclass

from mtmc_lsp.codegen.kernel.snippets import TRITON_DTYPES
from mtmc_lsp.core.dtypes import is_low_precision
from mtmc_lsp.ir.recurrence import Recurrence
from mtmc_lsp.schedule.configs import RecurrentConfig
from mtmc_lsp.schedule.recurrent_configs import units_of, uses_fma

OF_STATE, OF_INPUT = "gate != 2", "gate != 3"
"""Masks of a GRU tile's columns: those with a state term, and those with an input term."""


@dataclass(frozen=True)
class RecurrentKernel:
    """The properties that determine a kernel's source."""

    form: Recurrence
    dtype: str
    config: RecurrentConfig
    gives_sequence: bool
    """Whether the last layer's output sequence is read."""

    @property
    def has_diagonals(self) -> bool:
        """Whether a launch processes several layers (on a diagonal of layer and step)."""
        return self.form.directions == 1 and self.form.layers > 1

    @property
    def writes_sequence(self) -> bool:
        """Whether the hidden state of each step is written to the output sequence."""
        return self.gives_sequence or self.form.directions == 2

    def pointers(self) -> list[str]:
        """Names of the pointer parameters, in order."""
        biases = self.form.has_biases
        is_needed = {
            "gates_ptr": True,
            "weight_ih_ptr": self.has_diagonals,
            "weight_hh_ptr": True,
            "bias_ih_ptr": biases,
            "bias_hh_ptr": biases,
            "hidden_ptr": True,
            "memory_ptr": self.form.cell == "lstm",
            "steps_ptr": self.writes_sequence,
        }
        return [name for name, needed in is_needed.items() if needed]

    def constexprs(self) -> dict[str, int]:
        """The kernel's constexpr arguments."""
        config = self.config
        return {
            "LINES": self.form.parallel_layers,
            "HIDDEN": self.form.hidden,
            "BLOCK_B": config.block_m,
            "BLOCK_H": units_of(self.form, config),
            "BLOCK_K": config.block_k,
        }

    def body(self) -> list[str]:
        """The statements of the kernel's body."""
        wide = TRITON_DTYPES["float32" if is_low_precision(self.dtype) else self.dtype]
        shape = f"(BLOCK_B, {self._width}, BLOCK_K)" if self._uses_broadcast_sum else f"(BLOCK_B, {self._width})"
        lines = [*self._indices(), "", f"acc = tl.zeros({shape}, {wide})"]
        lines.append("previous_ptr = hidden_ptr + (step % 2 * LINES + line) * state")
        lines += self._product("previous", "weight_hh_ptr", "line", OF_STATE)
        if self.has_diagonals:
            above = ["below_ptr = hidden_ptr + ((step + 1) % 2 * LINES + line - 1) * state"]
            above += self._product("below", "weight_ih_ptr", "(line - 1)", OF_INPUT)
            lines += ["if line > 0:", *(f"    {text}" for text in above)]
        if self._uses_broadcast_sum:
            lines.append("acc = tl.sum(acc, 2)")
        return [*lines, *self._input_and_biases(), "", *self._cell(), "", *self._stores()]

    # Parts -------------------------------------------------------------------------------------------------------

    @property
    def _is_gru(self) -> bool:
        return self.form.cell == "gru"

    @property
    def _width(self) -> str:
        """Number of columns of the tile, as text."""
        return "BLOCK_H" if self.form.gates == 1 else "4 * BLOCK_H"

    @property
    def _uses_broadcast_sum(self) -> bool:
        """Whether products use ordinary arithmetic units with partial sums in registers, instead of ``tl.dot``."""
        return uses_fma(self.dtype, self.config.precision)

    @property
    def _has_full_unit_blocks(self) -> bool:
        """Whether the number of units is a multiple of the block size."""
        return self.form.hidden % units_of(self.form, self.config) == 0

    def _column_mask(self, part: str) -> str:
        """Mask of the tile's columns with a certain term, as text; empty for all."""
        conditions = [*([] if self._has_full_unit_blocks else ["unit < HIDDEN"]), *([part] if self._is_gru else [])]
        return conditions[0] if len(conditions) == 1 else " & ".join(f"({text})" for text in conditions)

    def _indices(self) -> list[str]:
        """Statements that compute the line, step, units and batch entries of a program instance."""
        form = self.form
        lines = ["line = tl.program_id(1)"]
        if self.has_diagonals:
            # Layer n starts n launches after the first layer.
            lines += ["step = diagonal - line", "if (step < 0) | (step >= n_steps):", "    return"]
        units = "tl.program_id(0) * BLOCK_H + tl.arange(0, BLOCK_H)"
        if form.gates == 1:
            lines += [f"units = {units}", "unit = units", "row = units"]
        else:
            row = "tl.minimum(gate, 2)" if self._is_gru else "gate"
            lines += [
                "# The gates of a unit are neighbouring columns of the tile.",
                "gate = tl.arange(0, 4 * BLOCK_H) % 4",
                "unit = tl.program_id(0) * BLOCK_H + tl.arange(0, 4 * BLOCK_H) // 4",
                f"row = {row} * HIDDEN + unit",
                f"units = {units}",
            ]
        return [
            *lines,
            "batch = tl.program_id(2) * BLOCK_B + tl.arange(0, BLOCK_B)",
            "batch_mask = (batch < n_batch)[:, None]",
            f"mask = batch_mask{'' if self._has_full_unit_blocks else ' & (units < HIDDEN)[None, :]'}",
            "# Elements per state, and the offsets of this program's block in it.",
            "state = n_batch * HIDDEN",
            "offsets = batch[:, None] * HIDDEN + units[None, :]",
        ]

    def _product(self, source: str, weights: str, line: str, part: str) -> list[str]:
        """``acc += source @ weights.T`` over the units of a state."""
        # Index suffixes of a tile of the state, and of a tile of the weights.
        rows, row_k, columns, column_k = "[:, None]", "[None, :]", "[None, :]", "[:, None]"
        batch_mask = "batch_mask"
        if self._uses_broadcast_sum:
            rows, row_k, columns, column_k = "[:, None, None]", "[None, None, :]", "[None, :, None]", "[None, None, :]"
            batch_mask = "batch_mask[:, :, None]"
        has_full_blocks = self.form.hidden % self.config.block_k == 0
        column_mask = self._column_mask(part)
        masks = [
            *([f"({column_mask}){columns}"] if column_mask else []),
            *([] if has_full_blocks else [f"(k < HIDDEN){column_k}"]),
        ]
        weight_mask = f", mask={' & '.join(masks)}, other=0.0" if masks else ""
        source_mask = batch_mask if has_full_blocks else f"{batch_mask} & (k < HIDDEN){row_k}"
        # Triton 3.6 does not infer the dtype of float64 products.
        options = {"float32": f', input_precision="{self.config.precision.value}"', "float64": ", out_dtype=tl.float64"}
        product = (
            f"acc += {source} * weight"
            if self._uses_broadcast_sum
            else f"acc = tl.dot({source}, weight, acc{options.get(self.dtype, '')})"
        )
        return [
            f"rows_ptr = {weights} + {line}.to(tl.int64) * ({self.form.gates} * HIDDEN * HIDDEN) + row * HIDDEN",
            "for start in range(0, HIDDEN, BLOCK_K):",
            "    k = start + tl.arange(0, BLOCK_K)",
            f"    {source} = tl.load({source}_ptr + batch{rows} * HIDDEN + k{row_k}, mask={source_mask}, other=0.0)",
            f"    weight = tl.load(rows_ptr{columns} + k{column_k}{weight_mask})",
            f"    {product}",
        ]

    def _input_and_biases(self) -> list[str]:
        """Statements that add the first layer's input term and the biases."""
        of_input, of_state = self._column_mask(OF_INPUT), self._column_mask(OF_STATE)
        position = "step"
        lines: list[str] = []
        if self.form.directions == 2:
            position = "position"
            lines.append("position = tl.where(line == 0, step, n_steps - 1 - step)")
        mask = (
            "batch_mask"
            + (f" & ({of_input})[None, :]" if of_input else "")
            + (" & (line == 0)" if self.has_diagonals else "")
        )
        shift = "" if self.form.directions == 1 else f" + line * ({self.form.gates} * HIDDEN)"
        lines += [
            f"gates_ptr += {position}.to(tl.int64) * step_stride{shift}",
            f"acc += tl.load(gates_ptr + batch[:, None] * batch_stride + row[None, :], mask={mask}, other=0.0)",
        ]
        if self.form.has_biases:
            lines.append(f"row += line * ({self.form.gates} * HIDDEN)")
            for name, part in (("bias_ih_ptr", of_input), ("bias_hh_ptr", of_state)):
                lines.append(f"acc += tl.load({name} + row{f', mask={part}, other=0.0' if part else ''})[None, :]")
        return lines

    def _cell(self) -> list[str]:
        """Statements that compute the new state from the gates."""
        tanh = "_tanh64" if self.dtype == "float64" else "_tanh"
        pairs = "even, odd = tl.split(tl.reshape(acc, (BLOCK_B, BLOCK_H, 2, 2)))"
        if self.form.cell == "lstm":
            return [
                pairs,
                "acc_in, acc_cell = tl.split(even)",
                "acc_forget, acc_out = tl.split(odd)",
                "memory = tl.load(memory_ptr + (step % 2 * LINES + line) * state + offsets, mask=mask, other=0.0)",
                f"memory = tl.sigmoid(acc_forget) * memory + tl.sigmoid(acc_in) * {tanh}(acc_cell)",
                f"hidden = tl.sigmoid(acc_out) * {tanh}(memory)",
            ]
        if self._is_gru:
            return [
                pairs,
                "acc_reset, acc_new = tl.split(even)",
                "acc_update, acc_state = tl.split(odd)",
                "old_state = tl.load(previous_ptr + offsets, mask=mask, other=0.0)",
                f"new = {tanh}(acc_new + tl.sigmoid(acc_reset) * acc_state)",
                "hidden = new + tl.sigmoid(acc_update) * (old_state - new)",
            ]
        # A comparison with NaN is false, so NaN propagates.
        return [f"hidden = {tanh}(acc)" if self.form.cell == "rnn_tanh" else "hidden = tl.where(acc < 0, 0.0, acc)"]

    def _stores(self) -> list[str]:
        lines = ["next_state = ((step + 1) % 2 * LINES + line) * state"]
        if self.form.cell == "lstm":
            lines.append("tl.store(memory_ptr + next_state + offsets, memory, mask=mask)")
        lines.append("tl.store(hidden_ptr + next_state + offsets, hidden, mask=mask)")
        if not self.writes_sequence:
            return lines
        if self.form.directions == 2:
            lines.append("steps_ptr += position.to(tl.int64) * (2 * state) + line * HIDDEN")
            store = "tl.store(steps_ptr + batch[:, None] * (2 * HIDDEN) + units[None, :], hidden, mask=mask)"
        else:
            store = "tl.store(steps_ptr + step.to(tl.int64) * state + offsets, hidden, mask=mask)"
        return [*lines, *(["if line == LINES - 1:", f"    {store}"] if self.has_diagonals else [store])]
