"""What the kernels of a matrix product share: its axes, and tiles of its operands and result."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from mtmc_lsp.codegen.kernel.axis_groups import Group, Mask, split_variable
from mtmc_lsp.codegen.kernel.expressions import Expressions
from mtmc_lsp.codegen.kernel.index import Index
from mtmc_lsp.codegen.kernel.parameters import Parameters
from mtmc_lsp.codegen.kernel.snippets import TRITON_DTYPES, Code
from mtmc_lsp.codegen.module.naming import PRODUCT_NAMES
from mtmc_lsp.codegen.tile.tile import merge_axes
from mtmc_lsp.core.dtypes import is_half
from mtmc_lsp.core.graph import TensorType
from mtmc_lsp.core.protocols import CannotCode
from mtmc_lsp.core.sizes import Size, product
from mtmc_lsp.ir.axes import Axis
from mtmc_lsp.ir.primitives import VIEW_OPS, KernelIR, Prim, PrimOp, ProductDims, is_zero_padding
from mtmc_lsp.ir.regions import Region, product_in

ZERO_OF_ZEROS = frozenset("cast square abs neg relu relu6 leaky_relu silu gelu gelu_tanh tanh sqrt mul add sub".split())
"""Pointwise functions that give 0 where each of their operands is."""


class ProductAxes:
    """The axes of the product: batch, rows (m), columns (n) and the contracted ones (k)."""

    def __init__(self, ir: KernelIR, region: Region, product_prim: Prim | None = None) -> None:
        self.ir = ir
        self.region = region
        self.prim: Prim = product_prim or product_in(ir, region)
        dims, name, left = ProductDims.of(self.prim), self.prim.name, self.prim.inputs[0]
        rows, end = dims.batch + dims.rows, len(self.prim.shape)
        self.batch = self._of(name, 0, dims.batch)
        self.m, self.n = self._of(name, dims.batch, rows), self._of(name, rows, end)
        self.k = self._of(left, rows, rows + dims.summed)
        self.kernel_positions = self._of(left, rows, rows + dims.kernel_positions)
        """Axes of ``k`` that are the places of a window."""
        if set(self.m) & set(self.n) or set(self.batch) & (set(self.m) | set(self.n)):
            raise CannotCode("a product of a tensor with itself along one axis")

    def _of(self, name: str, first: int, end: int) -> tuple[Axis, ...]:
        return tuple(axis for dim in range(first, end) for axis in self.region.table.axes(name, dim))

    @property
    def channels(self) -> tuple[Axis, ...]:
        """Axes of ``k`` that are no place of a window."""
        return self.k[len(self.kernel_positions) :]

    @property
    def sizes(self) -> dict[str, Size]:
        """``M``, ``N`` and ``K``."""
        return {
            name: product([axis.size for axis in axes])
            for name, axes in zip("MNK", (self.m, self.n, self.k), strict=True)
        }

    def are_wide(self, offsets: Iterable[Size]) -> bool:
        """Whether offsets up to any of these pass 32 bits at the workload's sizes."""
        sizes = self.ir.graph.sizes
        return any(size.value(sizes) >= 2**31 for size in offsets)

    @property
    def n_batch(self) -> Size:
        return product([axis.size for axis in self.batch])

    def is_plain(self, side: int) -> bool:
        """Whether the operand is read just as it lies in memory, in a half precision that tensor cores take."""
        return is_half(self.ir.prims[self.prim.inputs[side]].dtype) and self.is_read(side)

    def is_read(self, side: int) -> bool:
        """Whether the operand lies in memory, with zeros around it perhaps."""
        name = self.prim.inputs[side]
        while name not in self.region.inputs:
            inner = self.ir.prims[name]
            if inner.op not in VIEW_OPS and not is_zero_padding(inner):
                return False
            name = inner.inputs[0]
        return True

    def is_zero_outside(self, name: str, axes: Iterable[Axis]) -> bool:
        """Whether a value is certainly 0 beyond the last of these axes: what is loaded there is."""
        prim = self.ir.prims[name]
        if name in self.region.inputs:
            return bool(set(self.region.table.all_axes(name)) & set(axes))
        if prim.op in VIEW_OPS or is_zero_padding(prim):
            return self.is_zero_outside(prim.inputs[0], axes)
        if prim.op is not PrimOp.POINTWISE or prim.fn not in ZERO_OF_ZEROS:
            return False
        sources = [self.ir.prims[source] for source in prim.inputs]
        # A multiple of 0 is 0.
        counted = [each.name for each in sources if prim.fn != "mul" or each.op is not PrimOp.CONSTANT]
        return bool(counted) and all(self.is_zero_outside(source, axes) for source in counted)

    def over_tile(self, side: int, value: Code, shape: str, summed: Iterable[Axis], inside: str) -> Code:
        """An operand's value over a whole tile, and 0 beyond the last of what is summed, which must add nothing.

        Args:
            side: 0 for the left operand, 1 for the right one; 2 and 3 for their low halves where they are split.
            value: of the operand at the tile's places; it may be the same for all rows, or for all columns.
            shape: the tile's, as text.
            summed: the axes of K that the tile walks.
            inside: the condition on K; empty where no block of it sticks out.
        """
        text = value.text
        if not value.rows and not value.cols:
            text = f"tl.full({shape}, {text}, {TRITON_DTYPES[value.dtype]})"
        elif not (value.rows and value.cols):
            text = f"tl.broadcast_to({text}, {shape})"
        if inside and not self.is_zero_outside(self.prim.inputs[side], summed):
            text = f"tl.where({inside}, {text}, 0.0)"
        return value if text == value.text else Code(text, value.dtype, True, True)


