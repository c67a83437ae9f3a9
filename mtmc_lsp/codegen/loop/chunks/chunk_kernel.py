"""The kernel of a loop whose states are sums of outer products: programs compute chunks of iterations by matrix products.

Decays are differences of cumulative logarithms in float64, which are never positive for gates up to one. A gate of zero has a
logarithm that stands for an exact zero. Reads or states that are not finite, negative gates, and decays per channel whose
quotients could overflow set the flags of their rows. The sequential kernel computes those rows again, and its launch does nothing
for all others: infinities and NaN are those of the user's loop.
"""

from __future__ import annotations

from collections.abc import Mapping

from mtmc_lsp.codegen.kernel.kernel import MAX_GRID_Y, Kernel, Scratch, assemble
from mtmc_lsp.codegen.kernel.snippets import blocks_text
from mtmc_lsp.codegen.loop.chunks.chunk_products import ChunkProducts
from mtmc_lsp.codegen.loop.iterations import count_text, of_graph, result_pointer
from mtmc_lsp.codegen.loop.loop_kernel import write_loop_kernel
from mtmc_lsp.core.graph import Ref, TensorType
from mtmc_lsp.core.loop import LoopOutput, Position
from mtmc_lsp.core.sizes import Size, product
from mtmc_lsp.ir.axes import Axis
from mtmc_lsp.ir.loops.chunks import chunk_form
from mtmc_lsp.ir.loops.fusion import loop_in
from mtmc_lsp.ir.primitives import KernelIR
from mtmc_lsp.ir.regions import Region
from mtmc_lsp.schedule.configs import LoopConfig
from mtmc_lsp.schedule.loop_configs import sequential_config


def write_chunk_kernels(
    ir: KernelIR,
    region: Region,
    buffers: Mapping[str, TensorType],
    config: LoopConfig,
    name: str,
    docstring: str,
) -> list[Kernel]:
    """Write the kernels of a loop in chunks, in launch order: that of the chunks, and that of rows which need the loop itself.

    Raises:
        CannotCode: an operation of the body is not supported.
    """
    form = loop_in(ir, region)
    chunk = chunk_form(form)
    sources = [ir.of(ref).name for ref in form.node.args if isinstance(ref, Ref)]
    types = [buffers[source] for source in sources]
    precision = "tf32" if ir.graph.fp32_matmul == "tf32" else "ieee"

    def writer(wide: frozenset[Axis]) -> ChunkWriter:
        return ChunkWriter(form, chunk, types, config, wide, precision)

    probe = writer(frozenset())
    probe.write()
    result = writer(probe.far_axes())
    kernel = of_graph(result.kernel(name, docstring), form, sources)
    summary = (
        "Computes rows again, one iteration after another, with values that are not finite or decays too far apart."
    )
    again = write_loop_kernel(ir, region, buffers, sequential_config(form), f"{name}_again", summary, result.flags)
    return [kernel, again]


