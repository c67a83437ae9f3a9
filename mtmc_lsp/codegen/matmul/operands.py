"""Shared parts of matmul kernels: axes, and tiles of operands and result."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from mtmc_lsp.codegen.kernel.axis_groups import Group, Mask, split_variable
from mtmc_lsp.codegen.kernel.expressions import Expressions
from mtmc_lsp.codegen.kernel.index import Index
from mtmc_lsp.codegen.kernel.parameters import Parameters
from mtmc_lsp.codegen.kernel.snippets import TRITON_DTYPES, Code
from mtmc_lsp.codegen.module.naming import PRODUCT_NAMES
from mtmc_lsp.codegen.tile.tile import merge_axes
from mtmc_lsp.core.dtypes import is_low_precision
from mtmc_lsp.core.graph import TensorType
from mtmc_lsp.core.protocols import CannotCode
from mtmc_lsp.core.sizes import Size, product
from mtmc_lsp.ir.axes import Axis
from mtmc_lsp.ir.memory_order import packed_axis
from mtmc_lsp.ir.primitives import VIEW_OPS, KernelIR, Prim, PrimOp, ProductDims, is_zero_padding
from mtmc_lsp.ir.regions import Region, products_in

ZERO_OF_ZEROS = frozenset("cast square abs neg relu relu6 leaky_relu silu gelu gelu_tanh tanh sqrt mul add sub".split())
"""Pointwise functions that map zeros to zero."""


class ProductAxes:
    """The axes of a matrix product: batch, rows (m), columns (n) and contracted axes (k)."""

    def __init__(self, ir: KernelIR, region: Region, product_prim: Prim | None = None) -> None:
        self.ir = ir
        self.region = region
        self.products = (product_prim,) if product_prim else products_in(ir, region)
        self.prim: Prim = self.products[0]
        self.operands = self.prim.inputs + tuple(other.inputs[1] for other in self.products[1:])
        """The operands that a step of the loop over K loads: left and right in turn, then the right ones of further products."""
        roles, dims = region.table.of_product(self.prim), ProductDims.of(self.prim)
        self.batch, self.m, self.n, self.k = roles.batch, roles.m, roles.n, roles.k
        self.halves = region.halves if product_prim is None else None
        if self.halves is not None:
            self.n = self.halves.axes
        first = dims.batch + dims.rows
        positions = range(first, first + dims.kernel_positions)
        self.kernel_positions = tuple(x for dim in positions for x in region.table.axes(self.prim.inputs[0], dim))
        """Axes of ``k`` that are kernel positions of a convolution."""
        if set(self.m) & set(self.n) or set(self.batch) & (set(self.m) | set(self.n)):
            raise CannotCode(f"{self.prim.origin}: both operands of the product share an axis; leave it to PyTorch")

    @property
    def channels(self) -> tuple[Axis, ...]:
        """Axes of ``k`` that are not kernel positions."""
        return self.k[len(self.kernel_positions) :]

    @property
    def sizes(self) -> dict[str, Size]:
        """``M``, ``N`` and ``K``."""
        return {
            name: product([axis.size for axis in axes])
            for name, axes in zip("MNK", (self.m, self.n, self.k), strict=True)
        }

    def are_wide(self, offsets: Iterable[Size]) -> bool:
        """Whether any of these offset bounds exceeds 32 bits at the workload's sizes."""
        sizes = self.ir.graph.sizes
        return any(size.value(sizes) >= 2**31 for size in offsets)

    @property
    def n_batch(self) -> Size:
        return product([axis.size for axis in self.batch])

    def fixed(self, operand: int, tile: Expressions) -> dict[Axis, Index]:
        """The product's columns, where the operand has a half of them, as an index of the tile."""
        if self.halves is None or self.side_of(operand) == 0:
            return {}
        return {self.halves.whole: tile.index_of(self.halves.axes).plus(self.halves.length * (operand - 1))}

    def packed_axis(self, operand: int) -> Axis | None:
        """The axis along which each integer of a right operand in memory holds several numbers; None for other operands.

        It is the last axis of K or of the columns.
        """
        if self.side_of(operand) == 0 or self.kernel_positions or len(self.prim.inputs) > 2:
            return None
        along_k = packed_axis(self.ir, self.region, self.operands[operand], self.k)
        if along_k is not None or self.halves is not None:
            return along_k
        return packed_axis(self.ir, self.region, self.operands[operand], self.n)

    def side_of(self, operand: int) -> int:
        """0 for a left operand, 1 for a right one."""
        return min(operand, 1) if len(self.products) > 1 else operand % 2

    def is_plain(self, operand: int) -> bool:
        """Whether the operand is loaded unmodified in a 16-bit dtype that tensor cores support."""
        return is_low_precision(self.ir.prims[self.operands[operand]].dtype) and self.is_read(operand)

    def is_read(self, operand: int) -> bool:
        """Whether the operand is loaded without computation, except for zero padding."""
        name = self.operands[operand]
        while name not in self.region.inputs:
            inner = self.ir.prims[name]
            if inner.op not in VIEW_OPS and not is_zero_padding(inner):
                return False
            name = inner.inputs[0]
        return True

    def is_zero_outside(self, name: str, axes: Iterable[Axis]) -> bool:
        """Whether a value is provably 0 beyond the ends of these axes, where masked loads return 0."""
        prim = self.ir.prims[name]
        if name in self.region.inputs:
            return bool(set(self.region.table.all_axes(name)) & set(axes))
        if prim.op in VIEW_OPS or is_zero_padding(prim):
            return self.is_zero_outside(prim.inputs[0], axes)
        if prim.op is not PrimOp.POINTWISE or prim.fn not in ZERO_OF_ZEROS:
            return False
        sources = [self.ir.prims[source] for source in prim.inputs]
        # In products, constant factors do not matter.
        factors = [factor.name for factor in sources if prim.fn != "mul" or factor.op is not PrimOp.CONSTANT]
        return bool(factors) and all(self.is_zero_outside(source, axes) for source in factors)

    def over_tile(self, operand: int, value: Code, shape: str, contracted: Iterable[Axis], inside: str) -> Code:
        """Broadcast an operand's value to its tile, with 0 beyond the end of the contracted axes.

        Args:
            operand: index in :attr:`operands`.
            value: the operand's value; it may be constant along rows or columns.
            contracted: the axes of K that the tile covers.
            inside: the bounds check of K; empty if not needed.
        """
        text = value.text
        if not value.rows and not value.cols:
            text = f"tl.full({shape}, {text}, {TRITON_DTYPES[value.dtype]})"
        elif not (value.rows and value.cols):
            text = f"tl.broadcast_to({text}, {shape})"
        if inside and not self.is_zero_outside(self.operands[operand], contracted):
            text = f"tl.where({inside}, {text}, 0.0)"
        return value if text == value.text else Code(text, value.dtype, True, True)


