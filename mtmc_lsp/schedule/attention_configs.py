"""First tiles of attention kernels, and other tiles worth measuring."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from mtmc_lsp.core.device_model import DeviceModel, TensorCores
from mtmc_lsp.core.dtypes import ITEMSIZE
from mtmc_lsp.core.sizes import product
from mtmc_lsp.ir.attention_mask import limited_attention_band
from mtmc_lsp.ir.attention_pattern import attention_form, gradient_form, grouped_axes
from mtmc_lsp.ir.primitives import KernelIR, Prim, PrimOp
from mtmc_lsp.ir.regions import Region, RegionKind
from mtmc_lsp.schedule.column_tiles import next_power_of_two
from mtmc_lsp.schedule.configs import AttentionConfig
from mtmc_lsp.schedule.device_limits import ROWS_PER_WARP, max_stages

HALF, FULL = 2, 4
"""Bytes per element of keys and values: 16-bit (multiplied on tensor cores) and float32 (fp32 units)."""
WIDE_HEADS = (
    (128, 128, 8, 3), (128, 64, 8, 3), (128, 64, 8, 2), (64, 64, 4, 3), (64, 64, 4, 2), (64, 32, 4, 2), (32, 32, 4, 1),
)  # fmt: skip
TILES = {
    (HALF, 64): ((64, 64, 4, 3), (128, 64, 8, 3), (64, 64, 4, 2), (64, 32, 4, 2), (32, 32, 4, 1)),
    (HALF, 128): ((256, 64, 8, 4), *WIDE_HEADS),
    (HALF, 256): WIDE_HEADS,
    (FULL, 64): ((64, 64, 8, 3), (64, 32, 8, 2), (32, 32, 8, 2), (32, 32, 4, 1)),
    (FULL, 128): ((64, 32, 8, 2), (32, 32, 8, 2), (32, 32, 4, 1)),
    (FULL, 256): ((32, 32, 8, 2), (32, 32, 4, 1)),
}
"""Queries, keys, warps and stages, best first, by element size and the largest head that they serve.

Order measured on an H200 and an H100. H200, bfloat16, 4096 keys, speed relative to PyTorch's best kernel: heads of 64 reach 0.95
with each of the first two tiles (causal: 0.95 and 0.93; with key padding 1.19 and 1.03), heads of 128 reach 0.83, 0.71 and 0.73
with the first three. The float32 tiles are the largest that do not spill registers on sm_90.
"""
GRADIENT_TILES = {
    (HALF, 64): ((64, 64, 4, 2), (64, 64, 8, 2), (64, 64, 4, 1), (32, 64, 4, 2), (32, 32, 4, 1)),
    (HALF, 128): ((64, 64, 8, 2), (64, 64, 8, 1), (32, 64, 4, 1), (32, 32, 4, 1)),
    (FULL, 64): ((32, 32, 4, 2), (32, 32, 4, 1), (16, 32, 4, 1)),
    (FULL, 128): ((32, 32, 8, 1), (16, 32, 4, 1), (16, 16, 4, 1)),
}
"""Like :data:`TILES`, for gradients. Estimates, not measured: the tiles that compile for sm_90 without spilled registers."""
DECODING_TILES = {HALF: ((16, 128, 4, 3), (16, 64, 4, 3), (16, 32, 4, 2)), FULL: ((16, 32, 4, 2), (16, 16, 4, 2))}
"""Tiles for few queries (decoding): loading keys and values dominates. Estimates, not measured."""
FEW_QUERIES = 16
"""Rows of a tensor-core instruction. With fewer queries, the heads of a group are rows of one block, too."""
LEAST_KEYS = 256
"""Keys of a program from which on it pays that several programs share the keys of a query. An estimate, not measured."""
MAX_MASKED_QUERIES, MAX_MASKED_WIDE = 64, 128
"""Queries of a program under a band mask, with heads up to 128 and with wider ones: with more, a larger share of the computed
blocks is masked out. H200: a window of 512 keys took 110 us with 64 queries and 137 us with 128 (heads of 128), a causal ALiBi
152 and 194 us (heads of 64)."""


def attention_config(ir: KernelIR, region: Region, device: DeviceModel) -> AttentionConfig:
    """A first configuration of an attention: the best tile whose queries, keys and values fit into shared memory."""
    if region.kind is RegionKind.ATTENTION_GRADIENT:
        return gradient_variants(ir, region, device)[0]
    rows = queries_of(ir, region)
    if rows <= FEW_QUERIES:
        return _decoding_config(ir, region, device, DECODING_TILES[_kind(_head_sizes(ir, region)[2])])
    rows = max(64, rows)
    head, width, itemsize = _head_sizes(ir, region)
    if limited_attention_band(ir, region) is not None:
        rows = min(rows, MAX_MASKED_QUERIES if max(head, width) <= 128 else MAX_MASKED_WIDE)
    kind = _kind(itemsize)
    largest = min((most for size, most in TILES if size == kind and most >= max(head, width)), default=256)
    for tile in TILES[kind, largest]:
        config = _adapted(AttentionConfig(*tile), kind, device)
        if config.block_m <= rows and _shared_bytes(config, head, width, itemsize) <= device.shared_bytes:
            break
    return config


def queries_of(ir: KernelIR, region: Region) -> int:
    """Queries that read the same keys, at the workload's sizes: with few of them, also the heads of a group."""
    scores = _products(ir, region)[0]
    queries = scores.shape[-2].value(ir.graph.sizes)
    return queries * group_of(ir, region) if queries < FEW_QUERIES else queries


