"""Computes how many warps of a kernel fit on a multiprocessor, from its registers and shared memory."""

from __future__ import annotations

SHARED_LIMIT = {
    "sm_75": 65536,
    "sm_80": 166912,
    "sm_86": 101376,
    "sm_89": 101376,
    "sm_90": 232448,
    "sm_100": 232448,
    "sm_120": 101376,
    "gfx90a": 65536,
    "gfx942": 65536,
    "gfx1100": 65536,
}
"""Bytes of shared memory (LDS) available to one block."""

SHARED_PER_SM = {
    "sm_75": 65536,
    "sm_80": 167936,
    "sm_86": 102400,
    "sm_89": 102400,
    "sm_90": 233472,
    "sm_100": 233472,
    "sm_120": 102400,
}
WARPS_PER_SM = {"sm_75": 32, "sm_80": 64, "sm_86": 48, "sm_89": 48, "sm_90": 64, "sm_100": 64, "sm_120": 48}
BLOCKS_PER_SM = {"sm_75": 16, "sm_80": 32, "sm_86": 16, "sm_89": 24, "sm_90": 32, "sm_100": 32, "sm_120": 24}
RESERVED_SHARED = 1024
"""Bytes of shared memory that the driver reserves per block, since sm_80."""

CDNA_REGISTERS, CDNA_WAVES, CDNA_SIMDS, CDNA_LDS = 512, 8, 4, 65536
"""Vector registers per lane, waves per SIMD, SIMDs and bytes of LDS per compute unit of gfx90a and gfx942."""


def occupancy(registers: int, shared: int, warps: int, arch: str) -> float | None:
    """Resident warps divided by the maximum, 0 to 1; None for an architecture whose limits are not listed.

    Args:
        registers: per thread.
        shared: bytes per block.
        warps: per block (for AMD: waves).
        arch: ``sm_90``, ``gfx942``.
    """
    if arch in ("gfx90a", "gfx942"):
        per_simd = min(CDNA_WAVES, CDNA_REGISTERS // _rounded_up(registers, 8))
        blocks = per_simd * CDNA_SIMDS // warps
        if shared:
            blocks = min(blocks, CDNA_LDS // shared)
        return min(1.0, blocks * warps / (CDNA_WAVES * CDNA_SIMDS))
    if arch not in WARPS_PER_SM:
        return None
    # A multiprocessor has 65536 registers and allocates them in units of 256 per warp.
    blocks = min(65536 // (_rounded_up(registers * 32, 256) * warps), WARPS_PER_SM[arch] // warps, BLOCKS_PER_SM[arch])
    if shared:
        reserved = 0 if arch == "sm_75" else RESERVED_SHARED
        blocks = min(blocks, SHARED_PER_SM[arch] // (shared + reserved))
    return blocks * warps / WARPS_PER_SM[arch]


def _rounded_up(value: int, unit: int) -> int:
    return -(-max(value, 1) // unit) * unit
