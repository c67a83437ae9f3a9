"""The kernel of a loop over time steps: each program instance holds a tile of the states and runs all iterations.

States stay in registers. The pointers to rows move by one row per iteration, and the loads of the next iterations are in flight
while one computes: they depend on no state.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence, Set

from mtmc_lsp.codegen.kernel.kernel import Kernel, Scratch
from mtmc_lsp.codegen.kernel.snippets import TRITON_DTYPES, Code
from mtmc_lsp.codegen.loop.block_kernel import write_block_kernel
from mtmc_lsp.codegen.loop.cell_kernel import write_cell_kernel
from mtmc_lsp.codegen.loop.iterations import (
    axes_from,
    count_text,
    index_code,
    initial_text,
    loop_lines,
    of_graph,
    result_pointer,
    row_buffers,
    row_strides,
    sources_of,
    stride_text,
)
from mtmc_lsp.codegen.loop.step_kernel import write_step_kernel
from mtmc_lsp.codegen.tile.tile import merge_axes
from mtmc_lsp.codegen.tile.tile_kernel import TileWriter, steps_far
from mtmc_lsp.core.dtypes import compute_dtype
from mtmc_lsp.core.graph import Node, TensorType
from mtmc_lsp.core.loop import LoopInput, LoopOutput, Position
from mtmc_lsp.core.sizes import Size
from mtmc_lsp.ir.axes import Axis
from mtmc_lsp.ir.loops.blocks import BlockForm
from mtmc_lsp.ir.loops.cells import CellForm
from mtmc_lsp.ir.loops.form import LoopForm
from mtmc_lsp.ir.loops.fusion import loop_in
from mtmc_lsp.ir.memory_order import column_axes
from mtmc_lsp.ir.primitives import KernelIR
from mtmc_lsp.ir.regions import Region, RegionKind
from mtmc_lsp.schedule.configs import LoopConfig
from mtmc_lsp.schedule.loop_configs import tile_of


def write_loop_kernel(
    ir: KernelIR,
    region: Region,
    buffers: Mapping[str, TensorType],
    config: LoopConfig,
    name: str,
    docstring: str,
    flags: Scratch | None = None,
) -> Kernel:
    """Write the kernel of a loop.

    Args:
        flags: a number for each program and segment; a program whose numbers are all zero does nothing.

    Raises:
        CannotCode: an operation of the body is not supported.
    """
    form = loop_in(ir, region)
    if isinstance(form, CellForm) and config.is_stepwise:
        return write_step_kernel(ir, form, buffers, config, name, docstring)
    if isinstance(form, CellForm):
        return write_cell_kernel(ir, form, buffers, config, name, docstring)
    if isinstance(form, BlockForm):
        return write_block_kernel(ir, form, buffers, config, name, docstring)
    node = form.node
    sources = sources_of(ir, node)
    types = [buffers[source] for source in sources]
    body = form.region
    separate = [[axis] for axis in body.parallel_axes], [[axis] for axis in body.reduced_axes]
    probe = LoopWriter(form, node, types, config, *separate)
    probe.write()
    parallel, reduced = (merge_axes(axes, probe.accesses) for axes in (body.parallel_axes, body.reduced_axes))
    writer = LoopWriter(form, node, types, config, parallel, reduced)
    columns_of_map = [group for group in parallel if group[-1] in column_axes(form.ir, body)]
    columns = columns_of_map if body.kind is RegionKind.MAP else reduced
    writer.wide_columns = any(steps_far(columns, access) for access in probe.accesses)
    if flags is None:
        return of_graph(writer.finish(name, docstring, writer.write()), form, sources)
    pointer = writer.parameters.names.unique("flags_ptr")
    program = "tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)"
    segments = flags.shape[-1].constant
    test = [f"if tl.load({pointer} + {program}) == 0:"]
    if segments > 1:
        first = writer.parameters.names.unique("first_flag")
        test = [
            f"{first} = ({program}) * {segments}",
            f"if tl.max(tl.load({pointer} + {first} + tl.arange(0, {segments}))) == 0:",
        ]
    statements = [*test, "    return", *writer.write()]
    return of_graph(writer.finish(name, docstring, statements, ((pointer, flags),)), form, sources)


class LoopWriter(TileWriter):
    """Writes the body of one kernel that runs all iterations of a loop on a tile of its states."""

    def __init__(
        self,
        form: LoopForm,
        node: Node,
        types: Sequence[TensorType],
        config: LoopConfig,
        parallel: list[list[Axis]],
        reduced: list[list[Axis]],
    ) -> None:
        """Prepare one tile.

        Args:
            node: of the graph; its outputs have the types of the results.
            types: of the node's arguments in memory.
        """
        buffers = row_buffers(form, types)
        super().__init__(form.ir, form.region, buffers, tile_of(config), parallel, reduced)
        self.form, self.node, self.types, self.loop_config = form, node, types, config
        self.step = self.parameters.names.unique("t")
        self._moves: list[tuple[str, Position, Size]] = []
        """Pointers that move from row to row, with the stride of the rows."""

    def write(self) -> list[str]:
        """Write the statements of the kernel."""
        loop = self.form.loop
        count = self._before_loop()
        states = {item.name: self._initial(item) for item in loop.states}
        before, self.lines = self.lines, []
        invariant = set(self.tile.cache)
        for item in loop.inputs:
            if item.is_index:
                self._hold(item, self._index(item))
            elif item.position is not None:
                self._move(self.parameters.tensor(self.form.prim(item)), item.position, self._type_of(item))
        names = {code.text for code in states.values()}
        following = [self._following(item, states[item.name], names) for item in loop.states]
        for i, output in enumerate(loop.outputs):
            if output.position is not None:
                self._store_row(i, output, output.position)
        for item, code in zip(loop.states, following, strict=True):
            if code != states[item.name].text:
                self.lines.append(f"{states[item.name].text} = {code}")
        self.lines += [
            f"{pointer} += {stride_text(self.parameters, stride, at.step)}" for pointer, at, stride in self._moves
        ]
        inside, self.lines = self.lines, before
        self.tile.cache = {key: code for key, code in self.tile.cache.items() if key in invariant}
        self.lines += loop_lines(self.parameters, self._moves, self.step, count, self.config.stages, inside)
        for i, output in enumerate(loop.outputs):
            if output.position is None:
                self._store_last(i, output, states)
        return self.lines

    def _before_loop(self) -> str:
        """Emit what all iterations share; returns the number of iterations as text."""
        loop = self.form.loop
        count = count_text(self.form, self.parameters)
        self._declare_tile()
        for item in loop.inputs:
            prim = self.ir.prims[self.form.prim(item)]
            is_read = prim.name in self.region.inputs and self.tile.covers_axes(prim)
            if item.position is None and not item.is_state and is_read:
                self.tile.value(prim.name, self.tile.tile_index(prim.name))
        for name in self.form.invariant():
            if self.tile.covers_axes(self.ir.prims[name]):
                self.tile.value(name, self.tile.tile_index(name))
        for item in loop.inputs:
            if item.position is not None and item.argument is not None:
                # Emits the parts of its offsets before the loop.
                source = self.form.prim(item)
                if source not in self.region.inputs or not self.tile.covers_axes(self.ir.prims[source]):
                    continue  # The body reads a part of the row.
                self.tile.offset(self.parameters.buffers[source], self.tile.tile_index(source))
        return count

    def _declare_tile(self) -> None:
        offset = ""
        if self.is_map and self.col_groups:
            cast = "" if self.has_rows and self._fits_in_32_bits else ".to(tl.int64)"
            offset = f"tl.program_id({1 if self.has_rows else 0}){cast} * BLOCK + "
        if not self.is_map:
            self.named_size(self.n_cols, "n_cols")
        self._declare_columns(offset)

    # States ------------------------------------------------------------------------------------------------------

    def _initial(self, item: LoopInput) -> Code:
        """Emit the value of a state before the first iteration, and hold its variable for the body."""
        prim = self.ir.prims[self.form.prim(item)]
        at = self.tile.tile_index(axes_from(self.form, item))
        dtype = compute_dtype(prim.dtype)
        axes = self.region.table.all_axes(axes_from(self.form, item))
        along = [group for group in self.tile.groups if set(axes) & set(group.axes)]
        varies = Code("", dtype, any(group.rows for group in along), any(group.cols for group in along))
        name = self.parameters.names.unique(item.name)
        if item.initial is not None or prim.name not in self.region.inputs:
            # The body may not read what it changes; there is at least one iteration.
            text = initial_text(item.initial or 0.0, dtype, self.shape_text(varies))
        else:
            text = self._spread(self.tile.value(prim.name, at), varies)
            if self.lines and self.lines[-1].startswith(f"{text} = "):
                # The state is the variable that was loaded. Whatever else reads that memory loads it again.
                cache = self.tile.cache.items()
                self.tile.cache = {key: code for key, code in cache if text not in re.findall(r"\w+", code.text)}
                text = self.lines.pop().partition(" = ")[2]
        self.lines.append(f"{name} = {text}")
        code = Code(name, dtype, varies.rows, varies.cols)
        self._hold(item, code)
        return code

    def _hold(self, item: LoopInput, code: Code) -> None:
        self.tile.held[self.form.prim(item)] = self.tile.tile_index(axes_from(self.form, item)), code

    def _spread(self, code: Code, like: Code) -> str:
        """The text of a value with the shape of a state."""
        if (code.rows, code.cols) == (like.rows, like.cols) or not (like.rows or like.cols):
            return code.text
        return (
            f"tl.broadcast_to({code.text}, {self.shape_text(like)})"
            if code.rows or code.cols
            else (f"tl.full({self.shape_text(like)}, {code.text}, {TRITON_DTYPES[like.dtype]})")
        )

    def _following(self, item: LoopInput, state: Code, names: Set[str]) -> str:
        """Emit the value of a state after the iteration; returns a variable that no assignment to ``names`` changes."""
        assert item.next is not None
        prim = self.ir.of(item.next).name
        code = self.tile.cast(self.tile.value(prim, self.tile.tile_index(prim)), state.dtype)
        text = self._spread(code, state)
        if text.isidentifier() and text not in names - {state.text}:
            return text
        name = self.parameters.names.unique(f"next_{item.name}")
        self.lines.append(f"{name} = {text}")
        return name

    def _index(self, item: LoopInput) -> Code:
        """The number of the iteration as the body sees it."""
        assert item.position is not None
        return index_code(self.parameters, self.step, item.position)

    # Rows --------------------------------------------------------------------------------------------------------

    def _type_of(self, item: LoopInput) -> TensorType:
        assert item.argument is not None
        return self.types[item.argument]

    def _move(self, pointer: str, at: Position, kind: TensorType) -> None:
        self._moves.append((pointer, at, kind.stride[at.dim]))

    def _offset(self, size: Size) -> str:
        """A size that may exceed 32 bits: the launcher computes products."""
        return self.parameters.divisor(size)

    def _store_row(self, number: int, output: LoopOutput, position: Position) -> None:
        """Store the row of an iteration."""
        kind = self.node.outputs[number]
        prim = self.ir.prims[self.ir.of(output.value).name]
        strides = row_strides(kind, position, len(prim.shape))
        pointer = self._pointer(number)
        self._store_value(pointer, prim.name, TensorType(prim.shape, kind.dtype, strides), None)
        self._moves.append((pointer, position, kind.stride[position.dim]))

    def _store_last(self, number: int, output: LoopOutput, states: Mapping[str, Code]) -> None:
        """Store the last value of a state."""
        item = next(item for item in self.form.loop.states if item.next == output.value)
        self._store_value(
            self._pointer(number), axes_from(self.form, item), self.node.outputs[number], states[item.name]
        )

    def _store_value(self, pointer: str, prim: str, kind: TensorType, value: Code | None) -> None:
        at = self.tile.tile_index(prim)
        code = value if value is not None else self.tile.value(prim, at)
        offset = self.tile.offset(kind, at)
        mask = self.tile.mask_argument(offset, None)
        self.lines.append(f"tl.store({self.tile.address(pointer, offset)}, {code.text}{mask})")

    def _pointer(self, number: int) -> str:
        """The parameter for a result of the loop."""
        return result_pointer(self.form, self.parameters, number)
