"""Expressions of a cell: tiles whose columns are those of the state, of a result or of a matrix, in pieces of one block.

A column variable is the same for all axes of one size, so that what an iteration writes is where the next one reads it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from mtmc_lsp.codegen.kernel.axis_groups import Group
from mtmc_lsp.codegen.kernel.expressions import Expressions
from mtmc_lsp.codegen.kernel.index import Index, Variable
from mtmc_lsp.codegen.kernel.parameters import Parameters
from mtmc_lsp.codegen.kernel.snippets import COMPARE, Code
from mtmc_lsp.core.dtypes import is_float
from mtmc_lsp.core.graph import TensorType
from mtmc_lsp.core.protocols import CannotCode
from mtmc_lsp.core.sizes import Size
from mtmc_lsp.ir.axes import Axis
from mtmc_lsp.ir.loops.cells import CellForm
from mtmc_lsp.ir.primitives import Prim
from mtmc_lsp.schedule.cell_configs import cell_block
from mtmc_lsp.schedule.configs import LoopConfig


class Columns:
    """The column vectors of a kernel: for each size, one or several blocks."""

    def __init__(self, parameters: Parameters, config: LoopConfig, sizes: dict[str, int]) -> None:
        self.parameters, self.config, self._extents = parameters, config, sizes
        self.blocks: dict[Size, tuple[str, int]] = {}
        """For each size, the constexpr with the columns of a block, and its value."""
        self.groups: dict[tuple[Size, int, bool], Group] = {}
        self.masks: dict[int, str] = {}
        """The mask of each variable that needs one."""
        self.lines: list[str] = []
        self._usual = {"cols", "col_mask"}
        """Names that are reserved for columns."""

    def pieces(self, size: Size) -> range:
        """The numbers of the blocks of a size."""
        return range(-(-size.value(self._extents) // self.block(size)[1]))

    def block(self, size: Size) -> tuple[str, int]:
        """The name and the number of columns of a block."""
        if size not in self.blocks:
            name = f"BLOCK_{len(self.blocks) + 1}" if self.blocks else "BLOCK"
            self.blocks[size] = name, cell_block(size.value(self._extents), self.config)
        return self.blocks[size]

    def limits(self) -> tuple[str, ...]:
        """Conditions on named sizes under which the blocks cover all columns."""
        sizes = [size for size in self.blocks if not size.is_constant]
        return tuple(f"{size} <= {len(self.pieces(size)) * self.block(size)[1]}" for size in sizes)

    def variable(self, size: Size, piece: int, *, down: bool = False) -> Variable:
        """The columns of a block. ``down``: as rows of a matrix."""
        key = size, piece, down
        if key not in self.groups:
            self._declare(*key)
        axis = self.groups[key].axes[0]
        return Variable(axis.id, size, rows=down, cols=not down)

    def _name(self, preferred: str) -> str:
        """A name for a variable; the usual one for the first."""
        if preferred in self._usual:
            self._usual.remove(preferred)
            return preferred
        return self.parameters.names.unique(preferred)

    def _declare(self, size: Size, piece: int, down: bool) -> None:
        number = -1 - len(self.groups)
        name, mask = self._name("inner" if down else "cols"), self._name("inner_mask" if down else "col_mask")
        block, width = self.block(size)
        start = "" if not piece else f"{block} + " if piece == 1 else f"{piece} * {block} + "
        self.lines.append(f"{name} = {start}tl.arange(0, {block}){'[:, None]' if down else '[None, :]'}")
        self.groups[size, piece, down] = Group((Axis(number, size),), name, rows=down, cols=not down)
        if not (size.is_constant and (piece + 1) * width <= size.constant):
            self.lines.append(f"{mask} = {name} < {self.parameters.size(size).at(COMPARE + 1)}")
            self.masks[number] = mask


class CellExpressions(Expressions):
    """Evaluates the body of a cell at one block of columns at a time."""

    def __init__(
        self,
        form: CellForm,
        parameters: Parameters,
        columns: Columns,
        rows: Sequence[Group],
        flat: Sequence[Group],
        row_mask: str,
        emit: Callable[[str, bool], None],
        provide: Callable[[Prim, tuple[Index, ...]], Code],
    ) -> None:
        super().__init__(form.ir, form.region, parameters, rows, flat, [], emit, provide)
        self.form, self.columns, self.rows = form, columns, tuple(rows)
        self.row_mask = row_mask
        self.piece = 0
        """The block of columns at which values are evaluated."""
        self.states: dict[tuple[str, tuple[Index, ...]], Code] = {}
        """The states in registers, by primitive and position."""
        self.loads_columns = False
        """Whether neighbouring threads load neighbouring columns of matrices."""
        self._held = {form.prim(item) for item in form.loop.states}
        self._reached: tuple[Index, ...] = ()

    def at(self, name: str, piece: int) -> tuple[Index, ...]:
        """The position of a primitive in a block of columns."""
        self.piece = piece
        return self.tile_index(name)

    def _variable(self, axis: Axis) -> Variable:
        if axis in self.form.columns:
            return self.columns.variable(axis.size, self.piece)
        return super()._variable(axis)

    def index(self, index: Index) -> Code:
        """Expression for an index over rows and columns."""
        self.groups = (*self.rows, *self.columns.groups.values())
        return super().index(index)

    def value(self, name: str, at: tuple[Index, ...]) -> Code:
        """The value of a primitive at an index. States are in registers where their blocks are."""
        if name not in self._held:
            return super().value(name, at)
        if (name, at) not in self.states:
            raise CannotCode("an iteration reads a part of its state; leave the loop to PyTorch")
        return self.states[name, at]

    def reuse(self, name: str, at: tuple[Index, ...], code: Code) -> None:
        """Use a variable for a value that was computed before."""
        self.cache[name, at, ()] = code

    def initial(self, name: str, at: tuple[Index, ...]) -> Code:
        """The value of a state before the loop."""
        return super().value(name, at)

    def offset(self, kind: TensorType, at: tuple[Index, ...]) -> Code:
        """Element offset of an index in a buffer; notes where, for the mask."""
        self._reached = at
        return super().offset(kind, at)

    def load_address(self, pointer: str, offset: Code) -> str:
        """The address of a load, with what the compiler should know of it."""
        address = self.address(pointer, offset)
        is_matrix = self.loads_columns and offset.rows and offset.cols
        # With the larger alignment that the compiler knows, a thread would load parts of several columns.
        return f"tl.multiple_of({address}, [1, 1])" if is_matrix else address

    def mask_argument(self, offset: Code, dtype: str | None) -> str:
        """The mask of the last offset: of the rows and columns that it depends on."""
        names = self.masks_at(self._reached)
        if not names:
            return ""
        zero = "" if dtype is None else f", other={'0.0' if is_float(dtype) else '0'}"
        return f", mask={' & '.join(names)}{zero}"

    def masks_at(self, at: Sequence[Index]) -> list[str]:
        """The masks of the variables of an index."""
        names = []
        for index in at:
            for variable, _ in index.terms:
                names.append(self.columns.masks.get(variable.id, "") if variable.id < 0 else self.row_mask)
        return list(dict.fromkeys(name for name in names if name))
