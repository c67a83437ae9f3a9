"""A tile of rows and columns: its loop variables, masks and fused axes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from mtmc_lsp.codegen.kernel.axis_groups import Group, Mask, split_variable
from mtmc_lsp.codegen.kernel.expressions import Expressions
from mtmc_lsp.codegen.kernel.folds import folded
from mtmc_lsp.codegen.kernel.index import Index
from mtmc_lsp.codegen.kernel.kernel import MAX_GRID_Y
from mtmc_lsp.codegen.kernel.parameters import Parameters
from mtmc_lsp.codegen.kernel.snippets import Code
from mtmc_lsp.core.graph import TensorType
from mtmc_lsp.core.protocols import CannotCode
from mtmc_lsp.core.sizes import Size, product
from mtmc_lsp.ir.axes import Axis
from mtmc_lsp.ir.memory_order import column_axes, strided_columns, transposed_axis
from mtmc_lsp.ir.primitives import KernelIR, Prim, PrimOp
from mtmc_lsp.ir.regions import Region, RegionKind
from mtmc_lsp.schedule.column_tiles import next_power_of_two
from mtmc_lsp.schedule.configs import LoopOrder, TileConfig


def merge_axes(axes: Sequence[Axis], accesses: Sequence[Index]) -> list[list[Axis]]:
    """Fuse each axis with its outer neighbour if every access walks both as one dense axis."""
    groups: list[list[Axis]] = []
    for axis in axes:
        if groups and all(_dense(groups[-1][-1], axis, access) for access in accesses):
            groups[-1].append(axis)
        else:
            groups.append([axis])
    return groups


def _dense(outer: Axis, inner: Axis, access: Index) -> bool:
    steps = {variable.id: coefficient for variable, coefficient in access.terms if not variable.code}
    zero = Size.of(0)
    return steps.get(outer.id, zero) == steps.get(inner.id, zero) * inner.size


class TileBase:
    """The tile of a kernel, and the statements that are generated for it."""

    def __init__(
        self,
        ir: KernelIR,
        region: Region,
        buffers: Mapping[str, TensorType],
        config: TileConfig,
        parallel: list[list[Axis]],
        reduced: list[list[Axis]],
    ) -> None:
        self.ir = ir
        self.region = region
        self.config = config
        self.is_map = region.kind is RegionKind.MAP
        self.wide_columns = False
        """Whether column indices need 64 bits."""
        if self.is_map:
            column_axes_set = column_axes(ir, region)
            parallel, reduced = (
                [g for g in parallel if g[-1] not in column_axes_set],
                [g for g in parallel if g[-1] in column_axes_set],
            )
        outer, parallel = self._split_row_axes(parallel)
        self.outer_groups = outer
        """Axes outside the tile, for tiles whose rows (not columns) are neighbours in memory: one position per program."""
        self.n_outer = product([axis.size for group in outer for axis in group])
        self.n_rows = product([axis.size for group in parallel for axis in group])
        self.n_cols = product([axis.size for group in reduced for axis in group])
        self.has_rows = bool(parallel)
        self.rows_per_program = config.rows if self.has_rows else 1
        self.block = config.block
        if self.is_map and not self.has_rows:
            # All axes are fused into columns, so the tile's rows become columns too.
            self.block *= config.rows
        is_wide = self.n_cols.value(ir.graph.sizes) > MAX_GRID_Y * self.block
        self.columns_first = self.is_map and self.has_rows and bool(reduced)
        self.columns_first &= config.order is LoopOrder.COLUMNS or is_wide
        self.loop = config.loop and not self.is_map and bool(reduced)
        self.loop = self.loop or region.kind is RegionKind.SCAN
        self.parameters = Parameters(ir, buffers)
        self.lines: list[str] = []
        self.body: list[str] | None = None
        self.known: dict[str, Code] = {}
        self.extremes: dict[str, str] = {}
        """The variable with the extreme value of each arg-reduction."""
        self.axis = 1 if self.rows_per_program > 1 else 0
        self.row_groups, self.col_groups = parallel, reduced
        self.row_masked = self.rows_per_program > 1 and not _divides(self.rows_per_program, self.n_rows)
        self.col_masked = self._columns_need_mask()
        self.masks = [Mask("row_mask", True, False)] * self.row_masked + [
            Mask("col_mask", False, True)
        ] * self.col_masked
        groups, flat = self._row_variables()
        column_groups, flat_columns = self._column_variables()
        self.tile = Expressions(
            ir,
            region,
            self.parameters,
            [*groups, *column_groups],
            [*flat, *flat_columns],
            self.masks,
            self._emit,
            self._provide,
        )

    @property
    def accesses(self) -> list[Index]:
        return self.tile.accesses

    # Structure ---------------------------------------------------------------------------------------------------

    def _split_row_axes(self, rows: list[list[Axis]]) -> tuple[list[list[Axis]], list[list[Axis]]]:
        """Split the row axes into those outside the tile, and those of the tile's rows."""
        number = self.config.rows
        if len(rows) < 2 or number == 1 or self.config.is_split:
            return [], rows
        if self.is_map:
            row_axis = transposed_axis(self.ir, self.region)
            row_group = next((group for group in rows if row_axis in group), None)
        else:
            # The last group is the densest in memory.
            row_group = rows[-1] if strided_columns(self.ir, self.region) else None
            size = product([axis.size for axis in row_group or ()]).value(self.ir.graph.sizes)
            row_group = row_group if 2 * size > number else None
        return (
            ([group for group in rows if group is not row_group], [row_group]) if row_group is not None else ([], rows)
        )

    def _columns_need_mask(self) -> bool:
        if not self.n_cols.is_constant and not (self.loop or self.is_map):
            return True
        return not _divides(self._static_block(), self.n_cols)

    @property
    def _fits_in_32_bits(self) -> bool:
        return self.n_cols.value(self.ir.graph.sizes) < 2**31

    def _static_block(self) -> int:
        """Columns per tile: the whole row, rounded up to a power of two, for kernels without a loop."""
        if self.loop or self.is_map:
            return self.block
        return next_power_of_two(self.n_cols.constant) if self.n_cols.is_constant else self.block

    def _emit(self, text: str, cols: bool) -> None:
        (self.body if cols and self.body is not None else self.lines).append(text)

    def _row_variables(self) -> tuple[list[Group], list[Group]]:
        """Emit the row index or vector; returns the variables derived from it, and the flat variable."""
        if not self.has_rows:
            return [], []
        is_vector = self.rows_per_program > 1
        name = "rows" if is_vector else "row"
        text = f"tl.program_id({1 if self.columns_first else 0}).to(tl.int64)"
        if self.outer_groups:
            return self._rows_along_one_axis(text)
        self.lines.append(f"{name} = {text} * ROWS + tl.arange(0, ROWS)[:, None]" if is_vector else f"{name} = {text}")
        if self.row_masked:
            self.lines.append(f"row_mask = {name} < {self.named_size(self.n_rows, 'n_rows')}")
        flat = Group(tuple(axis for group in self.row_groups for axis in group), name, rows=is_vector)
        return split_variable(flat, self.row_groups, self.parameters.names, 0), [flat]

    def _rows_along_one_axis(self, program_id: str) -> tuple[list[Group], list[Group]]:
        """Emit row indices along one axis whose elements are neighbours in memory, so that loads coalesce whatever its length."""
        blocks = f"tl.cdiv({self.named_size(self.n_rows, 'n_rows')}, ROWS)"
        self.lines.append(f"piece = {program_id}")
        self.lines.append(f"rows = piece % {blocks} * ROWS + tl.arange(0, ROWS)[:, None]")
        self.lines.append(f"outer = piece // {blocks}")
        if self.row_masked:
            self.lines.append(f"row_mask = rows < {self.named_size(self.n_rows, 'n_rows')}")
        outer = Group(tuple(axis for group in self.outer_groups for axis in group), "outer")
        rows = Group(tuple(axis for group in self.row_groups for axis in group), "rows", rows=True)
        return [*split_variable(outer, self.outer_groups, self.parameters.names, 0), rows], [outer]

    def _column_variables(self) -> tuple[list[Group], list[Group]]:
        """The variables derived from the column vector, and the vector itself, which :meth:`_declare_columns` emits."""
        if not self.col_groups:
            return [], []
        flat = Group(tuple(axis for group in self.col_groups for axis in group), "cols", cols=True)
        return split_variable(flat, self.col_groups, self.parameters.names, len(self.row_groups)), [flat]

    def _declare_columns(self, start: str) -> None:
        broadcast = "[None, :]" if self.rows_per_program > 1 else ""
        if not self.col_groups:
            return
        text = f"{start}tl.arange(0, BLOCK){broadcast}"
        self._emit(f"cols = ({text}).to(tl.int64)" if self.wide_columns else f"cols = {text}", True)
        if self.col_masked:
            self._emit(f"col_mask = cols < {self.named_size(self.n_cols, 'n_cols')}", True)

    def named_size(self, size: Size, name: str) -> str:
        """The expression of a size under its own parameter name."""
        self.parameters.name_size(size, name)
        return self.parameters.size(size).text

    def _provide(self, prim: Prim, at: tuple[Index, ...]) -> Code:
        """The value of a primitive that depends on the kernel's structure.

        Raises:
            CannotCode: this kind of kernel does not support it.
        """
        if prim.op is PrimOp.UNROLLED_REDUCE:
            return folded(self, prim, at)
        raise CannotCode(
            f"{prim.origin}: {prim.op.value} is not supported in an elementwise kernel; put it into a separate kernel"
        )

    def shape_text(self, code: Code) -> str:
        """The tile shape of a value that varies along the same axes as ``code``."""
        if self.rows_per_program > 1:
            return f"[{'ROWS' if code.rows else 1}, {'BLOCK' if code.cols else 1}]"
        return "[BLOCK]" if code.cols else "[]"


def _divides(block: int, size: Size) -> bool:
    return bool(size.terms) and all(coefficient % block == 0 for _, coefficient in size.terms)
