"""Matmuls with partial sums: code shared by the kernel that writes the partial sums and the one that adds them."""

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
"""Largest tile of the second kernel. It is small, so that small results still occupy many program instances."""


def combine_config(config: MatmulConfig) -> MatmulConfig:
    """Derive the configuration of the kernel that adds the partial sums."""
    block_m, block_n = min(COMBINED_M, config.block_m), min(COMBINED_N, config.block_n)
    return replace(config, block_m=block_m, block_n=block_n, warps=4, stages=2)


class PartsWriter(ProductWriter):
    """Base class of both kernel writers."""

    def __init__(
        self,
        axes: ProductAxes,
        buffers: Mapping[str, TensorType],
        config: MatmulConfig,
        split_operands: list[SplitOperand] | None,
        parts: Scratch,
    ) -> None:
        """Accept the product's configuration; the second kernel derives smaller tiles from it (:func:`combine_config`)."""
        self.product_config = config
        super().__init__(axes, buffers, self._kernel_config(config), split_operands)
        self.parts = parts
        self.pointer = self.parameters.names.unique("product_parts_ptr")

    def _kernel_config(self, config: MatmulConfig) -> MatmulConfig:
        return config


class WritesParts(PartsWriter):
    """The first kernel, which writes the partial sums."""

    def _scratch_written(self) -> tuple[tuple[str, Scratch], ...]:
        return ((self.pointer, self.parts),)


class AddsParts(PartsWriter):
    """The second kernel, which adds the partial sums. Of pre-split operands it reads only the scales."""

    def _kernel_config(self, config: MatmulConfig) -> MatmulConfig:
        return combine_config(config)

    def _loop_over_split_operands(self) -> None:
        self._loop()

    def _scratch_read(self) -> tuple[tuple[str, Scratch], ...]:
        return ((self.pointer, self.parts), *super()._scratch_read()[len(self.scratch) :])
