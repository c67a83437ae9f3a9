"""First tiles of attention kernels, and others worth measuring."""

from __future__ import annotations

from mtmc_lsp.core.dtypes import ITEMSIZE
from mtmc_lsp.ir.attention_mask import limited_attention_band
from mtmc_lsp.ir.primitives import KernelIR, Prim, PrimOp
from mtmc_lsp.ir.regions import Region
from mtmc_lsp.schedule.column_tiles import next_power_of_two
from mtmc_lsp.schedule.configs import AttentionConfig

LEAST_SHARED_BYTES = 101_376
"""Shared memory that a program has on GPUs of compute capability 8.6 to 12, at least."""

HALF, FULL = 2, 4
"""Bytes of an element of keys and values: of half precision, which tensor cores multiply, and of float32, which they do not."""
WIDE_HEADS = ((128, 128, 8, 3), (128, 64, 8, 3), (128, 64, 8, 2), (64, 64, 4, 2), (64, 32, 4, 2), (32, 32, 4, 1))
TILES = {
    (HALF, 64): ((128, 64, 8, 3), (64, 64, 4, 3), (64, 64, 4, 2), (64, 32, 4, 2), (32, 32, 4, 1)),
    (HALF, 128): ((256, 64, 8, 4), *WIDE_HEADS),
    (HALF, 256): WIDE_HEADS,
    (FULL, 64): ((64, 64, 8, 3), (64, 32, 8, 2), (32, 32, 8, 2), (32, 32, 4, 1)),
    (FULL, 128): ((64, 32, 8, 2), (32, 32, 8, 2), (32, 32, 4, 1)),
    (FULL, 256): ((32, 32, 8, 2), (32, 32, 4, 1)),
}
"""Queries, keys, warps and stages of an attention's program, best first, by the largest head that they are for.

On an H200 heads of 64 in bfloat16 ran at 0.94 and 0.90 of the library's speed by the first two; heads of 128 by the second and
third at 0.74 and 0.73, and on an H100 by the first at 0.79, where causal ones ran at 0.73 by it.
Those of float32 are the largest that spill no registers on sm_90.
"""


def attention_config(ir: KernelIR, region: Region, shared_bytes: int = 0) -> AttentionConfig:
    """A first configuration of an attention: the best tiles whose keys and values fit into shared memory.

    Args:
        ir: the primitives.
        region: of an attention.
        shared_bytes: what a program may have; 0 where it is not known.
    """
    sizes = ir.graph.sizes
    scores, result = _products(ir, region)
    left, right = ir.prims[scores.inputs[0]], ir.prims[result.inputs[1]]
    head, width = (max(16, next_power_of_two(prim.shape[-1].value(sizes))) for prim in (left, right))
    each = max(ITEMSIZE[left.dtype], ITEMSIZE[right.dtype])
    largest = min((most for size, most in TILES if size == _kind(each) and most >= max(head, width)), default=256)
    most_rows = max(64, scores.shape[-2].value(sizes))
    if limited_attention_band(ir, region) is not None:
        most_rows = min(most_rows, MOST_BANDED)
    for config in (AttentionConfig(*tile) for tile in TILES[_kind(each), largest]):
        elements = config.block_m * head + config.block_n * config.stages * (head + width)
        if config.block_m <= most_rows and elements * each <= (shared_bytes or LEAST_SHARED_BYTES):
            break
    return config


MOST_BANDED = 128
"""Queries of a program where each sees but some keys: of many, more pairs lie in blocks that only some queries see."""


def attention_variants(ir: KernelIR, region: Region) -> list[AttentionConfig]:
    """Tiles to measure."""
    each = max(ITEMSIZE[ir.prims[product.inputs[1]].dtype] for product in _products(ir, region))
    tiles = [(64, 64, 8, 3), (64, 32, 8, 2), (32, 64, 8, 2), (32, 32, 8, 2), (32, 32, 4, 2)]
    if _kind(each) == HALF:
        tiles = [
            (128, 64, 8, 3), (64, 64, 4, 3), (128, 128, 8, 3), (64, 128, 4, 2), (128, 64, 4, 3), (128, 128, 4, 2),
            (128, 64, 8, 2), (64, 32, 4, 3), (256, 64, 8, 3), (256, 64, 8, 4), (256, 128, 8, 2),
        ]  # fmt: skip
    return [AttentionConfig(*tile) for tile in tiles]


def _kind(itemsize: int) -> int:
    return HALF if itemsize <= HALF else FULL


def _products(ir: KernelIR, region: Region) -> tuple[Prim, Prim]:
    """The one of queries and keys, and the one of weights and values."""
    scores, result = (ir.prims[name] for name in region.prims if ir.prims[name].op is PrimOp.MATMUL)
    return scores, result
