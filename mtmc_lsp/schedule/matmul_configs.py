"""How a product's kernel runs when it is first written, and which other ways are worth trying.

The choices are the fields of :class:`mtmc_lsp.schedule.configs.MatmulConfig`.
"""

from __future__ import annotations

from dataclasses import replace

from mtmc_lsp.core.device_model import DeviceModel
from mtmc_lsp.core.dtypes import ITEMSIZE, compute_dtype
from mtmc_lsp.core.graph import Graph
from mtmc_lsp.ir.dense_windows import are_contiguous_windows
from mtmc_lsp.ir.primitives import KernelIR, Prim, ProductDims, ProductSizes, has_split_operands
from mtmc_lsp.ir.regions import Region, product_in
from mtmc_lsp.schedule.column_tiles import next_power_of_two
from mtmc_lsp.schedule.configs import (
    PRE_SPLIT_MODES,
    SPLIT_PRECISION_MODES,
    KernelConfig,
    MatmulConfig,
    PrecisionMode,
    SplitOnLoad,
)
from mtmc_lsp.schedule.split_on_load import (
    BUSY,
    LEAST_CHANNELS,
    LEAST_SPLIT_ROWS,
    both_sides_config,
    lies_in_units,
    one_side_config,
    parts_of_sum,
    side_to_split_on_load,
    window_config,
)

PIECES = {PrecisionMode.FP16X3: 256, PrecisionMode.FP16X3_SHORT: 128}
"""Elements of K whose large terms tensor cores sum up by themselves, by precision mode."""
PROMOTED_ELEMENTS = 128 * 128
"""Largest tile whose sum and whose piece's sum both fit into the registers of eight warps."""
SUMS_OF_A_THREAD = 64
"""Sums of a tile that a thread may hold with those of a piece beside them; of more, leading bits alone are held apart."""
LEAST_MOVED, LEAST_DEPTH_MOVED = 64, 128
"""Rows of a tile, and terms of a sum, from which on making descriptors pays."""
FIRST_WITH_TMA = 90
"""Compute capability, times ten, of the first devices with the Tensor Memory Accelerator: Hopper."""
CORE_TILES = ((128, 256), (128, 128), (64, 128), (64, 64), (32, 64))
"""Tiles for half-precision operands, largest first."""


def user_mode(graph: Graph, prim: Prim) -> PrecisionMode:
    """The mode in which the user's own code runs a float32 product."""
    return PrecisionMode(graph.convolution_mode(prim.origin) if prim.attrs.get("convolution") else graph.fp32_matmul)


