"""Limits of configurations that follow from the device: programs that fill it, and tiles that fit its registers.

Each factor gives the number that was measured on an H200 (132 multiprocessors, 65536 registers each), as a share of the device's
resource. Other devices scale with that resource; nothing was measured on them.
"""

from __future__ import annotations

from mtmc_lsp.core.device_model import DeviceModel, TensorCores

MAX_THREADS_PER_BLOCK = 1024
"""Limit of CUDA and of HIP."""
AMD_MAX_STAGES = 2
"""Triton's AMD backend pipelines loops by one block of lookahead (``num_stages=2``)."""
ROWS_PER_WARP = 16
"""Rows of one ``mma`` or MFMA instruction; a WGMMA covers 64 rows with four warps."""


def min_tiles(device: DeviceModel) -> int:
    """Product tiles below which the device is largely idle, so that splitting K pays (H200: 128)."""
    return int(0.97 * device.sm_count)


def min_programs(device: DeviceModel) -> int:
    """Programs of a product below which a smaller tile is better (H200: 100)."""
    return int(0.76 * device.sm_count)


def min_reduction_programs(device: DeviceModel) -> int:
    """Programs of a reduction below which several programs share each row: about two per multiprocessor (H200: 256)."""
    return int(1.94 * device.sm_count)


def resident_programs(device: DeviceModel) -> int:
    """Programs of a tile kernel that run at once: about four per multiprocessor (H200: 512)."""
    return int(3.88 * device.sm_count)


def min_recurrent_programs(device: DeviceModel) -> int:
    """Programs that a launch of a recurrent layer should have (H200: 90)."""
    return int(0.685 * device.sm_count)


def max_row_elements(device: DeviceModel) -> int:
    """Elements of a row that one program holds in registers: a quarter of a multiprocessor's (H200: 16384)."""
    return device.registers_per_sm // 4


def max_warps(device: DeviceModel) -> int:
    """Warps of the largest block (NVIDIA: 32, CDNA: 16)."""
    return MAX_THREADS_PER_BLOCK // device.warp_size


def default_elements(device: DeviceModel) -> int:
    """Elements of a small tile: eight per thread in four warps (NVIDIA: 1024, CDNA: 2048)."""
    return 8 * 4 * device.warp_size


def max_stages(device: DeviceModel) -> int:
    """Pipeline stages that the compiler supports."""
    return AMD_MAX_STAGES if device.vendor == "amd" else 16


_PRODUCT_TILES = ((256, 256), (128, 256), (128, 128), (64, 128), (64, 64), (32, 64))
_LARGEST_TILE = {
    TensorCores.MMA: (128, 128),
    TensorCores.WGMMA: (128, 256),
    TensorCores.TCGEN05: (128, 256),
    TensorCores.MFMA: (256, 256),
}
"""Accumulators of eight warps: ``mma`` keeps operands in registers too, WGMMA reads them from shared memory, and CDNA has twice
the registers."""


def product_tiles(device: DeviceModel) -> tuple[tuple[int, int], ...]:
    """Tiles (M, N) of products of 16-bit operands, largest first."""
    return _PRODUCT_TILES[_PRODUCT_TILES.index(_LARGEST_TILE[device.tensor_cores]) :]


def splitting_pays(device: DeviceModel) -> bool:
    """Whether a float32 product of split operands is faster than fp32 units.

    Both are rates of large products. On an RTX 5090, 47 TFLOP/s for split operands are fewer than 80 for fp32 units.
    """
    return device.flops["fp16x3"] > device.flops["fp32"]
