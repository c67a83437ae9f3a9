"""First configurations of matrix products, and variants worth measuring (fields of
:class:`mtmc_lsp.schedule.configs.MatmulConfig`)."""

from __future__ import annotations

from dataclasses import replace

from mtmc_lsp.core.device_model import DeviceModel
from mtmc_lsp.core.dtypes import ITEMSIZE, compute_dtype
from mtmc_lsp.core.graph import Graph
from mtmc_lsp.ir.dense_windows import are_contiguous_windows
from mtmc_lsp.ir.primitives import KernelIR, Prim, ProductDims, ProductSizes, has_split_operands
from mtmc_lsp.ir.regions import Region, product_in, products_in
from mtmc_lsp.schedule.column_tiles import next_power_of_two
from mtmc_lsp.schedule.configs import (
    CONVERTED_MODES,
    PRE_SPLIT_MODES,
    SPLIT_PRECISION_MODES,
    KernelConfig,
    MatmulConfig,
    PrecisionMode,
    SplitOnLoad,
)
from mtmc_lsp.schedule.device_limits import (
    PRODUCT_SHARE,
    max_accumulators,
    max_promoted_elements,
    max_stages,
    min_programs,
    product_tiles,
    tf32_share,
)
from mtmc_lsp.schedule.split_on_load import (
    LEAST_CHANNELS,
    LEAST_SPLIT_ROWS,
    both_sides_config,
    is_tma_loadable,
    one_side_config,
    side_to_split_on_load,
    split_k_parts,
    window_config,
)

PIECES = {PrecisionMode.FP16X3: 256, PrecisionMode.FP16X3_SHORT: 128}
"""Terms of K that tensor cores sum before fp32 units take over, by precision mode."""
MIN_TMA_ROWS, MIN_TMA_DEPTH = 64, 128
"""Rows of a tile, and terms of a sum, from which on TMA descriptors pay, on devices that have TMA. Measured on an H200."""


def user_mode(graph: Graph, prim: Prim) -> PrecisionMode:
    """The mode in which the user's code runs a float32 product."""
    return PrecisionMode(graph.convolution_mode(prim.origin) if prim.attrs.get("convolution") else graph.fp32_matmul)


def product_config(
    ir: KernelIR, region: Region, device: DeviceModel, precision: PrecisionMode | None = None
) -> MatmulConfig:
    """A first configuration of a matrix product.

    Args:
        precision: the mode for float32 operands; None for the mode of the user's code.
    """
    config = _product_config(ir, region, device, precision)
    return replace(config, stages=min(config.stages, max_stages(device)))


