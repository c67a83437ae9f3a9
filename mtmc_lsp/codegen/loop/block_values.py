"""Values of a block: each value of an iteration is a tensor of the axes that a program instance holds.

A value may lack axes along which it is constant; it is broadcast where it meets others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from mtmc_lsp.codegen.kernel.expressions import Expressions
from mtmc_lsp.codegen.kernel.index import Index
from mtmc_lsp.codegen.kernel.parameters import Parameters
from mtmc_lsp.codegen.kernel.snippets import ATOM, TRITON_DTYPES, Code
from mtmc_lsp.codegen.loop.block_axes import BlockAxes
from mtmc_lsp.core.dtypes import compute_dtype, is_float, is_low_precision
from mtmc_lsp.core.protocols import CannotCode
from mtmc_lsp.core.sizes import Size
from mtmc_lsp.ir.axes import Axis
from mtmc_lsp.ir.loops.blocks import BlockForm
from mtmc_lsp.ir.primitives import Prim, PrimOp

Positions = tuple[int, ...]
"""Axes of a value in memory order, as positions in the layout of its primitive."""


class BlockValues(Expressions):
    """Evaluates values of the body of a loop on blocks. Each value is computed once."""

    def __init__(
        self,
        form: BlockForm,
        parameters: Parameters,
        axes: BlockAxes,
        emit: Callable[[str, bool], None],
        precision: str,
    ) -> None:
        super().__init__(form.ir, form.region, parameters, [], [], [], emit, self._provide)
        self.form, self.axes, self.precision = form, axes, precision
        self.codes: dict[str, Code] = {}
        self.positions: dict[str, Positions] = {}
        """The axes that the value of a primitive has."""
        self.variables: dict[str, str] = {}
        """The variables of intermediate values, by their expressions."""

    def hold(self, name: str, code: Code, positions: Positions) -> None:
        """Set the value of a primitive: a state, or the number of the iteration."""
        self.codes[name], self.positions[name] = code, positions

    def value(self, name: str, at: tuple[Index, ...] = ()) -> Code:
        """The value of a primitive, without the axes along which it is constant."""
        if name not in self.codes:
            prim = self.ir.prims[name]
            if name in self.region.inputs:
                code, positions = self.loaded(prim, name)
                code = self.assign(code, self.parameters.tensor(name).removesuffix("_ptr"))
            else:
                code, positions = self._computed(prim)
                is_computed = prim.op is not PrimOp.CONSTANT
                code = self._named(prim, Code(code.text, code.dtype, is_computed, False, code.precedence))
            self.codes[name], self.positions[name] = code, positions
        return self.codes[name]

    def whole(self, name: str) -> str:
        """The value of a primitive with all axes of its layout."""
        code = self.value(name)
        return self.spread(code, self.positions[name], self._layout(name))

    def spread(self, code: Code, positions: Positions, layout: Sequence[Axis]) -> str:
        """A value broadcast to a layout. It has the axes of the layout at ``positions``."""
        if len(positions) == len(layout):
            return code.text
        if not positions:
            return f"tl.full({self.axes.shape(layout)}, {code.text}, {TRITON_DTYPES[code.dtype]})"
        text = self._expanded(code, positions, range(len(layout)))
        return f"tl.broadcast_to({text}, {self.axes.shape(layout)})"

    def _layout(self, name: str) -> list[Axis]:
        return [axis for _, axis in self.form.layout(name)]

    @staticmethod
    def _expanded(code: Code, positions: Positions, target: Iterable[int]) -> str:
        """A value with an axis of one element where ``target`` has an axis that it lacks."""
        target = list(target)
        if not positions or len(target) == len(positions):
            return code.text
        index = ", ".join(":" if position in positions else "None" for position in target)
        return f"{code.at(ATOM)}[{index}]"

    def _moved(self, source: str, prim: Prim, dims: Sequence[int]) -> Positions:
        """Where the axes of an operand are in the layout of ``prim``; ``dims`` are its dimensions there."""
        target = [(dim, number) for dim, number in numbered(self.form.layout(prim.name))]
        axes = [(dims[dim], number) for dim, number in numbered(self.form.layout(source))]
        self.value(source)
        return tuple(target.index(axes[position]) for position in self.positions[source])

    def _places(self, name: str, target: str) -> Positions:
        """Where the axes of a value are in the layout of a primitive with as many dimensions."""
        axes, places = numbered(self.form.layout(name)), numbered(self.form.layout(target))
        self.value(name)
        return tuple(places.index(axes[position]) for position in self.positions[name])

    def _aligned_dims(self, source: str, prim: Prim) -> list[int]:
        rank = len(self.ir.prims[source].shape)
        return [dim + len(prim.shape) - rank for dim in range(rank)]

    def _computed(self, prim: Prim) -> tuple[Code, Positions]:
        """The value of a computed primitive, and the axes that it has."""
        raise NotImplementedError

    def _provide(self, prim: Prim, at: tuple[Index, ...]) -> Code:
        raise CannotCode(f"{prim.origin}: {prim.op.value} is not supported in a block")

    # Memory ------------------------------------------------------------------------------------------------------

    def loaded(self, prim: Prim, name: str) -> tuple[Code, Positions]:
        """A tensor in memory as the primitive ``name``: a slice of it, or a value with its dimensions."""
        pointer = self.parameters.tensor(prim.name)
        kind = self.parameters.buffers[prim.name]
        starts, steps = [Size.of(0)] * len(kind.stride), [1] * len(kind.stride)
        if self.form.is_view_of_memory(part := self.ir.prims[name]):
            dim, start, step = int(str(part.attrs["dim"])), part.attrs["start"], part.attrs["step"]
            assert isinstance(start, Size) and isinstance(step, int)
            starts[dim], steps[dim] = start, step
        layout = self._layout(name)
        address, positions = self.axes.address(pointer, name, kind.stride, starts, steps)
        mask = self.axes.mask_argument(layout, positions, "0.0" if is_float(prim.dtype) else "0")
        text = f"tl.load({address}{mask})"
        if is_low_precision(prim.dtype):
            text += ".to(tl.float32)"
        code = Code(text, compute_dtype(prim.dtype), bool(positions))
        return code, positions


def numbered(layout: Sequence[tuple[int, Axis]]) -> list[tuple[int, int]]:
    """Each axis of a layout as its dimension and its number in it."""
    counts: dict[int, int] = {}
    result = []
    for dim, _ in layout:
        result.append((dim, counts.get(dim, 0)))
        counts[dim] = counts.get(dim, 0) + 1
    return result


def without(positions: Positions, removed: int) -> Positions:
    """Positions in a layout from which an axis was removed."""
    return tuple(position - (position > removed) for position in positions)
