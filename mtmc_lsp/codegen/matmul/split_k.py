"""Products split along K: many programs share each tile's sum, and a second kernel adds the parts and does the epilogue.

For few tiles with a long K, where one program per tile would leave most of the device idle.
"""

from __future__ import annotations

from collections.abc import Mapping

from mtmc_lsp.codegen.kernel.kernel import Kernel, Scratch
from mtmc_lsp.codegen.kernel.snippets import UNARY
from mtmc_lsp.codegen.matmul.k_loops import WalkOfPart
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
    """The kernels of a product with ``config.split_k`` parts.

    Raises:
        CannotCode: something in it has no Triton form.
    """
    size = axes.n_batch * axes.sizes["M"] * axes.sizes["N"]
    sums = Scratch("product_parts", (Size.of(config.split_k), size), compute_dtype(axes.prim.dtype))
    what = "Each part of each tile of the product; K is too long for one program per tile."
    first = _PartWriter(axes, buffers, config, split_operands, sums)
    last = _CombineWriter(axes, buffers, config, split_operands, sums)
    return [first.kernel(f"{name}_parts", what), last.kernel(name, docstring)]


class _SplitWriter(PartsWriter):
    """What both kernels share: where the partial sums of a tile are."""

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
        """Whether offsets into the sums take 64 bits."""

    def _place(self, piece: str) -> str:
        rows, n = self._size("M"), self._size("N")
        batch = f"batch * {rows} * {n} + " if self.axes.batch else ""
        total = self.parameters.size(self.parts.shape[1]).at(UNARY)
        m = widened("m", wide=self.wide_sums)
        return f"{self.pointer} + {widened(piece, wide=self.wide_sums)} * {total} + {batch}{m} * {n} + n"

    def _mask_text(self) -> str:
        masks = self._mask("m", rows=True) + self._mask("n", rows=False)
        return f", mask={' & '.join(mask.text for mask in masks)}" if masks else ""

    def _limits(self) -> tuple[str, ...]:
        narrow = not self.wide_sums and not self.all_sums.is_constant
        return (*super()._limits(), *([int32_limit(self.all_sums)] if narrow else []))

    def _blocks(self) -> dict[str, int]:
        return {**super()._blocks(), "PARTS": self.config.split_k}


class _PartWriter(WritesParts, _SplitWriter):
    """Sums every ``PARTS``-th block of K."""

    _walk = WalkOfPart()

    def _program_order(self) -> None:
        super()._program_order()
        self.lines.append(f"piece = tl.program_id({2 if self.axes.batch else 1})")

    def _finish(self) -> None:
        self.lines.append(f"tl.store({self._place('piece')}, acc{self._mask_text()})")

    def _more_grid(self) -> tuple[str, ...]:
        return (str(self.config.split_k),)

    def _scratch_read(self) -> tuple[tuple[str, Scratch], ...]:
        return super()._scratch_read()[: len(self.scratch)]


class _CombineWriter(AddsParts, _SplitWriter):
    """Adds the parts of each tile, always in the same order, and does the epilogue."""

    def _loop(self) -> None:
        mask = self._mask_text()
        self.lines += [
            "for piece in range(0, PARTS):",
            f"    acc += tl.load({self._place('piece')}{mask}{', other=0.0' if mask else ''})",
        ]

    def _blocks(self) -> dict[str, int]:
        return {name: size for name, size in super()._blocks().items() if name not in ("BLOCK_K", "PIECE")}
