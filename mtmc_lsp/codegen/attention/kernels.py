"""The kernels of an attention region: one, or two where several programs share the keys of a block of queries."""

from __future__ import annotations

from collections.abc import Mapping

from mtmc_lsp.codegen.attention.attention_kernel import AttentionWriter
from mtmc_lsp.codegen.kernel.axis_groups import Mask
from mtmc_lsp.codegen.kernel.kernel import Kernel, assemble
from mtmc_lsp.codegen.kernel.snippets import blocks_text
from mtmc_lsp.codegen.matmul.operands import mask_needed
from mtmc_lsp.core.graph import TensorType
from mtmc_lsp.core.protocols import CannotCode
from mtmc_lsp.ir.attention_pattern import attention_form
from mtmc_lsp.ir.primitives import KernelIR
from mtmc_lsp.ir.regions import Region
from mtmc_lsp.schedule.column_tiles import next_power_of_two
from mtmc_lsp.schedule.configs import AttentionConfig

SMALLEST_BLOCK = 16
"""Queries of a program that combines parts."""


def write_attention_kernels(
    ir: KernelIR,
    region: Region,
    buffers: Mapping[str, TensorType],
    config: AttentionConfig,
    name: str,
    docstring: str,
) -> list[Kernel]:
    """Write the kernel of an attention region, or two kernels if programs share the keys.

    Raises:
        CannotCode: the region contains an unsupported operation or size.
    """
    form = attention_form([ir.prims[prim] for prim in region.prims])
    if form is None:
        raise CannotCode("the region is not an attention pattern (product, softmax, product); use matmul kernels")
    writer = AttentionWriter(ir, region, buffers, config, form)
    if not config.is_split:
        return [writer.kernel(name, docstring)]
    if writer.band.limits:
        raise CannotCode("split is not supported where a mask limits the keys of each query; use split = 1")
    first = writer.kernel(f"{name}_parts", "Unnormalised results, maxima and sums for parts of the keys.")
    last = _PartsCombiner(ir, region, buffers, config, form)
    return [first, last.combine(name, docstring, writer.unit)]


class _PartsCombiner(AttentionWriter):
    """Writes the second kernel of a split attention."""

    def combine(self, name: str, docstring: str, unit: float | None) -> Kernel:
        """The kernel that combines the parts of each query in a fixed order, and applies the operations after the attention.

        Args:
            unit: of the parts' maxima.
        """
        self.unit = unit
        width_block = max(16, next_power_of_two(self.width))
        blocks = {"BLOCK_M": SMALLEST_BLOCK, "WIDTH": width_block, "PARTS": self.config.split}
        queries = self.size_of(self.scores.m)
        m_masks: list[Mask] = []
        self.lines += self.block_of_queries(self.band)
        grid, sizes = [blocks_text("n_q", SMALLEST_BLOCK)], {"n_q": queries}
        if self.batch:
            self.lines.append("batch = tl.program_id(1).to(tl.int64)")
            grid.append("n_batch")
            sizes["n_batch"] = self.size_of(self.batch)
        if mask_needed(queries, SMALLEST_BLOCK):
            self.lines.append(f"m_mask = m < {self.parameters.size(queries).text}")
            m_masks = [Mask("m_mask", True, False)]
        mask = ", mask=m_mask, other=0.0" if m_masks else ""
        factor = "" if self.exponent_factor == 1.0 else f" * {self.exponent_factor!r}"
        self.lines += [
            "width = tl.arange(0, WIDTH)[None, :]",
            *self.first_statistics(m_masks, "[BLOCK_M, 1]", has_sink=True),
            "acc = tl.zeros([BLOCK_M, WIDTH], tl.float32)",
            "for part in range(0, PARTS):",
            f"    {self.row_of_part()}",
            f"    part_max = tl.load(maxima_ptr + row{mask})",
            "    new_max = tl.maximum(row_max, part_max)",
            f"    shrink = tl.exp2((row_max - new_max){factor})",
            f"    weights = tl.exp2((part_max - new_max){factor})",
            f"    acc = acc * shrink + tl.load(parts_ptr + row * WIDTH + width{mask}) * weights",
            f"    row_total = row_total * shrink + tl.load(totals_ptr + row{mask}) * weights",
            "    row_max = new_max",
            "row_total = tl.reshape(row_total, [BLOCK_M])",
        ]
        self.normalise()
        if self.saves_statistics:
            self.lines.append("row_max = tl.reshape(row_max, [BLOCK_M])")
        self.lines += self.statistics()
        self.store(m_masks, width_block)
        return assemble(
            name,
            self.parameters,
            blocks,
            docstring,
            self.lines,
            grid=tuple(grid),
            grid_sizes=sizes,
            num_warps=4,
            num_stages=2,
            limits=tuple(dict.fromkeys(self.limits)),
            scratch_read=self.scratch(),
        )
