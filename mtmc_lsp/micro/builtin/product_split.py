"""Products split along K: many programs share each tile's sum, and a second kernel adds the parts and does the epilogue.

For few tiles with a long K, where one program per tile would leave most of the device idle.
"""

from __future__ import annotations

from collections.abc import Mapping

from mtmc_lsp.core.dtypes import compute_dtype
from mtmc_lsp.core.graph import TensorType
from mtmc_lsp.core.sizes import Size
from mtmc_lsp.micro.builtin.kernel import Kernel, Scratch
from mtmc_lsp.micro.builtin.product_axes import ProductAxes, int32_limit, widened
from mtmc_lsp.micro.builtin.product_kernel import Config, ProductWriter
from mtmc_lsp.micro.builtin.product_walks import WalkOfPart
from mtmc_lsp.micro.builtin.split_operands import Halves

COMBINED_M, COMBINED_N = 32, 64
"""Largest tile of the second kernel: small, so that few results still make many programs."""


def combining(config: Config) -> Config:
    """The configuration of the kernel that adds the parts of a product that has this one."""
    tile = {"block_m": min(COMBINED_M, int(config["block_m"])), "block_n": min(COMBINED_N, int(config["block_n"]))}
    return {**config, **tile, "warps": 4, "stages": 2}


def write_split_product(
    axes: ProductAxes,
    buffers: Mapping[str, TensorType],
    config: Config,
    halves: list[Halves] | None,
    name: str,
    docstring: str,
) -> list[Kernel]:
    """The kernels of a product with ``config["split_k"]`` parts.

    Raises:
        CannotCode: something in it has no Triton form.
    """
    parts = int(config["split_k"])
    size = axes.n_batch * axes.sizes["M"] * axes.sizes["N"]
    sums = Scratch("product_parts", (Size.of(parts), size), compute_dtype(axes.prim.dtype))
    what = "Each part of each tile of the product; K is too long for one program per tile."
    own = {**config, "persist": 0}
    first = _PartWriter(axes, buffers, own, halves, sums, parts)
    last = _CombineWriter(axes, buffers, combining(own), halves, sums, parts)
    return [first.kernel(f"{name}_parts", what), last.kernel(name, docstring)]


class _SplitWriter(ProductWriter):
    """What both kernels share: the buffer of partial sums."""

    def __init__(
        self,
        axes: ProductAxes,
        buffers: Mapping[str, TensorType],
        config: Config,
        halves: list[Halves] | None,
        sums: Scratch,
        parts: int,
    ) -> None:
        super().__init__(axes, buffers, config, halves)
        self.sums, self.parts = sums, parts
        self.pointer = self.parameters.names.unique("product_parts_ptr")
        self.all_sums = axes.n_batch * axes.sizes["M"] * axes.sizes["N"] * parts
        self.wide_sums = axes.are_wide([self.all_sums])
        """Whether offsets into the sums take 64 bits."""

    def _place(self, piece: str) -> str:
        rows, n = self._size("M"), self._size("N")
        batch = f"batch * {rows} * {n} + " if self.axes.batch else ""
        total = self.parameters.size(self.axes.n_batch * self.axes.sizes["M"] * self.axes.sizes["N"]).at(80)
        m = widened("m", wide=self.wide_sums)
        return f"{self.pointer} + {widened(piece, wide=self.wide_sums)} * {total} + {batch}{m} * {n} + n"

    def _mask_text(self) -> str:
        masks = self._mask("m", rows=True) + self._mask("n", rows=False)
        return f", mask={' & '.join(mask.text for mask in masks)}" if masks else ""

    def _limits(self) -> tuple[str, ...]:
        narrow = not self.wide_sums and not self.all_sums.is_constant
        return (*super()._limits(), *([int32_limit(self.all_sums)] if narrow else []))


class _PartWriter(_SplitWriter):
    """Sums every ``PARTS``-th block of K."""

    _walk = WalkOfPart()

    def _program_order(self) -> None:
        super()._program_order()
        self.lines.append(f"piece = tl.program_id({2 if self.axes.batch else 1})")

    def _finish(self) -> None:
        self.lines.append(f"tl.store({self._place('piece')}, acc{self._mask_text()})")

    def _more_grid(self) -> tuple[str, ...]:
        return (str(self.parts),)

    def _blocks(self) -> dict[str, int]:
        return {**super()._blocks(), "PARTS": self.parts}

    def _scratch_read(self) -> tuple[tuple[str, Scratch], ...]:
        return super()._scratch_read()[: len(self.scratch)]

    def _scratch_written(self) -> tuple[tuple[str, Scratch], ...]:
        return ((self.pointer, self.sums),)


class _CombineWriter(_SplitWriter):
    """Adds the parts of each tile, always in the same order, and does the epilogue."""

    def _loop(self) -> None:
        mask = self._mask_text()
        self.lines += [
            "for piece in range(0, PARTS):",
            f"    acc += tl.load({self._place('piece')}{mask}{', other=0.0' if mask else ''})",
        ]

    _loop_over_halves = _loop

    def _blocks(self) -> dict[str, int]:
        blocks = {**super()._blocks(), "PARTS": self.parts}
        return {name: size for name, size in blocks.items() if name not in ("BLOCK_K", "PIECE")}

    def _scratch_read(self) -> tuple[tuple[str, Scratch], ...]:
        return ((self.pointer, self.sums), *super()._scratch_read()[len(self.scratch) :])
