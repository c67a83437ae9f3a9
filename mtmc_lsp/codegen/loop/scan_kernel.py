"""The kernels of a loop over time steps as associative scans: programs compute chunks of iterations at once.

A tile has one row per time step. Within a chunk, a scan composes the updates of the states; the states after the last step go to
the next chunk. Where segments share the iterations, one launch per level of dependent scans first writes what each segment does
to its states. Every later launch starts a segment with the updates of all earlier segments, in order. There are no atomics. With
one level, both launches have the same kernel, and a constant tells them apart.

Composed coefficients may overflow, or multiply zero by infinity, where one step after another gives numbers. A tile with a state
that is not finite is therefore computed again by the sequential kernel, whose launch does nothing for all other tiles.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

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
from mtmc_lsp.ir.loops.scan import Recurrence, ScanKind, scan_form
from mtmc_lsp.ir.memory_order import column_axes
from mtmc_lsp.ir.primitives import KernelIR
from mtmc_lsp.ir.regions import Region, RegionKind
from mtmc_lsp.schedule.configs import LoopConfig

FIRST_PASS = "IS_FIRST_PASS"


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
    two_passes = config.segments > 1 and scan.levels == 1
    two_passes &= all(item.kind is not ScanKind.SHIFT for item in scan.recurrences)
    for level in range(1, scan.levels + 1) if config.segments > 1 and not two_passes else ():
        suffix = f"_{level}" if scan.levels > 1 else ""
        kernels.append(next_writer().updates_kernel(level, f"{name}_segments{suffix}"))
    result = next_writer()
    write = result.two_pass_kernel if two_passes else result.result_kernel
    kernels.append(write(name, docstring))
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
            self._apply_segments(item)
        self._declare_unsafe()
        before, self.lines = self._open_chunk()
        self._scan_chunk({})
        self._close_chunk(before, first, last, count)
        self._store_results_at_end()
        return self._kernel(name, docstring)

    def two_pass_kernel(self, name: str, docstring: str) -> Kernel:
        """The kernel of two launches: the first writes what each segment does to the states, the second computes the results."""
        count = self._before_loop()
        first, last = self._declare_segment(count)
        items = self.scan.recurrences
        for item in items:
            self._declare_carried(item)
        totals: dict[tuple[str, ...], list[str]] = {}
        with self._in_pass(is_first=True):
            for item in items:
                totals[self._key(item)] = self._declare_update(item)
        stores = [line for item in items for line in self._stores_of_update(item, totals[self._key(item)])]
        with self._in_pass(is_first=False):
            for item in items:
                self._apply_segments(item)
            self._declare_unsafe()
        before, self.lines = self._open_chunk()
        # Both passes compose the updates of the chunk. No statement of one pass reads what a statement of the other computes.
        composed = {self._key(item): self._composed(item) for item in items}
        with self._in_pass(is_first=True):
            for item in items:
                self._compose_chunk(item, composed[self._key(item)], totals[self._key(item)])
        with self._in_pass(is_first=False):
            self._scan_chunk(composed)
        self._close_chunk(before, first, last, count)
        with self._in_pass(is_first=True):
            self.lines += stores
        with self._in_pass(is_first=False):
            self._store_results_at_end()
        names = ", ".join(state.name for item in items for state in item.states)
        summary = f"A first launch, with {FIRST_PASS}, writes the effect of each segment on {names} as one update."
        return self._kernel(name, f"{docstring}\n{summary}", (FIRST_PASS, (True, False)))

    @contextmanager
    def _in_pass(self, *, is_first: bool) -> Iterator[None]:
        """Emit what follows for one of the two launches; that for the second follows that for the first."""
        before, self.lines = self.lines, []
        yield
        inside, self.lines = self.lines, before
        if inside:
            self.lines.append(f"if {FIRST_PASS}:" if is_first else "else:")
            self.lines += [f"    {line}" for line in inside]

    def _declare_unsafe(self) -> None:
        if self._checked:
            shape = f"[ROWS, {'BLOCK' if self.col_groups else 1}]"
            self.lines.append(f"{self.unsafe} = tl.zeros({shape}, tl.int1)")

    def _scan_chunk(self, composed: Mapping[tuple[str, ...], list[str]]) -> None:
        """Emit the states and results of a chunk.

        Args:
            composed: variables of composed updates that are emitted already.
        """
        for item in self.scan.recurrences:
            self._scan_states(item, self._checked, composed.get(self._key(item)))
        for i, output in enumerate(self.form.loop.outputs):
            if output.position is not None:
                self._store_row(i, output, output.position)
        for item in self.scan.recurrences:
            self._carry_states(item)

    def _store_results_at_end(self) -> None:
        self._store_last_states()
        if self._checked:
            self._store_flag()

    def updates_kernel(self, level: int, name: str) -> Kernel:
        """The kernel that writes what each segment does to the states of a level."""
        count = self._before_loop()
        first, last = self._declare_segment(count)
        below = [item for item in self.scan.recurrences if item.level < level]
        ours = [item for item in self.scan.recurrences if item.level == level]
        for item in below:
            self._declare_carried(item)
            self._apply_segments(item)
        total = {item.states: self._declare_update(item) for item in ours}
        before, self.lines = self._open_chunk()
        for item in below:
            self._scan_states(item, [])
        for item in ours:
            parts = self._components(item) if item.kind is ScanKind.SHIFT else self._composed(item)
            self._compose_chunk(item, parts, total[item.states])
        for item in below:
            self._carry_states(item)
        self._close_chunk(before, first, last, count)
        for item in ours:
            self.lines += self._stores_of_update(item, total[item.states])
        names = ", ".join(state.name for item in ours for state in item.states)
        return self._kernel(name, f"What the iterations of each segment do to {names}, as one update.")

    def _stores_of_update(self, item: Recurrence, total: Sequence[str]) -> list[str]:
        """The stores of what the segment does to the states of a recurrence; notes the buffers."""
        buffers = []
        lines, offset = self._update_offset(self.segment, item)
        for variable, component in zip(total, composition_of(item).names, strict=True):
            state = item.states[0]
            scratch = Scratch(f"{state.name}_{component}", self._update_shape(), scan_dtype(item))
            pointer = self.parameters.names.unique(f"{state.name}_{component}_ptr")
            self.written.append((pointer, scratch))
            lines.append(f"tl.store({pointer} + {offset}, {variable}{self._lane_mask(item)})")
            buffers.append(scratch)
        self.updates[self._key(item)] = tuple(buffers)
        return lines

    # Values that are not finite -------------------------------------------------------------------------------------

    @property
    def _checked(self) -> list[Recurrence]:
        """The recurrences whose states may become infinite or NaN by the order of the composition alone."""
        items = self.scan.recurrences
        return [item for item in items if composition_of(item).may_overflow and is_float(item.states[0].type.dtype)]

    def _store_flag(self) -> None:
        """Emit the store of whether the program met a state that is not finite."""
        blocks = Size.of(1)
        if self.is_map and self.col_groups:
            blocks = Size.parse(f"({self.n_cols} + {self.block - 1}) // {self.block}")
        self.flags = Scratch("flags", (self.n_outer, blocks, Size.of(self.segments)), "int32")
        self.written.append((self.flags_pointer, self.flags))
        at = "tl.program_id(1)"
        if self.outer_groups:
            number = self.parameters.names.unique("number")
            self.lines.append(f"{number} = outer * tl.num_programs(1) + {at}")
            at = number
        if self.segments > 1:
            at = f"{at} * SEGMENTS + {self.segment}"
        self.lines.append(f"tl.store({self.flags_pointer} + {at}, tl.max({self.unsafe}.to(tl.int32)))")
