"""Which programs of a large grid run where work is estimated from a sample. Runs in workers."""

from __future__ import annotations

MOST_VISITED = 1 << 18
"""Programs of a grid that the interpreter counts through: of a larger grid, a sample is of the first ones."""
SAMPLED_STEPS = 3000
"""Memory operations of one launch after which no further program of a sample begins."""


class SampleEnded(BaseException):
    """No further program of a launch runs; the interpreter would turn an exception into an error of the kernel."""


def is_left_out(number: int, total: int, most: int, steps: int) -> bool:
    """Whether a program is not part of the sample of a grid.

    Args:
        total: the programs of the grid.
        most: the size of the sample.
        steps: memory operations of the programs before.

    Raises:
        SampleEnded: neither is any program after it.
    """
    if number >= MOST_VISITED or steps > SAMPLED_STEPS:
        raise SampleEnded
    visited = min(total, MOST_VISITED)
    return visited > most and number % -(-visited // most) != 0
