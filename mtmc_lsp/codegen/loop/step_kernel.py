"""The kernel of one iteration of a loop with products of its state: each program instance computes some columns of some rows.

The launcher launches it once for each iteration. A launch reads all columns of the states of the iteration before, so states are
in memory, in two slices: an iteration reads one and writes the other. The products of an iteration read neither its results nor
each other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from mtmc_lsp.codegen.kernel.axis_groups import Group
from mtmc_lsp.codegen.kernel.index import Index, Variable
from mtmc_lsp.codegen.kernel.kernel import Kernel, Scratch, assemble
from mtmc_lsp.codegen.kernel.persistence import hoist_invariants
from mtmc_lsp.codegen.kernel.snippets import COMPARE, TRITON_DTYPES, Code, blocks_text
from mtmc_lsp.codegen.loop.cell_expressions import CellExpressions, Columns
from mtmc_lsp.codegen.loop.cell_kernel import CellWriter, check_rows
from mtmc_lsp.codegen.loop.iterations import count_text, of_graph, result_pointer, row_strides, sources_of, stride_text
from mtmc_lsp.core.dtypes import compute_dtype
from mtmc_lsp.core.graph import TensorType, contiguous_stride
from mtmc_lsp.core.loop import LoopInput, LoopOutput
from mtmc_lsp.core.protocols import CannotCode
from mtmc_lsp.core.sizes import Size
from mtmc_lsp.ir.axes import Axis
from mtmc_lsp.ir.loops.cells import CellForm
from mtmc_lsp.ir.primitives import ONE, KernelIR, Prim
from mtmc_lsp.schedule.cell_configs import DOT_DTYPES, LEAST_ROWS_OF_DOT, MOST_SUMS, sums_of
from mtmc_lsp.schedule.configs import LoopConfig

DEPTH = "DEPTH"
"""The constexpr with the columns of the state that a product multiplies at once."""


def write_step_kernel(
    ir: KernelIR,
    form: CellForm,
    buffers: Mapping[str, TensorType],
    config: LoopConfig,
    name: str,
    docstring: str,
) -> Kernel:
    """Write the kernel of one iteration of a loop with products.

    Raises:
        CannotCode: an operation of the body is not supported.
    """
    check_rows(form, config)
    if sums_of(form, config) > MOST_SUMS:
        raise CannotCode("rows, block and depth are too large for the sums of this loop; make one of them smaller")
    sources = sources_of(ir, form.node)
    writer = StepWriter(form, [buffers[source] for source in sources], config, ir.graph.fp32_matmul)
    kernel = of_graph(writer.finish(name, docstring), form, sources)
    return replace(kernel, initial=tuple((pointer, writer.first(item, sources)) for item, pointer in writer.held))


class StepColumns(Columns):
    """The columns of a program, and those of the state that it multiplies at once."""

    def pieces(self, size: Size) -> range:
        """A program has one block of columns."""
        return range(1)

    def limits(self) -> tuple[str, ...]:
        """There are as many programs as all columns need."""
        return ()

    def _declare(self, size: Size, piece: int, down: bool) -> None:
        number, (block, width) = -1 - len(self.groups), self.block(size)
        name, mask = self._name("cols"), self._name("col_mask")
        self.lines.append(f"{name} = tl.program_id(1) * {block} + tl.arange(0, {block})[None, :]")
        self.groups[size, piece, down] = Group((Axis(number, size),), name, cols=True)
        if not (size.is_constant and size.constant % width == 0):
            self.lines.append(f"{mask} = {name} < {self.parameters.size(size).at(COMPARE + 1)}")
            self.masks[number] = mask

    def along(self, size: Size, start: str, depth: int, *, down: bool) -> tuple[Variable, list[str]]:
        """A variable for the columns that a product multiplies at once, and the statements that define it."""
        number = -1 - len(self.groups)
        name = self.parameters.names.unique("inner" if down else "k")
        lines = [f"{name} = {start} + tl.arange(0, {DEPTH}){'[:, None]' if down else '[None, :]'}"]
        self.groups[size, number, down] = Group((Axis(number, size),), name, rows=down, cols=not down)
        if not (size.is_constant and size.constant % depth == 0):
            mask = self.parameters.names.unique("inner_mask" if down else "k_mask")
            lines.append(f"{mask} = {name} < {self.parameters.size(size).at(COMPARE + 1)}")
            self.masks[number] = mask
        return Variable(number, size, rows=down, cols=not down), lines


class StepExpressions(CellExpressions):
    """Evaluates one iteration at the columns of a program; states are loaded where they are read."""

    def value(self, name: str, at: tuple[Index, ...]) -> Code:
        """The value of a primitive at an index."""
        return self.initial(name, at)


class StepWriter(CellWriter):
    """Writes the body of a kernel that runs one iteration of a loop on some rows and columns."""

    def __init__(self, form: CellForm, types: Sequence[TensorType], config: LoopConfig, precision: str) -> None:
        """Prepare the rows and columns.

        Args:
            types: of the node's arguments in memory.
            precision: of float32 products as the user set it.
        """
        super().__init__(form, types, config, precision)
        tile = self.tile
        self.columns = self.blocks = StepColumns(self.parameters, config, dict(form.ir.graph.sizes))
        self.blocks.block(form.width)
        self.tile = StepExpressions(
            form, self.parameters, self.blocks, tile.rows, tile.flat, tile.row_mask, self._emit, self._provide
        )
        self.sums: dict[tuple[str, tuple[Index, ...]], str] = {}
        """The variable of each product of the iteration."""
        self.held: list[tuple[LoopInput, str]] = []
        """The states that an iteration reads, and the parameters with both of their slices."""

    def first(self, item: LoopInput, sources: Sequence[str]) -> float | str:
        """A state before the first iteration: a number, or a primitive of the graph."""
        if item.initial is not None:
            return item.initial
        assert item.argument is not None
        return sources[item.argument]

    def finish(self, name: str, docstring: str) -> Kernel:
        """Write the statements and assemble the kernel."""
        body = self._body()
        config = self.config
        constexprs = {"ROWS": config.rows} if config.rows > 1 else {}
        scratch = []
        for item, pointer in self.held:
            shape = (Size.of(2), *item.type.shape)
            scratch.append((pointer, Scratch(pointer.removesuffix("_ptr"), shape, compute_dtype(item.type.dtype))))
        for item, _ in self.held:
            # A variable of the kernel: the launcher passes both slices.
            del self.parameters.tensors[self.form.prim(item)]
        return assemble(
            name,
            self.parameters,
            {**constexprs, **dict(self.columns.blocks.values()), DEPTH: config.depth},
            docstring,
            body,
            grid=(blocks_text("n_rows", config.rows), blocks_text("n_cols", self.columns.block(self.form.width)[1])),
            grid_sizes={"n_rows": self.n_rows, "n_cols": self.form.width},
            num_warps=config.warps,
            num_stages=config.stages,
            scratch_written=tuple(scratch),
            repeat=(self.step, self.form.loop.count),
        )

    def _body(self) -> list[str]:
        loop = self.form.loop
        head = ["row = tl.program_id(0).to(tl.int64)"]
        if self.config.rows > 1:
            head = ["rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]"]
            head.append(f"row_mask = rows < {self._named_size(self.n_rows, 'n_rows')}")
        # Other sizes read the same parameter.
        self.parameters.name_size(loop.count, str(loop.count) if loop.count.is_symbol else "n_steps")
        pointers = self._states()
        for axis in self.form.region.parallel_axes:
            # Emits the row's parts, which all statements may read.
            self.tile.index(self.tile.index_of((axis,)))
        rows, self.lines = self.lines, []
        for item in loop.inputs:
            if item.is_index:
                self._hold_index(item)
            elif item.position is not None and self.form.prim(item) in self.region.inputs:
                assert item.argument is not None
                stride = self.types[item.argument].stride[item.position.dim]
                self.moves.append((self.parameters.tensor(self.form.prim(item)), item.position, stride))
        stores: list[str] = []
        last: list[str] = []
        for item in loop.states:
            assert item.next is not None
            name, at, code = self._next(item)
            if item.name in pointers:
                stores.append(self._store_of(pointers[item.name], self._dense(item), name, at, code))
            for i, output in enumerate(loop.outputs):
                if output.position is None and output.value == item.next:
                    pointer = result_pointer(self.form, self.parameters, i)
                    last.append(self._store_of(pointer, self.form.node.outputs[i], name, at, code))
        stores += [self._row(i, output) for i, output in enumerate(loop.outputs) if output.position is not None]
        if last:
            stores += [
                f"if {self.step} == {count_text(self.form, self.parameters)} - 1:",
                *(f"    {line}" for line in last),
            ]
        # Loads that wait for no product are in flight while the products are computed.
        before, after = hoist_invariants(self.lines, set(self.sums.values()))
        self.lines = []
        sums = self._sums()
        return [*head, *rows, *self._moves(), *self.columns.lines, *before, *sums, *after, *stores]

    def _states(self) -> dict[str, str]:
        """Declare the states that the iteration reads; returns pointers to the slices that it writes, by state."""
        pointers: dict[str, str] = {}
        for item in self.form.loop.states:
            prim = self.form.prim(item)
            if prim not in self.region.inputs:
                continue
            pointer = self.parameters.names.unique(f"{item.name}_states_ptr")
            self.parameters.buffers = {**self.parameters.buffers, prim: self._dense(item)}
            self.parameters.tensors[prim] = self.parameters.names.unique(f"old_{item.name}_ptr")
            self.held.append((item, pointer))
            pointers[item.name] = self.parameters.names.unique(f"next_{item.name}_ptr")
        self.next_pointers = pointers
        return pointers

    def _moves(self) -> list[str]:
        """Statements that move the pointers to the rows of the iteration, and to the slices of its states."""
        lines = []
        for item, pointer in self.held:
            count = self.parameters.divisor(self._dense(item).numel)
            now, following = self.parameters.tensors[self.form.prim(item)], self.next_pointers[item.name]
            lines.append(f"{now} = {pointer} + {self.step} % 2 * {count}")
            lines.append(f"{following} = {pointer} + ({self.step} + 1) % 2 * {count}")
        for pointer, at, stride in self.moves:
            if (start := at.first * stride).terms:
                lines.append(f"{pointer} += {self.parameters.divisor(start)}")
            lines.append(
                f"{pointer} += tl.cast({self.step}, tl.int64) * {stride_text(self.parameters, stride, at.step)}"
            )
        return lines

    @staticmethod
    def _dense(item: LoopInput) -> TensorType:
        """One slice of a state in memory."""
        return TensorType(item.type.shape, compute_dtype(item.type.dtype), contiguous_stride(item.type.shape))

    def _next(self, item: LoopInput) -> tuple[str, tuple[Index, ...], Code]:
        """Emit the value of a state after the iteration."""
        assert item.next is not None
        name = self.ir.of(item.next).name
        at = self.tile.at(name, 0)
        value = self.tile.value(name, at)
        code = self.tile.cast(value, compute_dtype(item.type.dtype))
        if not code.text.isidentifier() and (code.rows or code.cols):
            is_same = code is value
            code = self.tile.assign(code, f"next_{item.name}")
            if is_same:
                self.tile.reuse(name, at, code)
        return name, at, code

    def _row(self, number: int, output: LoopOutput) -> str:
        """The store of the row of an iteration."""
        assert output.position is not None
        kind, name = self.form.node.outputs[number], self.ir.of(output.value).name
        pointer, at = result_pointer(self.form, self.parameters, number), self.tile.at(name, 0)
        shape = self.ir.prims[name].shape
        row = TensorType(shape, kind.dtype, row_strides(kind, output.position, len(shape)))
        self.moves.append((pointer, output.position, kind.stride[output.position.dim]))
        return self._store_of(pointer, row, name, at, self.tile.value(name, at))

    def _store_of(self, pointer: str, kind: TensorType, prim: str, at: tuple[Index, ...], code: Code) -> str:
        """The statement of a store; the parts of its address are emitted."""
        self._store(pointer, kind, prim, at, code)
        return self.lines.pop()

    # Products ----------------------------------------------------------------------------------------------------

    def _product(self, prim: Prim, at: tuple[Index, ...]) -> Code:
        """A product of rows and a matrix, which a loop before all other statements sums up."""
        if self.ir.prims[prim.inputs[0]].shape[-1] == ONE:
            return super()._product(prim, at)
        if (prim.name, at) not in self.sums:
            self.sums[prim.name, at] = self.parameters.names.unique("product")
        return Code(self.sums[prim.name, at], compute_dtype(prim.dtype), self.config.rows > 1, True)

    def _sums(self) -> list[str]:
        """The loops that sum up the products, one for each length of their sums."""
        by_length: dict[Size, list[tuple[Prim, tuple[Index, ...], str]]] = {}
        for (name, at), variable in self.sums.items():
            prim = self.ir.prims[name]
            by_length.setdefault(self.ir.prims[prim.inputs[0]].shape[-1], []).append((prim, at, variable))
        lines = []
        for size, products in by_length.items():
            lines += self._sum_loop(size, products)
        return lines

    def _sum_loop(self, size: Size, products: Sequence[tuple[Prim, tuple[Index, ...], str]]) -> list[str]:
        start = self.parameters.names.unique("start")
        self.tile.cache.clear()
        down, lines = self.blocks.along(size, start, self.config.depth, down=True)
        across = down
        if self.config.rows > 1:
            across, more = self.blocks.along(size, start, self.config.depth, down=False)
            lines += more
        before, after, self.lines = [], [], lines
        for prim, at, variable in products:
            *batch, row, column = at
            left = self._left(prim.inputs[0], (*batch, row, Index.of(across)))
            code = self.tile.value(prim.inputs[1], (*batch, Index.of(down), column))
            matrix = (code if code.text.isidentifier() else self.tile.assign(code, "matrix")).text
            dtype = TRITON_DTYPES[compute_dtype(prim.dtype)]
            if self.config.rows >= LEAST_ROWS_OF_DOT:
                shape, text = "[ROWS, BLOCK]", f"{variable} = {self._dot(prim, left, matrix, variable)}"
            elif self.config.rows > 1:
                shape = f"[ROWS, {DEPTH}, BLOCK]"
                text = f"{variable} += tl.expand_dims({left}, 2) * tl.expand_dims({matrix}, 0)"
                after.append(f"{variable} = tl.sum({variable}, axis=1)")
            else:
                shape, text = f"[{DEPTH}, BLOCK]", f"{variable} += {left} * {matrix}"
                after.append(f"{variable} = tl.sum({variable}, axis=0, keep_dims=True)")
            before.append(f"{variable} = tl.zeros({shape}, {dtype})")
            self.lines.append(text)
        self.tile.cache.clear()
        bounds = f"0, {self.parameters.size(size).text}, {DEPTH}"
        return [*before, f"for {start} in range({bounds}):", *(f"    {line}" for line in self.lines), *after]

    def _left(self, name: str, at: tuple[Index, ...]) -> str:
        """The left operand of a product as a variable, with zeros outside of the tensor."""
        code = self.tile.cast(self.tile.value(name, at), self.ir.prims[name].dtype)
        rows = "ROWS" if self.config.rows > 1 else DEPTH
        text = code.text
        if self.config.rows > 1 and not (code.rows and code.cols):
            text = f"tl.broadcast_to({text}, [{rows}, {DEPTH}])"
        elif not (code.rows or code.cols):
            text = f"tl.full([{DEPTH}, 1], {text}, {TRITON_DTYPES[code.dtype]})"
        if (masks := self.tile.masks_at(at[-1:])) and name not in self.region.inputs:
            text = f"tl.where({masks[0]}, {text}, 0.0)"
        if text.isidentifier():
            return text
        return self.tile.assign(Code(text, code.dtype, True, True), "operand").text

    def _dot(self, prim: Prim, left: str, matrix: str, total: str) -> str:
        if prim.dtype not in DOT_DTYPES:
            raise CannotCode(f"{prim.origin}: products of {prim.dtype} have at most 8 rows; set rows to 8 or less")
        if prim.dtype == "float32":
            return f'tl.dot({left}, {matrix}, {total}, input_precision="{self.precision}")'
        kind = TRITON_DTYPES[prim.dtype]
        return f"tl.dot({left}.to({kind}), {matrix}.to({kind}), {total})"
