"""Products whose sums are taken apart: what the kernel that writes the parts shares with the one that adds them."""

from __future__ import annotations

from collections.abc import Mapping

from mtmc_lsp.codegen.kernel.kernel import Scratch
from mtmc_lsp.codegen.matmul.matmul_kernel import Config, ProductWriter
from mtmc_lsp.codegen.matmul.operands import ProductAxes
from mtmc_lsp.codegen.matmul.split_operands import Halves
from mtmc_lsp.core.graph import TensorType

COMBINED_M, COMBINED_N = 32, 64
"""Largest tile of the second kernel: small, so that few results still make many programs."""


def combining(config: Config) -> Config:
    """The configuration of the kernel that adds the parts of a product that has this one, whose tile it keeps."""
    whole = {"tile_m": config["block_m"], "tile_n": config["block_n"]}
    tile = {"block_m": min(COMBINED_M, int(config["block_m"])), "block_n": min(COMBINED_N, int(config["block_n"]))}
    return {**config, **whole, **tile, "warps": 4, "stages": 2}


class PartsWriter(ProductWriter):
    """Writes one of the two kernels."""

    def __init__(
        self,
        axes: ProductAxes,
        buffers: Mapping[str, TensorType],
        config: Config,
        halves: list[Halves] | None,
        parts: Scratch,
    ) -> None:
        super().__init__(axes, buffers, config, halves)
        self.parts = parts
        self.pointer = self.parameters.names.unique("product_parts_ptr")


class WritesParts(PartsWriter):
    """The first kernel."""

    def _scratch_written(self) -> tuple[tuple[str, Scratch], ...]:
        return ((self.pointer, self.parts),)


class AddsParts(PartsWriter):
    """The second kernel, which reads no operands: of those that were split before, their scales alone."""

    def _loop_over_halves(self) -> None:
        self._loop()

    def _scratch_read(self) -> tuple[tuple[str, Scratch], ...]:
        return ((self.pointer, self.parts), *super()._scratch_read()[len(self.scratch) :])
