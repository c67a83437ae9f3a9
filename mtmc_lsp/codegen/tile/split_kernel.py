"""Split reductions for few long rows: several program instances share the columns of a row.

For each level of dependent reductions, one kernel writes ``PARTS`` partial results per row, and the next kernel combines them
first. The last kernel writes the region's outputs. There are no atomics, so results are deterministic.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from mtmc_lsp.codegen.kernel.index import Index
from mtmc_lsp.codegen.kernel.kernel import Kernel, Scratch, assemble
from mtmc_lsp.codegen.kernel.snippets import TRITON_DTYPES, Code, blocks_text
from mtmc_lsp.codegen.tile.tile_kernel import TileWriter, merged_axes, separate_axes, steps_far
from mtmc_lsp.core.dtypes import compute_dtype
from mtmc_lsp.core.graph import TensorType
from mtmc_lsp.ir.axes import Axis
from mtmc_lsp.ir.primitives import CENTRED, KernelIR, Prim, PrimOp
from mtmc_lsp.ir.regions import Region
from mtmc_lsp.schedule.configs import TileConfig

Partials = dict[str, tuple[Scratch, ...]]
"""Buffers of each reduction's partial results: the values, and for an arg-reduction also the positions."""


def write_split_kernels(
    ir: KernelIR,
    region: Region,
    buffers: Mapping[str, TensorType],
    config: TileConfig,
    name: str,
    docstring: str,
) -> list[Kernel]:
    """Write the kernels of a reduce region with ``config.split`` parts per row.

    Raises:
        CannotCode: an operation of the region is not supported.
    """
    config = replace(config, loop=True)
    probe = TileWriter(ir, region, buffers, config, *separate_axes(region))
    probe.write()
    parallel, reduced = merged_axes(probe)
    wide = any(steps_far(reduced, access) for access in probe.accesses)

    def pass_writer() -> _PassWriter:
        writer = _PassWriter(ir, region, buffers, config, parallel, reduced, partials)
        writer.wide_columns = wide
        return writer

    levels = probe.levels()
    partials: Partials = {}
    kernels: list[Kernel] = []
    numbers = sorted(set(levels.values()))
    for number in numbers:
        reductions = [ir.prims[prim] for prim, level in levels.items() if level == number]
        suffix = "" if len(numbers) == 1 else f"_{number}"
        kernels.append(pass_writer().partial_kernel(reductions, f"{name}_parts{suffix}"))
    return [*kernels, pass_writer().last_kernel(name, docstring)]