def _product_config(ir: KernelIR, region: Region, device: DeviceModel, precision: PrecisionMode | None) -> MatmulConfig:
    prim = product_in(ir, region)
    operand = ir.prims[prim.inputs[0]].dtype
    half = ITEMSIZE[compute_dtype(operand)] != ITEMSIZE[operand]
    if precision is PrecisionMode.FP16_SCALED and not can_scale(ir, prim):
        precision = None
    graph, kernel_positions = ir.graph, ProductDims.of(prim).kernel_positions
    if precision in SPLIT_PRECISION_MODES and not can_split(ir, prim, device):
        precision = PrecisionMode.IEEE
    mode = precision if precision and operand == "float32" else user_mode(graph, prim)
    mode = PrecisionMode.NATIVE if half else mode
    sized = ProductSizes.of(ir.prims, prim)
    m, n, batch = (size.value(ir.graph.sizes) for size in (sized.m, sized.n, sized.batch))
    channels = sized.channels.value(graph.sizes)
    loops_over_positions = (
        bool(kernel_positions) and channels >= LEAST_CHANNELS and not are_contiguous_windows(ir, prim)
    )
    if mode in SPLIT_PRECISION_MODES and (both := both_sides_config(ir, prim, device)) is not None:
        return both
    if has_split_operands(prim):
        mode = PrecisionMode.FP16X3_PROMOTED
    elif mode is PrecisionMode.FP16X3_PROMOTED:
        mode = PrecisionMode.FP16X3
    side = side_to_split_on_load(ir, prim, device) if mode in SPLIT_PRECISION_MODES else None
    if side is not None:
        on_load = window_config(m, n, batch, device) if kernel_positions else one_side_config(m, n, batch, side, device)
        if product_parts(ir, region, on_load, device) == 1:
            return on_load
    on_16_bits = half or mode in (*SPLIT_PRECISION_MODES, PrecisionMode.FP16_SCALED)
    if on_16_bits:
        terms = sized.k.value(graph.sizes)
        # With few terms, writing the results dominates, and a second resident program hides it. Measured on an H200: 64 terms,
        # small tile 2031 us against 2257; 256 terms, large tile 2429 us against 2639.
        has_one_accumulator = mode not in SPLIT_PRECISION_MODES or (
            is_one_piece(ir, prim, mode) and terms >= MIN_TMA_DEPTH
        )
        tall, wide = product_tiles(device)[0]
        most = tall * wide if has_one_accumulator else max_promoted_elements(device)
        most //= next_power_of_two(len(products_in(ir, region)))
        gathered = has_split_operands(prim) and kernel_positions and not loops_over_positions
        # Addresses that mix kernel positions and channels take many registers, for both halves.
        block_m, block_n, block_k, warps = _tensor_core_tile(m, n, batch, most // 2 if gathered else most, device)
        if gathered:
            block_k, warps = 32, 8 if block_m * block_n > 64 * 64 else 4
        elif kernel_positions:
            # A deeper block would be padding beyond the channels of one kernel position, or beyond K.
            depth = channels if loops_over_positions else sized.k.value(graph.sizes)
            block_k = min(block_k, max(16, next_power_of_two(depth)))
            # Two programs per multiprocessor: one writes its tile while the other multiplies. On an H200 1601 us, against 1985 us
            # with eight warps (64 to 128 channels, 3 x 3, 4.2 million positions).
            warps = 4 if half and block_m * block_n <= 128 * 128 else warps
    else:
        block_m, block_n = (min(128, max(16, next_power_of_two(size))) for size in (m, n))
        block_k, warps = 32, 8 if block_m * block_n >= 128 * 128 else 4
    stages = 3
    if not on_16_bits:
        # Operands stay in four or eight bytes.
        stage = ITEMSIZE[operand] * block_k * (block_m + block_n)
        stages = max(1, min(stages, device.shared_bytes // stage))
    if mode in PRE_SPLIT_MODES:
        # The longer of the two loops has 2 * K / 64 blocks.
        stages = min(5, max(3, terms // 32))
    config = MatmulConfig(block_m, block_n, block_k, 8, warps, stages, mode, kernel_positions=loops_over_positions)
    return replace(config, split_k=product_parts(ir, region, config, device))


def product_parts(ir: KernelIR, region: Region, config: MatmulConfig, device: DeviceModel) -> int:
    """Parts of K (split-K) for a product of few tiles with a long sum; 1 where the tiles fill the device."""
    if len(products_in(ir, region)) > 1:
        return 1
    sizes = ir.graph.sizes
    sized = ProductSizes.of(ir.prims, product_in(ir, region))
    m, n, batch = (size.value(sizes) for size in (sized.m, sized.n, sized.batch))
    tiles = -(-m // config.block_m) * -(-n // config.block_n) * batch
    return split_k_parts(tiles, region.columns.value(sizes), config.block_k, device)


def is_one_piece(ir: KernelIR, prim: Prim, precision: PrecisionMode) -> bool:
    """Whether tensor cores may sum all terms of a product of split operands, at the workload's sizes."""
    terms = ProductSizes.of(ir.prims, prim).k.value(ir.graph.sizes)
    return terms <= PIECES.get(precision, 0)


def holds_sums_apart(config: MatmulConfig, device: DeviceModel) -> bool:
    """Whether a product's tile is too large for a second accumulator, which would hold the sum of one piece.

    Such tiles keep only the leading bits of the sum separately.
    """
    return config.elements > max_accumulators(device) * device.warp_size * config.warps


def can_split(ir: KernelIR, prim: Prim, device: DeviceModel) -> bool:
    """Whether a product's kernel may split its operands, and the product is large enough for that.

    The halves of a convolution's windows would be many times the input. Convolutions split windows on load, or a rewrite splits
    the input before.
    """
    has_few_rows = ProductSizes.of(ir.prims, prim).m.value(ir.graph.sizes) < LEAST_SPLIT_ROWS
    if has_few_rows:
        return False
    return not ProductDims.of(prim).kernel_positions or side_to_split_on_load(ir, prim, device) is not None


def can_scale(ir: KernelIR, prim: Prim) -> bool:
    """Whether a product's operands may be scaled and rounded to float16: where the user's code runs it in TF32.

    Scaled windows of a convolution would be many times the input; rewrites convert the input.
    """
    is_large = ProductSizes.of(ir.prims, prim).m.value(ir.graph.sizes) >= LEAST_SPLIT_ROWS
    dtypes = {ir.prims[name].dtype for name in prim.inputs}
    if dtypes != {"float32"} or len(prim.inputs) > 2 or ProductDims.of(prim).kernel_positions or not is_large:
        return False
    return user_mode(ir.graph, prim) is PrecisionMode.TF32


def scaling_pays(ir: KernelIR, prim: Prim, device: DeviceModel) -> bool:
    """Whether scaled float16 operands are predicted to be faster than TF32 tiles.

    The conversion reads four bytes of each element and writes two. An estimate that orders the two; both are measured.
    """
    sized, sizes = ProductSizes.of(ir.prims, prim), ir.graph.sizes
    m, n, k, batch = (size.value(sizes) for size in (sized.m, sized.n, sized.k, sized.batch))
    operands, operations = batch * (m + n) * k, 2.0 * batch * m * n * k
    conversion = device.launch_us * 1e-6 + 6 * operands / device.bandwidth
    in_fp16 = max(2 * operands / device.bandwidth, operations / (PRODUCT_SHARE * device.flops["fp16"]))
    in_tf32 = max(4 * operands / device.bandwidth, operations / (tf32_share(device) * device.flops["tf32"]))
    return conversion + in_fp16 < in_tf32


def _tensor_core_tile(m: int, n: int, batch: int, most: int, device: DeviceModel) -> tuple[int, int, int, int]:
    """Rows, columns, depth and warps: the largest tile of up to ``most`` elements that fills the device, else the smallest
    tile."""
    fitting = [(a, b) for a, b in product_tiles(device) if a * b <= most]
    tiles = [(min(a, max(16, next_power_of_two(m))), min(b, max(16, next_power_of_two(n)))) for a, b in fitting]
    fills = (t for t in tiles if -(-m // t[0]) * -(-n // t[1]) * batch >= min_programs(device))
    tall, wide = next(fills, tiles[-1])
    return tall, wide, 64, 8 if tall * wide >= 128 * 128 else 4


def with_tma(ir: KernelIR, region: Region, config: MatmulConfig, device: DeviceModel) -> MatmulConfig:
    """A product's configuration that loads tiles by the Tensor Memory Accelerator, where the device has it and it pays.

    Each program creates descriptors, which takes as long as a few blocks of K. So where there are many tiles of split operands, a
    persistent program computes several. On an H200: 704 us against 741 for 4096 cubed, 2548 us against 3289 with 64 terms.
    """
    if not device.has_tma or config.block_m < MIN_TMA_ROWS:
        return config
    sizes, prim = ir.graph.sizes, product_in(ir, region)
    sized = ProductSizes.of(ir.prims, prim)
    m, n, k, batch = (size.value(sizes) for size in (sized.m, sized.n, sized.k, sized.batch))
    native = config.precision is PrecisionMode.NATIVE
    loadable = config.precision in CONVERTED_MODES or (
        native and all(is_tma_loadable(ir, region, each, side) for each in products_in(ir, region) for side in (0, 1))
    )
    if not loadable or k < MIN_TMA_DEPTH:
        return config
    config = _with_large_tile(config, m, n, k, batch, device)
    tiles = -(-m // config.block_m) * -(-n // config.block_n)
    has_many_tiles = config.precision in PRE_SPLIT_MODES and batch == 1 and tiles >= 2 * device.sm_count
    persist = device.sm_count if has_many_tiles and config.split_k == 1 else config.persist
    return replace(config, tma=True, persist=persist)


def _with_large_tile(config: MatmulConfig, m: int, n: int, k: int, batch: int, device: DeviceModel) -> MatmulConfig:
    """A product's configuration with the largest tile, where that still fills the device.

    On an H200: 77 us against 89 for 2048 cubed, 577 us against 680 for 4096 cubed. Without TMA, addresses would take the
    registers.
    """
    tall, wide = product_tiles(device)[0]
    mode = PrecisionMode.FP16X3
    promoted = max_promoted_elements(device)
    if config.precision is not mode or config.elements != promoted or config.split_k > 1 or k <= PIECES[mode]:
        return config
    larger = replace(config, block_m=tall, block_n=wide, stages=4)
    fits = stage_bytes(larger) * 4 <= device.shared_bytes
    return larger if fits and -(-m // tall) * -(-n // wide) * batch >= min_programs(device) else config


def by_pointers(config: MatmulConfig, device: DeviceModel) -> MatmulConfig:
    """A product's configuration without TMA: addresses take registers, so the largest tile is halved."""
    large = config.precision is PrecisionMode.FP16X3 and holds_sums_apart(config, device)
    return replace(config, block_n=config.block_n // 2 if large else config.block_n, tma=False)


def fitted(config: MatmulConfig, shared_bytes: int, loaded: int = 2, products: int = 1) -> MatmulConfig:
    """A product's configuration, reduced until it fits into the device's shared memory.

    Args:
        loaded: bytes of an operand's element as it is loaded.
        products: products of the kernel, which share the left operand.
    """
    if config.precision not in (PrecisionMode.NATIVE, PrecisionMode.FP16_SCALED, *SPLIT_PRECISION_MODES):
        return config
    for most, stages in (
        *((64, n) for n in range(config.stages, min(config.stages, 2) - 1, -1)),
        *((32, min(config.stages, n)) for n in (3, 2)),
    ):
        smaller = replace(config, block_k=min(most, config.block_k), stages=stages)
        stage = stage_bytes(smaller, products)
        # Wider operands are prefetched unconverted, and converted into one more buffer for tensor cores.
        needed = stage * stages if loaded <= 2 else stage * (loaded // 2) * (stages - 1) + stage
        if needed <= shared_bytes:
            return smaller
    return replace(config, block_k=32, stages=1)


def stage_bytes(config: KernelConfig, products: int = 1) -> int:
    """Shared memory of one stage of a product, at two bytes per element (16-bit operands); 0 for other kernels."""
    if not isinstance(config, MatmulConfig):
        return 0
    elements = config.block_k * (config.block_m + products * config.block_n)
    if config.split_on_load:
        # float32 operands, or both of their float16 halves.
        return 4 * elements
    # Pre-split operands: both halves of both operands of a block of K.
    return 2 * elements * (2 if config.precision is PrecisionMode.FP16X3_PROMOTED else 1)


def product_variants(
    config: MatmulConfig, device: DeviceModel, *, of_windows: bool, short: bool, products: int = 1
) -> list[MatmulConfig]:
    """A product's configuration with other tiles worth measuring; the lists were measured on an H200.

    Tiles that are too large for the device's registers or shared memory are dropped.

    Args:
        of_windows: whether the left operand is a convolution's windows.
        short: whether tensor cores may sum all terms at the workload's sizes (:func:`is_one_piece`).
        products: products of the kernel, each with an accumulator.
    """
    shapes = [
        (128, 256, 64, 8, 3), (128, 256, 64, 8, 4), (256, 128, 64, 8, 3), (256, 128, 64, 8, 4), (128, 128, 64, 8, 4),
        (128, 128, 64, 8, 3), (128, 128, 64, 4, 4), (128, 128, 128, 8, 3), (128, 256, 32, 8, 5), (64, 256, 64, 8, 4),
        (64, 128, 64, 4, 4), (128, 64, 64, 4, 4), (64, 64, 64, 4, 4), (32, 64, 64, 4, 5),
    ]  # fmt: skip
    mode = config.precision
    if mode in (PrecisionMode.IEEE, PrecisionMode.TF32):
        # Operands of four bytes: half the depth in the same shared memory.
        shapes = [(m, n, k // 2, w, s) for m, n, k, w, s in shapes]
    if config.split_on_load and of_windows:
        wide = config.block_n
        shapes = [
            (tall, wide, deep, warps, 1)
            for tall, deep, warps in [(256, 32, 4), (256, 32, 8), (128, 64, 8), (128, 64, 4), (128, 32, 8), (64, 32, 4)]
            if tall * wide <= max_promoted_elements(device) * warps // 8
        ]
    elif config.split_on_load is SplitOnLoad.BOTH:
        shapes = [(128, 128, 64, 8, 3), (128, 128, 32, 8, 3), (128, 64, 64, 4, 3), (64, 128, 64, 4, 3), (64, 64, 64, 4, 4),
                  (128, 64, 32, 8, 4), (64, 128, 32, 8, 4), (64, 64, 32, 4, 4)]  # fmt: skip
    elif config.split_on_load:
        tiles = [(128, 128, 64, 8, 3), (128, 128, 32, 8, 3), (128, 64, 64, 4, 3), (64, 128, 64, 4, 3), (64, 128, 32, 8, 4),
                 (64, 64, 64, 4, 3), (32, 128, 64, 4, 4), (32, 64, 64, 4, 4)]  # fmt: skip
        # Tiles are (few rows, many rows); the operand that is split on load has the many.
        is_right = config.split_on_load is SplitOnLoad.RIGHT
        shapes = [(few, many, k, w, s) if is_right else (many, few, k, w, s) for few, many, k, w, s in tiles]
    elif mode in PRE_SPLIT_MODES:
        # Two accumulators, unless tensor cores sum all terms: larger tiles spill registers.
        shapes = (
            [(128, 256, 64, 8, 4), (128, 128, 64, 8, 3), (128, 128, 64, 8, 2), (64, 128, 64, 4, 3)] if short else []
        )
        shapes += [
            (128, 128, 64, 8, 5), (128, 128, 64, 8, 4), (128, 128, 64, 8, 6), (128, 128, 128, 8, 3), (64, 128, 64, 4, 4),
            (128, 64, 64, 4, 4), (64, 64, 64, 4, 4), (64, 64, 128, 4, 3), (64, 32, 64, 4, 4),
        ]  # fmt: skip
        if config.tma and mode is PrecisionMode.FP16X3:
            shapes += [(128, 256, 64, 8, 4), (128, 256, 64, 8, 3), (256, 128, 64, 8, 4), (128, 128, 64, 4, 3)]
        if mode is PrecisionMode.FP16X3_SHORT:
            # A piece needs at least two blocks of K.
            shapes = [shape for shape in shapes if shape[2] < 128]
    elif mode is PrecisionMode.FP16X3_PROMOTED:
        # Two accumulators, and four tiles per stage: larger tiles spill registers or exceed shared memory.
        shapes = [
            (128, 128, 64, 8, 3), (128, 128, 64, 8, 2), (128, 128, 32, 8, 4), (128, 128, 32, 8, 3), (64, 128, 64, 4, 3),
            (128, 64, 64, 4, 3), (64, 128, 32, 4, 4), (64, 256, 32, 8, 4), (64, 64, 64, 4, 3), (64, 64, 32, 4, 4),
        ]  # fmt: skip
    tall, wide = product_tiles(device)[0]
    configs = [
        replace(config, block_m=m, block_n=n, block_k=k, warps=w, stages=min(s, max_stages(device)))
        for m, n, k, w, s in shapes
        if products * m * n <= tall * wide
    ]
    return [config for config in configs if stage_bytes(config, products) * config.stages <= device.shared_bytes]
