"""Kernels over a tile of rows and columns: elementwise maps, reductions along the columns, and scans.

``rows`` are independent. ``columns`` are reduced or, for a map, the densest axis in memory. A reduction either holds a whole row
at once, or loops over blocks of columns: once per level of dependent reductions, and once more to write outputs that vary along
the columns.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from mtmc_lsp.codegen.kernel import indexing
from mtmc_lsp.codegen.kernel.expressions import Expressions
from mtmc_lsp.codegen.kernel.index import Index
from mtmc_lsp.codegen.kernel.kernel import MAX_GRID_Y, Kernel, Scratch, assemble
from mtmc_lsp.codegen.kernel.persistence import loop_over_work_items
from mtmc_lsp.codegen.kernel.snippets import COMPARE, TRITON_DTYPES, Code, blocks_text, next_power_of_2_text
from mtmc_lsp.codegen.tile.tile import merge_axes
from mtmc_lsp.codegen.tile.tile_reductions import ReducingTile
from mtmc_lsp.core.dtypes import compute_dtype, is_float
from mtmc_lsp.core.graph import Ref, TensorType
from mtmc_lsp.core.protocols import CannotCode
from mtmc_lsp.core.sizes import Size
from mtmc_lsp.ir.axes import Axis
from mtmc_lsp.ir.concat_outputs import Part
from mtmc_lsp.ir.memory_order import column_axes
from mtmc_lsp.ir.primitives import CENTRED, KernelIR, Prim, PrimOp
from mtmc_lsp.ir.regions import Region, RegionKind
from mtmc_lsp.schedule.configs import MOST_ELEMENTS, TileConfig
from mtmc_lsp.schedule.tile_configs import is_wide_product

SCANS = {
    "sum": (
        "0.0",
        "tl.cumsum({value}, axis={axis}{reverse})",
        "{} + {}",
        "tl.sum({value}, axis={axis}, keep_dims=True)",
    ),
    "prod": (
        "1.0",
        "tl.cumprod({value}, axis={axis}{reverse})",
        "{} * {}",
        "tl.reduce({value}, {axis}, _multiply, keep_dims=True)",
    ),
    "log_sum_exp": (
        '-float("inf")',
        "tl.associative_scan({value}, {axis}, _log_add_exp{reverse})",
        "_log_add_exp({}, {})",
        "tl.reduce({value}, {axis}, _log_add_exp, keep_dims=True)",
    ),
}
"""For each scan function: neutral element, scan of a block, combination of two results, and total of a block."""


AxisGroups = tuple[list[list[Axis]], list[list[Axis]]]
"""Groups of parallel and of reduced axes. A kernel has one index for each group."""


def write_tile_kernel(
    ir: KernelIR,
    region: Region,
    buffers: Mapping[str, TensorType],
    config: TileConfig,
    name: str,
    docstring: str,
) -> Kernel:
    """Write the kernel of a map, reduce or scan region.

    Raises:
        CannotCode: an operation of the region is not supported.
    """
    probe = TileWriter(ir, region, buffers, config, *separate_axes(region))
    probe.write()
    parallel, reduced = merged_axes(probe)
    column_axes_set = column_axes(ir, region)
    columns = (
        [group for group in parallel if group[-1] in column_axes_set] if region.kind is RegionKind.MAP else reduced
    )
    writer = TileWriter(ir, region, buffers, config, parallel, reduced)
    writer.wide_columns = any(steps_far(columns, access) for access in probe.accesses)
    body = writer.write()
    if config.persist:
        body = loop_over_work_items(body, writer.work_items())
    return writer.finish(name, docstring, body)


def separate_axes(region: Region) -> AxisGroups:
    """The parallel and the reduced axes, each alone, for a first pass: it shows which of them all accesses walk as one."""
    return [[axis] for axis in region.parallel_axes], [[axis] for axis in region.reduced_axes]


def merged_axes(probe: TileWriter) -> AxisGroups:
    """The parallel and the reduced axes, with neighbours joined where all accesses of a first pass walk them as one."""
    return merge_axes(probe.region.parallel_axes, probe.accesses), merge_axes(probe.region.reduced_axes, probe.accesses)


def steps_far(columns: Sequence[Sequence[Axis]], access: Index) -> bool:
    """Whether offsets along the columns may exceed 32 bits: the access is not dense, and no constant size bounds it."""
    axes = [axis for group in columns for axis in group]
    steps = {variable.id: coefficient for variable, coefficient in access.terms if not variable.code}
    reach, below, dense = Size.of(0), Size.of(1), True
    for axis in reversed(axes):
        step = steps.get(axis.id, Size.of(0))
        dense = dense and (step == below or not step.terms)
        reach = reach + step * (axis.size - 1)
        below = below * axis.size
    return not dense and not (reach.is_constant and reach.constant < 2**31)


class TileWriter(ReducingTile):
    """Writes the body of one kernel over tiles of rows and columns."""

    def work_items(self) -> str:
        """The number of work items of a persistent kernel, as text.

        Raises:
            CannotCode: there is only one work item.
        """
        if self.has_rows:
            n_rows = self.named_size(self.n_rows, "n_rows")
            blocks = f"tl.cdiv({n_rows}, ROWS)" if self.rows_per_program > 1 else n_rows
            return f"{self.named_size(self.n_outer, 'n_outer')} * {blocks}" if self.outer_groups else blocks
        if self.is_map and self.col_groups:
            return f"tl.cdiv({self.named_size(self.n_cols, 'n_cols')}, BLOCK)"
        raise CannotCode("the kernel has only one work item, so it cannot be persistent; set persist to 0")

    def write(self) -> list[str]:
        """Write the statements of the body."""
        if self.is_map:
            offset = ""
            if self.col_groups:
                cast = "" if self.has_rows and self._fits_in_32_bits else ".to(tl.int64)"
                offset = f"tl.program_id({0 if self.columns_first or not self.has_rows else 1}){cast} * BLOCK + "
            if self._has_random_columns():
                self.lines.append(f"first = {offset.removesuffix(' + ')}")
                offset = "first + "
                self.tile.first_column = "first" if self.rows_per_program == 1 and self.block >= 4 else None
                self.tile.row_length = self.n_cols
            self._declare_columns(offset)
            self._store_all(self.region.outputs)
            return self.lines
        self.named_size(self.n_cols, "n_cols")
        if not self.loop:
            self._declare_columns("")
            self._store_all(self.region.outputs)
            return self.lines
        if self.region.kind is RegionKind.SCAN:
            self._write_scan()
        else:
            self._write_loops()
        return self.lines

    def _has_random_columns(self) -> bool:
        """Whether the kernel generates random numbers along the columns."""
        return bool(self.col_groups) and any(self.ir.prims[p].op is PrimOp.RANDOM for p in self.region.prims)

    def _store_all(self, outputs: Sequence[Ref]) -> None:
        for ref in outputs:
            self._store(ref)

    def _store(self, ref: Ref) -> None:
        parts = self.region.parts.get(ref)
        if parts is None:
            prim = self.ir.of(ref).name
            at = self.tile.tile_index(prim)
            self._store_at(ref, prim, at, at)
        for part in parts or ():
            at = self.tile.tile_index(part.prim)
            if part.index:
                self._add_at(ref, part, at)
            else:
                destination = (*at[: part.dim], at[part.dim].plus(part.start), *at[part.dim + 1 :])
                self._store_at(ref, part.prim, at, destination)

    def _add_at(self, ref: Ref, part: Part, at: tuple[Index, ...]) -> None:
        """Atomically add a primitive's value to a result at the row that an index tensor selects."""
        kind = self.ir.graph.type_of(ref)
        value = self.tile.value(part.prim, at)
        row = indexing.gathered_index(self.tile, part.index, at, kind.shape[part.dim])
        size = self.parameters.size(row.size)
        offset = self.tile.offset(kind, (*at[: part.dim], Index.of(row), *at[part.dim + 1 :]))
        # Out-of-range indices, for which PyTorch's kernel raises an error, must not access other memory.
        inside = f"({row.code} >= 0) & ({row.code} < {size.at(COMPARE + 1)})"
        tile_variation = Code("", "int64", value.rows or offset.rows, value.cols or offset.cols)
        mask = self.tile.mask_argument(tile_variation, None).removeprefix(", mask=")
        mask = f"{inside} & {mask}" if mask else inside
        address = Expressions.address(self.parameters.output(ref), offset)
        self._emit(f'tl.atomic_add({address}, {value.text}, mask={mask}, sem="relaxed")', tile_variation.cols)

    def _store_at(self, ref: Ref, prim: str, at: tuple[Index, ...], destination: tuple[Index, ...]) -> None:
        """Store a primitive's value ``at`` its index to a position in a result."""
        value = self.tile.value(prim, at)
        pointer = self.parameters.output(ref)
        offset = self.tile.offset(self.ir.graph.type_of(ref), destination)
        mask = self.tile.mask_argument(offset, None)
        self._emit(f"tl.store({Expressions.address(pointer, offset)}, {value.text}{mask})", offset.cols)

    def _open_loop(self) -> None:
        self.body = []
        self._declare_columns("start + ")

    def _close_loop(self, *, backwards: str = "") -> None:
        """End a loop over blocks of columns.

        Args:
            backwards: comment that explains why the loop starts with the last block; empty for a forward loop.
        """
        assert self.body is not None
        bound = self.named_size(self.n_cols, "n_cols")
        if backwards:
            self.lines.append(f"# {backwards}")
            self.lines.append(f"for back in range(0, {bound}, BLOCK):")
            self.lines.append(f"    start = (tl.cdiv({bound}, BLOCK) - 1) * BLOCK - back")
        else:
            self.lines.append(f"for start in {self._column_range(bound)}:")
        self.lines += [f"    {line}" for line in self.body]
        self.body = None
        self.tile.cache = {key: code for key, code in self.tile.cache.items() if not code.cols}
        self.tile.declared -= {group.name for group in self.tile.groups if group.cols}

    def _column_range(self, bound: str) -> str:
        """The ``range`` of start columns of the blocks."""
        return f"range(0, {bound}, BLOCK)"

    def _reduce_in_loop(self, reductions: Sequence[Prim], eviction: str = "") -> None:
        """Emit one loop over the columns for independent reductions."""
        self._open_loop()
        self.tile.eviction = eviction
        companions = {prim.inputs[1] for prim in reductions if prim.fn == "sum_exp"}
        companions |= {str(prim.attrs[CENTRED]) for prim in reductions if self._is_centred(prim)}
        accumulators = [self._accumulate(prim) for prim in reductions if prim.name not in companions]
        self._close_loop()
        for prim, names in accumulators:
            self._finish_reduction(prim, names)

    def _write_loops(self) -> None:
        levels = self.levels()
        along_columns = [ref for ref in self.region.outputs if self._varies_along_columns(ref)]
        has_several_loops = len(set(levels.values())) + bool(along_columns) > 1
        for level in sorted(set(levels.values())):
            reductions = [self.ir.prims[name] for name, reduction_level in levels.items() if reduction_level == level]
            self._reduce_in_loop(reductions, "evict_last" if has_several_loops else "")
        if along_columns:
            self._open_loop()
            self.tile.eviction = "evict_first" if has_several_loops else ""
            self._store_all(along_columns)
            self._close_loop(
                backwards="Backwards, because the last blocks of the previous loop are still in the cache."
                * has_several_loops
            )
        self.tile.eviction = ""
        self._store_all([ref for ref in self.region.outputs if ref not in along_columns])

    def _varies_along_columns(self, ref: Ref) -> bool:
        names = (name for stored_ref, name in self.region.stored(self.ir) if stored_ref == ref)
        return any(set(self.region.table.all_axes(name)) & set(self.region.reduced_axes) for name in names)

    def levels(self) -> dict[str, int]:
        """The level of each reduction: 1 plus the number of loops that must precede its loop."""
        level: dict[str, int] = {}
        reduction_levels: dict[str, int] = {}
        for name in self.region.prims:
            prim = self.ir.prims[name]
            below = max((level.get(source, 0) for source in prim.inputs), default=0)
            if prim.op is PrimOp.REDUCE:
                # Online softmax and Welford: a sum of exponentials shares the loop of its maximum, and a sum of squared
                # deviations the loop of its mean.
                reduction_levels[name] = level.get(prim.inputs[0], 0) + 1 if prim.fn == "sum_exp" else below + 1
                if self._is_centred(prim):
                    reduction_levels[name] = reduction_levels[str(prim.attrs[CENTRED])]
                level[name] = reduction_levels[name]
            else:
                level[name] = below
        return reduction_levels

    # Scans -------------------------------------------------------------------------------------------------------

    def _write_scan(self) -> None:
        """Emit a loop over blocks of columns that carries the running total of each row."""
        prim = next(p for p in map(self.ir.prims.__getitem__, self.region.prims) if p.op is PrimOp.SCAN)
        unique = self.parameters.names.unique
        carry, value, scanned = unique("carry"), unique("value"), unique("scanned")
        neutral = SCANS[prim.fn][0]
        if not is_float(prim.dtype):
            neutral = neutral.removesuffix(".0")
        backwards = bool(prim.attrs.get("reverse"))
        write = self._running_product if is_wide_product(prim) else self._running_total
        before, within, after = write(prim, neutral, carry, value, scanned, ", reverse=True" * backwards)
        self.lines += before
        self._open_loop()
        self._emit(f"{value} = {self._operand(prim, neutral)}", True)
        for line in within:
            self._emit(line, True)
        self.known[prim.name] = Code(scanned, compute_dtype(prim.dtype), self.rows_per_program > 1, True)
        self._store_all(self.region.outputs)
        for line in after:
            self._emit(line, True)
        self._close_loop(backwards="From the last block to the first." if backwards else "")

    @property
    def _one_per_row(self) -> str:
        return "[ROWS, 1]" if self.rows_per_program > 1 else "[1]"

    def _running_total(
        self, prim: Prim, neutral: str, carry: str, value: str, scanned: str, reverse: str
    ) -> tuple[list[str], list[str], list[str]]:
        """Statements before the loop, and inside it before and after the store."""
        _, scan, join, total = SCANS[prim.fn]
        kind = TRITON_DTYPES[compute_dtype(prim.dtype)]
        within = scan.format(value=value, axis=self.axis, reverse=reverse)
        return (
            [f"{carry} = tl.full({self._one_per_row}, {neutral}, {kind})"],
            [f"{scanned} = {join.format(within, carry)}"],
            [f"{carry} = {join.format(total.format(value=value, axis=self.axis), carry)}"],
        )

    def _running_product(
        self, prim: Prim, neutral: str, carry: str, value: str, scanned: str, reverse: str
    ) -> tuple[list[str], list[str], list[str]]:
        """Like :meth:`_running_total`, with separate significands and binary exponents.

        The product of a block may overflow although the total product, which includes small factors, does not.
        """
        unique = self.parameters.names.unique
        size, exponent, carried, shift = (
            unique("size"),
            unique("exponent"),
            unique("carry_exponent"),
            unique("carry_shift"),
        )
        kind = TRITON_DTYPES[compute_dtype(prim.dtype)]
        total = SCANS[prim.fn][3].format(value=size, axis=self.axis)
        return (
            [
                f"{carry} = tl.full({self._one_per_row}, {neutral}, tl.float64)",
                f"{carried} = tl.full({self._one_per_row}, 0, tl.int64)",
            ],
            [
                "# A block's product may overflow although the running product does not: exponents are summed separately.",
                f"{size}, {exponent} = _significand({value})",
                f"{scanned} = _scaled({carry} * tl.cumprod({size}, axis={self.axis}{reverse}), "
                f"{carried} + tl.cumsum({exponent}, axis={self.axis}{reverse})).to({kind})",
            ],
            [
                f"{carry}, {shift} = _significand({carry} * {total})",
                f"{carried} += tl.sum({exponent}, axis={self.axis}, keep_dims=True) + {shift}",
            ],
        )

    # Finishing ---------------------------------------------------------------------------------------------------

    def _persistent_grid(self, work_items: str) -> str:
        return f"min({self.config.persist}, {work_items})"

    @property
    def _most_columns(self) -> int:
        """Most columns of a tile that holds whole rows."""
        return MOST_ELEMENTS // self.rows_per_program

    def finish(
        self,
        name: str,
        docstring: str,
        body: list[str],
        scratch_read: tuple[tuple[str, Scratch], ...] = (),
        scratch_written: tuple[tuple[str, Scratch], ...] = (),
    ) -> Kernel:
        """Assemble the kernel and its launch parameters."""
        constexprs: dict[str, int | bool | str] = {}
        dynamic: dict[str, str] = {}
        limits: tuple[str, ...] = ()
        sizes: dict[str, Size] = {"n_cols": self.n_cols}
        grid: list[str] = []
        if self.has_rows:
            blocks = blocks_text("n_rows", self.rows_per_program)
            grid.append(f"{blocks} * n_outer" if self.outer_groups else blocks)
            sizes["n_rows"] = self.n_rows
            if self.outer_groups:
                sizes["n_outer"] = self.n_outer
        if self.rows_per_program > 1:
            constexprs["ROWS"] = self.rows_per_program
        if self.is_map and self.col_groups:
            grid.append(blocks_text("n_cols", self.block))
        if not grid:
            grid.append("1")
        if self.columns_first:
            grid.reverse()
            work_items = (
                self.n_outer * (self.n_rows + (self.rows_per_program - 1)) if self.outer_groups else self.n_rows
            )
            limits = (f"{work_items} <= {MAX_GRID_Y * self.rows_per_program}",)
        if self.config.persist:
            grid[0] = self._persistent_grid(grid[0])
        if self.loop or self.is_map or self.n_cols.is_constant:
            constexprs["BLOCK"] = self._static_block()
        else:
            dynamic["BLOCK"] = next_power_of_2_text("n_cols")
            limits = (*limits, f"{self.n_cols} <= {self._most_columns}")
        if self.is_map and self.has_rows and not self.n_cols.is_constant:
            most = 2**31 - 1 if self._fits_in_32_bits else None
            if len(grid) > 1 and not self.columns_first:
                most = min(most or MAX_GRID_Y * self.block, MAX_GRID_Y * self.block)
            limits = (*limits, f"{self.n_cols} <= {most}") if most is not None else limits
        if self.tile.needs_quads:
            dynamic["QUADS"] = "n_cols % 4 == 0"
        if not self.col_groups and self.is_map:
            constexprs.pop("BLOCK", None)
        return assemble(
            name,
            self.parameters,
            constexprs,
            docstring,
            body,
            grid=tuple(grid),
            grid_sizes=sizes,
            num_warps=self.config.warps,
            num_stages=self.config.stages,
            dynamic=dynamic,
            limits=limits,
            scratch_read=scratch_read,
            scratch_written=scratch_written,
        )
