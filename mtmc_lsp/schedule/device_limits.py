"""Limits of configurations that follow from the device: programs that fill it, and tiles that fit its registers.

Each factor gives the number that was measured on an H200 (132 multiprocessors, 65536 registers each), as a share of the device's
resource. Other devices scale with that resource; nothing was measured on them.
"""

from __future__ import annotations

from mtmc_lsp.core.device_model import DeviceModel, TensorCores
from mtmc_lsp.core.dtypes import ITEMSIZE

MAX_THREADS_PER_BLOCK = 1024
"""Limit of CUDA and of HIP."""
AMD_MAX_STAGES = 2
"""Triton's AMD backend pipelines loops by one block of lookahead (``num_stages=2``)."""
ROWS_PER_WARP = 16
"""Rows of one ``mma`` or MFMA instruction; a WGMMA covers 64 rows with four warps."""


PRODUCT_SHARE = 0.8
"""Share of the peak that a plain product reaches, nearly that of the library."""
TF32_BY_REGISTERS = 0.21
"""Share of the peak of a TF32 product where tensor cores read shared memory: its operands pass through registers for rounding
(86 of 403 TFLOP/s on an H200). With ``mma`` all operands pass through registers."""
FROM_SHARED = (TensorCores.WGMMA, TensorCores.TCGEN05)
"""Tensor cores that read operands from shared memory."""


def tf32_share(device: DeviceModel) -> float:
    """Share of the peak that a TF32 product reaches."""
    return TF32_BY_REGISTERS if device.tensor_cores in FROM_SHARED else PRODUCT_SHARE


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


def max_looped_elements(device: DeviceModel) -> int:
    """Columns of a tile that loops over its row, so that two or more programs are resident on a multiprocessor (H200: 8192).

    Two tensors take half of it each.
    """
    return max_row_elements(device) // 2


def max_shared_row_elements(device: DeviceModel) -> int:
    """Columns of a tile where programs share a row, so that writes overlap with the reads of other programs (H200: 4096).

    Measured on an H200, second kernel of a layer norm over 16 rows of 2^22: 153 us, and 168 us with twice the width.
    """
    return max_row_elements(device) // 4


def max_strided_columns(device: DeviceModel) -> int:
    """Strided columns that a tile of 64 rows holds in registers (H200: 256)."""
    return max_row_elements(device) // 64


def min_split_elements(device: DeviceModel) -> int:
    """Elements of a float32 reduction from which on splitting rows pays for the second kernel (H200: 2^18).

    Eight multiprocessors take about as long to read them as the second kernel takes to launch; the next power of two.
    """
    read_per_launch = device.launch_us * 1e-6 * device.bandwidth / device.sm_count
    return 1 << int(8 * read_per_launch / ITEMSIZE["float32"]).bit_length()


def max_accumulators(device: DeviceModel) -> int:
    """Accumulators per thread up to which a second accumulator of the same size fits beside it (NVIDIA: 64, CDNA: 128).

    Both take half of the thread's registers; operands and addresses take the others.
    """
    return -(-device.registers_per_thread // 4)


def max_promoted_elements(device: DeviceModel) -> int:
    """Elements of the largest product tile with two accumulators, which take half of a multiprocessor's registers (H200: 128 x
    128 in eight warps)."""
    return device.registers_per_sm // 4


def max_warps(device: DeviceModel) -> int:
    """Warps of the largest block (NVIDIA: 32, CDNA: 16)."""
    return MAX_THREADS_PER_BLOCK // device.warp_size


def default_elements(device: DeviceModel) -> int:
    """Elements of a small tile: eight per thread in four warps (NVIDIA: 1024, CDNA: 2048)."""
    return 8 * 4 * device.warp_size


def short_row(device: DeviceModel) -> int:
    """Columns below which a small tile has more than 16 rows: with fewer elements its threads would have little to do."""
    return default_elements(device) // 16


def transaction_columns(device: DeviceModel) -> int:
    """Fixed cost of a tile, in columns: a row of four-byte elements begins and ends within a sector, so at most two
    sectors are read unnecessarily (NVIDIA: 16, CDNA: 32)."""
    return 2 * device.sector_bytes // ITEMSIZE["float32"]


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
