"""First tiles of attention kernels, and other tiles worth measuring."""

from __future__ import annotations

from dataclasses import replace

from mtmc_lsp.core.device_model import DeviceModel, TensorCores
from mtmc_lsp.core.dtypes import ITEMSIZE
from mtmc_lsp.core.sizes import product
from mtmc_lsp.ir.attention_mask import limited_attention_band
from mtmc_lsp.ir.attention_pattern import gradient_form
from mtmc_lsp.ir.primitives import KernelIR, Prim, PrimOp
from mtmc_lsp.ir.regions import Region, RegionKind
from mtmc_lsp.schedule.column_tiles import next_power_of_two
from mtmc_lsp.schedule.configs import AttentionConfig
from mtmc_lsp.schedule.device_limits import ROWS_PER_WARP, max_stages

HALF, FULL = 2, 4
"""Bytes per element of keys and values: 16-bit (multiplied on tensor cores) and float32 (fp32 units)."""
WIDE_HEADS = ((128, 128, 8, 3), (128, 64, 8, 3), (128, 64, 8, 2), (64, 64, 4, 2), (64, 32, 4, 2), (32, 32, 4, 1))
TILES = {
    (HALF, 64): ((128, 64, 8, 3), (64, 64, 4, 3), (64, 64, 4, 2), (64, 32, 4, 2), (32, 32, 4, 1)),
    (HALF, 128): ((256, 64, 8, 4), *WIDE_HEADS),
    (HALF, 256): WIDE_HEADS,
    (FULL, 64): ((64, 64, 8, 3), (64, 32, 8, 2), (32, 32, 8, 2), (32, 32, 4, 1)),
    (FULL, 128): ((64, 32, 8, 2), (32, 32, 8, 2), (32, 32, 4, 1)),
    (FULL, 256): ((32, 32, 8, 2), (32, 32, 4, 1)),
}
"""Queries, keys, warps and stages, best first, by element size and the largest head that they serve.

Order measured on an H200 and an H100. H200, bfloat16, speed relative to PyTorch: heads of 64 reach 0.94 and 0.90 with the first
two tiles; heads of 128 reach 0.74 and 0.73 with the second and third. H100, heads of 128: 0.79 with the first tile (causal:
0.73). The float32 tiles are the largest that do not spill registers on sm_90.
"""
GRADIENT_TILES = {
    (HALF, 64): ((64, 64, 4, 2), (64, 64, 8, 2), (64, 64, 4, 1), (32, 64, 4, 2), (32, 32, 4, 1)),
    (HALF, 128): ((64, 64, 8, 2), (64, 64, 8, 1), (32, 64, 4, 1), (32, 32, 4, 1)),
    (FULL, 64): ((32, 32, 4, 2), (32, 32, 4, 1), (16, 32, 4, 1)),
    (FULL, 128): ((32, 32, 8, 1), (16, 32, 4, 1), (16, 16, 4, 1)),
}
"""Like :data:`TILES`, for gradients. Estimates, not measured: the tiles that compile for sm_90 without spilled registers."""
MAX_MASKED_QUERIES = 128
"""Queries of a program under a band mask: with more, a larger share of the computed blocks is masked out."""


def attention_config(ir: KernelIR, region: Region, device: DeviceModel) -> AttentionConfig:
    """A first configuration of an attention: the best tile whose queries, keys and values fit into shared memory."""
    if region.kind is RegionKind.ATTENTION_GRADIENT:
        return gradient_variants(ir, region, device)[0]
    rows = max(64, _products(ir, region)[0].shape[-2].value(ir.graph.sizes))
    if limited_attention_band(ir, region) is not None:
        rows = min(rows, MAX_MASKED_QUERIES)
    head, width, itemsize = _head_sizes(ir, region)
    kind = _kind(itemsize)
    largest = min((most for size, most in TILES if size == kind and most >= max(head, width)), default=256)
    for tile in TILES[kind, largest]:
        config = _adapted(AttentionConfig(*tile), kind, device)
        if config.block_m <= rows and _shared_bytes(config, head, width, itemsize) <= device.shared_bytes:
            break
    return config