class Tile:
    """A tile of an operand or the result: evaluates expressions and appends statements to a list."""

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
        second: Code | None = None,
        widen: bool = True,
        separate_axes: bool = False,
        accesses: Sequence[Index] = (),
    ) -> None:
        self.lines = lines
        self.axes = axes
        self.known = known or {}
        self.second = second
        """The second half of the product's columns, where both halves are read."""
        groups: list[Group] = []
        flat: list[Group] = []
        for (axis_list, name), is_rows in ((rows, True), (cols, False)):
            if not axis_list:
                continue
            flat_group = Group(axis_list, name, rows=is_rows, cols=not is_rows)
            axis_groups = [[axis] for axis in axis_list] if separate_axes else merge_axes(axis_list, accesses)
            groups += split_variable(flat_group, axis_groups, parameters.names, 0)
            flat.append(flat_group)
        for (axis_list, name), first in (((axes.batch, "batch"), 10), (scalar, 20)):
            if not axis_list:
                continue
            flat_group = Group(axis_list, name)
            axis_groups = [[axis] for axis in axis_list] if separate_axes else merge_axes(axis_list, accesses)
            groups += split_variable(flat_group, axis_groups, parameters.names, first)
            flat.append(flat_group)
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
        if self.second is not None and prim is self.axes.prim and at[-1].constant.terms:
            return self.second
        if prim.name in self.known:
            return self.known[prim.name]
        raise CannotCode(
            f"{prim.origin}: {prim.op.value} cannot be fused into a matmul kernel; put it into a separate kernel"
        )

    def value(self, prim: str) -> Code:
        return self.expressions.value(prim, self.expressions.tile_index(prim))


def operand_accesses(
    axes: ProductAxes, buffers: Mapping[str, TensorType], operand: int, kernel_positions: tuple[Axis, ...] = ()
) -> list[Index]:
    """The accesses of an operand with separate axes, which show the axes that can be fused.

    Args:
        operand: index in :attr:`ProductAxes.operands`.
        kernel_positions: contracted axes that are scalar in a tile.
    """
    rows, columns = (axes.m, axes.n)[axes.side_of(operand)], axes.k[len(kernel_positions) :]
    parameters = Parameters(axes.ir, buffers, PRODUCT_NAMES)
    probe = Tile(
        axes,
        parameters,
        (rows, "r"),
        (columns, "k"),
        [],
        [],
        scalar=(kernel_positions, "kernel_position"),
        separate_axes=True,
    )
    probe.expressions.fixed = axes.fixed(operand, probe.expressions)
    probe.value(axes.operands[operand])
    return probe.expressions.accesses


def tile_of_program(tall: str, wide: str) -> list[str]:
    """Statements that compute the tile of program ``pid``; ``tall`` and ``wide`` are the names of its tile sizes."""
    return [
        "first_m = pid // (GROUP_M * blocks_n) * GROUP_M",
        "group_m = min(blocks_m - first_m, GROUP_M)",
        f"m_start = (first_m + pid % group_m) * {tall}",
        f"n_start = pid % (GROUP_M * blocks_n) // group_m * {wide}",
    ]


def int32_limit(size: Size) -> str:
    """The guard condition that offsets below ``size`` fit in 32 bits."""
    return f"{size} < 2147483648"


def widened(index: str, *, wide: bool) -> str:
    """The expression of an index, converted to 64 bits if ``wide``."""
    return f"tl.cast({index}, tl.int64)" if wide else index


def mask_needed(size: Size, block: int) -> bool:
    """Whether the last block may extend beyond ``size``."""
    return any(coefficient % block for _, coefficient in size.terms)