class Tile:
    """One operand's (or the result's) tile: its expressions, written into a list of lines."""

    def __init__(
        self,
        axes: ProductAxes,
        parameters: Parameters,
        rows: tuple[tuple[Axis, ...], str],
        cols: tuple[tuple[Axis, ...], str],
        masks: Sequence[Mask],
        lines: list[str],
        *,
        scalar: tuple[tuple[Axis, ...], str] = ((), ""),
        known: Mapping[str, Code] | None = None,
        widen: bool = True,
        apart: bool = False,
        accesses: Sequence[Index] = (),
    ) -> None:
        self.lines = lines
        self.axes = axes
        self.known = known or {}
        groups: list[Group] = []
        flat: list[Group] = []
        for (own, name), is_rows in ((rows, True), (cols, False)):
            if not own:
                continue
            whole = Group(own, name, rows=is_rows, cols=not is_rows)
            pieces = [[axis] for axis in own] if apart else merge_axes(own, accesses)
            groups += split_variable(whole, pieces, parameters.names, 0)
            flat.append(whole)
        for (own, name), first in (((axes.batch, "batch"), 10), (scalar, 20)):
            if not own:
                continue
            whole = Group(own, name)
            pieces = [[axis] for axis in own] if apart else merge_axes(own, accesses)
            groups += split_variable(whole, pieces, parameters.names, first)
            flat.append(whole)
        self.expressions = Expressions(
            axes.ir,
            axes.region,
            parameters,
            groups,
            flat,
            masks,
            lambda text, cols: self.lines.append(text),
            self._provide,
            widen=widen,
        )

    def _provide(self, prim: Prim, at: tuple[Index, ...]) -> Code:
        if prim.name in self.known:
            return self.known[prim.name]
        raise CannotCode(f"{prim.op.value} beside a matrix product")

    def value(self, prim: str) -> Code:
        return self.expressions.value(prim, self.expressions.tile_index(prim))


def operand_accesses(
    axes: ProductAxes, buffers: Mapping[str, TensorType], side: int, kernel_positions: tuple[Axis, ...] = ()
) -> list[Index]:
    """How an operand is read, with every axis apart: shows which axes run as one.

    Args:
        side: 0 for the left operand, 1 for the right one; 2 and 3 for their low halves where they are split.
        kernel_positions: those of the contracted axes that one index at a time is walked along.
    """
    rows, columns = (axes.m, axes.n)[side % 2], axes.k[len(kernel_positions) :]
    parameters = Parameters(axes.ir, buffers, PRODUCT_NAMES)
    probe = Tile(
        axes, parameters, (rows, "r"), (columns, "k"), [], [], scalar=(kernel_positions, "kernel_position"), apart=True
    )
    probe.value(axes.prim.inputs[side])
    return probe.expressions.accesses


def tile_of_program(tall: str, wide: str) -> list[str]:
    """Statements that say which tile the ``pid``-th program has, by the names of the tile's extents."""
    return [
        "first_m = pid // (GROUP_M * blocks_n) * GROUP_M",
        "group_m = min(blocks_m - first_m, GROUP_M)",
        f"m_start = (first_m + pid % group_m) * {tall}",
        f"n_start = pid % (GROUP_M * blocks_n) // group_m * {wide}",
    ]


def int32_limit(size: Size) -> str:
    """The guard's condition under which offsets below ``size`` fit in 32 bits."""
    return f"{size} < 2147483648"


def widened(index: str, *, wide: bool) -> str:
    """The expression of an index, in 64 bits where offsets need them."""
    return f"tl.cast({index}, tl.int64)" if wide else index


def mask_needed(size: Size, block: int) -> bool:
    """Whether the last block may reach beyond ``size``."""
    return any(coefficient % block for _, coefficient in size.terms)
