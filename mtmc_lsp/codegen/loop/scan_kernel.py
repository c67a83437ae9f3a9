"""The kernels of a loop over time steps as associative scans: programs compute chunks of iterations at once.

A tile has one row per time step. Within a chunk, a scan composes the updates of the states; the states after the last step go to
the next chunk. Where segments share the iterations, one kernel per level of dependent scans first writes what each segment does
to its states. Every later kernel starts a segment with the updates of all earlier segments, in order. There are no atomics.

Composed coefficients may overflow, or multiply zero by infinity, where one step after another gives numbers. A tile with a state
that is not finite is therefore computed again by the sequential kernel, whose launch does nothing for all other tiles.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from mtmc_lsp.codegen.kernel.kernel import Kernel, Scratch
from mtmc_lsp.codegen.loop.compositions import (
    composition_of,
    scan_dtype,
)
from mtmc_lsp.codegen.loop.iterations import of_graph, sources_of
from mtmc_lsp.codegen.loop.loop_kernel import write_loop_kernel
from mtmc_lsp.codegen.loop.scan_states import ScanStates
from mtmc_lsp.codegen.loop.scan_tile import Updates
from mtmc_lsp.codegen.tile.tile import merge_axes
from mtmc_lsp.codegen.tile.tile_kernel import steps_far
from mtmc_lsp.core.dtypes import is_float
from mtmc_lsp.core.graph import TensorType
from mtmc_lsp.core.protocols import CannotCode
from mtmc_lsp.core.sizes import Size
from mtmc_lsp.ir.axes import Axis
from mtmc_lsp.ir.loops.fusion import loop_in
from mtmc_lsp.ir.loops.scan import Recurrence, scan_form
from mtmc_lsp.ir.memory_order import column_axes
from mtmc_lsp.ir.primitives import KernelIR
from mtmc_lsp.ir.regions import Region, RegionKind
from mtmc_lsp.schedule.configs import LoopConfig


def write_scan_kernels(
    ir: KernelIR,
    region: Region,
    buffers: Mapping[str, TensorType],
    config: LoopConfig,
    name: str,
    docstring: str,
) -> list[Kernel]:
    """Write the kernels of a loop as scans, in launch order; the one with the name ``name`` computes the results.

    Raises:
        CannotCode: an operation of the body is not supported.
    """
    form = loop_in(ir, region)
    scan, body = scan_form(form), form.region
    sources = sources_of(ir, form.node)
    types = [buffers[source] for source in sources]
    updates: Updates = {}

    def writer(parallel: Sequence[list[Axis]], reduced: list[list[Axis]]) -> ScanWriter:
        return ScanWriter(form, scan, form.node, types, config, [*parallel], reduced, updates)

    probe = writer([[axis] for axis in body.parallel_axes], [[axis] for axis in body.reduced_axes])
    probe.result_kernel(name, docstring)
    parallel, reduced = (merge_axes(axes, probe.accesses) for axes in (body.parallel_axes, body.reduced_axes))
    columns = [group for group in parallel if group[-1] in column_axes(form.ir, body)]
    columns = columns if body.kind is RegionKind.MAP else reduced
    wide = any(steps_far(columns, access) for access in probe.accesses)

    def next_writer() -> ScanWriter:
        one = writer(parallel, reduced)
        one.wide_columns = wide
        return one

    kernels = []
    updates.clear()
    for level in range(1, scan.levels + 1) if config.segments > 1 else ():
        suffix = f"_{level}" if scan.levels > 1 else ""
        kernels.append(next_writer().updates_kernel(level, f"{name}_segments{suffix}"))
    result = next_writer()
    kernels.append(result.result_kernel(name, docstring))
    kernels = [of_graph(kernel, form, sources) for kernel in kernels]
    if result.flags is None:
        return kernels
    sequential = LoopConfig(1, config.block, config.warps, config.stages)
    summary = "Computes tiles again, one iteration after another, whose states are not all finite."
    again = write_loop_kernel(ir, region, buffers, sequential, f"{name}_again", summary, result.flags)
    if again.grid_sizes["n_cols"] != result.n_cols:
        raise CannotCode("the scan and the sequential kernel of the loop have different tiles")
    return [*kernels, again]


class ScanWriter(ScanStates):
    """Writes the kernels of a loop whose tiles have one row per time step."""

    def result_kernel(self, name: str, docstring: str) -> Kernel:
        """The kernel that computes the results."""
        count = self._before_loop()
        first, last = self._declare_segment(count)
        for item in self.scan.recurrences:
            self._declare_carried(item)
        checked = [item for item in self.scan.recurrences if self._is_checked(item)]
        if checked:
            shape = f"[ROWS, {'BLOCK' if self.col_groups else 1}]"
            self.lines.append(f"{self.unsafe} = tl.zeros({shape}, tl.int1)")
        before, self.lines = self._open_chunk()
        for item in self.scan.recurrences:
            self._scan_states(item, checked)
        for i, output in enumerate(self.form.loop.outputs):
            if output.position is not None:
                self._store_row(i, output, output.position)
        for item in self.scan.recurrences:
            self._carry_states(item)
        self._close_chunk(before, first, last, count)
        self._store_last_states()
        if checked:
            self._store_flag()
        return self._kernel(name, docstring)

    def updates_kernel(self, level: int, name: str) -> Kernel:
        """The kernel that writes what each segment does to the states of a level."""
        count = self._before_loop()
        first, last = self._declare_segment(count)
        below = [item for item in self.scan.recurrences if item.level < level]
        ours = [item for item in self.scan.recurrences if item.level == level]
        for item in below:
            self._declare_carried(item)
        total = {item.states: self._declare_update(item) for item in ours}
        before, self.lines = self._open_chunk()
        for item in below:
            self._scan_states(item, [])
        for item in ours:
            self._compose_chunk(item, total[item.states])
        for item in below:
            self._carry_states(item)
        self._close_chunk(before, first, last, count)
        for item in ours:
            buffers = []
            for variable, component in zip(total[item.states], composition_of(item).names, strict=True):
                state = item.states[0]
                scratch = Scratch(f"{state.name}_{component}", self._update_shape(), scan_dtype(item))
                pointer = self.parameters.names.unique(f"{state.name}_{component}_ptr")
                self.written.append((pointer, scratch))
                self.lines.append(
                    f"tl.store({pointer} + {self._update_offset(self.segment, item)}, {variable}{self._lane_mask(item)})"
                )
                buffers.append(scratch)
            self.updates[self._key(item)] = tuple(buffers)
        names = ", ".join(state.name for item in ours for state in item.states)
        return self._kernel(name, f"What the iterations of each segment do to {names}, as one update.")

    # Values that are not finite -------------------------------------------------------------------------------------

    @staticmethod
    def _is_checked(item: Recurrence) -> bool:
        return composition_of(item).may_overflow and is_float(item.states[0].type.dtype)

    def _store_flag(self) -> None:
        """Emit the store of whether the program met a state that is not finite."""
        blocks = Size.of(1)
        if self.is_map and self.col_groups:
            blocks = Size.parse(f"({self.n_cols} + {self.block - 1}) // {self.block}")
        self.flags = Scratch("flags", (self.n_outer, blocks, Size.of(self.segments)), "int32")
        self.written.append((self.flags_pointer, self.flags))
        outer = "outer * tl.num_programs(1) + " if self.outer_groups else ""
        at = f"{outer}tl.program_id(1)"
        if self.segments > 1:
            at = f"({at}) * SEGMENTS + {self.segment}"
        self.lines.append(f"tl.store({self.flags_pointer} + {at}, tl.max({self.unsafe}.to(tl.int32)))")
