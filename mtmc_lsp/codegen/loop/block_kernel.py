"""The kernel of a loop whose iterations combine the elements of a block: each program instance holds a block of the states.

All values of an iteration stay in registers. Reductions, shifts and products exchange elements inside the program instance.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from mtmc_lsp.codegen.kernel.kernel import Kernel, assemble
from mtmc_lsp.codegen.kernel.parameters import Parameters
from mtmc_lsp.codegen.kernel.persistence import hoist_invariants
from mtmc_lsp.codegen.kernel.snippets import Code, blocks_text
from mtmc_lsp.codegen.loop.block_axes import BlockAxes
from mtmc_lsp.codegen.loop.block_expressions import BlockExpressions
from mtmc_lsp.codegen.loop.iterations import (
    axes_from,
    count_text,
    index_code,
    initial_text,
    loop_lines,
    of_graph,
    result_pointer,
    row_buffers,
    row_strides,
    sources_of,
    stride_text,
)
from mtmc_lsp.core.dtypes import compute_dtype
from mtmc_lsp.core.graph import TensorType
from mtmc_lsp.core.loop import LoopInput, LoopOutput, Position
from mtmc_lsp.core.sizes import Size, product
from mtmc_lsp.ir.loops.blocks import BlockForm
from mtmc_lsp.ir.primitives import KernelIR
from mtmc_lsp.schedule.configs import LoopConfig


def write_block_kernel(
    ir: KernelIR,
    form: BlockForm,
    buffers: Mapping[str, TensorType],
    config: LoopConfig,
    name: str,
    docstring: str,
) -> Kernel:
    """Write the kernel of a loop on blocks.

    Raises:
        CannotCode: an operation of the body is not supported.
    """
    sources = sources_of(ir, form.node)
    writer = _BlockWriter(form, [buffers[source] for source in sources], config, ir.graph.fp32_matmul)
    kernel = writer.finish(name, docstring)
    return of_graph(kernel, form, sources)


class _BlockWriter:
    """Writes the body of one kernel that runs all iterations of a loop on one block."""

    def __init__(self, form: BlockForm, types: Sequence[TensorType], config: LoopConfig, precision: str) -> None:
        self.form, self.ir, self.region, self.types, self.config = form, form.ir, form.region, types, config
        buffers = row_buffers(form, types)
        self.parameters = Parameters(form.ir, buffers)
        self.step = self.parameters.names.unique("t")
        self.lines: list[str] = []
        self.moves: list[tuple[str, Position, Size]] = []
        """Pointers that move from row to row, with the stride of the rows."""
        self.axes = BlockAxes(form, self.parameters)
        self.block = BlockExpressions(
            form, self.parameters, self.axes, self._emit, "tf32" if precision == "tf32" else "ieee"
        )

    def _emit(self, text: str, cols: bool) -> None:
        self.lines.append(text)

    def finish(self, name: str, docstring: str) -> Kernel:
        """Write the statements and assemble the kernel."""
        body = self._body()
        return assemble(
            name,
            self.parameters,
            dict(self.axes.blocks.values()),
            docstring,
            body,
            grid=(blocks_text("n_rows", 1),),
            grid_sizes={"n_rows": product([axis.size for axis in self.region.parallel_axes])},
            num_warps=self.config.warps,
            num_stages=self.config.stages,
            limits=self.axes.limits(),
        )

    def _body(self) -> list[str]:
        loop = self.form.loop
        count = count_text(self.form, self.parameters)
        states = {item.name: self._initial(item) for item in loop.states}
        before, self.lines = self.lines, []
        for item in loop.inputs:
            prim = self.form.prim(item)
            if item.is_index:
                assert item.position is not None
                self.block.hold(prim, index_code(self.parameters, self.step, item.position), ())
            elif item.position is not None and prim in self.region.inputs:
                assert item.argument is not None
                stride = self.types[item.argument].stride[item.position.dim]
                self.moves.append((self.parameters.tensor(prim), item.position, stride))
        names = {code.text for code in states.values()}
        following = [(item, self._following(item, states[item.name], names)) for item in loop.states]
        for i, output in enumerate(loop.outputs):
            if output.position is not None:
                self._store_row(i, output, output.position)
        self.lines += [
            f"{states[item.name].text} = {code}" for item, code in following if code != states[item.name].text
        ]
        self.lines += [
            f"{pointer} += {stride_text(self.parameters, stride, at.step)}" for pointer, at, stride in self.moves
        ]
        invariant, inside = hoist_invariants(
            self.lines, {self.step, *names, *(pointer for pointer, _, _ in self.moves)}
        )
        self.lines = [*before, *invariant]
        self.lines += loop_lines(self.parameters, self.moves, self.step, count, self.config.stages, inside)
        for i, output in enumerate(loop.outputs):
            if output.position is None:
                self._store_last(i, output, states)
        return [*self.axes.lines, *self.lines]

    def _initial(self, item: LoopInput) -> Code:
        """Emit a state before the first iteration, and hold its variable for the body."""
        prim = self.ir.prims[self.form.prim(item)]
        layout = [axis for _, axis in self.form.layout(axes_from(self.form, item))]
        dtype = compute_dtype(prim.dtype)
        name = self.parameters.names.unique(item.name)
        if item.initial is not None:
            text = initial_text(item.initial, dtype, self.axes.shape(layout))
        else:
            code, positions = self.block.loaded(prim, axes_from(self.form, item))
            text = self.block.spread(code, positions, layout)
        self.lines.append(f"{name} = {text}")
        code = Code(name, dtype, bool(layout))
        self.block.hold(prim.name, code, tuple(range(len(layout))))
        return code

    def _following(self, item: LoopInput, state: Code, names: set[str]) -> str:
        """Emit a state after the iteration; returns a variable that no assignment to ``names`` changes."""
        assert item.next is not None
        prim = self.ir.of(item.next).name
        value = self.block.value(prim)
        positions = self.block.positions[prim]
        layout = [axis for _, axis in self.form.layout(prim)]
        text = self.block.spread(self.block.cast(value, state.dtype), positions, layout)
        if text.isidentifier() and text not in names - {state.text}:
            return text
        name = self.parameters.names.unique(f"next_{item.name}")
        self.lines.append(f"{name} = {text}")
        if value.dtype == state.dtype:
            self.block.hold(prim, Code(name, state.dtype, bool(layout)), tuple(range(len(layout))))
        return name

    # Results -----------------------------------------------------------------------------------------------------

    def _store_row(self, number: int, output: LoopOutput, position: Position) -> None:
        """Store the row of an iteration."""
        kind = self.form.node.outputs[number]
        prim = self.ir.prims[self.ir.of(output.value).name]
        strides = row_strides(kind, position, len(prim.shape))
        pointer = result_pointer(self.form, self.parameters, number)
        self.block.value(prim.name)
        self._store(pointer, prim.name, strides, self.block.whole(prim.name))
        self.moves.append((pointer, position, kind.stride[position.dim]))

    def _store_last(self, number: int, output: LoopOutput, states: Mapping[str, Code]) -> None:
        """Store the last value of a state."""
        item = next(item for item in self.form.loop.states if item.next == output.value)
        pointer = result_pointer(self.form, self.parameters, number)
        strides = self.form.node.outputs[number].stride
        self._store(pointer, axes_from(self.form, item), strides, states[item.name].text)

    def _store(self, pointer: str, prim: str, strides: Sequence[Size], text: str) -> None:
        layout = [axis for _, axis in self.form.layout(prim)]
        address, positions = self.axes.address(pointer, prim, strides, [Size.of(0)] * len(strides), [1] * len(strides))
        self.lines.append(f"tl.store({address}, {text}{self.axes.mask_argument(layout, positions, '')})")