class _PassWriter(TileWriter):
    """Writes one of the kernels. ``partials`` holds the results of earlier kernels, and receives this one's."""

    def __init__(
        self,
        ir: KernelIR,
        region: Region,
        buffers: Mapping[str, TensorType],
        config: TileConfig,
        parallel: list[list[Axis]],
        reduced: list[list[Axis]],
        partials: Partials,
    ) -> None:
        self.partials = partials
        self.parts = config.split
        self.loaded: dict[Scratch, str] = {}
        self.read: list[tuple[str, Scratch]] = []
        self.written: list[tuple[str, Scratch]] = []
        super().__init__(ir, region, buffers, config, parallel, reduced)

    _stride_text = "(PARTS * BLOCK)"
    _first_text = "part * BLOCK"

    # Kernels -----------------------------------------------------------------------------------------------------

    def partial_kernel(self, reductions: Sequence[Prim], name: str) -> Kernel:
        """The kernel that writes the partial results of each row."""
        self._declare_part()
        self._reduce_in_loop(reductions)
        for prim in reductions:
            self._store_partial(prim)
        functions = " and ".join(
            dict.fromkeys(prim.fn.replace("sum_exp", "sum of exponentials") for prim in reductions)
        )
        summary = f"The {functions} of each part of each row; rows are too long for one program instance."
        return self._kernel(name, summary, parts=True)

    def last_kernel(self, name: str, docstring: str) -> Kernel:
        """The kernel that combines the partial results and writes the outputs."""
        along_columns = [ref for ref in self.region.outputs if self._varies_along_columns(ref)]
        per_row = [ref for ref in self.region.outputs if ref not in along_columns]
        if not along_columns:
            self._store_all(per_row)
            return self._kernel(name, docstring, parts=False)
        self._declare_part()
        self._open_loop()
        self._store_all(along_columns)
        self._close_loop()
        before = len(self.lines)
        self._store_all(per_row)
        if per_row:
            statements = self.lines[before:]
            self.lines[before:] = ["if part == 0:", *(f"    {line}" for line in statements)]
        return self._kernel(name, docstring, parts=True)

    def _declare_part(self) -> None:
        # A single row may be a whole tensor with more than 2**31 elements.
        self.lines.append("part = tl.program_id(1)" if self.has_rows else "part = tl.program_id(0).to(tl.int64)")

    @property
    def _has_wide_positions(self) -> bool:
        return self.wide_columns or not self.has_rows

    def _column_range(self, bound: str) -> str:
        return f"range(part * BLOCK, {bound}, PARTS * BLOCK)"

    def _kernel(self, name: str, docstring: str, *, parts: bool) -> Kernel:
        grid: list[str] = []
        rows = self.rows_per_program
        if self.has_rows:
            grid.append(blocks_text("n_rows", rows))
        if parts:
            grid.append(str(self.parts))
        constexprs: dict[str, int | bool | str] = {"ROWS": rows} if rows > 1 else {}
        if any("BLOCK" in line for line in self.lines):
            constexprs["BLOCK"] = self.block
        constexprs["PARTS"] = self.parts
        return assemble(
            name,
            self.parameters,
            constexprs,
            docstring,
            self.lines,
            grid=tuple(grid) or ("1",),
            grid_sizes={"n_cols": self.n_cols, "n_rows": self.n_rows},
            num_warps=self.config.warps,
            num_stages=self.config.stages,
            scratch_read=tuple(self.read),
            scratch_written=tuple(self.written),
        )

    # Partial results ---------------------------------------------------------------------------------------------

    def _store_partial(self, prim: Prim) -> None:
        value = self.known[prim.name]
        items = [(value.text, value.dtype, prim.fn)]
        if prim.fn.startswith("arg"):
            source = compute_dtype(self.ir.prims[prim.inputs[0]].dtype)
            items = [(self.extremes[prim.name], source, "extreme"), (value.text, "int64", prim.fn)]
        shape = (self.n_rows, self.n_rows.of(self.parts)) if self.has_rows else (self.n_rows.of(self.parts),)
        buffers: list[Scratch] = []
        for text, dtype, kind in items:
            if dtype == "bool":
                text, dtype = f"({text}).to(tl.int32)", "int32"
            scratch = Scratch(f"{kind}_parts_{prim.name}", shape, dtype)
            pointer = self.parameters.names.unique(f"{kind}_parts_ptr")
            self.written.append((pointer, scratch))
            mask = ", mask=row_mask" if self.row_masked else ""
            self.lines.append(f"tl.store({pointer} + {self._row_offset()}part, {text}{mask})")
            buffers.append(scratch)
        self.partials[prim.name] = tuple(buffers)

    def _row_offset(self) -> str:
        return f"{'rows' if self.rows_per_program > 1 else 'row'} * PARTS + " if self.has_rows else ""

    def _partial(self, scratch: Scratch) -> str:
        """The variable with all parts of a partial result."""
        if scratch not in self.loaded:
            if not self.loaded:
                broadcast = "[None, :]" if self.rows_per_program > 1 else ""
                self._emit(f"parts = tl.arange(0, PARTS){broadcast}", False)
            name_prefix = scratch.name.rpartition("_")[0]
            pointer = self.parameters.names.unique(f"{name_prefix}_ptr")
            self.read.append((pointer, scratch))
            name = self.parameters.names.unique(name_prefix)
            mask = ", mask=row_mask, other=0" if self.row_masked else ""
            self._emit(f"{name} = tl.load({pointer} + {self._row_offset()}parts{mask})", False)
            self.loaded[scratch] = name
        return self.loaded[scratch]

    def _provide(self, prim: Prim, at: tuple[Index, ...]) -> Code:
        if prim.op is PrimOp.REDUCE and prim.name in self.partials and prim.name not in self.known:
            self._combine(prim)
        return super()._provide(prim, at)

    def _combine_moments(self, prim: Prim) -> None:
        """Combine sums of squared deviations of parts with different means (Chan, Golub & LeVeque 1983)."""
        total = self.ir.prims[str(prim.attrs[CENTRED])]
        if total.name not in self.known:
            self._combine(total)
        sums, spreads = (self._partial(self.partials[name][0]) for name in (total.name, prim.name))
        n_cols, unique = self.named_size(self.n_cols, "n_cols"), self.parameters.names.unique
        counts, mean_difference = unique("part_counts"), unique("mean_difference")
        last = f"tl.minimum(tl.maximum({n_cols} % (PARTS * BLOCK) - parts * BLOCK, 0), BLOCK)"
        self._emit(f"{counts} = ({n_cols} // (PARTS * BLOCK) * BLOCK + {last}).to({TRITON_DTYPES[prim.dtype]})", False)
        mean = f"{self.known[total.name].text} / {n_cols}"
        self._emit(f"{mean_difference} = {sums} / tl.maximum({counts}, 1.0) - {mean}", False)
        self._set(
            prim, self._across("tl.sum", f"{spreads} + {counts} * {mean_difference} * {mean_difference}"), prim.dtype
        )

    def _combine(self, prim: Prim) -> None:
        """Emit statements that combine the partial results."""
        scratches = self.partials[prim.name]
        if prim.fn == "sum_exp":
            top = self.ir.prims[prim.inputs[1]]
            if top.name not in self.known:
                self._combine(top)
            tops, sums = self._partial(self.partials[top.name][0]), self._partial(scratches[0])
            scaled = f"{sums} * tl.exp({tops} - {self.known[top.name].text})"
            self._set(prim, self._across("tl.sum", scaled), prim.dtype)
        elif self._is_centred(prim):
            self._combine_moments(prim)
        elif prim.fn.startswith("arg"):
            self._set_position(prim, *(self._partial(scratch) for scratch in scratches))
        else:
            self._set(prim, self._collapse(prim, self._partial(scratches[0])), compute_dtype(prim.dtype))
