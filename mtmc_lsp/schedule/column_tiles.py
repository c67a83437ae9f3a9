"""Column tiles: how many columns a program of an elementwise kernel computes at once."""

from __future__ import annotations

from mtmc_lsp.core.device_model import DeviceModel
from mtmc_lsp.schedule.configs import TileConfig
from mtmc_lsp.schedule.device_limits import default_elements, transaction_columns


def column_block(columns: int, device: DeviceModel) -> int:
    """The tile width with the least traffic: few columns beyond the end, and not much narrower than a memory transaction."""
    widest = min(default_elements(device), next_power_of_two(columns))
    choices = [1 << power for power in range(widest.bit_length())]
    fixed = transaction_columns(device)
    return min(choices, key=lambda block: (-(-columns // block) * (block + fixed), -block))


def single_columns(columns: int, warps: int, device: DeviceModel) -> TileConfig:
    """A tile with one element per thread."""
    threads = device.warp_size * warps
    block = min(threads, column_block(columns, device))
    return TileConfig(threads // block, block, warps=warps)


def next_power_of_two(number: int) -> int:
    """The smallest power of two that is at least ``number``."""
    return 1 << max(0, number - 1).bit_length()
