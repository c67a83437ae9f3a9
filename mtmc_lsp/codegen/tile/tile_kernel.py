"""Kernels over a tile of rows and columns: elementwise maps, reductions along the columns, and scans.

``rows`` are independent; ``columns`` are what is reduced (or, for a map, the axis that lies densest in memory). A reduction
either holds a whole row of columns at once, or loops over blocks of columns, once per level of reductions that need each
other's results and once more to write what still varies along the columns.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from mtmc_lsp.codegen.kernel import indexing as moves
from mtmc_lsp.codegen.kernel.expressions import Expressions
from mtmc_lsp.codegen.kernel.index import Index
from mtmc_lsp.codegen.kernel.kernel import Kernel, assemble
from mtmc_lsp.codegen.kernel.persistence import one_group_after_another
from mtmc_lsp.codegen.kernel.snippets import COMPARE, TRITON_DTYPES, Code, blocks_text
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

MOST_PROGRAMS = 65535
"""Size of a grid's second dimension."""

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
"""For each scan: what changes nothing, the scan of a block, how two results are joined, and a block's total."""


def write_tile_kernel(
    ir: KernelIR,
    region: Region,
    buffers: Mapping[str, TensorType],
    config: TileConfig,
    name: str,
    docstring: str,
) -> Kernel:
    """Render a map, reduce or scan region.

    Raises:
        CannotCode: something in it has no Triton form.
    """
    # A first pass with every axis apart shows which neighbouring axes all accesses walk as one.
    apart = [[axis] for axis in region.parallel_axes], [[axis] for axis in region.reduced_axes]
    probe = TileWriter(ir, region, buffers, config, *apart)
    probe.write()
    kept = merge_axes(region.parallel_axes, probe.accesses)
    reduced = merge_axes(region.reduced_axes, probe.accesses)
    own = column_axes(ir, region)
    columns = [group for group in kept if group[-1] in own] if region.kind is RegionKind.MAP else reduced
    writer = TileWriter(ir, region, buffers, config, kept, reduced)
    writer.wide_columns = any(steps_far(columns, access) for access in probe.accesses)
    body = writer.write()
    if config.persist:
        body = one_group_after_another(body, writer.pieces())
    return writer.finish(name, docstring, body)


