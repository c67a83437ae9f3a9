"""Kernels that walk rows and sum over all of them: the backward pass of a norm.

A fixed number of programs walks the rows. Each one stores the results of its rows, adds their contributions to the sums in
registers, and writes one row of partial sums at its end. The second kernel adds the rows of all programs and applies the
operations after the sums. There are no atomics, so results are deterministic.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from mtmc_lsp.codegen.kernel.index import Index
from mtmc_lsp.codegen.kernel.kernel import Kernel, Scratch
from mtmc_lsp.codegen.kernel.persistence import loop_over_work_items
from mtmc_lsp.codegen.kernel.snippets import PRODUCT, TRITON_DTYPES, Code, next_power_of_2_text
from mtmc_lsp.codegen.module.naming import value_name
from mtmc_lsp.codegen.tile.tile_kernel import AxisGroups, TileWriter, merged_axes, separate_axes, steps_far
from mtmc_lsp.core.dtypes import compute_dtype
from mtmc_lsp.core.graph import TensorType
from mtmc_lsp.core.protocols import CannotCode
from mtmc_lsp.core.sizes import Size, product
from mtmc_lsp.ir.primitives import KernelIR, Prim, PrimOp
from mtmc_lsp.ir.reductions.column_sums import (
    MOST_ACCUMULATORS,
    part_after_sums,
    part_for_rows,
    results_of_sums,
)
from mtmc_lsp.ir.regions import Region
from mtmc_lsp.schedule.configs import TileConfig
from mtmc_lsp.schedule.reductions.column_sum_configs import MOST_HELD

MOST_WARPS = 16
"""Most warps where rows are longer than those of the workload: with 32, a thread has half as many registers, and AMD has 16."""
PARTS, COLUMNS = 64, 32
"""Programs and columns of a tile of partial sums in the second kernel. An estimate, not measured."""


def write_column_sum_kernels(
    ir: KernelIR,
    region: Region,
    buffers: Mapping[str, TensorType],
    config: TileConfig,
    name: str,
    docstring: str,
) -> list[Kernel]:
    """Write two kernels: the first walks the rows and writes partial sums, the second adds these.

    Raises:
        CannotCode: an operation of the region is not supported.
    """
    if not config.persist or config.loop or config.is_split:
        raise CannotCode("a kernel that sums over its rows has a fixed number of programs, each with whole rows")
    width = product([axis.size for axis in region.reduced_axes])
    words = {prim: value_name(ir, ref) for prim, ref in results_of_sums(ir, region).items()}
    partials = {
        prim: Scratch(f"{words[prim]}_parts", (Size.of(config.persist), width), compute_dtype(ir.prims[prim].dtype))
        for prim in region.sums
    }
    rows, after = part_for_rows(ir, region), part_after_sums(ir, region)
    probe = _RowWriter(ir, rows, buffers, config, separate_axes(rows), partials)
    probe.write()
    parallel, reduced = merged_axes(probe)
    walker = _RowWriter(ir, rows, buffers, config, (parallel, reduced), partials)
    walker.wide_columns = any(steps_far(reduced, access) for access in probe.accesses)
    kernel = walker.kernel(name, docstring)
    adding = replace(config, rows=1, block=COLUMNS, warps=4, persist=0)
    adder = _SumWriter(ir, after, buffers, adding, separate_axes(after), partials)
    return [kernel, adder.kernel(f"{name.removesuffix('_kernel')}_sums_kernel")]


class _PartialsWriter(TileWriter):
    """Writes one of the kernels."""

    def __init__(
        self,
        ir: KernelIR,
        region: Region,
        buffers: Mapping[str, TensorType],
        config: TileConfig,
        axes: AxisGroups,
        partials: Mapping[str, Scratch],
    ) -> None:
        self.partials = partials
        """The buffer of the partial sums, by sum."""
        self.totals: dict[str, str] = {}
        """The accumulator of each sum."""
        self.pointers: dict[str, str] = {}
        """The parameter for the buffer of each sum."""
        super().__init__(ir, region, buffers, config, *axes)

    def _buffers(self) -> tuple[tuple[str, Scratch], ...]:
        return tuple((pointer, self.partials[prim]) for prim, pointer in self.pointers.items())


class _RowWriter(_PartialsWriter):
    """Writes the kernel that walks rows."""

    def write(self) -> list[str]:
        """Write the statements for one tile of rows."""
        lines = super().write()
        for prim in map(self.ir.prims.__getitem__, self.partials):
            source = prim.inputs[0]
            value = self.tile.value(source, self.tile.tile_index(source))
            text = self._broadcast(self.tile.cast(value, compute_dtype(prim.dtype)))
            if self.row_masked:
                text = f"tl.where(row_mask, {text}, 0.0)"
            word = self.partials[prim.name].name.removesuffix("_parts")
            self.totals[prim.name] = self.parameters.names.unique(f"{word}_total")
            lines.append(f"{self.totals[prim.name]} += {text}")
        return lines

    def kernel(self, name: str, docstring: str) -> Kernel:
        """The kernel around these statements."""
        n_cols = self.named_size(self.n_cols, "n_cols")
        holds_loads = self.config.elements <= MOST_HELD
        body, stages = self.write(), self.config.stages
        walk = loop_over_work_items(body, self.work_items(), holds_loads=holds_loads, stages=stages)
        shape = "[ROWS, BLOCK]" if self.rows_per_program > 1 else "[BLOCK]"
        before, after = [], []
        self.parameters.size(self.n_cols)
        for prim, scratch in self.partials.items():
            total = self.totals[prim]
            self.pointers[prim] = pointer = self.parameters.names.unique(f"{scratch.name}_ptr")
            before.append(f"{total} = tl.zeros({shape}, {TRITON_DTYPES[scratch.dtype]})")
            value = f"tl.sum({total}, axis=0, keep_dims=True)" if self.rows_per_program > 1 else total
            mask = ", mask=col_mask" if self.col_masked else ""
            at = f"tl.program_id(0).to(tl.int64) * {n_cols} + cols"
            after.append(f"tl.store({pointer} + {at}, {value}{mask})")
        body = [*before, *walk, *after]
        kernel = self.finish(name, docstring, body, scratch_written=self._buffers())
        return kernel if self.n_cols.is_constant else replace(kernel, warps_text=self._warps_text())

    def _warps_text(self) -> str:
        """The number of warps with which a thread holds as many elements of a row as at the workload's sizes."""
        each, most = max(1, self.config.block // self.config.warps), max(MOST_WARPS, self.config.warps)
        return f"max(1, min({most}, ({next_power_of_2_text('n_cols')}) // {each}))"

    def _persistent_grid(self, work_items: str) -> str:
        # Programs without rows write sums of 0.
        return str(self.config.persist)

    @property
    def _most_columns(self) -> int:
        return min(super()._most_columns, MOST_ACCUMULATORS // (len(self.partials) * self.rows_per_program))


class _SumWriter(_PartialsWriter):
    """Writes the kernel that adds the sums of all programs."""

    def kernel(self, name: str) -> Kernel:
        """The kernel."""
        body = self.write()
        return self.finish(name, "Adds the sums of all program instances.", body, scratch_read=self._buffers())

    def _provide(self, prim: Prim, at: tuple[Index, ...]) -> Code:
        if prim.op is not PrimOp.REDUCE:
            return super()._provide(prim, at)
        if any(a != b for a, b in zip(at, self.tile.tile_index(prim.name), strict=True)):
            raise CannotCode(f"{prim.origin}: its kernel reads this sum at another position")
        if prim.name not in self.known:
            self._add(prim)
        return self.known[prim.name]

    def _add(self, prim: Prim) -> None:
        """Emit a loop over the partial sums."""
        unique, scratch = self.parameters.names.unique, self.partials[prim.name]
        word = scratch.name.removesuffix("_parts")
        pointer, total = unique(f"{scratch.name}_ptr"), unique(f"{word}_totals")
        programs, width = scratch.shape[0].constant, self.parameters.size(scratch.shape[1])
        self.pointers[prim.name] = pointer
        offset = self.tile.index(self.tile.index_of(self.region.parallel_axes))
        columns = f"({offset.text})[None, :]" if offset.text != "cols" else "cols[None, :]"
        mask = " & col_mask[None, :]" if self.col_masked else ""
        parts = unique("parts")
        self.lines += [
            f"{total} = tl.zeros([{PARTS}, BLOCK], {TRITON_DTYPES[scratch.dtype]})",
            f"for first_part in range(0, {programs}, {PARTS}):",
            f"    {parts} = first_part + tl.arange(0, {PARTS})[:, None]",
            f"    part_mask = ({parts} < {programs}){mask}",
            f"    {total} += tl.load({pointer} + {parts} * {width.at(PRODUCT)} + {columns}, mask=part_mask, other=0.0)",
        ]
        name = unique(f"{word}_total")
        self.lines.append(f"{name} = tl.sum({total}, axis=0)")
        self.known[prim.name] = Code(name, scratch.dtype, cols=True)
