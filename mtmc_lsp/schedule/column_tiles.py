"""Tiles of columns: how many of them a program of an elementwise kernel takes at once."""

from __future__ import annotations

from mtmc_lsp.schedule.configs import TileConfig

SHORT = 16
"""Columns whose transactions cost as much again as what they bring: shorter tiles waste memory's width."""


def column_block(columns: int) -> int:
    """The tile of columns that reads least: little beyond the last column, and not much less than memory brings at once."""
    choices = [1 << power for power in range(min(10, next_power_of_two(columns).bit_length() - 1) + 1)]
    return min(choices, key=lambda block: (-(-columns // block) * (block + SHORT), -block))


def single_columns(columns: int, warps: int) -> TileConfig:
    """A tile with one element for each thread."""
    block = min(32 * warps, column_block(columns))
    return TileConfig(32 * warps // block, block, warps=warps)


def next_power_of_two(number: int) -> int:
    """The smallest power of two that is at least ``number``."""
    return 1 << max(0, number - 1).bit_length()
