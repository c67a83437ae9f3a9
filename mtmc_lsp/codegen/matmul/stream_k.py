"""Stream-K matmul: a fixed number of program instances; the blocks of K of the last tiles are distributed evenly over them.

If the number of tiles is not a multiple of the number of programs, part of the device is idle in the last wave. Therefore every
program computes one tile of each full wave alone. The blocks of K of the remaining tiles, in order, are split into equal runs,
one per program (Osama et al., "Stream-K", arXiv 2301.03598). A run is at most as long as a tile, so it overlaps at most two
tiles. A program writes its partial sum of each to memory. A second kernel adds the partial sums of each of these tiles in the
order of K, and runs the epilogue: no program waits for another.

Program ``p`` stores its partial sum of shared tile ``t`` at index ``p + t``. From one partial sum to the next, ``p`` or ``t``
grows, so indices are unique. There are at most as many shared tiles as programs (at least one tile is always shared), so there
are fewer than twice as many partial sums as programs.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace

from mtmc_lsp.codegen.kernel.kernel import Kernel, Scratch
from mtmc_lsp.codegen.kernel.snippets import PRODUCT, blocks_text
from mtmc_lsp.codegen.matmul.descriptors import MAKE_DESCRIPTOR
from mtmc_lsp.codegen.matmul.k_loops import BlockRangeLoop
from mtmc_lsp.codegen.matmul.operands import ProductAxes, tile_of_program, widened
from mtmc_lsp.codegen.matmul.partial_sums import AddsParts, PartsWriter, WritesParts
from mtmc_lsp.codegen.matmul.split_operands import SplitOperand, name_sizes
from mtmc_lsp.codegen.module.naming import PRODUCT_NAMES
from mtmc_lsp.core.dtypes import compute_dtype
from mtmc_lsp.core.graph import TensorType
from mtmc_lsp.core.sizes import Size, product
from mtmc_lsp.schedule.configs import MatmulConfig

STREAM_NAMES = PRODUCT_NAMES | frozenset(
    "program tile tiles whole waves turn shared run first last begin end is_whole TILE_M TILE_N PROGRAMS".split()
)
"""Names that stream-K kernels use for their own variables."""


def write_stream_product(
    axes: ProductAxes,
    buffers: Mapping[str, TensorType],
    config: MatmulConfig,
    split_operands: list[SplitOperand] | None,
    name: str,
    docstring: str,
) -> list[Kernel]:
    """Write the kernels of a matmul with ``config.stream_k`` program instances.

    Batched products use pointers, because every tile would need a new descriptor.

    Raises:
        CannotCode: the region is not supported.
    """
    config = replace(config, tma=config.tma and not axes.batch)
    shape = (Size.of(2 * config.stream_k), Size.of(config.elements))
    parts = Scratch("product_parts", shape, compute_dtype(axes.prim.dtype))
    summary = "The tiles of full waves, and partial sums of the remaining tiles, whose blocks of K are shared evenly."
    first = _RunWriter(axes, buffers, config, split_operands, parts)
    last = _FinishWriter(axes, buffers, config, split_operands, parts)
    return [first.kernel(f"{name}_runs", summary), last.kernel(name, docstring)]


class _StreamWriter(PartsWriter):
    """The distribution of tiles over programs, shared by both kernels."""

    _reserved = STREAM_NAMES

    @property
    def _tile(self) -> tuple[int, int]:
        """Rows and columns of the distributed tiles."""
        return self.product_config.block_m, self.product_config.block_n

    def _tile_distribution(self, tall: str, wide: str) -> list[str]:
        """Statements that compute the number of tiles, steps per tile and steps per run."""
        for size_name, half in zip("MN", self.split_operands or [], strict=False):
            name_sizes(self.parameters, size_name, half)
        batch = f" * {self.parameters.size(self.axes.n_batch).at(PRODUCT)}" if self.axes.batch else ""
        return [
            f"blocks_m = tl.cdiv({self._size('M')}, {tall})",
            f"blocks_n = tl.cdiv({self._size('N')}, {wide})",
            f"tiles = blocks_m * blocks_n{batch}",
            "# Each program has one tile of every wave but the last, and a run of blocks of K from the tiles of the last wave.",
            "whole = (tiles - 1) // PROGRAMS * PROGRAMS",
            f"steps = {self._blocks_of_tile()}",
            "run = tl.cdiv((tiles - whole) * steps, PROGRAMS)",
        ]

    def _blocks_of_tile(self) -> str:
        """The number of blocks of K per tile, as text."""
        if self.split_operands is not None:
            return f"{self.parameters.size(self.split_operands[0].k_pad).text} // BLOCK_K"
        kernel_positions = self.axes.kernel_positions if self.config.kernel_positions else ()
        count, depth = (
            self.parameters.size(product([axis.size for axis in axes]))
            for axes in (kernel_positions, self.axes.k[len(kernel_positions) :])
        )
        blocks = f"tl.cdiv({depth.text}, BLOCK_K)"
        return f"{count.at(PRODUCT)} * {blocks}" if kernel_positions else blocks

    def _tile_position(self, tall: str, wide: str) -> list[str]:
        """Statements that compute the position of tile number ``tile``."""
        if not self.axes.batch:
            return ["pid = tile", *tile_of_program(tall, wide)]
        return [
            "batch = tl.cast(tile // (blocks_m * blocks_n), tl.int64)",
            "pid = tile % (blocks_m * blocks_n)",
            *tile_of_program(tall, wide),
        ]

    def _blocks(self) -> dict[str, int]:
        return {**super()._blocks(), "PROGRAMS": self.config.stream_k}


class _RunWriter(WritesParts, _StreamWriter):
    """Computes whole tiles, and partial sums of shared tiles."""

    _walk = BlockRangeLoop()

    def _body(self) -> None:
        head = [
            f"program = {widened('tl.program_id(0)', wide=self.wide_indices)}",
            *self._tile_distribution("BLOCK_M", "BLOCK_N"),
            "first = min(program * run, (tiles - whole) * steps)",
            "last = min(first + run, (tiles - whole) * steps)",
            "waves = whole // PROGRAMS",
        ]
        self._program_order()
        self._product()
        descriptors = [line for line in self.lines if re.match(rf"\w+ = {re.escape(MAKE_DESCRIPTOR)}\(", line)]
        statements = [line for line in self.lines if line not in descriptors]
        turns = "for turn in range(0, waves + tl.cdiv(last, steps) - first // steps):"
        self.lines = [*head, *descriptors, turns, *(f"    {line}" for line in statements)]

    def _program_order(self) -> None:
        self.lines += [
            "is_whole = turn < waves",
            "tile = tl.where(is_whole, turn * PROGRAMS + program, whole + first // steps + turn - waves)",
            "shared = tile - whole",
            "begin = tl.where(is_whole, 0, max(first - shared * steps, 0))",
            "end = tl.where(is_whole, steps, min(last - shared * steps, steps))",
            "# Grouped order: programs that share operands run close together, so operands stay in the L2 cache.",
            *self._tile_position("BLOCK_M", "BLOCK_N"),
            "m = (m_start + tl.arange(0, BLOCK_M))[:, None]",
            "n = (n_start + tl.arange(0, BLOCK_N))[None, :]",
        ]
        self._masks()

    def _finish(self) -> None:
        start = len(self.lines)
        super()._finish()
        inside = "tl.arange(0, BLOCK_M)[:, None] * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]"
        self.lines[start:] = [
            "if is_whole:",
            *(f"    {line}" for line in self.lines[start:]),
            "else:",
            f"    address = {self.pointer} + (program + shared) * (BLOCK_M * BLOCK_N)",
            f"    tl.store(address + {inside}, acc)",
        ]

    def _grid(self, blocks: Mapping[str, int]) -> tuple[str, ...]:
        return (str(blocks["PROGRAMS"]),)


class _FinishWriter(AddsParts, _StreamWriter):
    """Adds the partial sums of each shared tile and runs the epilogue; each program instance processes a part of a tile."""

    def _program_order(self) -> None:
        self.lines += [
            f"shared = {widened('tl.program_id(0)', wide=self.wide_indices)}",
            *self._tile_distribution("TILE_M", "TILE_N"),
            "tile = whole + shared",
            *self._tile_position("TILE_M", "TILE_N"),
            "rows = tl.program_id(1) // (TILE_N // BLOCK_N) * BLOCK_M + tl.arange(0, BLOCK_M)",
            "cols = tl.program_id(1) % (TILE_N // BLOCK_N) * BLOCK_N + tl.arange(0, BLOCK_N)",
            "m = (m_start + rows)[:, None]",
            "n = (n_start + cols)[None, :]",
        ]
        self._masks()

    def _loop(self) -> None:
        self.lines += [
            "# Programs process the blocks of K in order, so the partial sums of a tile are consecutive.",
            f"address = {self.pointer} + shared * (TILE_M * TILE_N) + rows[:, None] * TILE_N + cols[None, :]",
            "for program in range(shared * steps // run, tl.cdiv((shared + 1) * steps, run)):",
            "    acc += tl.load(address + program * (TILE_M * TILE_N))",
        ]

    def _grid(self, blocks: Mapping[str, int]) -> tuple[str, ...]:
        tall, wide = blocks["TILE_M"], blocks["TILE_N"]
        tiles = f"{blocks_text('n_m', tall)} * ({blocks_text('n_n', wide)}){' * n_batch' if self.axes.batch else ''}"
        pieces = tall // blocks["BLOCK_M"] * (wide // blocks["BLOCK_N"])
        return (f"({tiles} - 1) % {blocks['PROGRAMS']} + 1", str(pieces))

    def _blocks(self) -> dict[str, int]:
        tall, wide = self._tile
        blocks = {**super()._blocks(), "TILE_M": tall, "TILE_N": wide}
        return {name: size for name, size in blocks.items() if name != "PIECE"}
