"""Products with an operand that is read once, or nearly: it is split into float16 halves as it is loaded.

Splitting an operand before its product reads it once more and writes its halves, which pays where many tiles use these.

With few rows (or columns) each element of the other operand (of weights, mostly) meets one tile or two, and its bytes are what
takes the time: a program then scales and splits each tile of it in registers, which tensor cores take as their left operand (PTX
ISA, ``wgmma``). On an H200, 128 rows by 32768 x 32768 weights took 2.1 ms so, and 5.2 ms with a pass that splits the weights
before (cuBLAS in float32: 5.3 ms); 1024 rows by 8192 x 8192 took 1.15 ms so, and 0.76 ms with that pass.

With few rows and few columns a long K is all that there is: a pass that splits an operand before has few rows to share among its
programs (an H200 took 11 ms for 256 x 524288 by 524288 x 256 so, and cuBLAS in float32 1.3 ms). There both operands are split as
they are read, by programs that share K.

So are those of short sums, whose time is that of writing the results: 32768 x 32 by 32 x 32768 took 2445 us with passes that
split before, and 2071 us so, in tiles of 128 x 64, a row of them after the other (writing alone: 918 us, cuBLAS in float32:
2540 us); with 64 terms there is too much to split for each tile.

The windows of a convolution with few channels are the other case: written out, their halves would be many times the input. On
an H200 four such convolutions, which cuDNN runs in float32, took 0.38, 0.83, 0.45 and 2.1 ms so, and 0.62, 1.9, 0.75 and 9.9 ms
by cuDNN (3 or 8 channels to 24, 64, 64 and 16, windows of 27, 27, 9 and 64 places).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from mtmc_lsp.core.dtypes import ITEMSIZE
from mtmc_lsp.core.sizes import Size
from mtmc_lsp.ir.axes import AxisTable
from mtmc_lsp.ir.primitives import BIJECTIVE_VIEWS, KernelIR, Prim, ProductDims, ProductSizes, has_split_operands
from mtmc_lsp.schedule.configs import MatmulConfig, PrecisionMode, SplitOnLoad

LEAST_CHANNELS = 16
"""Channels from which on the places of a window are walked one after another, a block of channels each."""
LEAST_SPLIT_ROWS = 32
"""Rows of a product from which on its operands are split."""
FEW_ROWS = 256
"""Rows up to which the other operand is split as it is read."""
LEAST_RATIO = 4
"""How many times as many rows as these the other operand must have."""
UNIT_BYTES = 16
"""Hardware that moves tiles takes steps of whole multiples of this."""
FEW_TILES = 128
"""With fewer tiles than this, each with a long sum, much of a large device would be idle."""
LEAST_PARTS = 4
"""Parts of K from which on they pay for the kernel that adds them."""
FEW_TERMS = 32
"""Terms of a sum up to which a program splits its own tiles in less time than it takes to write the results."""
LEAST_RESULTS = 4
"""How many results there must be for each element of the operands."""
BUSY = 100
"""Programs below which a smaller tile is taken, so that no large part of the device idles."""
WHOLE_LIMIT = 16384
"""Sizes of K up to which a row is split while it is held in registers."""
HELD_TOGETHER, LEAST_HELD_TOGETHER = 8192, 2048
"""Elements that a program holds which splits rows with dense K, 64 to a thread of four warps; and with how few it is left where
there are few programs. The H200 split 2048 x 2048 beside the other operand in 24 us so, in 27 us with single rows, and in 31 us
with eight warps."""
STRIDED_ROWS = 16
"""Most rows of a program that splits an operand whose K is not dense, or too large to be held."""


def side_to_split_on_load(ir: KernelIR, prim: Prim) -> int | None:
    """The side of a float32 product whose operand is best split on load (0 left, 1 right); None where neither is."""
    if has_split_operands(prim):
        return None
    sized, sizes = ProductSizes.of(ir.prims, prim), ir.graph.sizes
    m, n, k, batch = (size.value(sizes) for size in (sized.m, sized.n, sized.k, sized.batch))
    if ProductDims.of(prim).kernel_positions:
        if sized.channels.value(sizes) >= LEAST_CHANNELS or ir.prims[prim.inputs[0]].dtype != "float32":
            return None
        tile = window_config(m, n, batch)
        tiles = -(-m // tile.block_m) * -(-n // tile.block_n) * batch
        # Windows are not split by programs that share K, which few tiles with a long sum would need.
        return 0 if parts_of_sum(tiles, k, tile.block_k) == 1 else None
    side, few = (1, m) if m <= n else (0, n)
    name = prim.inputs[side]
    if not LEAST_SPLIT_ROWS <= few <= FEW_ROWS or max(m, n) < LEAST_RATIO * few or ir.prims[name].dtype != "float32":
        return None
    return side if is_dense_along_sum(ir, prim, side) else None


def parts_of_sum(tiles: int, depth: int, block_k: int) -> int:
    """How many programs share the sum of each tile: a power of two, each with a few blocks of K; 1 where none need to."""
    parts = min(FEW_TILES // tiles, depth // (8 * block_k))
    return 1 << (parts.bit_length() - 1) if parts >= LEAST_PARTS else 1


def split_programs(rows: int, k: Size, sizes: Mapping[str, int]) -> int:
    """About how many programs a pass has that splits an operand of so many rows before its product."""
    depth = k.value(sizes)
    return -(-rows // (rows_held(rows, depth) if depth <= WHOLE_LIMIT else strided_rows(rows)))


def rows_held(rows: int, depth: int) -> int:
    """Rows with dense K that a program splits at a time, where it holds them: fewer where there would be few programs."""
    most = max(1, HELD_TOGETHER // depth)
    return next((own for own in _halved(most) if rows // own >= 2 * FEW_TILES or own * depth <= LEAST_HELD_TOGETHER), 1)


def _halved(number: int) -> Iterator[int]:
    while number >= 1:
        yield number
        number //= 2


def strided_rows(rows: int) -> int:
    """Rows that a program splits at a time where K is not dense: fewer where there would be few programs."""
    return next((own for own in (STRIDED_ROWS, 8) if rows // own >= FEW_TILES), 4)


def config_split_on_load(
    block_m: int,
    block_n: int,
    block_k: int,
    split_on_load: SplitOnLoad,
    *,
    warps: int,
    stages: int,
    group_m: int = 8,
    split_k: int = 1,
) -> MatmulConfig:
    """The configuration of a product with an operand that is split on load.

    Each block of K has scales of its own, so fp32 units add the blocks up.
    """
    mode = PrecisionMode.FP16X3_PROMOTED
    return MatmulConfig(
        block_m, block_n, block_k, group_m, warps, stages, mode, split_on_load=split_on_load, split_k=split_k
    )


def both_sides_config(ir: KernelIR, prim: Prim) -> MatmulConfig | None:
    """The configuration of a float32 product whose operands are both split on load.

    One of few tiles with a long sum, or one of many results that are short sums. ``None`` for others, and where an operand is no
    tensor in memory.
    """
    if has_split_operands(prim) or ProductDims.of(prim).kernel_positions or ir.prims[prim.inputs[0]].dtype != "float32":
        return None
    sized, sizes = ProductSizes.of(ir.prims, prim), ir.graph.sizes
    m, n, k, batch = (size.value(sizes) for size in (sized.m, sized.n, sized.k, sized.batch))
    if min(m, n) < LEAST_SPLIT_ROWS or not all(_stored(ir, name)[-1] in ir.value_of for name in prim.inputs):
        return None
    if k <= FEW_TERMS and batch * m * n >= LEAST_RESULTS * batch * (m + n) * k:
        block_k = max(16, 1 << (k - 1).bit_length())
        return config_split_on_load(128, 64, block_k, SplitOnLoad.BOTH, group_m=1, warps=4, stages=2)
    tall, wide = (min(128, 1 << (size - 1).bit_length()) for size in (m, n))
    deep = 32
    parts = parts_of_sum(-(-m // tall) * -(-n // wide) * batch, k, deep)
    if parts == 1:
        return None
    warps = 8 if tall * wide >= 128 * 128 else 4
    return config_split_on_load(tall, wide, deep, SplitOnLoad.BOTH, warps=warps, stages=4, split_k=parts)


def one_side_config(m: int, n: int, batch: int, side: int) -> MatmulConfig:
    """The configuration of a product whose operand at ``side`` is split on load, and the other one before."""
    few, many = (m, n) if side else (n, m)
    own = min(128, max(32, 1 << (few - 1).bit_length()))
    tall = next((tall for tall in (128, 64) if -(-many // tall) * -(-few // own) * batch >= BUSY), 64)
    block_m, block_n = (own, tall) if side else (tall, own)
    warps = 8 if own * tall >= 128 * 128 else 4
    return config_split_on_load(block_m, block_n, 64, SplitOnLoad.of(side), warps=warps, stages=3)


def window_config(m: int, n: int, batch: int) -> MatmulConfig:
    """Likewise where that operand is the windows of a convolution with few channels.

    In one stage: where neither side of a tile lies dense in memory, copies that run ahead conflict in shared memory.
    """
    wide = min(128, max(16, 1 << (n - 1).bit_length()))
    tall = 128 if -(-m // 128) * -(-n // wide) * batch >= BUSY else 64
    warps = 8 if tall * wide >= 128 * 128 else 4
    return config_split_on_load(tall, wide, 32, SplitOnLoad.LEFT, warps=warps, stages=1)


def is_dense_along_sum(ir: KernelIR, prim: Prim, side: int) -> bool:
    """Whether the operand lies in memory as it is, neighbours along K side by side."""
    dims, name = ProductDims.of(prim), prim.inputs[side]
    chain = _stored(ir, name)
    stored = chain[-1]
    if stored not in ir.value_of:
        return False
    kind = ir.graph.type_of(ir.value_of[stored])
    table = AxisTable(ir.prims, chain[-2::-1], ir.graph.sizes) if len(chain) > 1 else None
    first = dims.batch + (dims.rows if side == 0 else 0)
    summed = range(first, first + dims.summed)
    inner = [dim for dim, step in enumerate(kind.stride) if step.is_constant and step.constant == 1]
    if table is None:
        return bool(set(inner) & set(summed))
    along = {axis for dim in summed for axis in table.axes(name, dim)}
    return any(axes[-1] in along for dim in inner if (axes := table.axes(stored, dim)))


def lies_in_units(ir: KernelIR, prim: Prim, side: int) -> bool:
    """Whether an operand lies in memory as it is, dense along one axis, and all its other steps are whole units of hardware's."""
    stored = _stored(ir, prim.inputs[side])[-1]
    if ProductDims.of(prim).kernel_positions or stored not in ir.value_of:
        return False
    kind = ir.graph.type_of(ir.value_of[stored])
    sizes = ir.graph.sizes
    steps = [step.value(sizes) for step, size in zip(kind.stride, kind.shape, strict=True) if size.value(sizes) > 1]
    return 1 in steps and 0 not in steps and sum(step * ITEMSIZE[kind.dtype] % UNIT_BYTES != 0 for step in steps) == 1


def _stored(ir: KernelIR, name: str) -> list[str]:
    """An operand, and what it is another view of in turn: the last one is what is read."""
    chain = [name]
    while ir.prims[chain[-1]].op in BIJECTIVE_VIEWS:
        chain.append(ir.prims[chain[-1]].inputs[0])
    return chain