def product_config(ir: KernelIR, region: Region, precision: PrecisionMode | None = None) -> MatmulConfig:
    """A first configuration of a matrix product.

    Args:
        ir: what the region is a part of.
        region: one with a product.
        precision: the mode for float32 operands; None for the one that the user's own code runs.
    """
    prim = product_in(ir, region)
    operand = ir.prims[prim.inputs[0]].dtype
    half = ITEMSIZE[compute_dtype(operand)] != ITEMSIZE[operand]
    graph, kernel_positions = ir.graph, ProductDims.of(prim).kernel_positions
    if precision in SPLIT_PRECISION_MODES and not can_split(ir, prim):
        precision = PrecisionMode.IEEE
    mode = precision if precision and operand == "float32" else user_mode(graph, prim)
    mode = PrecisionMode.NATIVE if half else mode
    sized = ProductSizes.of(ir.prims, prim)
    m, n, batch = (size.value(ir.graph.sizes) for size in (sized.m, sized.n, sized.batch))
    channels = sized.channels.value(graph.sizes)
    loops_over_positions = (
        bool(kernel_positions) and channels >= LEAST_CHANNELS and not are_contiguous_windows(ir, prim)
    )
    if mode in SPLIT_PRECISION_MODES and (both := both_sides_config(ir, prim)) is not None:
        return both
    if has_split_operands(prim):
        mode = PrecisionMode.FP16X3_PROMOTED
    elif mode is PrecisionMode.FP16X3_PROMOTED:
        mode = PrecisionMode.FP16X3
    side = side_to_split_on_load(ir, prim) if mode in SPLIT_PRECISION_MODES else None
    if side is not None:
        on_load = window_config(m, n, batch) if kernel_positions else one_side_config(m, n, batch, side)
        if product_parts(ir, region, on_load) == 1:
            return on_load
    if half or mode in SPLIT_PRECISION_MODES:
        terms = sized.k.value(graph.sizes)
        # Of few terms the result's way to memory counts, beside which another program multiplies: on an H200 2031 us of 2257 (64
        # terms), and the larger tile 2429 us of 2639 (256 terms).
        one_sum = mode not in SPLIT_PRECISION_MODES or (is_one_piece(ir, prim, mode) and terms >= LEAST_DEPTH_MOVED)
        most = CORE_TILES[0][0] * CORE_TILES[0][1] if one_sum else PROMOTED_ELEMENTS
        gathered = has_split_operands(prim) and kernel_positions and not loops_over_positions
        # Addresses that mix places and channels take many registers, for both halves.
        block_m, block_n, block_k, warps = _tensor_core_tile(m, n, batch, most // 2 if gathered else most)
        if gathered:
            block_k, warps = 32, 8 if block_m * block_n > 64 * 64 else 4
        elif kernel_positions:
            # Beyond the channels of one place of the window, or its last place, there would be nothing to multiply.
            depth = channels if loops_over_positions else sized.k.value(graph.sizes)
            block_k = min(block_k, max(16, next_power_of_two(depth)))
            # Two programs to a multiprocessor: one writes its tile while the other multiplies. On an H200 1601 us, and 1985 in
            # eight warps (64 to 128 channels, 3 x 3, 4.2 million places).
            warps = 4 if half and block_m * block_n <= 128 * 128 else warps
    else:
        block_m, block_n = (min(128, max(16, next_power_of_two(size))) for size in (m, n))
        block_k, warps = 32, 8 if block_m * block_n >= 128 * 128 else 4
    stages = 3
    if mode in PRE_SPLIT_MODES:
        # The longer of the two walks has 2 * K / 64 blocks.
        stages = min(5, max(3, terms // 32))
    config = MatmulConfig(block_m, block_n, block_k, 8, warps, stages, mode, kernel_positions=loops_over_positions)
    return replace(config, split_k=product_parts(ir, region, config))


def product_parts(ir: KernelIR, region: Region, config: MatmulConfig) -> int:
    """Into how many parts of K to split a product of few tiles with a long sum; 1 where it has tiles enough."""
    sizes = ir.graph.sizes
    own = ProductSizes.of(ir.prims, product_in(ir, region))
    m, n, batch = (size.value(sizes) for size in (own.m, own.n, own.batch))
    tiles = -(-m // config.block_m) * -(-n // config.block_n) * batch
    return parts_of_sum(tiles, region.columns.value(sizes), config.block_k)


def is_one_piece(ir: KernelIR, prim: Prim, precision: PrecisionMode) -> bool:
    """Whether a product of split operands has so few terms, by the workload, that tensor cores may sum all of them."""
    terms = ProductSizes.of(ir.prims, prim).k.value(ir.graph.sizes)
    return terms <= PIECES.get(precision, 0)


def holds_sums_apart(config: MatmulConfig) -> bool:
    """Whether a product of split operands has a tile too large for a second accumulator, which the sum of a piece would be in."""
    return config.elements > SUMS_OF_A_THREAD * 32 * config.warps


def can_split(ir: KernelIR, prim: Prim) -> bool:
    """Whether a product's own kernel may split its operands, and it is large enough for that.

    Of windows, halves would be many times the input: there it is split as it is read, or the input itself before, by a rewrite.
    """
    few = ProductSizes.of(ir.prims, prim).m.value(ir.graph.sizes) < LEAST_SPLIT_ROWS
    return not few and (not ProductDims.of(prim).kernel_positions or side_to_split_on_load(ir, prim) is not None)


def _tensor_core_tile(m: int, n: int, batch: int, most: int) -> tuple[int, int, int, int]:
    """The largest tile of up to ``most`` elements, cut to the result's size, that keeps the device busy; else the smallest."""
    fitting = [(a, b) for a, b in CORE_TILES if a * b <= most]
    tiles = [(min(a, max(16, next_power_of_two(m))), min(b, max(16, next_power_of_two(n)))) for a, b in fitting]
    tall, wide = next((t for t in tiles if -(-m // t[0]) * -(-n // t[1]) * batch >= BUSY), tiles[-1])
    return tall, wide, 64, 8 if tall * wide >= 128 * 128 else 4


def with_tiles_moved(ir: KernelIR, region: Region, config: MatmulConfig, device: DeviceModel) -> MatmulConfig:
    """A product's configuration, with tiles of its operands moved by hardware (TMA) where the device has that.

    A program makes the descriptors that this takes, which takes as long as a few blocks of K: where there are many tiles of split
    operands, one program makes several. On an H200 that took 704 us of 741 for 4096 cubed, and 2548 of 3289 with 64 terms.

    Args:
        ir: what the region is a part of.
        region: one with a product.
        config: as chosen for the sizes.
        device: what it runs on.
    """
    number = device.arch.removeprefix("sm_")
    if not number.isdigit() or int(number) < FIRST_WITH_TMA or config.block_m < LEAST_MOVED:
        return config
    sizes, prim = ir.graph.sizes, product_in(ir, region)
    own = ProductSizes.of(ir.prims, prim)
    m, n, k, batch = (size.value(sizes) for size in (own.m, own.n, own.k, own.batch))
    native = config.precision is PrecisionMode.NATIVE
    moved = config.precision in PRE_SPLIT_MODES or (native and all(lies_in_units(ir, prim, side) for side in (0, 1)))
    if not moved or k < LEAST_DEPTH_MOVED:
        return config
    config = _with_sums_apart(config, m, n, k, batch, device)
    tiles = -(-m // config.block_m) * -(-n // config.block_n)
    many = config.precision in PRE_SPLIT_MODES and batch == 1 and tiles >= 2 * device.sm_count
    persist = device.sm_count if many and config.split_k == 1 else config.persist
    return replace(config, tma=True, persist=persist)


def _with_sums_apart(config: MatmulConfig, m: int, n: int, k: int, batch: int, device: DeviceModel) -> MatmulConfig:
    """A product's configuration, with the larger tile whose sums are set apart, where that still keeps the device busy.

    On an H200 the product of 2048 cubed took 77 us of 89 so, and that of 4096 cubed 577 us of 680. Without descriptors, addresses
    would take the registers.
    """
    tall, wide = CORE_TILES[0]
    mode = PrecisionMode.FP16X3
    if config.precision is not mode or config.elements != PROMOTED_ELEMENTS or config.split_k > 1 or k <= PIECES[mode]:
        return config
    larger = replace(config, block_m=tall, block_n=wide, stages=4)
    fits = not device.shared_bytes or stage_bytes(larger) * 4 <= device.shared_bytes
    return larger if fits and -(-m // tall) * -(-n // wide) * batch >= BUSY else config


def by_pointers(config: MatmulConfig) -> MatmulConfig:
    """A product's configuration where its tiles are loaded by addresses, which take registers of their own."""
    large = config.precision is PrecisionMode.FP16X3 and holds_sums_apart(config)
    return replace(config, block_n=config.block_n // 2 if large else config.block_n, tma=False)


def fitted(config: MatmulConfig, shared_bytes: int, loaded: int = 2) -> MatmulConfig:
    """A product's configuration, made small enough for the device's shared memory.

    Args:
        config: as chosen for the sizes.
        shared_bytes: what a program may have; 0 where it is not known.
        loaded: bytes of an operand's element as it is loaded.
    """
    if not shared_bytes or config.precision not in (PrecisionMode.NATIVE, *SPLIT_PRECISION_MODES):
        return config
    for most, stages in (*((64, n) for n in range(config.stages, min(config.stages, 2) - 1, -1)), (32, 3), (32, 2)):
        smaller = replace(config, block_k=min(most, config.block_k), stages=stages)
        own = stage_bytes(smaller)
        # What is rounded on the way is loaded as it is, ahead of its use, and lies there once more as tensor cores take it.
        needed = own * stages if loaded <= 2 else own * (loaded // 2) * (stages - 1) + own
        if needed <= shared_bytes:
            return smaller
    return replace(config, block_k=32, stages=1)


def stage_bytes(config: KernelConfig) -> int:
    """Shared memory of one stage of a product, at two bytes an element (what tensor cores are fed); 0 for other kernels."""
    if not isinstance(config, MatmulConfig):
        return 0
    elements = config.block_k * (config.block_m + config.block_n)
    if config.split_on_load:
        # Operands as they are, in four bytes, or both halves of them.
        return 4 * elements
    # Of given halves, both of both operands of a block of K lie there at once.
    return 2 * elements * (2 if config.precision is PrecisionMode.FP16X3_PROMOTED else 1)


def product_variants(config: MatmulConfig, *, of_windows: bool, short: bool) -> list[MatmulConfig]:
    """A product's configuration with other tiles that are worth measuring.

    Args:
        config: the present one.
        of_windows: whether the left operand is a convolution's windows.
        short: whether the sum is one piece by the workload (:func:`is_one_piece`).
    """
    shapes = [
        (128, 256, 64, 8, 3), (128, 256, 64, 8, 4), (256, 128, 64, 8, 3), (256, 128, 64, 8, 4), (128, 128, 64, 8, 4),
        (128, 128, 64, 8, 3), (128, 128, 64, 4, 4), (128, 128, 128, 8, 3), (128, 256, 32, 8, 5), (64, 256, 64, 8, 4),
        (64, 128, 64, 4, 4), (128, 64, 64, 4, 4), (64, 64, 64, 4, 4), (32, 64, 64, 4, 5),
    ]  # fmt: skip
    mode = config.precision
    if mode in (PrecisionMode.IEEE, PrecisionMode.TF32):
        # Operands of four bytes: the same shared memory holds half of K.
        shapes = [(m, n, k // 2, w, s) for m, n, k, w, s in shapes]
    if config.split_on_load and of_windows:
        wide = config.block_n
        shapes = [
            (tall, wide, deep, warps, 1)
            for tall, deep, warps in [(256, 32, 4), (256, 32, 8), (128, 64, 8), (128, 64, 4), (128, 32, 8), (64, 32, 4)]
            if tall * wide <= PROMOTED_ELEMENTS * warps // 8
        ]
    elif config.split_on_load is SplitOnLoad.BOTH:
        shapes = [(128, 128, 64, 8, 3), (128, 128, 32, 8, 3), (128, 64, 64, 4, 3), (64, 128, 64, 4, 3), (64, 64, 64, 4, 4),
                  (128, 64, 32, 8, 4), (64, 128, 32, 8, 4), (64, 64, 32, 4, 4)]  # fmt: skip
    elif config.split_on_load:
        tiles = [(128, 128, 64, 8, 3), (128, 128, 32, 8, 3), (128, 64, 64, 4, 3), (64, 128, 64, 4, 3), (64, 128, 32, 8, 4),
                 (64, 64, 64, 4, 3), (32, 128, 64, 4, 4), (32, 64, 64, 4, 4)]  # fmt: skip
        # Few rows, many rows: which of them are the left operand's, the side says.
        is_right = config.split_on_load is SplitOnLoad.RIGHT
        shapes = [(few, many, k, w, s) if is_right else (many, few, k, w, s) for few, many, k, w, s in tiles]
    elif mode in PRE_SPLIT_MODES:
        # Two accumulators, unless the sum is one piece or set apart: what is larger spills.
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
            # Of fewer than two blocks a piece would be a part of the product.
            shapes = [shape for shape in shapes if shape[2] < 128]
    elif mode is PrecisionMode.FP16X3_PROMOTED:
        # Two accumulators, and four tiles per stage: what is larger spills, or does not fit into shared memory.
        shapes = [
            (128, 128, 64, 8, 3), (128, 128, 64, 8, 2), (128, 128, 32, 8, 4), (128, 128, 32, 8, 3), (64, 128, 64, 4, 3),
            (128, 64, 64, 4, 3), (64, 128, 32, 4, 4), (64, 256, 32, 8, 4), (64, 64, 64, 4, 3), (64, 64, 32, 4, 4),
        ]  # fmt: skip
    return [replace(config, block_m=m, block_n=n, block_k=k, warps=w, stages=s) for m, n, k, w, s in shapes]
