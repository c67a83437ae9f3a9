"""Which blocks of K a program of a product takes: all of them, every so many, or a run of neighbours."""

from __future__ import annotations


class Walk:
    """All blocks, one after another."""

    number = "start // BLOCK_K"
    """How many blocks the program took before the one at ``start``, counted from the first that any program takes."""

    def places(self, length: str) -> str:
        """The ``range`` of places along K at which blocks begin."""
        return f"range(0, {length}, BLOCK_K)"

    def steps(self, count: str) -> str:
        """The ``range`` of numbers of blocks."""
        return f"range(0, {count})"

    def both_halves(self, pad: str) -> list[str]:
        """The head of the loop over both halves of split operands, ``pad`` apart, and what it begins with."""
        return [f"for start in {self.places(f'2 * {pad}')}:"]


class WalkOfPart(Walk):
    """Every ``PARTS``-th block, from the ``piece``-th on."""

    number = "start // (PARTS * BLOCK_K)"

    def places(self, length: str) -> str:
        """From the part's first block on."""
        return f"range(piece * BLOCK_K, {length}, PARTS * BLOCK_K)"

    def steps(self, count: str) -> str:
        """From the part's first block on."""
        return f"range(piece, {count}, PARTS)"


class WalkOfRun(Walk):
    """The blocks from ``begin`` to ``end``."""

    def places(self, length: str) -> str:
        """The run's: it ends no later than K does."""
        return "range(begin * BLOCK_K, end * BLOCK_K, BLOCK_K)"

    def steps(self, count: str) -> str:
        """The run's: it ends no later than K does."""
        return "range(begin, end)"

    def both_halves(self, pad: str) -> list[str]:
        """One half's block, then the other's."""
        return ["for step in range(2 * begin, 2 * end):", f"    start = step // 2 * BLOCK_K + step % 2 * {pad}"]
