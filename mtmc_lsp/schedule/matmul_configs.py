"""How a product's kernel runs when it is first written, and which other ways are worth trying.

A configuration has ``block_m``, ``block_n``, ``block_k``, ``group_m``, ``warps``, ``stages``, ``precision``, ``once``
(:mod:`mtmc_lsp.schedule.split_on_load`), and ``tma``: hardware moves tiles of the operands; of convolutions also ``taps``:
a block of K is a block of channels at one place of the window. Also ``split_k`` (parts of K), ``stream_k`` (programs
that share the
blocks of K of the last wave of tiles: :mod:`mtmc_lsp.tuning.waves`) and ``persist`` (programs that do one tile after another).
"""

from __future__ import annotations

from collections.abc import Mapping

from mtmc_lsp.core.device_model import DeviceModel
from mtmc_lsp.core.dtypes import ITEMSIZE, compute_dtype
from mtmc_lsp.ir.dense_windows import are_dense_runs
from mtmc_lsp.ir.primitives import KernelIR, Prim, ProductDims, ProductSizes, is_of_halves
from mtmc_lsp.ir.regions import Region, product_in
from mtmc_lsp.schedule.column_tiles import next_power_of_two
from mtmc_lsp.schedule.split_on_load import (
    BOTH,
    BUSY,
    LEAST_CHANNELS,
    LEAST_SPLIT_ROWS,
    ONCE,
    both_tile,
    lies_in_units,
    once_tile,
    parts_of_sum,
    read_once,
    window_tile,
)

Config = dict[str, "int | str | bool"]

SPLIT = "fp16x3"
"""The precision mode for fp32 products: operands scaled and split into two float16 halves before the product. Pieces of the sum
are added up by fp32 units: tensor cores round every addition of theirs towards zero, so their own error grows with K, above all
where no terms cancel."""
SHORT = "fp16x3-short"
"""As :data:`SPLIT`, in pieces of half the length: as exact as a float32 product, a twentieth slower."""
PROMOTED = "fp16x3-promoted"
"""For operands that are split as they are read, or given as halves: each block of K is a piece."""
HALVES = (SPLIT, SHORT, PROMOTED)
"""Modes whose operands are split into halves."""
SPLIT_BEFORE = (SPLIT, SHORT)
"""Modes whose operands are split by kernels that run before the product's."""
PIECES = {SPLIT: 256, SHORT: 128}
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


