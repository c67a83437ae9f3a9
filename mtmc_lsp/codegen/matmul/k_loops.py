"""Loops over K: all blocks, every n-th block, or a range of consecutive blocks."""

from __future__ import annotations


class BlockLoop:
    """A loop over all blocks of K."""

    number = "start // BLOCK_K"
    """Number of blocks processed before the one at ``start``, relative to the first block of program instance 0."""

    def starts(self, length: str) -> str:
        """The ``range`` of start positions along K."""
        return f"range(0, {length}, BLOCK_K)"

    def steps(self, count: str) -> str:
        """The ``range`` of block numbers."""
        return f"range(0, {count})"

    def both_halves(self, pad: str) -> list[str]:
        """Head of the loop over both halves (``pad`` elements apart), and its first statements."""
        return [f"for start in {self.starts(f'2 * {pad}')}:"]


class StridedBlockLoop(BlockLoop):
    """A loop over every ``PARTS``-th block, starting with block ``piece``."""

    number = "start // (PARTS * BLOCK_K)"

    def starts(self, length: str) -> str:
        """See :class:`BlockLoop`; starts at the part's first block."""
        return f"range(piece * BLOCK_K, {length}, PARTS * BLOCK_K)"

    def steps(self, count: str) -> str:
        """See :class:`BlockLoop`; starts at the part's first block."""
        return f"range(piece, {count}, PARTS)"


class BlockRangeLoop(BlockLoop):
    """A loop over the blocks from ``begin`` to ``end``."""

    def starts(self, length: str) -> str:
        """See :class:`BlockLoop`; the range is within K."""
        return "range(begin * BLOCK_K, end * BLOCK_K, BLOCK_K)"

    def steps(self, count: str) -> str:
        """See :class:`BlockLoop`; the range is within K."""
        return "range(begin, end)"

    def both_halves(self, pad: str) -> list[str]:
        """The block of one half, then the same block of the other half."""
        return ["for step in range(2 * begin, 2 * end):", f"    start = step // 2 * BLOCK_K + step % 2 * {pad}"]
