"""Loops whose body contains products of the state and a matrix, such as recurrent cells.

Each element of the next state depends on all elements of a row of the state, so a program instance holds whole rows: a tile of
some rows (of the batch) and all columns. Rows are independent. The matrices are the same in all iterations.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from mtmc_lsp.core.graph import MATRIX_PRODUCTS, Graph, Node, Ref
from mtmc_lsp.core.loop import MATRIX_TILE, MOST_MATRIX_TILES, Loop, LoopInput
from mtmc_lsp.core.sizes import Size, product
from mtmc_lsp.ir.axes import Axis, AxisTable
from mtmc_lsp.ir.loops.form import LoopForm
from mtmc_lsp.ir.primitives import ONE, KernelIR, Prim, PrimOp
from mtmc_lsp.ir.region_values import needed_primitives, used_outside
from mtmc_lsp.ir.regions import CannotFuse, Region, RegionKind

MOVING = frozenset(
    {
        PrimOp.POINTWISE,
        PrimOp.RESHAPE,
        PrimOp.PERMUTE,
        PrimOp.EXPAND,
        PrimOp.ALIAS,
        PrimOp.SLICE,
        PrimOp.CONSTANT,
        PrimOp.REDUCE,
        PrimOp.MATMUL,
    }
)
"""Primitives that a cell may contain."""
REDUCTIONS = frozenset({"sum"})
"""Reductions of a row that a cell may contain."""


@dataclass(frozen=True)
class CellForm(LoopForm):
    """A loop with products of its state in its body."""

    columns: frozenset[Axis]
    """The axes of the body that are columns of a tile."""

    @cached_property
    def products(self) -> tuple[Prim, ...]:
        """The products of an iteration."""
        prims = (self.ir.prims[name] for name in self.region.prims)
        return tuple(prim for prim in prims if prim.op is PrimOp.MATMUL)

    @cached_property
    def has_matrix_per_row(self) -> bool:
        """Whether rows have different matrices, such as one per head. Then a program instance has one row."""
        return any(len(prim.shape) > 2 for prim in self.products)

    def widths(self) -> Iterator[tuple[Size, Size]]:
        """The rows and columns of each matrix."""
        for prim in self.products:
            *_, rows, columns = self.ir.prims[prim.inputs[1]].shape
            yield rows, columns

    def matrix_elements(self) -> int:
        """The elements of all matrices."""
        sizes = self.ir.graph.sizes
        return sum(rows.value(sizes) * columns.value(sizes) for rows, columns in self.widths())

    def pieces(self, block: int) -> int:
        """The tiles of ``block`` rows and columns of all matrices."""
        sizes = self.ir.graph.sizes
        return sum(
            -(-rows.value(sizes) // block) * -(-columns.value(sizes) // block) for rows, columns in self.widths()
        )

    def columns_of(self, name: str) -> tuple[Axis, ...]:
        """The axes of a primitive that are columns."""
        return tuple(axis for axis in self.region.table.all_axes(name) if axis in self.columns)

    @cached_property
    def fits(self) -> bool:
        """Whether a program instance can hold whole rows and multiply them with all matrices."""
        return self.pieces(MATRIX_TILE) <= MOST_MATRIX_TILES

    @cached_property
    def width(self) -> Size:
        """The columns of the states and results, where an iteration is a launch."""
        return next(iter(self.columns_written), ONE)

    @cached_property
    def columns_written(self) -> frozenset[Size]:
        """The numbers of columns of the states and results."""
        names = [self.ir.of(ref).name for ref in self.loop.results]
        return frozenset(axis.size for name in names for axis in self.columns_of(name))

    @cached_property
    def against_launches(self) -> str:
        """Why an iteration cannot be one launch, whose programs compute columns of all states; empty if it can be."""
        after: set[str] = set()
        for name in self.region.prims:
            prim = self.ir.prims[name]
            if prim.op is PrimOp.REDUCE:
                return "an iteration sums over columns"
            if prim.op is PrimOp.MATMUL and prim.inputs[0] in after:
                return "a product waits for another one of the same iteration"
            if prim.op is PrimOp.MATMUL or after & set(prim.inputs):
                after.add(name)
            if prim.op is PrimOp.SLICE and name in after and not self.columns_of(name):
                return "an iteration reads single columns of a product"
        return "" if len(self.columns_written) == 1 else "its states and results have different numbers of columns"


def product_flops(loop: Loop, graph: Graph) -> float:
    """Operations of the matrix products of one iteration."""
    body, total = loop.body(graph), 0.0
    for node in loop.nodes:
        position = MATRIX_PRODUCTS.get(node.op.split(".")[1])
        left = node.args[position] if position is not None else None
        if isinstance(left, Ref):
            total += 2.0 * (product(node.type.shape) * body.type_of(left).shape[-1]).value(graph.sizes)
    return total


def has_products(ir: KernelIR) -> bool:
    """Whether the body contains products of matrices."""
    return any(prim.op is PrimOp.MATMUL for prim in ir.prims.values())


def cell_form(node: Node, results: tuple[Ref, ...], ir: KernelIR) -> CellForm:
    """A body with products as one region.

    Raises:
        CannotFuse: no program instance can hold its rows; the message says why.
    """
    return _Cell(node, results, ir).form()


class _Cell:
    """One body while it is analysed."""

    def __init__(self, node: Node, results: tuple[Ref, ...], ir: KernelIR) -> None:
        assert node.loop is not None
        self.node, self.results, self.ir, self.loop = node, results, ir, node.loop
        self.outputs = used_outside(ir, ir.graph.named)
        roots = [ir.of(ref).name for ref in self.outputs]
        self.prims, self.inputs = needed_primitives(ir, set(ir.graph.named), roots)
        self.members = [ir.prims[name] for name in self.prims]
        self.table = AxisTable(ir.prims, [*self.inputs, *self.prims], ir.graph.sizes)
        self.columns: set[Axis] = set()
        states = [(ir.values[item.name, 0], ir.of(item.next).name) for item in self.loop.states if item.next]
        self.states = [(state, following) for state, following in states if state in self.inputs]
        changing = {ir.values[item.name, 0] for item in self.loop.inputs if self._changes(item)}
        # A value that only the code after the loop reads is a state that no iteration reads.
        self.varying = self._varying(changing & set(self.inputs))

    @staticmethod
    def _changes(item: LoopInput) -> bool:
        return item.is_state or item.position is not None

    def _varying(self, names: set[str]) -> set[str]:
        """The primitives that are computed from some others, and these."""
        result = set(names)
        for prim in self.members:
            if result & set(prim.inputs):
                result.add(prim.name)
        return result

    def form(self) -> CellForm:
        """The body with rows and columns."""
        for prim in self.members:
            self._check(prim)
        self._find_columns()
        rows = self._rows()
        self._check_states()
        region = Region(
            tuple(self.ir.graph.named), self.prims, self.inputs, self.outputs, RegionKind.LOOP, self.table, rows, ()
        )
        form = CellForm(self.node, self.results, self.ir, region, frozenset(self.columns))
        if not form.fits and form.against_launches:
            raise CannotFuse(
                f"the matrices of the loop are too large for one program instance, and {form.against_launches}"
            )
        return form

    def _check(self, prim: Prim) -> None:
        if prim.op not in MOVING:
            raise CannotFuse(f"an iteration of the loop with products contains {prim.op.value}")
        if prim.op is PrimOp.REDUCE and prim.fn not in REDUCTIONS:
            raise CannotFuse(f"an iteration of the loop with products reduces by {prim.fn}")
        if prim.op is not PrimOp.MATMUL:
            return
        left, right = prim.inputs[:2]
        if len(prim.inputs) > 2 or "dims" in prim.attrs:
            raise CannotFuse("an iteration of the loop contains a product of several dimensions")
        if right in self.varying or left not in self.varying:
            raise CannotFuse("an iteration of the loop multiplies by a matrix that changes")

    def _find_columns(self) -> None:
        """Columns are what products and reductions sum over and what products give, in this iteration or in another one."""
        for prim in self.members:
            if prim.op is PrimOp.MATMUL:
                roles = self.table.of_product(prim)
                self.columns |= {*roles.k, *roles.n}
            elif prim.op is PrimOp.REDUCE:
                dims = prim.attrs["dims"]
                assert isinstance(dims, tuple)
                self.columns |= {axis for dim in dims for axis in self.table.axes(prim.inputs[0], dim)}
            elif prim.op is PrimOp.SLICE and prim.shape[dim := int(str(prim.attrs["dim"]))] == ONE:
                # A single column has no axis.
                self.columns |= set(self.table.axes(prim.inputs[0], dim))
        slices = [(prim.inputs[0], prim.name) for prim in self.members if prim.op is PrimOp.SLICE]
        pairs = [*self.states, *slices]
        size = -1
        while size != len(self.columns):
            size = len(self.columns)
            for first, second in pairs:
                for dim in range(len(self.ir.prims[first].shape)):
                    one, other = self.table.axes(first, dim), self.table.axes(second, dim)
                    if self.columns & {*one, *other}:
                        self.columns |= {*one, *other}

    def _rows(self) -> tuple[Axis, ...]:
        """The axes of independent rows, which all states and results have."""
        for first, second in self.states:
            for dim in range(len(self.ir.prims[first].shape)):
                one, other = self.table.axes(first, dim), self.table.axes(second, dim)
                if len(one) == len(other) and not self.columns & {*one, *other}:
                    self.table.tie(one, other)
        rows: tuple[Axis, ...] = ()
        names = [self.ir.of(ref).name for ref in self.outputs]
        for name in names:
            axes = tuple(axis for axis in self.table.all_axes(name) if axis not in self.columns)
            if rows and set(axes) != set(rows):
                raise CannotFuse("the results of an iteration with products have different rows")
            rows = rows or axes
        for name in (*self.varying, *names):
            axes = self.table.all_axes(name)
            columns = [axis for axis in axes if axis in self.columns]
            if len(columns) > 1 or not set(axes) - self.columns <= set(rows):
                raise CannotFuse("an iteration with products has values of more than rows and columns")
        if not rows:
            raise CannotFuse("a loop with products of a single row")
        return rows

    def _check_states(self) -> None:
        """Reject slices of states: registers cannot be sliced. A part of a product is computed from a part of the matrix."""
        held = {name for name, _ in self.states}
        for prim in self.members:
            if not held & set(prim.inputs) or prim.op in (PrimOp.MATMUL, PrimOp.REDUCE):
                continue
            if prim.op is PrimOp.SLICE:
                raise CannotFuse("an iteration of the loop reads a part of its state")
            held.add(prim.name)
