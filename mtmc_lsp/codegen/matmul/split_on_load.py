"""Matmuls with few rows or columns: the small operand is split in advance, the large one as it is loaded.

Tensor cores take their left operand from registers, where the large operand is split. If the large operand is the right one, the
kernel computes the transposed product. See :mod:`mtmc_lsp.schedule.split_on_load`.
"""

from __future__ import annotations

from collections.abc import Mapping

from mtmc_lsp.codegen.kernel.axis_groups import Mask
from mtmc_lsp.codegen.kernel.kernel import Kernel
from mtmc_lsp.codegen.matmul.matmul_kernel import ProductWriter, operand_name
from mtmc_lsp.codegen.matmul.operands import ProductAxes, Tile, mask_needed, operand_accesses
from mtmc_lsp.codegen.matmul.split_operands import SplitOperand, name_sizes, write_split
from mtmc_lsp.core.device_model import DeviceModel
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
    device: DeviceModel,
) -> list[Kernel]:
    """Write the kernel that splits the small operand, and the matmul kernel.

    Raises:
        CannotCode: the region is not supported.
    """
    axes = ProductAxes(ir, region)
    side = 1 if config.split_on_load is SplitOnLoad.LEFT else 0
    operand = operand_name(ir, region, axes.prim.inputs[side]) or "ab"[side]
    small = SplitOperand.of(axes, side, operand, config.block_k, device)
    split = write_split(axes, buffers, small, f"{name}_split_{small.name}")
    return [split, _SplitOnLoadWriter(axes, buffers, config, small).kernel(name, docstring)]


class _SplitOnLoadWriter(ProductWriter):
    def __init__(
        self, axes: ProductAxes, buffers: Mapping[str, TensorType], config: MatmulConfig, small: SplitOperand
    ) -> None:
        super().__init__(axes, buffers, config, [small])
        self.small = small
        self.is_transposed = small.side == 0
        """Whether the kernel computes the transposed product."""
        if self.is_transposed:
            self._sum_shape = "[BLOCK_N, BLOCK_M]"

    def _loop_over_split_operands(self) -> None:
        small, axes = self.small, self.axes
        name_sizes(self.parameters, "MN"[small.side], small)
        k, pad = (self.parameters.size(size).text for size in (small.k, small.k_pad))
        depth = self.config.block_k
        unique = self.parameters.names.unique
        row, low, high = unique(f"{small.name}_row"), unique(f"{small.name}_low"), unique(f"{small.name}_high")
        batch = f"batch * {self.parameters.size(small.rows).text} * 2 * {pad} + " if axes.batch else ""
        large_index, small_index = ("n", "tl.trans(m)") if self.is_transposed else ("m", "n")
        if self.is_transposed:
            self.lines.append(
                "# Transposed product: tensor cores take their left operand from registers, where it is split."
            )
            large_index = unique("n_row")
            self.lines.append(f"{large_index} = tl.trans(n)")
        small_rows = f"({small_index} % {self.parameters.size(small.rows).text})"
        self.lines += [
            "# Rows beyond the last wrap around; their results are not stored.",
            f"{row} = {self.scratch[0]} + {batch}{small_rows}{'.to(tl.int64)' * small.wide} * (2 * {pad})"
            " + tl.arange(0, BLOCK_K)[:, None]",
            f"for start in range(0, {k}, BLOCK_K):",
        ]
        needs_mask = mask_needed(small.k, depth)
        body = ["k = start + tl.arange(0, BLOCK_K)"]
        value = self._large_operand(large_index, k, needs_mask, body)
        low_at, high_at = ("", f" + {pad}") if small.side == 0 else (f" + {pad}", "")
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
            "# Each block of K has its own scale. FP32 units round to nearest, tensor cores towards zero.",
            "acc += part * inverse",
        ]
        self.lines += [f"    {line}" for line in body]
        if self.is_transposed:
            self.lines.append("acc = tl.trans(acc)")

    def _large_operand(self, index: str, k: str, needs_mask: bool, body: list[str]) -> str:
        """Write the load of a tile of the large operand (its rows by K); returns its variable."""
        side = 1 - self.small.side
        rows, size = (self.axes.n, self._size("N")) if side else (self.axes.m, self._size("M"))
        masks = []
        if self._needs_mask("mn"[side]):
            masks.append(Mask(f"({index} < {size})", True, False))
        inside = f"(k[None, :] < {k})" if needs_mask else ""
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
        variable = self.parameters.names.unique("value")
        body.append(f"{variable} = {value}")
        return variable
