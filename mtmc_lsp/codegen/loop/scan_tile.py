"""The tile of a loop that runs as scans: chunks of iterations, their segments, and the memory that they access."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from mtmc_lsp.codegen.kernel.axis_groups import Group, split_variable
from mtmc_lsp.codegen.kernel.expressions import Expressions
from mtmc_lsp.codegen.kernel.index import Index, Variable
from mtmc_lsp.codegen.kernel.kernel import MAX_GRID_Y, Kernel, Scratch, assemble
from mtmc_lsp.codegen.kernel.snippets import Code, blocks_text, next_power_of_2_text
from mtmc_lsp.codegen.loop.compositions import composition_of
from mtmc_lsp.codegen.loop.iterations import axes_from
from mtmc_lsp.codegen.loop.loop_kernel import LoopWriter
from mtmc_lsp.core.graph import Node, TensorType
from mtmc_lsp.core.loop import LoopInput, LoopOutput, Position
from mtmc_lsp.core.protocols import CannotCode
from mtmc_lsp.core.sizes import Size
from mtmc_lsp.ir.axes import Axis
from mtmc_lsp.ir.loops.form import LoopForm
from mtmc_lsp.ir.loops.scan import Recurrence, ScanForm
from mtmc_lsp.ir.primitives import Prim
from mtmc_lsp.schedule.configs import MOST_ELEMENTS, LoopConfig

MOST_UNSHARED = 2
"""Components of an update whose offset is written out for each of them."""
Updates = dict[tuple[str, ...], tuple[Scratch, ...]]
"""Names of a recurrence's states to the buffers with what each segment does to them."""


class _TimeExpressions(Expressions):
    """Evaluates the body for a chunk of iterations: what an iteration reads is loaded for all steps of the chunk."""

    def __init__(self, like: Expressions, writer: ScanTile) -> None:
        super().__init__(
            like.ir,
            like.region,
            like.parameters,
            like.groups,
            like.flat,
            like.masks,
            like.emit,
            like.provide,
        )
        self.writer = writer
        self.positions = {
            writer.form.prim(item): item.position
            for item in writer.form.loop.inputs
            if item.position is not None and item.argument is not None
        }

    def _load(self, prim: Prim, at: tuple[Index, ...]) -> Code:
        position = self.positions.get(prim.name)
        if position is not None:
            at = (*at[: position.dim], self.writer.time_index(position), *at[position.dim + 1 :])
        return super()._load(prim, at)

    def mask_argument(self, offset: Code, dtype: str | None) -> str:
        text = super().mask_argument(offset, dtype)
        if not self.writer.has_chunk_mask:
            return text
        return text.replace(f"mask={self.writer.both_masks}", f"mask={self.writer.chunk_mask}")


