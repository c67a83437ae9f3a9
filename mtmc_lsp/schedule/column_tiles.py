"""Column tiles: how many columns a program of an elementwise kernel computes at once."""

from __future__ import annotations

from mtmc_lsp.core.device_model import DeviceModel
from mtmc_lsp.schedule.configs import TileConfig

TRANSACTION_COLUMNS = 16
"""Fixed cost of a tile, in columns: narrower tiles spend more on memory transactions than on data."""


def column_block(columns: int) -> int:
    """The tile width with the least traffic: few columns beyond the end, and not much narrower than a memory transaction."""
    choices = [1 << power for power in range(min(10, next_power_of_two(columns).bit_length() - 1) + 1)]
    return min(choices, key=lambda block: (-(-columns // block) * (block + TRANSACTION_COLUMNS), -block))


def single_columns(columns: int, warps: int, device: DeviceModel) -> TileConfig:
    """A tile with one element per thread."""
    threads = device.warp_size * warps
    block = min(threads, column_block(columns))
    return TileConfig(threads // block, block, warps=warps)


def next_power_of_two(number: int) -> int:
    """The smallest power of two that is at least ``number``."""
    return 1 << max(0, number - 1).bit_length()
