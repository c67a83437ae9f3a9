"""Products whose sums are taken apart: what the kernel that writes the parts shares with the one that adds them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from mtmc_lsp.codegen.kernel.kernel import Scratch
from mtmc_lsp.codegen.matmul.matmul_kernel import ProductWriter
from mtmc_lsp.codegen.matmul.operands import ProductAxes
from mtmc_lsp.codegen.matmul.split_operands import SplitOperand
from mtmc_lsp.core.graph import TensorType
from mtmc_lsp.schedule.configs import MatmulConfig

COMBINED_M, COMBINED_N = 32, 64
"""Largest tile of the second kernel: small, so that few results still make many programs."""


def combining(config: MatmulConfig) -> MatmulConfig:
    """The configuration of the kernel that adds the parts of a product that has this one."""
    block_m, block_n = min(COMBINED_M, config.block_m), min(COMBINED_N, config.block_n)
    return replace(config, block_m=block_m, block_n=block_n, warps=4, stages=2)


class PartsWriter(ProductWriter):
    """Writes one of the two kernels."""

    def __init__(
        self,
        axes: ProductAxes,
        buffers: Mapping[str, TensorType],
        config: MatmulConfig,
        split_operands: list[SplitOperand] | None,
        parts: Scratch,
    ) -> None:
        """Take the configuration of the product; the kernel that adds the parts has smaller tiles (:func:`combining`)."""
        self.product_config = config
        super().__init__(axes, buffers, self._own_config(config), split_operands)
        self.parts = parts
        self.pointer = self.parameters.names.unique("product_parts_ptr")

    def _own_config(self, config: MatmulConfig) -> MatmulConfig:
        return config


class WritesParts(PartsWriter):
    """The first kernel."""

    def _scratch_written(self) -> tuple[tuple[str, Scratch], ...]:
        return ((self.pointer, self.parts),)


class AddsParts(PartsWriter):
    """The second kernel, which reads no operands: of those that were split before, their scales alone."""

    def _own_config(self, config: MatmulConfig) -> MatmulConfig:
        return combining(config)

    def _loop_over_split_operands(self) -> None:
        self._loop()

    def _scratch_read(self) -> tuple[tuple[str, Scratch], ...]:
        return ((self.pointer, self.parts), *super()._scratch_read()[len(self.scratch) :])
