"""Split-K matmul: several program instances share each tile's sum; a second kernel adds the partial sums and runs the epilogue.

Useful for few tiles with a long K, where one program instance per tile would leave most of the device idle.
"""

from __future__ import annotations

from collections.abc import Mapping

from mtmc_lsp.codegen.kernel.kernel import Kernel, Scratch
from mtmc_lsp.codegen.kernel.snippets import UNARY
from mtmc_lsp.codegen.matmul.k_loops import StridedBlockLoop
from mtmc_lsp.codegen.matmul.operands import ProductAxes, int32_limit, widened
from mtmc_lsp.codegen.matmul.partial_sums import AddsParts, PartsWriter, WritesParts
from mtmc_lsp.codegen.matmul.split_operands import SplitOperand
from mtmc_lsp.core.dtypes import compute_dtype
from mtmc_lsp.core.graph import TensorType
from mtmc_lsp.core.sizes import Size, product
from mtmc_lsp.schedule.configs import MatmulConfig


def write_split_product(
    axes: ProductAxes,
    buffers: Mapping[str, TensorType],
    config: MatmulConfig,
    split_operands: list[SplitOperand] | None,
    name: str,
    docstring: str,
) -> list[Kernel]:
    """Write the kernels of a matmul with ``config.split_k`` parts along K.

    Raises:
        CannotCode: the region is not supported.
    """
    size = axes.n_batch * axes.sizes["M"] * axes.sizes["N"]
    parts = Scratch("product_parts", (Size.of(config.split_k), size), compute_dtype(axes.prim.dtype))
    summary = "Partial sums along K for each tile of the product."
    first = _PartWriter(axes, buffers, config, split_operands, parts)
    last = _CombineWriter(axes, buffers, config, split_operands, parts)
    return [first.kernel(f"{name}_parts", summary), last.kernel(name, docstring)]


class _SplitWriter(PartsWriter):
    """Address computation of the partial sums, shared by both kernels."""

    def __init__(
        self,
        axes: ProductAxes,
        buffers: Mapping[str, TensorType],
        config: MatmulConfig,
        split_operands: list[SplitOperand] | None,
        parts: Scratch,
    ) -> None:
        super().__init__(axes, buffers, config, split_operands, parts)
        self.all_sums = product(parts.shape)
        self.wide_sums = axes.are_wide([self.all_sums])
        """Whether offsets into the partial sums need 64 bits."""

    def _address(self, piece: str) -> str:
        rows, n = self._size("M"), self._size("N")
        batch = f"batch * {rows} * {n} + " if self.axes.batch else ""
        total = self.parameters.size(self.parts.shape[1]).at(UNARY)
        m = widened("m", wide=self.wide_sums)
        return f"{self.pointer} + {widened(piece, wide=self.wide_sums)} * {total} + {batch}{m} * {n} + n"

    def _mask_text(self) -> str:
        masks = self._mask("m", rows=True) + self._mask("n", rows=False)
        return f", mask={' & '.join(mask.text for mask in masks)}" if masks else ""

    def _limits(self) -> tuple[str, ...]:
        needs_limit = not self.wide_sums and not self.all_sums.is_constant
        return (*super()._limits(), *([int32_limit(self.all_sums)] if needs_limit else []))

    def _blocks(self) -> dict[str, int]:
        return {**super()._blocks(), "PARTS": self.config.split_k}


class _PartWriter(WritesParts, _SplitWriter):
    """Sums every ``PARTS``-th block of K."""

    _walk = StridedBlockLoop()

    def _program_order(self) -> None:
        super()._program_order()
        self.lines.append(f"piece = tl.program_id({2 if self.axes.batch else 1})")

    def _finish(self) -> None:
        self.lines.append(f"tl.store({self._address('piece')}, acc{self._mask_text()})")

    def _more_grid(self) -> tuple[str, ...]:
        return (str(self.config.split_k),)

    def _scratch_read(self) -> tuple[tuple[str, Scratch], ...]:
        return super()._scratch_read()[: len(self.scratch)]


class _CombineWriter(AddsParts, _SplitWriter):
    """Adds the partial sums of each tile in a fixed order, and runs the epilogue."""

    def _loop(self) -> None:
        mask = self._mask_text()
        self.lines += [
            "for piece in range(0, PARTS):",
            f"    acc += tl.load({self._address('piece')}{mask}{', other=0.0' if mask else ''})",
        ]

    def _blocks(self) -> dict[str, int]:
        return {name: size for name, size in super()._blocks().items() if name not in ("BLOCK_K", "PIECE")}
