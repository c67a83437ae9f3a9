"""Reductions of few long rows: many programs share each row's columns, and their partial results are combined after.

For each level of reductions that need each other's results one kernel writes ``PARTS`` partial results per row; the next
kernel combines them first. The last one writes what the region gives. No atomics: the same inputs give the same bits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from mtmc_lsp.codegen.kernel.index import Index
from mtmc_lsp.codegen.kernel.kernel import Kernel, Scratch, assemble
from mtmc_lsp.codegen.kernel.snippets import TRITON_DTYPES, Code, blocks_text
from mtmc_lsp.codegen.tile.tile import merge_axes
from mtmc_lsp.codegen.tile.tile_kernel import TileWriter, steps_far
from mtmc_lsp.core.dtypes import compute_dtype
from mtmc_lsp.core.graph import TensorType
from mtmc_lsp.ir.axes import Axis
from mtmc_lsp.ir.primitives import CENTRED, KernelIR, Prim, PrimOp
from mtmc_lsp.ir.regions import Region
from mtmc_lsp.schedule.configs import TileConfig

Partials = dict[str, tuple[Scratch, ...]]
"""Reduction to the buffers of its partial results: its values, and for an arg-reduction where they were found."""


def write_split_kernels(
    ir: KernelIR,
    region: Region,
    buffers: Mapping[str, TensorType],
    config: TileConfig,
    name: str,
    docstring: str,
) -> list[Kernel]:
    """Render a reduce region with ``config.split`` parts per row.

    Raises:
        CannotCode: something in it has no Triton form.
    """
    config = replace(config, loop=True)
    probe = TileWriter(
        ir, region, buffers, config, [[a] for a in region.parallel_axes], [[a] for a in region.reduced_axes]
    )
    probe.write()
    kept, reduced = merge_axes(region.parallel_axes, probe.accesses), merge_axes(region.reduced_axes, probe.accesses)
    wide = any(steps_far(reduced, access) for access in probe.accesses)

    def pass_writer() -> _PassWriter:
        writer = _PassWriter(ir, region, buffers, config, kept, reduced, partials)
        writer.wide_columns = wide
        return writer

    levels = probe.levels()
    partials: Partials = {}
    kernels: list[Kernel] = []
    numbers = sorted(set(levels.values()))
    for number in numbers:
        wanted = [ir.prims[prim] for prim, own in levels.items() if own == number]
        suffix = "" if len(numbers) == 1 else f"_{number}"
        kernels.append(pass_writer().partial_kernel(wanted, f"{name}_parts{suffix}"))
    return [*kernels, pass_writer().last_kernel(name, docstring)]


class _PassWriter(TileWriter):
    """Writes one of the kernels; ``partials`` is what the earlier ones left, and is added to."""

    def __init__(
        self,
        ir: KernelIR,
        region: Region,
        buffers: Mapping[str, TensorType],
        config: TileConfig,
        kept: list[list[Axis]],
        reduced: list[list[Axis]],
        partials: Partials,
    ) -> None:
        self.partials = partials
        self.parts = config.split
        self.loaded: dict[Scratch, str] = {}
        self.read: list[tuple[str, Scratch]] = []
        self.written: list[tuple[str, Scratch]] = []
        super().__init__(ir, region, buffers, config, kept, reduced)

    _stride_text = "(PARTS * BLOCK)"
    _first_text = "part * BLOCK"

    # Kernels -----------------------------------------------------------------------------------------------------

    def partial_kernel(self, wanted: Sequence[Prim], name: str) -> Kernel:
        """The kernel that reduces each part of each row."""
        self._declare_part()
        self._reduce_in_loop(wanted)
        for prim in wanted:
            self._store_partial(prim)
        words = " and ".join(dict.fromkeys(prim.fn.replace("sum_exp", "sum of exponentials") for prim in wanted))
        what = f"The {words} of each part of each row: a row has too many columns for one program."
        return self._kernel(name, what, parts=True)

    def last_kernel(self, name: str, docstring: str) -> Kernel:
        """The kernel that combines the parts and writes the results."""
        full = [ref for ref in self.region.outputs if self._varies_along_columns(ref)]
        rest = [ref for ref in self.region.outputs if ref not in full]
        if not full:
            self._store_all(rest)
            return self._kernel(name, docstring, parts=False)
        self._declare_part()
        self._open_loop()
        self._store_all(full)
        self._close_loop()
        before = len(self.lines)
        self._store_all(rest)
        if rest:
            once = self.lines[before:]
            self.lines[before:] = ["if part == 0:", *(f"    {line}" for line in once)]
        return self._kernel(name, docstring, parts=True)

    def _declare_part(self) -> None:
        # One row may be the whole of a tensor with more than 2**31 elements.
        self.lines.append("part = tl.program_id(1)" if self.has_rows else "part = tl.program_id(0).to(tl.int64)")

    @property
    def _has_wide_places(self) -> bool:
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
        made: list[Scratch] = []
        for text, dtype, word in items:
            if dtype == "bool":
                text, dtype = f"({text}).to(tl.int32)", "int32"
            scratch = Scratch(f"{word}_parts_{prim.name}", shape, dtype)
            pointer = self.parameters.names.unique(f"{word}_parts_ptr")
            self.written.append((pointer, scratch))
            mask = ", mask=row_mask" if self.row_masked else ""
            self.lines.append(f"tl.store({pointer} + {self._row_offset()}part, {text}{mask})")
            made.append(scratch)
        self.partials[prim.name] = tuple(made)

    def _row_offset(self) -> str:
        return f"{'rows' if self.rows_per_program > 1 else 'row'} * PARTS + " if self.has_rows else ""

    def _partial(self, scratch: Scratch) -> str:
        """The variable that holds all parts of a partial result."""
        if scratch not in self.loaded:
            if not self.loaded:
                wide = "[None, :]" if self.rows_per_program > 1 else ""
                self._emit(f"parts = tl.arange(0, PARTS){wide}", False)
            word = scratch.name.rpartition("_")[0]
            pointer = self.parameters.names.unique(f"{word}_ptr")
            self.read.append((pointer, scratch))
            name = self.parameters.names.unique(word)
            mask = ", mask=row_mask, other=0" if self.row_masked else ""
            self._emit(f"{name} = tl.load({pointer} + {self._row_offset()}parts{mask})", False)
            self.loaded[scratch] = name
        return self.loaded[scratch]

    def _provide(self, prim: Prim, at: tuple[Index, ...]) -> Code:
        if prim.op is PrimOp.REDUCE and prim.name in self.partials and prim.name not in self.known:
            self._combine(prim)
        return super()._provide(prim, at)

    def _combine_moments(self, prim: Prim) -> None:
        """Statements that make a row's sum of squared deviations of its parts', whose means differ."""
        total = self.ir.prims[str(prim.attrs[CENTRED])]
        if total.name not in self.known:
            self._combine(total)
        totals, spreads = (self._partial(self.partials[name][0]) for name in (total.name, prim.name))
        n_cols, unique = self.named_size(self.n_cols, "n_cols"), self.parameters.names.unique
        counts, apart = unique("part_counts"), unique("apart")
        last = f"tl.minimum(tl.maximum({n_cols} % (PARTS * BLOCK) - parts * BLOCK, 0), BLOCK)"
        self._emit(f"{counts} = ({n_cols} // (PARTS * BLOCK) * BLOCK + {last}).to({TRITON_DTYPES[prim.dtype]})", False)
        mean = f"{self.known[total.name].text} / {n_cols}"
        self._emit(f"{apart} = {totals} / tl.maximum({counts}, 1.0) - {mean}", False)
        self._set(prim, self._across("tl.sum", f"{spreads} + {counts} * {apart} * {apart}"), prim.dtype)

    def _combine(self, prim: Prim) -> None:
        """Statements that make one result of the parts."""
        scratches = self.partials[prim.name]
        if prim.fn == "sum_exp":
            top = self.ir.prims[prim.inputs[1]]
            if top.name not in self.known:
                self._combine(top)
            tops, totals = self._partial(self.partials[top.name][0]), self._partial(scratches[0])
            scaled = f"{totals} * tl.exp({tops} - {self.known[top.name].text})"
            self._set(prim, self._across("tl.sum", scaled), prim.dtype)
        elif self._is_centred(prim):
            self._combine_moments(prim)
        elif prim.fn.startswith("arg"):
            self._set_place(prim, *(self._partial(scratch) for scratch in scratches))
        else:
            self._set(prim, self._collapse(prim, self._partial(scratches[0])), compute_dtype(prim.dtype))