def attention_variants(ir: KernelIR, region: Region, device: DeviceModel) -> list[AttentionConfig]:
    """Tiles to measure: those that fit into shared memory."""
    if region.kind is RegionKind.ATTENTION_GRADIENT:
        return gradient_variants(ir, region, device)
    head, width, itemsize = _head_sizes(ir, region)
    kind = _kind(itemsize)
    tiles = [(64, 64, 8, 3), (64, 32, 8, 2), (32, 64, 8, 2), (32, 32, 8, 2), (32, 32, 4, 2)]
    if kind == HALF:
        tiles = [
            (128, 64, 8, 3), (64, 64, 4, 3), (128, 128, 8, 3), (64, 128, 4, 2), (128, 64, 4, 3), (128, 128, 4, 2),
            (128, 64, 8, 2), (64, 32, 4, 3), (256, 64, 8, 3), (256, 64, 8, 4), (256, 128, 8, 2),
        ]  # fmt: skip
    configs = (_adapted(AttentionConfig(*tile), kind, device) for tile in tiles)
    return [config for config in configs if _shared_bytes(config, head, width, itemsize) <= device.shared_bytes]


def gradient_variants(ir: KernelIR, region: Region, device: DeviceModel) -> list[AttentionConfig]:
    """Tiles of a kernel that computes gradients of an attention, best first: those that fit into shared memory."""
    form = gradient_form([ir.prims[name] for name in region.prims])
    assert form is not None
    roles = [region.table.of_product(prim) for prim in (*form.inner, *form.results)]
    pairs = (roles[0].m, roles[0].n)
    features = {axes for each in roles for axes in (each.m, each.n, each.k)} - set(pairs)
    sizes = [product([axis.size for axis in axes]).value(ir.graph.sizes) for axes in features]
    heads = [max(16, next_power_of_two(size)) for size in sizes]
    itemsize = max(ITEMSIZE[ir.prims[name].dtype] for prim in form.inner for name in prim.inputs)
    kind = _kind(itemsize)
    tiles = GRADIENT_TILES[kind, 64 if max(heads) <= 64 else 128]
    configs = [_adapted(AttentionConfig(*tile), kind, device) for tile in tiles]
    # Two tiles of a row's elements (queries and gradients of the result, or keys and values), and a tile of pairs.
    row = 2 * max(heads) * itemsize
    fitting = [
        config
        for config in configs
        if row * (config.block_n + config.block_m * config.stages) + config.elements * itemsize <= device.shared_bytes
    ]
    return fitting or configs[-1:]


def _adapted(config: AttentionConfig, kind: int, device: DeviceModel) -> AttentionConfig:
    """The configuration with the stages that the compiler supports, and no warp with less than one instruction's rows."""
    config = replace(config, stages=min(config.stages, max_stages(device)))
    if kind == FULL or device.tensor_cores in (TensorCores.WGMMA, TensorCores.TCGEN05):
        return config
    return replace(config, warps=min(config.warps, config.block_m // ROWS_PER_WARP))


def _shared_bytes(config: AttentionConfig, head: int, width: int, itemsize: int) -> int:
    """Shared memory of a program: its queries, and keys and values of all stages."""
    return itemsize * (config.block_m * head + config.block_n * config.stages * (head + width))


def _head_sizes(ir: KernelIR, region: Region) -> tuple[int, int, int]:
    """Padded elements per query and per value, and bytes per element."""
    scores, result = _products(ir, region)
    left, right = ir.prims[scores.inputs[0]], ir.prims[result.inputs[1]]
    head, width = (max(16, next_power_of_two(prim.shape[-1].value(ir.graph.sizes))) for prim in (left, right))
    return head, width, max(ITEMSIZE[left.dtype], ITEMSIZE[right.dtype])


def _kind(itemsize: int) -> int:
    return HALF if itemsize <= HALF else FULL


def _products(ir: KernelIR, region: Region) -> tuple[Prim, Prim]:
    """The product of queries and keys, and the product of weights and values."""
    scores, result = (ir.prims[name] for name in region.prims if ir.prims[name].op is PrimOp.MATMUL)
    return scores, result