def steps_far(columns: Sequence[Sequence[Axis]], access: Index) -> bool:
    """Whether an access may go beyond 32 bits along the columns: it does not walk them densely, and no size bounds it."""
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

    def pieces(self) -> str:
        """How many pieces of work there are for programs to do one after another.

        Raises:
            CannotCode: there is but one.
        """
        if self.has_rows:
            n_rows = self.named_size(self.n_rows, "n_rows")
            blocks = f"tl.cdiv({n_rows}, ROWS)" if self.rows_per_program > 1 else n_rows
            return f"{self.named_size(self.n_outer, 'n_outer')} * {blocks}" if self.outer_groups else blocks
        if self.is_map and self.col_groups:
            return f"tl.cdiv({self.named_size(self.n_cols, 'n_cols')}, BLOCK)"
        raise CannotCode("one program does all of it already")

    def write(self) -> list[str]:
        """The body's lines."""
        if self.is_map:
            offset = ""
            if self.col_groups:
                wide = "" if self.has_rows and self._fits_in_32_bits else ".to(tl.int64)"
                offset = f"tl.program_id({0 if self.columns_first or not self.has_rows else 1}){wide} * BLOCK + "
            if self._draws():
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

    def _draws(self) -> bool:
        """Whether random numbers are drawn for the columns."""
        return bool(self.col_groups) and any(self.ir.prims[p].op is PrimOp.RANDOM for p in self.region.prims)

    def _store_all(self, outputs: Sequence[Ref]) -> None:
        for ref in outputs:
            self._store(ref)

    def _store(self, ref: Ref) -> None:
        parts = self.region.parts.get(ref)
        if parts is None:
            own = self.ir.of(ref).name
            at = self.tile.own_index(own)
            self._store_at(ref, own, at, at)
        for part in parts or ():
            at = self.tile.own_index(part.prim)
            if part.index:
                self._add_at(ref, part, at)
            else:
                place = (*at[: part.dim], at[part.dim].plus(part.start), *at[part.dim + 1 :])
                self._store_at(ref, part.prim, at, place)

    def _add_at(self, ref: Ref, part: Part, at: tuple[Index, ...]) -> None:
        """Add what a primitive is to a result, where another says."""
        kind = self.ir.graph.type_of(ref)
        value = self.tile.value(part.prim, at)
        place = moves.looked_up(self.tile, part.index, at, kind.shape[part.dim])
        size = self.parameters.size(place.size)
        offset = self.tile.offset(kind, (*at[: part.dim], Index.of(place), *at[part.dim + 1 :]))
        # An index that is none, at which PyTorch's own kernel would stop, must not reach other memory.
        inside = f"({place.code} >= 0) & ({place.code} < {size.at(COMPARE + 1)})"
        spread = Code("", "int64", value.rows or offset.rows, value.cols or offset.cols)
        mask = self.tile.mask_argument(spread, None).removeprefix(", mask=")
        mask = f"{inside} & {mask}" if mask else inside
        address = Expressions.address(self.parameters.output(ref), offset)
        self._emit(f'tl.atomic_add({address}, {value.text}, mask={mask}, sem="relaxed")', spread.cols)

    def _store_at(self, ref: Ref, prim: str, at: tuple[Index, ...], place: tuple[Index, ...]) -> None:
        """Write what a primitive is ``at`` an index of its own to a place in a result."""
        value = self.tile.value(prim, at)
        pointer = self.parameters.output(ref)
        offset = self.tile.offset(self.ir.graph.type_of(ref), place)
        mask = self.tile.mask_argument(offset, None)
        self._emit(f"tl.store({Expressions.address(pointer, offset)}, {value.text}{mask})", offset.cols)

    def _open_loop(self) -> None:
        self.body = []
        self._declare_columns("start + ")

    def _close_loop(self, *, backwards: str = "") -> None:
        """End a loop over blocks of columns.

        Args:
            backwards: why it begins with the last block, where it does.
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
        """Where the blocks of columns start."""
        return f"range(0, {bound}, BLOCK)"

    def _reduce_in_loop(self, wanted: Sequence[Prim], eviction: str = "") -> None:
        """One loop over the columns for reductions that do not need each other."""
        self._open_loop()
        self.tile.eviction = eviction
        paired = {prim.inputs[1] for prim in wanted if prim.fn == "sum_exp"}
        paired |= {str(prim.attrs[CENTRED]) for prim in wanted if self._is_centred(prim)}
        accumulators = [self._accumulate(prim) for prim in wanted if prim.name not in paired]
        self._close_loop()
        for prim, names in accumulators:
            self._finish_reduction(prim, names)

    def _write_loops(self) -> None:
        levels = self.levels()
        full = [ref for ref in self.region.outputs if self._varies_along_columns(ref)]
        several = len(set(levels.values())) + bool(full) > 1
        for level in sorted(set(levels.values())):
            wanted = [self.ir.prims[name] for name, own in levels.items() if own == level]
            self._reduce_in_loop(wanted, "evict_last" if several else "")
        if full:
            self._open_loop()
            self.tile.eviction = "evict_first" if several else ""
            self._store_all(full)
            self._close_loop(backwards="Backwards, so that what was read last is still in the cache." * several)
        self.tile.eviction = ""
        self._store_all([ref for ref in self.region.outputs if ref not in full])

    def _varies_along_columns(self, ref: Ref) -> bool:
        names = (name for known, name in self.region.stored(self.ir) if known == ref)
        return any(set(self.region.table.all_axes(name)) & set(self.region.reduced_axes) for name in names)

    def levels(self) -> dict[str, int]:
        """Reductions by how many loops must come before theirs."""
        level: dict[str, int] = {}
        own: dict[str, int] = {}
        for name in self.region.prims:
            prim = self.ir.prims[name]
            below = max((level.get(source, 0) for source in prim.inputs), default=0)
            if prim.op is PrimOp.REDUCE:
                # A sum of exponentials runs in the loop of its maximum (online softmax), one of squares in that of its mean.
                own[name] = level.get(prim.inputs[0], 0) + 1 if prim.fn == "sum_exp" else below + 1
                if self._is_centred(prim):
                    own[name] = own[str(prim.attrs[CENTRED])]
                level[name] = own[name]
            else:
                level[name] = below
        return own

    # Scans -------------------------------------------------------------------------------------------------------

    def _write_scan(self) -> None:
        """Block after block of columns, carrying the running total of each row."""
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
        """What stands before the loop, and in it before and behind what is stored."""
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
        """As :meth:`_running_total`, significands and exponents of two by themselves.

        A block's product may overflow where the whole one, begun with what is small, does not.
        """
        unique = self.parameters.names.unique
        size, exponent, carried, more = unique("size"), unique("exponent"), unique("carry_exponent"), unique("more")
        kind = TRITON_DTYPES[compute_dtype(prim.dtype)]
        total = SCANS[prim.fn][3].format(value=size, axis=self.axis)
        return (
            [
                f"{carry} = tl.full({self._one_per_row}, {neutral}, tl.float64)",
                f"{carried} = tl.full({self._one_per_row}, 0, tl.int64)",
            ],
            [
                "# Some numbers' product may overflow where it does not with all before them: exponents are added up apart.",
                f"{size}, {exponent} = _significand({value})",
                f"{scanned} = _scaled({carry} * tl.cumprod({size}, axis={self.axis}{reverse}), "
                f"{carried} + tl.cumsum({exponent}, axis={self.axis}{reverse})).to({kind})",
            ],
            [
                f"{carry}, {more} = _significand({carry} * {total})",
                f"{carried} += tl.sum({exponent}, axis={self.axis}, keep_dims=True) + {more}",
            ],
        )

    # Finishing ---------------------------------------------------------------------------------------------------

    def finish(self, name: str, docstring: str, body: list[str]) -> Kernel:
        """The kernel with its launch."""
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
            pieces = self.n_outer * (self.n_rows + (self.rows_per_program - 1)) if self.outer_groups else self.n_rows
            limits = (f"{pieces} <= {MOST_PROGRAMS * self.rows_per_program}",)
        if self.config.persist:
            grid[0] = f"min({self.config.persist}, {grid[0]})"
        if self.loop or self.is_map or self.n_cols.is_constant:
            constexprs["BLOCK"] = self._static_block()
        else:
            dynamic["BLOCK"] = "triton.next_power_of_2(n_cols)"
            limits = (*limits, f"{self.n_cols} <= {MOST_ELEMENTS // self.rows_per_program}")
        if self.is_map and self.has_rows and not self.n_cols.is_constant and self._fits_in_32_bits:
            limits = (*limits, f"{self.n_cols} < {2**31}")
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
        )
