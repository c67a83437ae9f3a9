"""The kernel of a loop with products of its state: each program instance holds whole rows of the states and runs all iterations.

States stay in registers, in blocks of columns. A product sums over these blocks, with one tile of the matrix for each. The tiles
stay in registers if they fit; otherwise each iteration loads them again, from a cache.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace

from mtmc_lsp.codegen.kernel.axis_groups import Group, split_variable
from mtmc_lsp.codegen.kernel.index import Index
from mtmc_lsp.codegen.kernel.kernel import Kernel, assemble
from mtmc_lsp.codegen.kernel.parameters import Parameters
from mtmc_lsp.codegen.kernel.persistence import hoist_invariants, loads_first
from mtmc_lsp.codegen.kernel.snippets import ATOM, PRODUCT, TRITON_DTYPES, Code, blocks_text
from mtmc_lsp.codegen.loop.cell_expressions import CellExpressions, Columns
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
from mtmc_lsp.core.dtypes import compute_dtype, is_float
from mtmc_lsp.core.graph import TensorType, contiguous_stride
from mtmc_lsp.core.loop import MOST_MATRIX_TILES, LoopInput, LoopOutput, Position
from mtmc_lsp.core.protocols import CannotCode
from mtmc_lsp.core.sizes import Size
from mtmc_lsp.ir.loops.cells import CellForm
from mtmc_lsp.ir.primitives import ONE, KernelIR, Prim, PrimOp
from mtmc_lsp.schedule.cell_configs import DOT_DTYPES, LEAST_ROWS_OF_DOT, MOST_TERMS, keeps_columns, kept_tiles
from mtmc_lsp.schedule.configs import LoopConfig, PrecisionMode

Place = tuple[str, tuple[Index, ...]]
"""A primitive and a position."""
MOST_SUMS = 4
"""Most products that one reduction sums: the gates of an LSTM. Each has a device function, ``_sums_of_2`` to ``_sums_of_4``."""
COLUMNS_COMMENT = "# Alignment 1: a thread loads half of a column, not parts of several ones, and sums it in registers."


def write_cell_kernel(
    ir: KernelIR,
    form: CellForm,
    buffers: Mapping[str, TensorType],
    config: LoopConfig,
    name: str,
    docstring: str,
) -> Kernel:
    """Write the kernel of a loop with products.

    Raises:
        CannotCode: an operation of the body is not supported.
    """
    if form.pieces(config.block) > 2 * MOST_MATRIX_TILES:
        raise CannotCode(f"block cannot be {config.block}: each iteration would multiply too many tiles of matrices")
    check_rows(form, config)
    sources = sources_of(ir, form.node)
    types = [buffers[source] for source in sources]
    writer = CellWriter(form, types, config, ir.graph.fp32_matmul)
    kernel = writer.finish(name, docstring)
    if writer.is_by_columns and (together := _with_one_operand(writer.summed)):
        writer = CellWriter(form, types, config, ir.graph.fp32_matmul, together)
        kernel = writer.finish(name, docstring)
    return of_graph(kernel, form, sources)


def check_rows(form: CellForm, config: LoopConfig) -> None:
    """Check that one program may compute the rows of the configuration.

    Raises:
        CannotCode: each row has a matrix, and there are several rows.
    """
    if form.has_matrix_per_row and config.rows > 1:
        raise CannotCode(f"rows cannot be {config.rows}: rows of this loop have different matrices")


class CellWriter:
    """Writes the body of one kernel that runs all iterations of a loop on some rows."""

    def __init__(
        self,
        form: CellForm,
        types: Sequence[TensorType],
        config: LoopConfig,
        precision: str,
        together: Sequence[Sequence[Place]] = (),
    ) -> None:
        """Prepare the rows.

        Args:
            types: of the node's arguments in memory.
            precision: of float32 products as the user set it.
            together: products by columns that one reduction sums.
        """
        self.summed: list[tuple[Place, Hashable]] = []
        """The products by columns in their order, with what is equal for products that one reduction can sum."""
        self.together = {place: places for places in together for place in places}
        self.form, self.ir, self.region, self.types, self.config = form, form.ir, form.region, types, config
        allows_tf32 = precision == "tf32" and config.precision is not PrecisionMode.TF32X3
        self.precision = "tf32" if allows_tf32 else config.precision.value
        self.is_by_columns = keeps_columns(form, config)
        buffers = row_buffers(form, types)
        self.copied: dict[str, TensorType] = {}
        """The views of matrices that the launcher copies, so that the elements of a row are contiguous."""
        for prim, is_transposed in (self._strided_rows(buffers) if self.is_by_columns else {}).items():
            view = _exchanged(buffers[prim]) if is_transposed else buffers[prim]
            copy = replace(view, stride=contiguous_stride(view.shape))
            self.copied[prim], buffers[prim] = view, _exchanged(copy) if is_transposed else copy
        self.parameters = Parameters(form.ir, buffers)
        self.step = self.parameters.names.unique("t")
        self.lines: list[str] = []
        self.matrices: set[str] = set()
        """The variables of the tiles of matrices that each iteration loads."""
        self.kept: list[str] = []
        """The variables of those that stay in registers."""
        self.most_kept = kept_tiles(form, config)
        self.operands: dict[tuple[str, tuple[Index, ...]], str] = {}
        """The variables of the left operands of products, by primitive and position."""
        self.moves: list[tuple[str, Position, Size]] = []
        """Pointers that move from row to row, with the stride of the rows."""
        self.columns = Columns(self.parameters, config, dict(form.ir.graph.sizes))
        axes = form.region.parallel_axes
        self.n_rows = form.region.rows
        is_vector = config.rows > 1
        flat = Group(axes, "rows" if is_vector else "row", rows=is_vector)
        groups = split_variable(flat, [[axis] for axis in axes], self.parameters.names, 0)
        row_mask = "row_mask" if is_vector else ""
        self.tile = CellExpressions(
            form, self.parameters, self.columns, groups, [flat], row_mask, self._emit, self._provide
        )
        self.tile.loads_columns = self.is_by_columns

    def _strided_rows(self, buffers: Mapping[str, TensorType]) -> dict[str, bool]:
        """The matrices whose rows have strides in memory, which neighbouring threads would read slowly.

        The value says whether a matrix is transposed, as the weight of a linear layer: its last dimension is summed.
        """
        table, found = self.region.table, dict[str, bool]()
        for prim in self.form.products:
            summed, names = set(table.of_product(prim).k), [prim.inputs[1]]
            while names:
                name = names.pop()
                if name not in self.region.inputs:
                    names += self.ir.prims[name].inputs
                elif len(self.ir.prims[name].shape) > 1:
                    is_transposed = bool(summed & set(table.axes(name, -1)))
                    if buffers[name].stride[-2 if is_transposed else -1] != ONE:
                        found[name] = is_transposed
        return found

    def _emit(self, text: str, cols: bool) -> None:
        self.lines.append(text)

    # The kernel --------------------------------------------------------------------------------------------------

    def finish(self, name: str, docstring: str) -> Kernel:
        """Write the statements and assemble the kernel."""
        body = self._body()
        config, constexprs = self.config, dict(self.columns.blocks.values())
        if config.rows > 1:
            constexprs = {"ROWS": config.rows, **constexprs}
        tensors = self.parameters.tensors
        copied = {tensors[prim]: kind for prim, kind in self.copied.items() if prim in tensors}
        return assemble(
            name,
            self.parameters,
            constexprs,
            docstring,
            body,
            grid=(blocks_text("n_rows", config.rows),),
            grid_sizes={"n_rows": self.n_rows},
            num_warps=config.warps,
            num_stages=config.stages,
            limits=self.columns.limits(),
            copied=copied,
        )

    def _body(self) -> list[str]:
        loop = self.form.loop
        count = count_text(self.form, self.parameters)
        head = ["row = tl.program_id(0).to(tl.int64)"]
        if self.config.rows > 1:
            head = ["rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]"]
            head.append(f"row_mask = rows < {self._named_size(self.n_rows, 'n_rows')}")
        states = {
            (item.name, piece): self._initial(item, piece) for item in loop.states for piece in self._pieces(item)
        }
        before, self.lines = self.lines, []
        for item in loop.inputs:
            if item.is_index:
                self._hold_index(item)
            elif item.position is not None and self.form.prim(item) in self.region.inputs:
                assert item.argument is not None
                stride = self.types[item.argument].stride[item.position.dim]
                self.moves.append((self.parameters.tensor(self.form.prim(item)), item.position, stride))
        names = {code.text for code in states.values()}
        following = [(key, self._following(key, states, names)) for key in states]
        for i, output in enumerate(loop.outputs):
            if output.position is not None:
                self._store_row(i, output, output.position)
        self.lines += [f"{states[key].text} = {code}" for key, code in following if code != states[key].text]
        self.lines += [
            f"{pointer} += {stride_text(self.parameters, stride, at.step)}" for pointer, at, stride in self.moves
        ]
        varying = {self.step, *names, *(pointer for pointer, _, _ in self.moves)}
        varying |= self.matrices
        invariant, inside = hoist_invariants(self.lines, varying)
        if self.is_by_columns:
            before.append(COLUMNS_COMMENT)
            inside = loads_first(inside)
        self.lines = [*before, *invariant]
        self.lines += loop_lines(self.parameters, self.moves, self.step, count, self.config.stages, inside)
        self.tile.cache.clear()
        for i, output in enumerate(loop.outputs):
            if output.position is None:
                self._store_last(i, output, states)
        return [*head, *self.columns.lines, *self.lines]

    def _named_size(self, size: Size, name: str) -> str:
        self.parameters.name_size(size, name)
        return self.parameters.size(size).text

    # States ------------------------------------------------------------------------------------------------------

    def _pieces(self, item: LoopInput) -> range:
        return self._pieces_of(axes_from(self.form, item))

    def _pieces_of(self, prim: str) -> range:
        """The blocks of columns of a primitive; one if it has no columns."""
        axes = self.form.columns_of(prim)
        return self.columns.pieces(axes[0].size) if axes else range(1)

    def _shape(self, prim: str) -> str:
        axes = self.form.columns_of(prim)
        columns = self.columns.block(axes[0].size)[0] if axes else "1"
        return f"[{'ROWS' if self.config.rows > 1 else '1'}, {columns}]"

    def _initial(self, item: LoopInput, piece: int) -> Code:
        """Emit a block of a state before the first iteration, and hold its variable for the body."""
        source = axes_from(self.form, item)
        prim = self.ir.prims[self.form.prim(item)]
        at = self.tile.at(source, piece)
        dtype = compute_dtype(prim.dtype)
        name = self.parameters.names.unique(item.name)
        if item.initial is not None:
            text = initial_text(item.initial, dtype, self._shape(source))
        else:
            text = self._spread(self.tile.initial(prim.name, at), source)
        self.lines.append(f"{name} = {text}")
        code = Code(name, dtype, self.config.rows > 1, True)
        self.tile.states[prim.name, at] = code
        return code

    def _spread(self, code: Code, like: str) -> str:
        """The text of a value with the shape of a primitive."""
        has_columns = bool(self.form.columns_of(like))
        if code.cols == has_columns and code.rows == (self.config.rows > 1) and (code.rows or code.cols):
            return code.text
        shape = self._shape(like)
        if code.rows or code.cols:
            return f"tl.broadcast_to({code.text}, {shape})"
        return f"tl.full({shape}, {code.text}, {TRITON_DTYPES[code.dtype]})"

    def _following(self, key: tuple[str, int], states: Mapping[tuple[str, int], Code], names: set[str]) -> str:
        """Emit a block of a state after the iteration; returns a variable that no assignment to ``names`` changes."""
        item = next(item for item in self.form.loop.states if item.name == key[0])
        assert item.next is not None
        prim, state = self.ir.of(item.next).name, states[key]
        at = self.tile.at(prim, key[1])
        value = self.tile.value(prim, at)
        code = self.tile.cast(value, state.dtype)
        text = self._spread(code, prim)
        if text.isidentifier() and text not in names - {state.text}:
            return text
        name = self.parameters.names.unique(f"next_{item.name}")
        self.lines.append(f"{name} = {text}")
        if code is value and text == code.text:
            self.tile.reuse(prim, at, replace(code, text=name, precedence=ATOM))
        return name

    def _hold_index(self, item: LoopInput) -> None:
        """Hold the number of the iteration as the body sees it."""
        assert item.position is not None
        self.tile.held[self.form.prim(item)] = (), index_code(self.parameters, self.step, item.position)

    # Products and sums -------------------------------------------------------------------------------------------

    def _provide(self, prim: Prim, at: tuple[Index, ...]) -> Code:
        if prim.op is PrimOp.MATMUL:
            return self._product(prim, at)
        if prim.op is PrimOp.REDUCE and prim.fn == "sum":
            return self._sum(prim, at)
        raise CannotCode(f"{prim.origin}: {prim.op.value} is not supported in a loop with products")

    def _product(self, prim: Prim, at: tuple[Index, ...]) -> Code:
        """Emit a product of rows and a matrix: a sum over blocks of columns of the left operand."""
        left, right = prim.inputs
        size = self.ir.prims[left].shape[-1]
        dtype = compute_dtype(prim.dtype)
        *batch, row, column = at
        if size == ONE:
            factors = [
                self.tile.value(left, (*batch, row, Index())),
                self.tile.value(right, (*batch, Index(), column)),
            ]
            text = f"{factors[0].at(PRODUCT)} * {factors[1].at(PRODUCT + 1)}"
            return Code(text, dtype, factors[0].rows or factors[1].rows, True, PRODUCT)
        if self.is_by_columns:
            return self._product_by_columns(prim, at, size)
        total, pieces = "", self.columns.pieces(size)
        # With one row, terms of several tiles are added before their sum, which takes longer than a multiplication.
        adds_terms = self.config.rows == 1 and len(pieces) > 1
        for piece in pieces:
            along = Index.of(self.columns.variable(size, piece))
            down = Index.of(self.columns.variable(size, piece, down=True))
            matrix = self.tile.value(right, (*batch, down, column))
            if not matrix.text.isidentifier():
                matrix = self.tile.assign(matrix, "matrix")
            if matrix.text not in self.kept and len(self.kept) < self.most_kept:
                self.kept.append(matrix.text)
            operand = self._operand(left, (*batch, row, along), size)
            text = f"{operand} * {matrix.text}" if adds_terms else self._product_text(prim, operand, matrix.text, size)
            if matrix.text not in self.kept:
                self.matrices.add(matrix.text)
            if total:
                self.lines.append(f"{total} += {text}")
            else:
                total = self.parameters.names.unique("terms" if adds_terms else "product")
                self.lines.append(f"{total} = {text}")
        if adds_terms:
            terms, total = total, self.parameters.names.unique("product")
            self.lines.append(f"{total} = tl.sum({terms}, axis=0, keep_dims=True)")
        return Code(total, dtype, self.config.rows > 1, True)

    def _product_by_columns(self, prim: Prim, at: tuple[Index, ...], size: Size) -> Code:
        """Emit a product of one row: two threads hold each column of the matrix, and sum in their registers."""
        left = prim.inputs[0]
        place, columns = (prim.name, at), tuple(variable for variable, _ in at[-1].terms)
        self.summed.append((place, (left, at[:-1], size, columns, prim.dtype)))
        places = self.together.get(place, (place,))
        terms = [self._terms(self.ir.prims[name], position, size) for name, position in places]
        names = [self.parameters.names.unique("product") for _ in places]
        shape = f"[1, {self._block_of(at[-1])}]"
        if len(places) == 1:
            self.lines.append(f"{names[0]} = tl.reshape(tl.sum({terms[0]}, axis=0), {shape})")
        else:
            sums = f"tl.reduce(({', '.join(terms)}), 0, _sums_of_{len(places)})"
            self.lines.append(f"{', '.join(names)} = {sums}")
            self.lines += [f"{name} = tl.reshape({name}, {shape})" for name in names]
        codes = {
            other: Code(name, compute_dtype(prim.dtype), False, True) for other, name in zip(places, names, strict=True)
        }
        for (name, position), code in codes.items():
            self.tile.reuse(name, position, code)
        return codes[place]

    def _terms(self, prim: Prim, at: tuple[Index, ...], size: Size) -> str:
        """The terms of a product of one row, added over the blocks of columns of the left operand."""
        left, right = prim.inputs
        *batch, row, column = at
        terms = []
        for piece in self.columns.pieces(size):
            along = Index.of(self.columns.variable(size, piece))
            down = Index.of(self.columns.variable(size, piece, down=True))
            matrix = self.tile.value(right, (*batch, down, column))
            if not matrix.text.isidentifier():
                matrix = self.tile.assign(matrix, "matrix")
            terms.append(f"{self._operand(left, (*batch, row, along), size)} * {matrix.text}")
        return " + ".join(terms)

    def _block_of(self, column: Index) -> str:
        """The columns of the block in which an index is; 1 for a single column."""
        blocks = [self.columns.block(variable.size)[0] for variable, _ in column.terms]
        return blocks[0] if blocks else "1"

    def _operand(self, left: str, at: tuple[Index, ...], size: Size) -> str:
        """The left operand of a product, with zeros outside of the tensor, as a variable."""
        if (left, at) in self.operands:
            return self.operands[left, at]
        code = self.tile.cast(self.tile.value(left, at), self.ir.prims[left].dtype)
        rows, block = "ROWS" if self.config.rows > 1 else "1", self.columns.block(size)[0]
        text = code.text
        if not code.cols or code.rows != (self.config.rows > 1):
            text = f"tl.broadcast_to({text}, [{rows}, {block}])"
        if masks := self.tile.masks_at(at[-1:]):
            text = f"tl.where({masks[0]}, {text}, 0.0)"
        if self.is_by_columns:
            # Without the reshape, the compiler may move whole matrices, or compute the whole state in each thread.
            text = f"tl.expand_dims(tl.reshape({text}, [{block}]), 1)"
        elif self.config.rows == 1:
            # A sum over one row removes the dimension. With ``tl.trans``, the compiler may change the layout of whole matrices.
            text = f"tl.expand_dims(tl.sum({text}, axis=0), 1)"
        if not text.isidentifier():
            name = self.parameters.names.unique("operand")
            self.lines.append(f"{name} = {text}")
            text = name
        self.operands[left, at] = text
        return text

    def _product_text(self, prim: Prim, left: str, matrix: str, size: Size) -> str:
        rows = self.config.rows
        if rows >= LEAST_ROWS_OF_DOT:
            if prim.dtype not in DOT_DTYPES:
                raise CannotCode(f"{prim.origin}: products of {prim.dtype} have at most 8 rows; set rows to 8 or less")
            if prim.dtype == "float32":
                return f'tl.dot({left}, {matrix}, input_precision="{self.precision}")'
            kind = TRITON_DTYPES[prim.dtype]
            return f"tl.dot({left}.to({kind}), {matrix}.to({kind}))"
        if rows * self.columns.block(size)[1] ** 2 > MOST_TERMS:
            raise CannotCode("rows and block are too large for the products of this loop; make one of them smaller")
        if rows == 1:
            return f"tl.sum({left} * {matrix}, axis=0, keep_dims=True)"
        return f"tl.sum(tl.expand_dims({left}, 2) * tl.expand_dims({matrix}, 0), axis=1)"

    def _sum(self, prim: Prim, at: tuple[Index, ...]) -> Code:
        """Emit the sum of rows."""
        dims = prim.attrs["dims"]
        source = prim.inputs[0]
        shape = self.ir.prims[source].shape
        if not isinstance(dims, tuple) or len(dims) != 1:
            raise CannotCode(f"{prim.origin}: a sum over several dimensions is not supported in a loop with products")
        size, total = shape[dims[0]], ""
        for piece in self.columns.pieces(size):
            column = Index.of(self.columns.variable(size, piece))
            index = tuple(column if i == dims[0] else item for i, item in enumerate(at))
            code = self.tile.cast(self.tile.value(source, index), prim.dtype)
            text = code.text
            if not code.cols:
                text = f"tl.broadcast_to({text}, [{'ROWS' if code.rows else '1'}, {self.columns.block(size)[0]}])"
            if masks := self.tile.masks_at([column]):
                text = f"tl.where({masks[0]}, {text}, {'0.0' if is_float(prim.dtype) else '0'})"
            text = f"tl.sum({text}, axis=1, keep_dims=True)"
            if total:
                self.lines.append(f"{total} += {text}")
            else:
                total = self.parameters.names.unique("row_sum")
                self.lines.append(f"{total} = {text}")
        return Code(total, compute_dtype(prim.dtype), self.config.rows > 1, True)

    # Results -----------------------------------------------------------------------------------------------------

    def _store_row(self, number: int, output: LoopOutput, position: Position) -> None:
        """Store the row of an iteration."""
        kind = self.form.node.outputs[number]
        prim = self.ir.prims[self.ir.of(output.value).name]
        strides = row_strides(kind, position, len(prim.shape))
        pointer = result_pointer(self.form, self.parameters, number)
        row = TensorType(prim.shape, kind.dtype, strides)
        for piece in self._pieces_of(prim.name):
            at = self.tile.at(prim.name, piece)
            self._store(pointer, row, prim.name, at, self.tile.value(prim.name, at))
        self.moves.append((pointer, position, kind.stride[position.dim]))

    def _store_last(self, number: int, output: LoopOutput, states: Mapping[tuple[str, int], Code]) -> None:
        """Store the last value of a state."""
        item = next(item for item in self.form.loop.states if item.next == output.value)
        pointer, source = result_pointer(self.form, self.parameters, number), axes_from(self.form, item)
        for piece in self._pieces(item):
            at = self.tile.at(source, piece)
            self._store(pointer, self.form.node.outputs[number], source, at, states[item.name, piece])

    def _store(self, pointer: str, kind: TensorType, prim: str, at: tuple[Index, ...], code: Code) -> None:
        offset = self.tile.offset(kind, at)
        mask = self.tile.mask_argument(offset, None)
        address = self.tile.address(pointer, offset)
        if not (offset.rows or offset.cols):
            # The value has one element in each dimension, and a pointer to one element takes a scalar.
            address = (
                f"{pointer} + tl.zeros([1, 1], tl.int32)"
                if address == pointer
                else (f"{address} + tl.zeros([1, 1], tl.int32)")
            )
        self.lines.append(f"tl.store({address}, {self._spread(code, prim)}{mask})")


def _with_one_operand(summed: Sequence[tuple[Place, Hashable]]) -> list[list[Place]]:
    """Groups of products with the same left operand and columns, of at most :data:`MOST_SUMS`; single products are left out."""
    groups: dict[Hashable, list[Place]] = {}
    for place, key in summed:
        groups.setdefault(key, []).append(place)
    parts = [places[i : i + MOST_SUMS] for places in groups.values() for i in range(0, len(places), MOST_SUMS)]
    return [part for part in parts if len(part) > 1]


def _exchanged(kind: TensorType) -> TensorType:
    """A view with the last two dimensions exchanged."""
    *batch, rows, columns = kind.shape
    *strides, down, along = kind.stride
    return replace(kind, shape=(*batch, columns, rows), stride=(*strides, along, down))
