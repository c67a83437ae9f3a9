"""First tiles of attention kernels, and others worth measuring."""

from __future__ import annotations

from mtmc_lsp.core.dtypes import ITEMSIZE
from mtmc_lsp.macro.prims import PrimOp, Program
from mtmc_lsp.macro.regions import Region

Config = dict[str, "int | str | bool"]

LEAST_SHARED_BYTES = 101_376
"""Shared memory that a program has on GPUs of compute capability 8.6 to 12, at least."""

ATTENTION_TILES = {
    64: ((128, 64, 8, 3), (64, 64, 4, 3), (64, 64, 4, 2), (64, 32, 4, 2), (32, 32, 4, 1)),
    256: ((128, 128, 8, 3), (128, 64, 8, 3), (128, 64, 8, 2), (64, 64, 4, 2), (64, 32, 4, 2), (32, 32, 4, 1)),
}
"""Queries, keys, warps and stages of an attention's program by the largest head that they are for, best first.

On an H200 heads of 64 in bfloat16 ran at 0.94 and 0.90 of the library's speed by the first two, heads of 128 at 0.74 and 0.73.
"""


def attention_config(program: Program, region: Region, shared_bytes: int = 0) -> Config:
    """A first configuration of an attention: the best tiles whose keys and values fit into shared memory.

    Args:
        program: the primitives.
        region: of an attention.
        shared_bytes: what a program may have; 0 where it is not known.
    """
    sizes = program.graph.sizes
    scores, result = (program.prims[name] for name in region.prims if program.prims[name].op is PrimOp.MATMUL)
    left, right = program.prims[scores.inputs[0]], program.prims[result.inputs[1]]
    head, width = (prim.shape[-1].value(sizes) for prim in (left, right))
    most_rows = max(64, scores.shape[-2].value(sizes))
    for block_m, block_n, warps, stages in ATTENTION_TILES[64 if max(head, width) <= 64 else 256]:
        config: Config = {"block_m": block_m, "block_n": block_n, "warps": warps, "stages": stages}
        elements = block_m * head + block_n * stages * (head + width)
        if block_m <= most_rows and elements * ITEMSIZE[right.dtype] <= (shared_bytes or LEAST_SHARED_BYTES):
            break
    return config


def attention_variants() -> list[Config]:
    """Tiles to measure."""
    tiles = [
        (128, 64, 8, 3), (64, 64, 4, 3), (128, 128, 8, 3), (64, 128, 4, 2), (128, 64, 4, 3), (128, 128, 4, 2),
        (128, 64, 8, 2), (64, 32, 4, 3),
    ]  # fmt: skip
    return [{"block_m": m, "block_n": n, "warps": w, "stages": s} for m, n, w, s in tiles]