class ChunkWriter(ChunkProducts):
    """Writes the kernel of the chunks."""

    @property
    def flags(self) -> Scratch:
        """A number for each row of the sequential kernel: whether it must compute the row."""
        rows = product([axis.size for axis in self.region.parallel_axes])
        return Scratch("flags", (rows, Size.of(1)), "int32")

    def write(self) -> list[str]:
        """Write the statements of the kernel."""
        loop = self.form.loop
        count = count_text(self.form, self.parameters)
        if any(item.has_values and item.state.initial is None for item in self.chunk.memories) or any(
            output.position is None for output in loop.outputs
        ):
            self.declare_state_rows()
        self._write_invariant()
        for memory in self.chunk.memories:
            name = self.parameters.names.unique(memory.state.name)
            self.lines.append(f"{name} = {self.initial(memory.state, memory.has_values)}")
            self.states[memory.prim] = name
        self.lines.append(f"{self.unsafe} = tl.zeros([ROWS, BLOCK], tl.int1)")
        if self.chunk.has_key_gates:
            self.lines.append(f"{self.far} = tl.zeros([ROWS, KEYS], tl.int1)")
        before, self.lines = self.lines, []
        self.lines.append("rows = (start + tl.arange(0, ROWS)[:, None]).to(tl.int64)")
        self.lines.append(f"row_mask = rows < {count}")
        for item in loop.inputs:
            if item.is_index:
                self.hold_index(item)
        self.write_chunk()
        for i, output in enumerate(loop.outputs):
            if output.position is not None:
                self._store_rows(i, output, output.position)
        self.carry()
        inside, self.lines = self.lines, before
        ahead = f", num_stages={self.config.stages}" if self.config.stages > 1 else ""
        self.lines.append(f"for start in tl.range(0, {count}, ROWS{ahead}):")
        self.lines += [f"    {line}" for line in inside]
        for i, output in enumerate(loop.outputs):
            if output.position is None:
                self._store_state(i, output)
        self._store_flags()
        return [*self.before, *self.lines]

    def _write_invariant(self) -> None:
        """Emit what all iterations share."""
        for item in self.form.loop.inputs:
            if item.position is None and not item.is_state:
                self.leaf(self.form.prim(item))
        for name in self.form.invariant():
            axes = set(self.region.table.all_axes(name))
            if not {self.chunk.keys, self.chunk.values} <= axes:
                self.leaf(name)

    # Results --------------------------------------------------------------------------------------------------------

    def _store_rows(self, number: int, output: LoopOutput, position: Position) -> None:
        """Store the rows of all iterations of the chunk."""
        kind = self.form.node.outputs[number]
        prim = self.ir.prims[self.ir.of(output.value).name]
        side = self.side_of(prim.name)
        at, rest = side.tile_index(prim.name), position.dim + (len(prim.shape) == len(kind.shape))
        code = side.value(prim.name, at)
        offset = side.offset(kind, (*at[: position.dim], self.time_index(position), *at[rest:]))
        pointer = result_pointer(self.form, self.parameters, number)
        self.lines.append(f"tl.store({side.address(pointer, offset)}, {code.text}{side.mask_argument(offset, None)})")

    def _store_state(self, number: int, output: LoopOutput) -> None:
        """Store a state after the last iteration."""
        (memory,) = [item for item in self.chunk.memories if item.state.next == output.value]
        kind = self.form.node.outputs[number]
        side = self.state if memory.has_values else self.key
        prim = self.ir.of(output.value).name
        offset = side.offset(kind, side.tile_index(prim))
        pointer = result_pointer(self.form, self.parameters, number)
        text = self.states[memory.prim]
        self.lines.append(f"tl.store({side.address(pointer, offset)}, {text}{side.mask_argument(offset, None)})")

    def _store_flags(self) -> None:
        """Emit the store of the rows that the sequential kernel computes again."""
        self.lines.append(f"{self.flag} = tl.max({self.unsafe}.to(tl.int32), axis=0, keep_dims=True)")
        terms = [f"tl.max({self.far}.to(tl.int32))"] if self.chunk.has_key_gates else []
        for memory in self.chunk.memories:
            outside = f'(~(tl.abs({self.states[memory.prim]}) < float("inf"))).to(tl.int32)'
            terms.append(f"tl.max({outside}, axis=0, keep_dims=True)" if memory.has_values else f"tl.max({outside})")
        self.lines += [f"{self.flag} = tl.maximum({self.flag}, {term})" for term in terms]
        row = self.value.index_of(self.region.parallel_axes)
        offset = self.value.index(row)
        mask = self.value.mask_argument(offset, None)
        self.lines.append(f"tl.store({self.value.address(self.flags_pointer, offset)}, {self.flag}{mask})")

    # Kernel ---------------------------------------------------------------------------------------------------------

    def kernel(self, name: str, docstring: str) -> Kernel:
        """The kernel of the chunks."""
        body = self.write()
        limits = []
        if not self.chunk.keys.size.is_constant:
            limits.append(f"{self.chunk.keys.size} <= {self.keys}")
        if not self.chunk.values.size.is_constant:
            limits.append(f"{self.chunk.values.size} <= {MAX_GRID_Y * self.config.block}")
        return assemble(
            name,
            self.parameters,
            {"ROWS": self.config.chunk, "KEYS": self.keys, "BLOCK": self.config.block},
            docstring,
            body,
            grid=("n_outer" if self.outer else "1", blocks_text("n_values", self.config.block)),
            grid_sizes={"n_values": self.chunk.values.size, "n_outer": self.n_outer},
            num_warps=self.config.warps,
            num_stages=self.config.stages,
            limits=tuple(limits),
            scratch_written=((self.flags_pointer, self.flags),),
        )