def product_config(ir: KernelIR, region: Region, precision: str = "") -> Config:
    """A first configuration of a matrix product.

    Args:
        program: what the region is a part of.
        region: one with a product.
        precision: the mode for fp32 operands; empty for the one that the user's own code runs.
    """
    prim = product_in(ir, region)
    operand = ir.prims[prim.inputs[0]].dtype
    half = ITEMSIZE[compute_dtype(operand)] != ITEMSIZE[operand]
    graph, taps = ir.graph, ProductDims.of(prim).taps
    own = graph.convolution_mode(prim.origin) if prim.attrs.get("convolution") else graph.fp32_matmul
    if precision in HALVES and not can_split(ir, prim):
        precision = "ieee"
    mode = "native" if half else (precision if precision and operand == "float32" else own)
    sized = ProductSizes.of(ir.prims, prim)
    m, n, batch = (size.value(ir.graph.sizes) for size in (sized.m, sized.n, sized.batch))
    channels = sized.channels.value(graph.sizes)
    walks_taps = bool(taps) and channels >= LEAST_CHANNELS and not are_dense_runs(ir, prim)
    # Split as they are read, blocks of K have scales of their own, so fp32 units add them to the sum.
    if mode in HALVES and (both := both_tile(ir, prim)) is not None:
        return {**both, "precision": PROMOTED}
    if is_of_halves(prim):
        mode = PROMOTED
    elif mode == PROMOTED:
        mode = SPLIT
    side = read_once(ir, prim) if mode in HALVES else None
    if side is not None:
        tile_of = window_tile(m, n, batch) if taps else once_tile(m, n, batch, side)
        once: Config = {**tile_of, "precision": PROMOTED}
        if not split_product_parts(ir, region, once):
            return once
    if half or mode in HALVES:
        terms = sized.k.value(graph.sizes)
        # Of few terms the result's way to memory counts, beside which another program multiplies: on an H200 2031 us of 2257 (64
        # terms), and the larger tile 2429 us of 2639 (256 terms).
        one_sum = mode not in HALVES or (is_one_piece(ir, prim, mode) and terms >= LEAST_DEPTH_MOVED)
        most = CORE_TILES[0][0] * CORE_TILES[0][1] if one_sum else PROMOTED_ELEMENTS
        gathered = is_of_halves(prim) and taps and not walks_taps
        # Addresses that mix places and channels take many registers, for both halves.
        block_m, block_n, block_k, warps = _tensor_core_tile(m, n, batch, most // 2 if gathered else most)
        if gathered:
            block_k, warps = 32, 8 if block_m * block_n > 64 * 64 else 4
        elif taps:
            # Beyond the channels of one place of the window, or its last place, there would be nothing to multiply.
            depth = channels if walks_taps else sized.k.value(graph.sizes)
            block_k = min(block_k, max(16, next_power_of_two(depth)))
            # Two programs to a multiprocessor: one writes its tile while the other multiplies. On an H200 1601 us, and 1985 in
            # eight warps (64 to 128 channels, 3 x 3, 4.2 million places).
            warps = 4 if half and block_m * block_n <= 128 * 128 else warps
    else:
        block_m, block_n = (min(128, max(16, next_power_of_two(size))) for size in (m, n))
        block_k, warps = 32, 8 if block_m * block_n >= 128 * 128 else 4
    tile: Config = {"block_m": block_m, "block_n": block_n, "block_k": block_k, "group_m": 8}
    stages = 3
    if mode in SPLIT_BEFORE:
        # The longer of the two walks has 2 * K / 64 blocks.
        stages = min(5, max(3, terms // 32))
    config: Config = {**tile, "warps": warps, "stages": stages, "precision": mode}
    if walks_taps:
        config["taps"] = True
    return {**config, **split_product_parts(ir, region, config)}


def split_product_parts(ir: KernelIR, region: Region, config: Mapping[str, int | str | bool]) -> Config:
    """How to split a product of few tiles with a long sum; nothing where it has tiles enough."""
    sizes = ir.graph.sizes
    prim = product_in(ir, region)
    own = ProductSizes.of(ir.prims, prim)
    m, n, batch = (size.value(sizes) for size in (own.m, own.n, own.batch))
    tiles = -(-m // int(config["block_m"])) * -(-n // int(config["block_n"])) * batch
    depth = region.columns.value(sizes)
    parts = parts_of_sum(tiles, depth, int(config["block_k"]))
    return {"split_k": parts} if parts > 1 else {}


def is_one_piece(ir: KernelIR, prim: Prim, precision: str) -> bool:
    """Whether a product of split operands has so few terms, by the workload, that tensor cores may sum all of them."""
    terms = ProductSizes.of(ir.prims, prim).k.value(ir.graph.sizes)
    return terms <= PIECES.get(precision, 0)


def holds_sums_apart(config: Mapping[str, int | str | bool]) -> bool:
    """Whether a product of split operands has a tile too large for a second accumulator, which the sum of a piece would be in."""
    return int(config["block_m"]) * int(config["block_n"]) > SUMS_OF_A_THREAD * 32 * int(config["warps"])


def can_split(ir: KernelIR, prim: Prim) -> bool:
    """Whether a product's own kernel may split its operands, and it is large enough for that.

    Of windows, halves would be many times the input: there it is split as it is read, or the input itself before, by a rewrite.
    """
    few = ProductSizes.of(ir.prims, prim).m.value(ir.graph.sizes) < LEAST_SPLIT_ROWS
    return not few and (not ProductDims.of(prim).taps or read_once(ir, prim) is not None)


def _tensor_core_tile(m: int, n: int, batch: int, most: int) -> tuple[int, int, int, int]:
    """The largest tile of up to ``most`` elements, cut to the result's size, that keeps the device busy; else the smallest."""
    fitting = [(a, b) for a, b in CORE_TILES if a * b <= most]
    tiles = [(min(a, max(16, next_power_of_two(m))), min(b, max(16, next_power_of_two(n)))) for a, b in fitting]
    tall, wide = next((t for t in tiles if -(-m // t[0]) * -(-n // t[1]) * batch >= BUSY), tiles[-1])
    return tall, wide, 64, 8 if tall * wide >= 128 * 128 else 4


def with_tiles_moved(ir: KernelIR, region: Region, config: Config, device: DeviceModel) -> Config:
    """A product's configuration, with tiles of its operands moved by hardware (TMA) where the device has that.

    A program makes the descriptors that this takes, which takes as long as a few blocks of K: where there are many tiles of split
    operands, one program makes several. On an H200 that took 704 us of 741 for 4096 cubed, and 2548 of 3289 with 64 terms.

    Args:
        program: what the region is a part of.
        region: one with a product.
        config: as chosen for the sizes.
        device: what it runs on.
    """
    number = device.arch.removeprefix("sm_")
    if not number.isdigit() or int(number) < FIRST_WITH_TMA or int(config["block_m"]) < LEAST_MOVED:
        return config
    sizes, prim = ir.graph.sizes, product_in(ir, region)
    own = ProductSizes.of(ir.prims, prim)
    m, n, k, batch = (size.value(sizes) for size in (own.m, own.n, own.k, own.batch))
    moved = config.get("precision") in SPLIT_BEFORE or (
        config.get("precision") == "native" and all(lies_in_units(ir, prim, side) for side in (0, 1))
    )
    if not moved or k < LEAST_DEPTH_MOVED:
        return config
    config = _with_sums_apart(config, m, n, k, batch, device)
    tiles = -(-m // int(config["block_m"])) * -(-n // int(config["block_n"]))
    many = config["precision"] in SPLIT_BEFORE and batch == 1 and tiles >= 2 * device.sm_count
    return {**config, "tma": True, **({"persist": device.sm_count} if many and "split_k" not in config else {})}


def _with_sums_apart(config: Config, m: int, n: int, k: int, batch: int, device: DeviceModel) -> Config:
    """A product's configuration, with the larger tile whose sums are set apart, where that still keeps the device busy.

    On an H200 the product of 2048 cubed took 77 us of 89 so, and that of 4096 cubed 577 us of 680. Without descriptors, addresses
    would take the registers.
    """
    tall, wide = CORE_TILES[0]
    is_largest = int(config["block_m"]) * int(config["block_n"]) == PROMOTED_ELEMENTS
    if config.get("precision") != SPLIT or not is_largest or "split_k" in config or k <= PIECES[SPLIT]:
        return config
    larger: Config = {**config, "block_m": tall, "block_n": wide, "stages": 4}
    fits = not device.shared_bytes or stage_bytes(larger) * 4 <= device.shared_bytes
    return larger if fits and -(-m // tall) * -(-n // wide) * batch >= BUSY else config


def by_pointers(config: Mapping[str, int | str | bool]) -> Config:
    """A product's configuration where its tiles are loaded by addresses, which take registers of their own."""
    smaller = (
        {"block_n": int(config["block_n"]) // 2}
        if config.get("precision") == SPLIT and holds_sums_apart(config)
        else {}
    )
    return {**config, **smaller, "tma": False}


def fitted(config: Config, shared_bytes: int, loaded: int = 2) -> Config:
    """A product's configuration, made small enough for the device's shared memory.

    Args:
        config: as chosen for the sizes.
        shared_bytes: what a program may have; 0 where it is not known.
        loaded: bytes of an operand's element as it is loaded.
    """
    half = config.get("precision", "native") in ("native", *HALVES)
    if not shared_bytes or not half:
        return config
    wanted = int(config["stages"])
    for most, stages in (*((64, n) for n in range(wanted, min(wanted, 2) - 1, -1)), (32, 3), (32, 2)):
        deep = min(most, int(config["block_k"]))
        own = stage_bytes({**config, "block_k": deep})
        # What is rounded on the way is loaded as it is, ahead of its use, and lies there once more as tensor cores take it.
        needed = own * stages if loaded <= 2 else own * (loaded // 2) * (stages - 1) + own
        if needed <= shared_bytes:
            return {**config, "block_k": deep, "stages": stages}
    return {**config, "block_k": 32, "stages": 1}


def stage_bytes(config: Mapping[str, int | str | bool]) -> int:
    """Shared memory of one stage of a product, at two bytes an element (what tensor cores are fed); 0 for what is none."""
    if "block_k" not in config:
        return 0
    if ONCE in config:
        # Operands as they are, in four bytes, or both halves of them.
        return 4 * int(config["block_k"]) * (int(config["block_m"]) + int(config["block_n"]))
    # Of given halves, both of both operands of a block of K lie there at once.
    tiles = 2 if config.get("precision") == PROMOTED else 1
    return 2 * int(config["block_k"]) * (int(config["block_m"]) + int(config["block_n"])) * tiles


def product_variants(config: Mapping[str, int | str | bool], *, of_windows: bool, short: bool) -> list[Config]:
    """Other tiles worth measuring, as changes to a product's configuration.

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
    if config["precision"] in ("ieee", "tf32"):
        # Operands of four bytes: the same shared memory holds half of K.
        shapes = [(m, n, k // 2, w, s) for m, n, k, w, s in shapes]
    if ONCE in config and of_windows:
        wide = int(config["block_n"])
        shapes = [
            (tall, wide, deep, warps, 1)
            for tall, deep, warps in [(256, 32, 4), (256, 32, 8), (128, 64, 8), (128, 64, 4), (128, 32, 8), (64, 32, 4)]
            if tall * wide <= PROMOTED_ELEMENTS * warps // 8
        ]
    elif config.get(ONCE) == BOTH:
        shapes = [(128, 128, 64, 8, 3), (128, 128, 32, 8, 3), (128, 64, 64, 4, 3), (64, 128, 64, 4, 3), (64, 64, 64, 4, 4),
                  (128, 64, 32, 8, 4), (64, 128, 32, 8, 4), (64, 64, 32, 4, 4)]  # fmt: skip
    elif ONCE in config:
        tiles = [(128, 128, 64, 8, 3), (128, 128, 32, 8, 3), (128, 64, 64, 4, 3), (64, 128, 64, 4, 3), (64, 128, 32, 8, 4),
                 (64, 64, 64, 4, 3), (32, 128, 64, 4, 4), (32, 64, 64, 4, 4)]  # fmt: skip
        # Few rows, many rows: which of them are the left operand's, the side says.
        shapes = [(few, many, k, w, s) if config[ONCE] else (many, few, k, w, s) for few, many, k, w, s in tiles]
    elif config["precision"] in SPLIT_BEFORE:
        # Two accumulators, unless the sum is one piece or set apart: what is larger spills.
        shapes = (
            [(128, 256, 64, 8, 4), (128, 128, 64, 8, 3), (128, 128, 64, 8, 2), (64, 128, 64, 4, 3)] if short else []
        )
        shapes += [
            (128, 128, 64, 8, 5), (128, 128, 64, 8, 4), (128, 128, 64, 8, 6), (128, 128, 128, 8, 3), (64, 128, 64, 4, 4),
            (128, 64, 64, 4, 4), (64, 64, 64, 4, 4), (64, 64, 128, 4, 3), (64, 32, 64, 4, 4),
        ]  # fmt: skip
        if config.get("tma") and config["precision"] == SPLIT:
            shapes += [(128, 256, 64, 8, 4), (128, 256, 64, 8, 3), (256, 128, 64, 8, 4), (128, 128, 64, 4, 3)]
        if config["precision"] == SHORT:
            # Of fewer than two blocks a piece would be a part of the product.
            shapes = [shape for shape in shapes if shape[2] < 128]
    elif config["precision"] == PROMOTED:
        # Two accumulators, and four tiles per stage: what is larger spills, or does not fit into shared memory.
        shapes = [
            (128, 128, 64, 8, 3), (128, 128, 64, 8, 2), (128, 128, 32, 8, 4), (128, 128, 32, 8, 3), (64, 128, 64, 4, 3),
            (128, 64, 64, 4, 3), (64, 128, 32, 4, 4), (64, 256, 32, 8, 4), (64, 64, 64, 4, 3), (64, 64, 32, 4, 4),
        ]  # fmt: skip
    return [{"block_m": m, "block_n": n, "block_k": k, "warps": w, "stages": s} for m, n, k, w, s in shapes]
