"""The axes of blocks: index vectors and masks of those that a program instance holds, and numbers of the others."""

from __future__ import annotations

from collections.abc import Sequence

from mtmc_lsp.codegen.kernel.parameters import Parameters
from mtmc_lsp.codegen.kernel.snippets import COMPARE, PRODUCT
from mtmc_lsp.core.sizes import Size, product
from mtmc_lsp.ir.axes import Axis
from mtmc_lsp.ir.loops.blocks import BlockForm
from mtmc_lsp.ir.primitives import ONE


class BlockAxes:
    """Index vectors, masks and addresses of a kernel whose program instances hold whole blocks."""

    def __init__(self, form: BlockForm, parameters: Parameters) -> None:
        self.form, self.parameters = form, parameters
        self.blocks: dict[Size, tuple[str, int]] = {}
        """For each size, the constexpr with the elements of a block, and its value."""
        self._indices: dict[Size, str] = {}
        self._masks: dict[Size, str] = {}
        self._rows: dict[Axis, str] = {}
        self.lines: list[str] = ["row = tl.program_id(0).to(tl.int64)"]

    def block(self, axis: Axis) -> str:
        """The constexpr with the elements of an axis in a block."""
        if axis.size not in self.blocks:
            name = f"BLOCK_{len(self.blocks) + 1}" if self.blocks else "BLOCK"
            self.blocks[axis.size] = name, self.form.extent(axis)
        return self.blocks[axis.size][0]

    def shape(self, layout: Sequence[Axis]) -> str:
        """The shape of a block."""
        return f"[{', '.join(self.block(axis) for axis in layout)}]"

    def limits(self) -> tuple[str, ...]:
        """Conditions on named sizes under which the blocks hold all elements."""
        return tuple(f"{size} <= {width}" for size, (_, width) in self.blocks.items() if not size.is_constant)

    def index(self, axis: Axis) -> str:
        """The vector of indices of an axis."""
        if axis.size not in self._indices:
            block = self.block(axis)
            name = self._indices[axis.size] = self.parameters.names.unique("index")
            self.lines.append(f"{name} = tl.arange(0, {block})")
        return self._indices[axis.size]

    def mask(self, axis: Axis) -> str:
        """The vector that tells which indices are inside of the tensor; empty if all are."""
        if axis.size.is_constant and axis.size.constant == self.form.extent(axis):
            return ""
        if axis.size not in self._masks:
            index = self.index(axis)
            name = self._masks[axis.size] = self.parameters.names.unique("inside")
            self.lines.append(f"{name} = {index} < {self.parameters.size(axis.size).at(COMPARE + 1)}")
        return self._masks[axis.size]

    def row(self, axis: Axis) -> str:
        """The index of an axis that is split among program instances."""
        axes = self.form.region.parallel_axes
        if len(axes) == 1:
            return "row"
        if axis not in self._rows:
            at = axes.index(axis)
            below = product([each.size for each in axes[at + 1 :]])
            text = "row" if below == ONE else f"row // {self.parameters.divisor(below)}"
            if at:
                text = f"{text if below == ONE else f'({text})'} % {self.parameters.divisor(axis.size)}"
            name = self._rows[axis] = self.parameters.names.unique("outer" if not at else "inner")
            self.lines.append(f"{name} = {text}")
        return self._rows[axis]

    def address(
        self, pointer: str, name: str, strides: Sequence[Size], starts: Sequence[Size], steps: Sequence[int]
    ) -> tuple[str, tuple[int, ...]]:
        """The addresses of a primitive's elements, and the axes of its layout that they have.

        Args:
            strides: of the dimensions of the tensor.
            starts: the first element of each dimension.
            steps: between elements of each dimension.
        """
        scalars: list[str] = []
        vectors: list[tuple[int, str, Size]] = []
        layout = self.form.layout(name)
        for dim, (stride, start, step) in enumerate(zip(strides, starts, steps, strict=True)):
            if (offset := start * stride).terms:
                scalars.append(self.parameters.divisor(offset))
            inner = Size.of(1)
            axes = self.form.region.table.axes(name, dim)
            for number, axis in reversed(list(enumerate(axes))):
                coefficient = stride * step * inner
                inner = inner * axis.size
                if not coefficient.terms:
                    continue
                if axis not in self.form.inside:
                    scalars.append(self._scaled(self.row(axis), coefficient))
                    continue
                position = [i for i, (each, _) in enumerate(layout) if each == dim][self._number(axes, number)]
                vectors.append((position, self.index(axis), coefficient))
        vectors.sort(key=lambda item: item[0])
        positions = tuple(position for position, _, _ in vectors)
        terms = [pointer, *scalars]
        for position, index, coefficient in vectors:
            dims = ", ".join(":" if each == position else "None" for each in positions)
            terms.append(self._scaled(index if len(positions) == 1 else f"{index}[{dims}]", coefficient))
        return " + ".join(terms), positions

    def _number(self, axes: Sequence[Axis], number: int) -> int:
        """The number of an axis among those of its dimension that the block holds."""
        return sum(axis in self.form.inside for axis in axes[:number])

    def _scaled(self, index: str, coefficient: Size) -> str:
        return index if coefficient == ONE else f"{index} * {self.parameters.size(coefficient).at(PRODUCT + 1)}"

    def mask_argument(self, layout: Sequence[Axis], positions: Sequence[int], other: str) -> str:
        """The mask of a load, or of a store if ``other`` is empty."""
        masks = []
        for position in positions:
            dims = ", ".join(":" if each == position else "None" for each in positions)
            if mask := self.mask(layout[position]):
                masks.append(mask if len(positions) == 1 else f"{mask}[{dims}]")
        if not masks:
            return ""
        return f", mask={' & '.join(masks)}" + (f", other={other}" if other else "")