def group_of(ir: KernelIR, region: Region) -> int:
    """Heads that share keys and values."""
    form = attention_form([ir.prims[name] for name in region.prims])
    assert form is not None
    return product([axis.size for axis in grouped_axes(ir.prims, region.inputs, region.table, form)]).value(
        ir.graph.sizes
    )


def programs_of_attention(ir: KernelIR, region: Region, config: AttentionConfig) -> int:
    """Programs of an attention's kernel."""
    queries = queries_of(ir, region)
    shared = queries // _products(ir, region)[0].shape[-2].value(ir.graph.sizes)
    batch = product([axis.size for axis in region.table.of_product(_products(ir, region)[1]).batch])
    return batch.value(ir.graph.sizes) // shared * -(-queries // config.block_m) * config.split


def _decoding_config(
    ir: KernelIR, region: Region, device: DeviceModel, tiles: Sequence[tuple[int, int, int, int]]
) -> AttentionConfig:
    """The best tile that fits into shared memory, with as many parts of the keys as fill the device twice."""
    head, width, itemsize = _head_sizes(ir, region)
    for tile in tiles:
        config = _adapted(AttentionConfig(*tile), _kind(itemsize), device)
        if _shared_bytes(config, head, width, itemsize) <= device.shared_bytes:
            break
    if limited_attention_band(ir, region) is not None:
        return config
    keys = region.columns.value(ir.graph.sizes)
    wanted = 2 * device.sm_count // max(1, programs_of_attention(ir, region, config))
    parts = max(1, min(wanted, keys // LEAST_KEYS))
    return replace(config, split=1 << (parts.bit_length() - 1))


def attention_variants(ir: KernelIR, region: Region, device: DeviceModel) -> list[AttentionConfig]:
    """Tiles to measure: those that fit into shared memory."""
    if region.kind is RegionKind.ATTENTION_GRADIENT:
        return gradient_variants(ir, region, device)
    head, width, itemsize = _head_sizes(ir, region)
    kind = _kind(itemsize)
    if queries_of(ir, region) <= FEW_QUERIES:
        return _decoding_variants(ir, region, device)
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


def _decoding_variants(ir: KernelIR, region: Region, device: DeviceModel) -> list[AttentionConfig]:
    """Each tile for few queries with half, as many and twice the parts of the first configuration."""
    head, width, itemsize = _head_sizes(ir, region)
    first = attention_config(ir, region, device)
    keys = region.columns.value(ir.graph.sizes)
    parts = (first.split // 2, first.split, 2 * first.split) if limited_attention_band(ir, region) is None else (1,)
    return [
        replace(config, split=number)
        for tile in DECODING_TILES[_kind(itemsize)]
        if _shared_bytes(config := _adapted(AttentionConfig(*tile), _kind(itemsize), device), head, width, itemsize)
        <= device.shared_bytes
        for number in parts
        if 1 <= number <= max(1, keys // config.block_n)
    ]


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
