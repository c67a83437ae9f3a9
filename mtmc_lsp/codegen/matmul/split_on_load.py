"""Products with few rows or columns: the halves of the few are made before, the other operand is split as it is read.

The other operand is the left one of the tensor cores' products, which they take from registers, where it is split. So where it
is the product's right operand, the sum is kept transposed until the end. See :mod:`mtmc_lsp.schedule.split_on_load`.
"""

from __future__ import annotations

from collections.abc import Mapping

from mtmc_lsp.codegen.kernel.axis_groups import Mask
from mtmc_lsp.codegen.kernel.kernel import Kernel
from mtmc_lsp.codegen.matmul.matmul_kernel import ProductWriter, operand_name
from mtmc_lsp.codegen.matmul.operands import ProductAxes, Tile, mask_needed, operand_accesses
from mtmc_lsp.codegen.matmul.split_operands import SplitOperand, name_sizes, write_split
from mtmc_lsp.core.graph import TensorType
from mtmc_lsp.ir.primitives import KernelIR
from mtmc_lsp.ir.regions import Region
from mtmc_lsp.schedule.configs import MatmulConfig, SplitOnLoad


def write_product_split_on_load(
    ir: KernelIR,
    region: Region,
    buffers: Mapping[str, TensorType],
    config: MatmulConfig,
    name: str,
    docstring: str,
) -> list[Kernel]:
    """The kernel that splits the few rows, and the product's.

    Args:
        ir: what the region is a part of.
        region: one with a product.
        buffers: what lies in memory.
        config: with the one side that is split on load.
        name: of the product's kernel.
        docstring: of the product's kernel.

    Raises:
        CannotCode: something in it has no Triton form.
    """
    axes = ProductAxes(ir, region)
    side = 1 if config.split_on_load is SplitOnLoad.LEFT else 0
    few = SplitOperand.of(axes, side, operand_name(ir, region, axes.prim.inputs[side]) or "ab"[side], config.block_k)
    split = write_split(axes, buffers, few, f"{name}_split_{few.name}")
    return [split, _OnceWriter(axes, buffers, config, few).kernel(name, docstring)]


class _OnceWriter(ProductWriter):
    def __init__(
        self, axes: ProductAxes, buffers: Mapping[str, TensorType], config: MatmulConfig, few: SplitOperand
    ) -> None:
        super().__init__(axes, buffers, config, [few])
        self.few = few
        self.is_turned = few.side == 0
        """Whether the sum is kept transposed."""
        if self.is_turned:
            self._sum_shape = "[BLOCK_N, BLOCK_M]"

    def _loop_over_split_operands(self) -> None:
        few, axes = self.few, self.axes
        name_sizes(self.parameters, "MN"[few.side], few)
        k, pad = (self.parameters.size(size).text for size in (few.k, few.k_pad))
        depth = self.config.block_k
        unique = self.parameters.names.unique
        row, low, high = unique(f"{few.name}_row"), unique(f"{few.name}_low"), unique(f"{few.name}_high")
        batch = f"batch * {self.parameters.size(few.rows).text} * 2 * {pad} + " if axes.batch else ""
        many, few_index = ("n", "tl.trans(m)") if self.is_turned else ("m", "n")
        if self.is_turned:
            self.lines.append("# Transposed: tensor cores take their left operand from registers, where it is split.")
            many = unique("n_row")
            self.lines.append(f"{many} = tl.trans(n)")
        few_rows = f"({few_index} % {self.parameters.size(few.rows).text})"
        self.lines += [
            "# Rows beyond the last wrap around; what they give is not stored.",
            f"{row} = {self.scratch[0]} + {batch}{few_rows}{'.to(tl.int64)' * few.wide} * (2 * {pad})"
            " + tl.arange(0, BLOCK_K)[:, None]",
            f"for start in range(0, {k}, BLOCK_K):",
        ]
        masked = mask_needed(few.k, depth)
        body = ["k = start + tl.arange(0, BLOCK_K)"]
        value = self._many(many, k, masked, body)
        low_at, high_at = ("", f" + {pad}") if few.side == 0 else (f" + {pad}", "")
        body += [
            f"factor, inverse = _unit_scale(tl.max(tl.abs({value}), axis=1, keep_dims=True))",
            f"scaled = {value} * factor",
            "high = scaled.to(tl.float16)",
            "low = (scaled - high.to(tl.float32)).to(tl.float16)",
            f"{low} = tl.load({row} + start{low_at})",
            f"{high} = tl.load({row} + start{high_at})",
            f"part = tl.dot(low, {high})",
            f"part = tl.dot(high, {low}, part)",
            f"part = tl.dot(high, {high}, part)",
            "# Each block of K has its own scale; fp32 units also round to nearest, and tensor cores towards zero.",
            "acc += part * inverse",
        ]
        self.lines += [f"    {line}" for line in body]
        if self.is_turned:
            self.lines.append("acc = tl.trans(acc)")

    def _many(self, index: str, k: str, masked: bool, body: list[str]) -> str:
        """Write what reads a tile of the operand that is read once, its rows by K; the name that holds it."""
        side = 1 - self.few.side
        rows, size = (self.axes.n, self._size("N")) if side else (self.axes.m, self._size("M"))
        masks = []
        if self._sticks_out("mn"[side]):
            masks.append(Mask(f"({index} < {size})", True, False))
        inside = f"(k[None, :] < {k})" if masked else ""
        if inside:
            masks.append(Mask(inside, False, True))
        tile = Tile(
            self.axes, self.parameters, (rows, index), (self.axes.k, "k[None, :]"), masks, body,
            accesses=operand_accesses(self.axes, self.buffers, side),
        )  # fmt: skip
        shape = f"[BLOCK_{'MN'[side]}, BLOCK_K]"
        value = self.axes.over_tile(side, tile.value(self.axes.prim.inputs[side]), shape, self.axes.k, inside).text
        if value.isidentifier():
            return value
        named = self.parameters.names.unique("value")
        body.append(f"{named} = {value}")
        return named
