"""Right operands whose integers in memory hold several numbers along K or along the columns: the nibbles of packed 4-bit weights.

Each integer is loaded once. Its numbers are computed in registers and interleaved, so that the other operand is loaded and the
result stored as they are. Without this, each number would load its integer again, with addresses that do not allow vector loads.
The order of the numbers in an integer is part of their expressions: AutoAWQ's is 0, 2, 4, 6, 1, 3, 5, 7.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mtmc_lsp.codegen.kernel.axis_groups import Mask
from mtmc_lsp.codegen.kernel.index import Index
from mtmc_lsp.codegen.kernel.parameters import Parameters
from mtmc_lsp.codegen.kernel.snippets import TRITON_DTYPES, Code
from mtmc_lsp.codegen.matmul.operands import ProductAxes, Tile
from mtmc_lsp.codegen.module.naming import PRODUCT_NAMES
from mtmc_lsp.core.dtypes import is_low_precision
from mtmc_lsp.core.graph import TensorType
from mtmc_lsp.core.sizes import Size, product
from mtmc_lsp.ir.axes import Axis

Side = tuple[tuple[Axis, ...], str]
"""Axes along one side of a tile, and the text of their index."""
INTEGERS, COLUMNS = "packed_k", "packed_n"
"""The variables that count integers along K and along the columns."""


def loop_start(axis: Axis) -> str:
    """The statement that sets :data:`INTEGERS` for a block of K."""
    parts = axis.size.constant
    return f"{INTEGERS} = start // {parts} + tl.arange(0, BLOCK_K // {parts})"


@dataclass(frozen=True)
class PackedOperand:
    """Writes the tile of an operand whose numbers are packed into integers, of ``BLOCK_K`` rows and ``BLOCK_N`` columns."""

    axes: ProductAxes
    buffers: Mapping[str, TensorType]
    parameters: Parameters
    operand: int
    """Index in :attr:`ProductAxes.operands`."""
    axis: Axis
    """The axis along which integers hold several numbers."""
    lines: list[str]
    """The statements are appended."""

    def along_k(self, masks: Sequence[Mask], *, is_masked: bool) -> str:
        """Write the numbers of a tile with integers along K, and return the text of the tile.

        Args:
            masks: conditions on columns.
            is_masked: whether the last block may extend beyond K.
        """
        rows, parts = self.axes.k[:-1], self.axis.size.constant
        count = self.parameters.size(product([each.size for each in rows])).text
        inside = f"({INTEGERS}[:, None] < {count})" if is_masked else ""
        masks = [Mask(inside, True, False), *masks] if is_masked else masks
        shape = f"[BLOCK_K // {parts}, BLOCK_N]"
        sides = (rows, f"{INTEGERS}[:, None]"), (self.axes.n, "n")
        numbers = self._write_numbers(sides, masks, shape, inside)
        order = ", ".join(map(str, (0, *range(2, parts.bit_length() + 1), 1)))
        return f"tl.reshape(tl.permute({_joined(numbers)}, [{order}]), [BLOCK_K, BLOCK_N])"

    def along_columns(self, masks: Sequence[Mask], *, inside: str, is_masked: bool) -> str:
        """Write the numbers of a tile with integers along its columns, and return the text of the tile.

        Args:
            masks: conditions on rows of the operand, which are along K.
            inside: the bounds check of K; empty if not needed.
            is_masked: whether the last block may extend beyond the columns.
        """
        columns, parts = self.axes.n[:-1], self.axis.size.constant
        count = self.parameters.size(product([each.size for each in columns])).text
        masks = [*masks, Mask(f"({COLUMNS} < {count})", False, True)] if is_masked else list(masks)
        statement = f"{COLUMNS} = (n_start // {parts} + tl.arange(0, BLOCK_N // {parts}))[None, :]"
        if statement not in self.lines:
            self.lines.append(statement)
        shape = f"[BLOCK_K, BLOCK_N // {parts}]"
        sides = (self.axes.k, "k[:, None]"), (columns, COLUMNS)
        return f"tl.reshape({_joined(self._write_numbers(sides, masks, shape, inside))}, [BLOCK_K, BLOCK_N])"

    def _write_numbers(self, sides: tuple[Side, Side], masks: Sequence[Mask], shape: str, inside: str) -> list[str]:
        """Write the statements of a tile of integers, and return a variable for each of their numbers.

        Args:
            sides: rows and columns of the tile, each with its index.
            shape: of the tile.
        """
        axes, (rows, _), (columns, _) = self.axes, *sides
        probe = Tile(
            axes,
            Parameters(axes.ir, self.buffers, PRODUCT_NAMES),
            (rows, "k"),
            (columns, "r"),
            [],
            [],
            separate_axes=True,
        )
        _numbers(probe, self.operand, self.axis)
        tile = Tile(axes, self.parameters, *sides, masks, self.lines, accesses=probe.expressions.accesses)
        dtype = axes.ir.prims[axes.operands[self.operand]].dtype
        rounded = f".to({TRITON_DTYPES[dtype]})" if is_low_precision(dtype) else ""
        numbers: list[str] = []
        for value in _numbers(tile, self.operand, self.axis):
            whole = axes.over_tile(self.operand, value, shape, axes.k, inside)
            number = self.parameters.names.unique("number")
            self.lines.append(f"{number} = {whole.at(100) if rounded else whole.text}{rounded}")
            numbers.append(number)
        return numbers


def _numbers(tile: Tile, operand: int, axis: Axis) -> list[Code]:
    """The value of an operand at each position along ``axis``."""
    values: list[Code] = []
    for part in range(axis.size.constant):
        columns = tile.axes.fixed(operand, tile.expressions)
        tile.expressions.fixed = {axis: Index(constant=Size.of(part)), **columns}
        values.append(tile.value(tile.axes.operands[operand]))
    return values


def _joined(numbers: Sequence[str]) -> str:
    """The expression of a tensor with further dimensions of size 2, whose indices are the bits of a number's position."""
    if len(numbers) == 1:
        return numbers[0]
    return f"tl.join({_joined(numbers[::2])}, {_joined(numbers[1::2])})"
