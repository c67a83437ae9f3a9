"""Products by stream-K: a fixed number of programs, and the last tiles' blocks of K shared out evenly among them.

Where tiles do not make whole waves of programs, part of the device would idle in the last wave. So every program computes a tile
of each whole wave by itself; the blocks of K of the tiles that are left, one tile's after the other's, are cut into as many equal
runs as there are programs (Osama et al., "Stream-K", arXiv 2301.03598). A run has no more blocks than a tile, so it lies in
two tiles at most, and what a program has summed of each it writes to memory. A second kernel adds the parts of each of these
tiles, always in the order of K, and does the epilogue: no program waits for another.

The ``p``-th program's part of the ``t``-th of the shared tiles is in place ``p + t`` of the parts: from one part to the next
``p`` or ``t`` grows, so no two parts have the same place. There are fewer shared tiles than programs, or as many where
tiles make whole waves; so at least one tile is shared, and places are fewer than twice the programs.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace

from mtmc_lsp.codegen.kernel.kernel import Kernel, Scratch
from mtmc_lsp.codegen.kernel.snippets import PRODUCT, blocks_text
from mtmc_lsp.codegen.matmul.descriptors import MAKE
from mtmc_lsp.codegen.matmul.k_loops import WalkOfRun
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
"""Names that these kernels use for themselves."""


def write_stream_product(
    axes: ProductAxes,
    buffers: Mapping[str, TensorType],
    config: MatmulConfig,
    split_operands: list[SplitOperand] | None,
    name: str,
    docstring: str,
) -> list[Kernel]:
    """The kernels of a product by ``config.stream_k`` programs.

    Descriptors of a batch's matrices would be made anew for every tile, so there tiles are read by pointers.

    Raises:
        CannotCode: something in it has no Triton form.
    """
    config = replace(config, tma=config.tma and not axes.batch)
    shape = (Size.of(2 * config.stream_k), Size.of(config.elements))
    parts = Scratch("product_parts", shape, compute_dtype(axes.prim.dtype))
    what = "The tiles of whole waves; of each tile that is left, the parts that programs with equal shares of K have."
    first = _RunWriter(axes, buffers, config, split_operands, parts)
    last = _FinishWriter(axes, buffers, config, split_operands, parts)
    return [first.kernel(f"{name}_runs", what), last.kernel(name, docstring)]


class _StreamWriter(PartsWriter):
    """What both kernels share: how tiles are dealt out."""

    _reserved = STREAM_NAMES

    @property
    def _tile(self) -> tuple[int, int]:
        """Rows and columns of the tiles that are dealt out."""
        return self.product_config.block_m, self.product_config.block_n

    def _dealt_out(self, tall: str, wide: str) -> list[str]:
        """Statements that count tiles and blocks of K."""
        for size_name, half in zip("MN", self.split_operands or [], strict=False):
            name_sizes(self.parameters, size_name, half)
        batch = f" * {self.parameters.size(self.axes.n_batch).at(PRODUCT)}" if self.axes.batch else ""
        return [
            f"blocks_m = tl.cdiv({self._size('M')}, {tall})",
            f"blocks_n = tl.cdiv({self._size('N')}, {wide})",
            f"tiles = blocks_m * blocks_n{batch}",
            "# Each program has a tile of every wave but the last, which may not be full, and of its tiles a run of blocks of K.",
            "whole = (tiles - 1) // PROGRAMS * PROGRAMS",
            f"steps = {self._blocks_of_tile()}",
            "run = tl.cdiv((tiles - whole) * steps, PROGRAMS)",
        ]

    def _blocks_of_tile(self) -> str:
        """The number of blocks of K of each tile."""
        if self.split_operands is not None:
            return f"{self.parameters.size(self.split_operands[0].k_pad).text} // BLOCK_K"
        kernel_positions = self.axes.kernel_positions if self.config.kernel_positions else ()
        count, depth = (
            self.parameters.size(product([axis.size for axis in axes]))
            for axes in (kernel_positions, self.axes.k[len(kernel_positions) :])
        )
        blocks = f"tl.cdiv({depth.text}, BLOCK_K)"
        return f"{count.at(PRODUCT)} * {blocks}" if kernel_positions else blocks

    def _place_of_tile(self, tall: str, wide: str) -> list[str]:
        """Statements that say where the ``tile``-th tile is."""
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
    """Whole tiles, and parts of those that programs share."""

    _walk = WalkOfRun()

    def _body(self) -> None:
        head = [
            f"program = {widened('tl.program_id(0)', wide=self.many)}",
            *self._dealt_out("BLOCK_M", "BLOCK_N"),
            "first = min(program * run, (tiles - whole) * steps)",
            "last = min(first + run, (tiles - whole) * steps)",
            "waves = whole // PROGRAMS",
        ]
        self._program_order()
        self._product()
        made = [line for line in self.lines if re.match(rf"\w+ = {re.escape(MAKE)}\(", line)]
        each = [line for line in self.lines if line not in made]
        turns = "for turn in range(0, waves + tl.cdiv(last, steps) - first // steps):"
        self.lines = [*head, *made, turns, *(f"    {line}" for line in each)]

    def _program_order(self) -> None:
        self.lines += [
            "is_whole = turn < waves",
            "tile = tl.where(is_whole, turn * PROGRAMS + program, whole + first // steps + turn - waves)",
            "shared = tile - whole",
            "begin = tl.where(is_whole, 0, max(first - shared * steps, 0))",
            "end = tl.where(is_whole, steps, min(last - shared * steps, steps))",
            "# Programs that share operands run near each other, so the operands stay in the L2 cache.",
            *self._place_of_tile("BLOCK_M", "BLOCK_N"),
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
            f"    place = {self.pointer} + (program + shared) * (BLOCK_M * BLOCK_N)",
            f"    tl.store(place + {inside}, acc)",
        ]

    def _grid(self, blocks: Mapping[str, int]) -> tuple[str, ...]:
        return (str(blocks["PROGRAMS"]),)


class _FinishWriter(AddsParts, _StreamWriter):
    """Adds the parts of each shared tile, and does the epilogue, a piece of the tile to each program."""

    def _program_order(self) -> None:
        self.lines += [
            f"shared = {widened('tl.program_id(0)', wide=self.many)}",
            *self._dealt_out("TILE_M", "TILE_N"),
            "tile = whole + shared",
            *self._place_of_tile("TILE_M", "TILE_N"),
            "rows = tl.program_id(1) // (TILE_N // BLOCK_N) * BLOCK_M + tl.arange(0, BLOCK_M)",
            "cols = tl.program_id(1) % (TILE_N // BLOCK_N) * BLOCK_N + tl.arange(0, BLOCK_N)",
            "m = (m_start + rows)[:, None]",
            "n = (n_start + cols)[None, :]",
        ]
        self._masks()

    def _loop(self) -> None:
        self.lines += [
            "# Programs took the blocks of K in order, so the parts lie side by side.",
            f"place = {self.pointer} + shared * (TILE_M * TILE_N) + rows[:, None] * TILE_N + cols[None, :]",
            "for program in range(shared * steps // run, tl.cdiv((shared + 1) * steps, run)):",
            "    acc += tl.load(place + program * (TILE_M * TILE_N))",
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
