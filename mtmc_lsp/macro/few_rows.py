"""Products with few rows (or columns): the other operand is read once, and split into halves as it is read.

Splitting an operand before its product reads it once more and writes its halves, which pays where many tiles use these. With
few rows each element of the other operand (of weights, mostly) meets one tile or two, and its bytes are what takes the time: a
program then scales and splits each tile of it in registers, which tensor cores take as their left operand (PTX ISA, ``wgmma``).
On an H200, 128 rows by 32768 x 32768 weights took 2.1 ms so, and 5.2 ms with a pass that splits the weights before (cuBLAS in
float32: 5.3 ms); 1024 rows by 8192 x 8192 took 1.15 ms so, and 0.76 ms with that pass.
"""

from __future__ import annotations

from mtmc_lsp.macro.axes import AxisTable
from mtmc_lsp.macro.prims import Prim, PrimOp, ProductDims, ProductSizes, Program, is_of_halves

ONCE = "once"
"""In a product's configuration: the side (0 left, 1 right) of the operand that is split as it is read."""
LEAST_SPLIT_ROWS = 32
"""Rows of a product from which on its operands are split."""
FEW_ROWS = 256
"""Rows up to which the other operand is split as it is read."""
LEAST_RATIO = 4
"""How many times as many rows as these the other operand must have."""
BUSY = 100
"""Programs below which a smaller tile is taken, so that no large part of the device idles."""
_IN_PLACE = frozenset({PrimOp.PERMUTE, PrimOp.RESHAPE, PrimOp.ALIAS})


def read_once(program: Program, prim: Prim) -> int | None:
    """The side of a float32 product whose operand is best split as it is read; ``None`` where both are split before."""
    if is_of_halves(prim) or ProductDims.of(prim).taps:
        return None
    sized, sizes = ProductSizes.of(program.prims, prim), program.graph.sizes
    m, n = sized.m.value(sizes), sized.n.value(sizes)
    side, few = (1, m) if m <= n else (0, n)
    name = prim.inputs[side]
    if (
        not LEAST_SPLIT_ROWS <= few <= FEW_ROWS
        or max(m, n) < LEAST_RATIO * few
        or program.prims[name].dtype != "float32"
    ):
        return None
    return side if _is_dense_along_sum(program, prim, side) else None


def once_tile(m: int, n: int, batch: int, side: int) -> dict[str, int | str | bool]:
    """Blocks, warps and stages for a product whose operand at ``side`` is split as it is read."""
    few, many = (m, n) if side else (n, m)
    own = min(128, max(32, 1 << (few - 1).bit_length()))
    tall = next((tall for tall in (128, 64) if -(-many // tall) * -(-few // own) * batch >= BUSY), 64)
    blocks = {"block_m": own, "block_n": tall} if side else {"block_m": tall, "block_n": own}
    return {
        **blocks,
        "block_k": 64,
        "group_m": 8,
        "warps": 8 if own * tall >= 128 * 128 else 4,
        "stages": 3,
        ONCE: side,
    }


def _is_dense_along_sum(program: Program, prim: Prim, side: int) -> bool:
    """Whether the operand lies in memory as it is, neighbours along K side by side."""
    dims, name = ProductDims.of(prim), prim.inputs[side]
    chain = [name]
    while program.prims[chain[-1]].op in _IN_PLACE:
        chain.append(program.prims[chain[-1]].inputs[0])
    stored = chain[-1]
    if stored not in program.value_of:
        return False
    kind = program.graph.type_of(program.value_of[stored])
    table = AxisTable(program.prims, chain[-2::-1], program.graph.sizes) if len(chain) > 1 else None
    first = dims.batch + (dims.rows if side == 0 else 0)
    summed = range(first, first + dims.summed)
    inner = [dim for dim, step in enumerate(kind.stride) if step.is_constant and step.constant == 1]
    if table is None:
        return bool(set(inner) & set(summed))
    along = {axis for dim in summed for axis in table.axes(name, dim)}
    return any(axes[-1] in along for dim in inner if (axes := table.axes(stored, dim)))