class ScanTile(LoopWriter):
    """A tile with one row per time step of a chunk."""

    def __init__(
        self,
        form: LoopForm,
        scan: ScanForm,
        node: Node,
        types: Sequence[TensorType],
        config: LoopConfig,
        parallel: list[list[Axis]],
        reduced: list[list[Axis]],
        updates: Updates,
    ) -> None:
        """Prepare one kernel. ``updates`` holds what earlier kernels wrote, and receives what this one writes."""
        self.time = Axis(-1, form.loop.count)
        super().__init__(form, node, types, config, [*parallel, [self.time]], reduced)
        if self.columns_first:
            raise CannotCode(f"the loop has more than {MAX_GRID_Y} tiles of columns; leave it to the sequential kernel")
        self.scan, self.updates, self.segments = scan, updates, config.segments
        self.tile = _TimeExpressions(self.tile, self)
        self.step = "rows"
        unique = self.parameters.names.unique
        self.segment, self.earlier, self.is_last, self.unsafe, self.flags_pointer, self.chunk_mask = (
            unique(name) for name in ("segment", "earlier", "is_last", "unsafe", "flags_ptr", "mask")
        )
        self.flags: Scratch | None = None
        self.read: list[tuple[str, Scratch]] = []
        self.written: list[tuple[str, Scratch]] = []
        self.carried: dict[str, Code] = {}
        """The variable of each state between chunks."""
        self.following: dict[str, Code] = {}
        """The variable of each state after the steps of the chunk."""
        self.outside: set[object] = set()
        """Keys of values that are computed in front of the chunks."""

    # Tile -----------------------------------------------------------------------------------------------------------

    def _split_row_axes(self, rows: list[list[Axis]]) -> tuple[list[list[Axis]], list[list[Axis]]]:
        return [group for group in rows if self.time not in group], [[self.time]]

    def _row_variables(self) -> tuple[list[Group], list[Group]]:
        time = Group((self.time,), "rows", rows=True)
        if not self.outer_groups:
            return [time], []
        self.lines.append("outer = tl.program_id(0).to(tl.int64)")
        outer = Group(tuple(axis for group in self.outer_groups for axis in group), "outer")
        return [*split_variable(outer, self.outer_groups, self.parameters.names, 0), time], [outer]

    def _declare_tile(self) -> None:
        if not self.is_map:
            self.named_size(self.n_cols, "n_cols")
        self._declare_columns("tl.program_id(1) * BLOCK + " if self.is_map and self.col_groups else "")

    def time_index(self, position: Position) -> Index:
        """The index of the chunk's steps along a dimension."""
        steps = Index.of(Variable(self.time.id, self.time.size, rows=True))
        return (steps * position.step).plus(position.first)

    def _index(self, item: LoopInput) -> Code:
        return replace(super()._index(item), rows=True)

    # Chunks ---------------------------------------------------------------------------------------------------------

    def _declare_segment(self, count: str) -> tuple[str, str]:
        """Emit the range of iterations of the program; returns its first and last one, exclusive."""
        if self.segments == 1:
            return "0", count
        begin, end, length = (self.parameters.names.unique(name) for name in ("begin", "end", "length"))
        self.lines += [
            f"{self.segment} = tl.program_id(2)",
            f"{length} = tl.cdiv(tl.cdiv({count}, ROWS), SEGMENTS) * ROWS",
            f"{begin} = {self.segment} * {length}",
            f"{end} = tl.minimum({begin} + {length}, {count})",
        ]
        return begin, end

    def _open_chunk(self) -> tuple[list[str], list[str]]:
        self.outside = set(self.tile.cache)
        lines = ["rows = (start + tl.arange(0, ROWS)[:, None]).to(tl.int64)"]
        if self.row_masked:
            n_rows = self.named_size(self.n_rows, "n_rows")
            lines.append(f"row_mask = rows < {n_rows}")
            lines.append(f"{self.is_last} = rows == tl.minimum(start + ROWS, {n_rows}) - 1")
        else:
            lines.append(f"{self.is_last} = rows == start + ROWS - 1")
        if self.has_chunk_mask:
            lines.append(f"{self.chunk_mask} = {self.both_masks}")
        before, self.lines = self.lines, lines
        for item in self.form.loop.inputs:
            if item.is_index:
                self._hold(item, self._index(item))
        return before, lines

    @property
    def has_chunk_mask(self) -> bool:
        """Whether a chunk may have both rows and columns that are not there."""
        return self.row_masked and self.col_masked and bool(self.col_groups)

    @property
    def both_masks(self) -> str:
        """The mask of the elements of a chunk, over the masks of its rows and columns."""
        return " & ".join(mask.text for mask in self.masks)

    def _close_chunk(self, before: list[str], first: str, last: str, count: str) -> None:
        inside, self.lines = self.lines, before
        self.tile.cache = {key: code for key, code in self.tile.cache.items() if key in self.outside}
        self.known.clear()
        stages = f", num_stages={self.config.stages}" if self.config.stages > 1 else ""
        self.lines.append(f"for start in tl.range({first}, {last}, ROWS{stages}):")
        self.lines += [f"    {line}" for line in inside]

    # Memory ---------------------------------------------------------------------------------------------------------

    def _update_shape(self) -> tuple[Size, ...]:
        return (self.n_outer, Size.of(self.segments), self.n_cols)

    def _update_offset(self, segment: str, item: Recurrence) -> tuple[list[str], str]:
        """Offset of a segment's update, and the statements before it: many components share a variable."""
        row = f"(outer * SEGMENTS + {segment})" if self.outer_groups else f"tl.cast({segment}, tl.int64)"
        lane = "cols" if self._varies(item) else "tl.arange(0, 1)[:, None]"
        text = f"{row} * {self.named_size(self.n_cols, 'n_cols')} + {lane}" if self.col_groups else f"{row} + {lane}"
        if len(composition_of(item).names) <= MOST_UNSHARED:
            return [], text
        name = self.parameters.names.unique("at")
        return [f"{name} = {text}"], name

    def _lane_mask(self, item: Recurrence) -> str:
        return ", mask=col_mask" if self.col_masked and self._varies(item) else ""

    def _varies(self, item: Recurrence | LoopInput) -> bool:
        """Whether a state varies along the columns."""
        state = item.states[0] if isinstance(item, Recurrence) else item
        axes = set(self.region.table.all_axes(axes_from(self.form, state)))
        return any(axes & set(group.axes) for group in self.tile.groups if group.cols)

    def _shape(self, item: Recurrence | LoopInput, rows: str) -> str:
        return f"[{rows}, {'BLOCK' if self._varies(item) else 1}]"

    def _store_row(self, number: int, output: LoopOutput, position: Position) -> None:
        """Store the rows of all steps of the chunk."""
        kind = self.node.outputs[number]
        prim = self.ir.prims[self.ir.of(output.value).name]
        at, rest = self.tile.tile_index(prim.name), position.dim + (len(prim.shape) == len(kind.shape))
        code = self.tile.value(prim.name, at)
        offset = self.tile.offset(kind, (*at[: position.dim], self.time_index(position), *at[rest:]))
        address = self.tile.address(self._pointer(number), offset)
        self.lines.append(f"tl.store({address}, {code.text}{self.tile.mask_argument(offset, None)})")

    def _store_last_states(self) -> None:
        """Store the states after the last iteration, which the last segment has."""
        stores, before = [], self.lines
        for i, output in enumerate(self.form.loop.outputs):
            if output.position is None:
                self.lines = []
                self._store_last(i, output, self.carried)
                stores += self.lines
        self.lines = before
        if stores and self.segments > 1:
            stores = [f"if {self.segment} == SEGMENTS - 1:", *(f"    {line}" for line in stores)]
        self.lines += stores

    def _store_value(self, pointer: str, prim: str, kind: TensorType, value: Code | None) -> None:
        at = self.tile.tile_index(prim)
        code = value if value is not None else self.tile.value(prim, at)
        offset = self.tile.offset(kind, at)
        if not offset.cols:
            offset = Code(f"{offset.text} + tl.arange(0, 1)[:, None]", offset.dtype)
        mask = self.tile.mask_argument(offset, None)
        self.lines.append(f"tl.store({self.tile.address(pointer, offset)}, {code.text}{mask})")

    # Kernel ---------------------------------------------------------------------------------------------------------

    def _kernel(self, name: str, docstring: str, passes: tuple[str, tuple[bool, ...]] | None = None) -> Kernel:
        constexprs: dict[str, int | bool | str] = {"ROWS": self.rows_per_program}
        dynamic: dict[str, str] = {}
        limits: tuple[str, ...] = ()
        blocks = "1"
        if self.is_map and self.col_groups:
            constexprs["BLOCK"], blocks = self.block, blocks_text("n_cols", self.block)
            limits = () if self.n_cols.is_constant else (f"{self.n_cols} <= {MAX_GRID_Y * self.block}",)
        elif self.n_cols.is_constant:
            constexprs["BLOCK"] = self._static_block()
        else:
            dynamic["BLOCK"] = next_power_of_2_text("n_cols")
            limits = (f"{self.n_cols} <= {MOST_ELEMENTS // self.rows_per_program}",)
        if not self.col_groups:
            constexprs.pop("BLOCK", None)
        grid = ["n_outer" if self.outer_groups else "1", blocks]
        if self.segments > 1:
            constexprs["SEGMENTS"] = self.segments
            grid.append(str(self.segments))
        return assemble(
            name,
            self.parameters,
            constexprs,
            docstring,
            self.lines,
            grid=tuple(grid),
            grid_sizes={"n_cols": self.n_cols, "n_outer": self.n_outer},
            num_warps=self.config.warps,
            num_stages=self.config.stages,
            dynamic=dynamic,
            limits=limits,
            scratch_written=tuple(self.written),
            scratch_read=tuple(self.read),
            passes=passes,
        )
