"""Tiles of queries, keys and values, of scores and of results: what kernels of attention share."""

from __future__ import annotations

from collections.abc import Mapping

from mtmc_lsp.codegen.kernel.axis_groups import Mask
from mtmc_lsp.codegen.kernel.index import Index
from mtmc_lsp.codegen.kernel.parameters import Parameters
from mtmc_lsp.codegen.kernel.snippets import SUM, Code
from mtmc_lsp.codegen.matmul.operands import ProductAxes, Tile, int32_limit
from mtmc_lsp.codegen.module.naming import ATTENTION_NAMES
from mtmc_lsp.core.graph import TensorType
from mtmc_lsp.core.sizes import Size, product
from mtmc_lsp.ir.attention_mask import Band
from mtmc_lsp.ir.axes import Axis
from mtmc_lsp.ir.primitives import KernelIR, Prim
from mtmc_lsp.ir.regions import Region
from mtmc_lsp.schedule.configs import AttentionConfig

Side = tuple[tuple[Axis, ...], str]


class AttentionTiles:
    """Evaluates primitives of an attention's region over tiles, and collects the kernel's statements and limits."""

    def __init__(
        self,
        ir: KernelIR,
        region: Region,
        buffers: Mapping[str, TensorType],
        config: AttentionConfig,
        result: Prim,
        names: frozenset[str] = ATTENTION_NAMES,
    ) -> None:
        """Prepare a kernel.

        Args:
            result: a product whose batch axes are those of the kernel.
            names: of the kernel's variables.
        """
        self.names = names
        self.ir = ir
        self.buffers = buffers
        self.config = config
        self.result = ProductAxes(ir, region, result)
        self.parameters = Parameters(ir, buffers, names)
        self.lines: list[str] = []
        self.limits: list[str] = []

    def constant(self, axes: tuple[Axis, ...]) -> int:
        """A head size as an integer. A named size is fixed to the workload's value by a limit."""
        size = product([axis.size for axis in axes])
        number = size.value(self.ir.graph.sizes)
        if not size.is_constant:
            self.limits.append(f"{size} == {number}")
        return number

    def size_of(self, axes: tuple[Axis, ...]) -> Size:
        """The product of the sizes of some axes."""
        return product([axis.size for axis in axes])

    def block_of_queries(self, band: Band) -> list[str]:
        """Statements for the queries of a program, in rows. ``band`` is the range of keys that are visible to a query."""
        if not band.limits:
            return ["m = (tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M))[:, None]"]
        # With a causal mask the last blocks have the most keys. They start first, so that no long block runs alone at
        # the end.
        longest_first = band.first is None
        block = "tl.num_programs(0) - 1 - tl.program_id(0)" if longest_first else "tl.program_id(0)"
        start = f"({block}) * BLOCK_M" if longest_first else f"{block} * BLOCK_M"
        return [f"first_query = {start}", "m = (first_query + tl.arange(0, BLOCK_M))[:, None]"]

    def shifted(self, position: str, size: Size) -> str:
        """A position plus an offset."""
        if size.is_constant:
            number = size.constant
            return position if number == 0 else f"{position} {'-' if number < 0 else '+'} {abs(number)}"
        return f"{position} + {self.parameters.size(size).at(SUM)}"

    @staticmethod
    def edge(name: str, size: int, block: int) -> str:
        """The bounds check of a padded axis; empty if it is not padded."""
        return f"({name} < {size})" if size != block else ""

    @staticmethod
    def masks_of(text: str, *, rows: bool) -> list[Mask]:
        """The mask of a bounds check along rows or columns."""
        return [Mask(text, rows, not rows)] if text else []

    def tile(
        self,
        rows: Side,
        cols: Side,
        masks: list[Mask],
        lines: list[str],
        values: Mapping[str, Code],
        prim: str,
        *,
        widen: bool = True,
        fixed: tuple[Axis, ...] = (),
    ) -> Code:
        """Evaluate a primitive over a tile: a first pass with separate axes finds the axes that can be fused.

        Args:
            fixed: axes along which the value does not change.
        """
        accesses: list[Index] = []
        for is_final in (False, True):
            tile = self.make_tile(rows, cols, masks, lines if is_final else [], values, accesses, is_final, widen=widen)
            tile.expressions.fixed = {axis: Index() for axis in fixed}
            code = tile.value(prim)
            accesses = tile.expressions.accesses
        self.limit(accesses)
        return code

    def make_tile(
        self,
        rows: Side,
        cols: Side,
        masks: list[Mask],
        lines: list[str],
        values: Mapping[str, Code],
        accesses: list[Index],
        is_final: bool,
        *,
        widen: bool,
    ) -> Tile:
        """A tile; before the final pass its statements and parameters are dropped."""
        parameters = self.parameters if is_final else Parameters(self.ir, self.buffers, self.names)
        return Tile(
            self.result,
            parameters,
            rows,
            cols,
            masks,
            lines,
            known=values,
            separate_axes=not is_final,
            accesses=accesses,
            widen=widen,
        )

    def limit(self, accesses: list[Index]) -> None:
        """Add limits for 32-bit offsets inside a tile; batch offsets are 64-bit."""
        for access in accesses:
            extent = product([])
            for variable, step in access.terms:
                if variable.rows or variable.cols:
                    extent = extent + step * variable.size
            if not extent.is_constant or extent.constant >= 2**31:
                self.limits.append(int32_limit(extent))
