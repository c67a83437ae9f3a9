"""Matmul loops over operands that are split into float16 halves.

:mod:`mtmc_lsp.codegen.matmul.split_operands` defines the layout of the halves. One loop over both halves computes low*high and
high*low. The high*high loop starts in the middle of a left row and at the beginning of a right row.

Tensor cores round each addition towards zero, so the error grows with the number of additions, above all for sums without
cancellation. The large term is therefore summed in pieces of K, and FP32 units add the pieces with rounding to nearest. Measured
on an H200 for 4096 x 4096 matrices of positive numbers: 684 us and a relative error of 1.1e-6 with pieces of 256 (pieces of 128:
720 us, 4.7e-7; one piece: 614 us, 2.3e-5; cuBLAS float32: 2674 us, 8.4e-7).

A tile of 128 x 128 has a second accumulator for the current piece. A tile of twice that size needs fewer operand loads, but has
no registers for a second accumulator. Instead, one 32-bit word per two results suffices: at the end of a piece, the 16 leading
bits of each sum (sign, exponent and seven significand bits) move there, and the next piece adds to the remainder. The remainder
is at most 2**-7 of the sum, so tensor cores lose about as little as if they started from zero. Subtracting the leading bits is
exact, so each piece rounds the total only once, to nearest. On an H200 the matmul alone took 577 us with pieces of 512, at a
relative error of 2.6e-6 (2048 cubed: 77 us, and 89 us with two accumulators).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from mtmc_lsp.codegen.kernel.parameters import Parameters
from mtmc_lsp.codegen.matmul.descriptors import descriptor_of_rows
from mtmc_lsp.codegen.matmul.k_loops import BlockLoop
from mtmc_lsp.codegen.matmul.operands import ProductAxes
from mtmc_lsp.codegen.matmul.split_operands import SplitOperand, name_sizes
from mtmc_lsp.codegen.module.naming import Names
from mtmc_lsp.schedule.configs import MatmulConfig, PrecisionMode
from mtmc_lsp.schedule.matmul_configs import PIECES, holds_sums_apart


def loops_over_halves(
    axes: ProductAxes,
    parameters: Parameters,
    operands: tuple[SplitOperand, SplitOperand],
    values: Sequence[str],
    config: MatmulConfig,
    block_loop: BlockLoop,
) -> list[str]:
    """Statements of the matmul loops: small terms first, so that they lose little to rounding.

    Args:
        values: pointers to their halves.
    """
    for size_name, half in zip("MN", operands, strict=True):
        name_sizes(parameters, size_name, half)
    pad = parameters.size(operands[0].k_pad).text
    tiles = [parameters.names.unique(f"{half.name}_part") for half in operands]
    lines, load = (_descriptors if config.tma else _rows)(axes, parameters, operands, values)

    def step(starts: tuple[str, str], total: str) -> list[str]:
        loads = [f"{tile} = {load(side, starts[side])}" for side, tile in enumerate(tiles)]
        return [*loads, f"{total} = tl.dot({', '.join(tiles)}, {total})"]

    lines += ["# low*high and high*low in one loop.", *block_loop.both_halves(pad)]
    lines += [f"    {line}" for line in step(("start", "start"), "acc")]
    high = (f"{pad} + start", "start")
    loop_head = f"for start in {block_loop.starts(pad)}:"
    single_piece = [loop_head, *(f"    {line}" for line in step(high, "acc"))]
    if _is_one_piece(operands[0], config):
        return [*lines, "# Then high*high.", *single_piece]
    pieces = (
        _separate_leading_bits(block_loop, pad, loop_head, step(high, "acc"))
        if holds_sums_apart(config, operands[0].device)
        else _two_accumulators(block_loop, loop_head, step(high, "part"))
    )
    lines += [
        "# Then high*high in pieces of PIECE blocks of K. FP32 units add the pieces with rounding to nearest; tensor cores round",
        "# towards zero, and that error accumulates over a long sum.",
    ]
    if "ONE_PIECE" in launch_constexprs(axes, operands[0], config):
        return [
            *lines,
            "if ONE_PIECE:",
            *(f"    {line}" for line in single_piece),
            "else:",
            *(f"    {line}" for line in pieces),
        ]
    return [*lines, *pieces]


def loop_over_converted(
    axes: ProductAxes,
    parameters: Parameters,
    operands: tuple[SplitOperand, SplitOperand],
    values: Sequence[str],
    config: MatmulConfig,
    block_loop: BlockLoop,
) -> list[str]:
    """Statements of the matmul loop over operands that were scaled and rounded to float16.

    Args:
        values: pointers to the converted operands.
    """
    for size_name, operand in zip("MN", operands, strict=True):
        name_sizes(parameters, size_name, operand)
    pad = parameters.size(operands[0].k_pad).text
    tiles = [parameters.names.unique(f"{operand.name}_tile") for operand in operands]
    lines, load = (_descriptors if config.tma else _rows)(axes, parameters, operands, values)
    loads = [f"{tile} = {load(side, 'start')}" for side, tile in enumerate(tiles)]
    body = [*loads, f"acc = tl.dot({', '.join(tiles)}, acc)"]
    return [*lines, f"for start in {block_loop.starts(pad)}:", *(f"    {line}" for line in body)]


def _two_accumulators(block_loop: BlockLoop, loop_head: str, body: list[str]) -> list[str]:
    """The loop over ``high*high`` with two accumulators."""
    zeros = "tl.zeros([BLOCK_M, BLOCK_N], tl.float32)"
    flush = [f"if ({block_loop.number} + 1) % PIECE == 0:", "    acc += part", f"    part = {zeros}"]
    return [f"part = {zeros}", loop_head, *(f"    {line}" for line in [*body, *flush]), "acc += part"]


def _separate_leading_bits(block_loop: BlockLoop, pad: str, loop_head: str, body: list[str]) -> list[str]:
    """The loop over ``high*high`` with one accumulator, and the leading bits of earlier pieces stored separately."""
    is_end = f"(({block_loop.number} + 1) % PIECE == 0) & (start + BLOCK_K < {pad})"
    flush = [f"if {is_end}:", "    acc, leading = _split_leading_bits(acc, leading)"]
    zeros = "leading = tl.zeros([BLOCK_M, BLOCK_N // 2], tl.int32)"
    return [zeros, loop_head, *(f"    {line}" for line in [*body, *flush]), "acc = _join_leading_bits(acc, leading)"]


def _is_one_piece(operand: SplitOperand, config: MatmulConfig) -> bool:
    """Whether K is constant and short enough for a single piece."""
    return operand.k_pad.is_constant and operand.k_pad.constant <= PIECES[config.precision]


def launch_constexprs(axes: ProductAxes, operand: SplitOperand, config: MatmulConfig) -> dict[str, str]:
    """Constexprs that the launcher derives from the call's K: whether there is one piece, and the length of pieces.

    ``ONE_PIECE`` exists if the workload's K fits in one piece but other calls may have a longer K.
    """
    if operand.k_pad.is_constant or config.is_split:
        return {}
    captured_k, piece_terms = operand.k_pad.value(axes.ir.graph.sizes), PIECES[config.precision]
    constexprs = {"ONE_PIECE": f"k_pad <= {piece_terms}"} if captured_k <= piece_terms else {}
    if _uses_long_pieces(operand, config):
        usual, long = (blocks_of_piece(config, terms) for terms in (piece_terms, LONG_PIECE))
        constexprs["PIECE"] = f"{long} if k_pad >= {LONG_SUMS} else {usual}"
    return constexprs


def piece_blocks(operand: SplitOperand, config: MatmulConfig) -> dict[str, int]:
    """The constexpr ``PIECE`` (blocks of K per piece) if it is the same for every call."""
    if _is_one_piece(operand, config):
        return {}
    terms = PIECES[config.precision]
    if _uses_long_pieces(operand, config) and not config.is_split:
        if not operand.k_pad.is_constant:
            return {}
        terms = LONG_PIECE if operand.k_pad.constant >= LONG_SUMS else terms
    return {"PIECE": blocks_of_piece(config, terms)}


def blocks_of_piece(config: MatmulConfig, terms: int) -> int:
    """Number of blocks of K with ``terms`` terms; at least two, since one block is a single ``tl.dot``."""
    return max(2, terms // config.block_k)


def _uses_long_pieces(operand: SplitOperand, config: MatmulConfig) -> bool:
    """Whether long sums use longer pieces: if the precision mode tolerates the error, and each piece has a cost."""
    return config.precision is PrecisionMode.FP16X3 and holds_sums_apart(config, operand.device)


LONG_PIECE, LONG_SUMS = 512, 2048
"""Terms per piece with separate leading bits, and the sum length from which this applies: cuBLAS's error grows with
the length too. For 2048 positive terms, pieces of 512 have a relative error of 2.6e-6, 4.3 times cuBLAS's (256:
1.1e-6, 1.9 times)."""


Loads = tuple[list[str], Callable[[int, str], str]]
"""Statements before the loop, and a function from side and start to the expression that loads a tile."""


def _rows(
    axes: ProductAxes, parameters: Parameters, operands: tuple[SplitOperand, SplitOperand], values: Sequence[str]
) -> Loads:
    """Load tiles with pointers to the start of each row."""
    pad = parameters.size(operands[0].k_pad).text
    rows = [parameters.names.unique(f"{half.name}_row") for half in operands]
    lines = ["k = tl.arange(0, BLOCK_K)", "# Rows beyond the last wrap around; their results are not stored."]
    for half, row, pointer, index, k in zip(operands, rows, values, "mn", ("k[None, :]", "k[:, None]"), strict=True):
        count = parameters.size(half.rows).text
        length = half.length_text(pad)
        batch = f"batch * {count} * {length} + " if axes.batch else ""
        wide = ".to(tl.int64)" * half.wide
        factor = f"({length})" if half.halves > 1 else length
        lines.append(f"{row} = {pointer} + {batch}({index} % {count}){wide} * {factor} + {k}")
    return lines, lambda side, start: f"tl.load({rows[side]} + {start})"


def _descriptors(
    axes: ProductAxes, parameters: Parameters, operands: tuple[SplitOperand, SplitOperand], values: Sequence[str]
) -> Loads:
    """Load tiles with tensor descriptors."""
    pad = parameters.size(operands[0].k_pad).text
    names = [parameters.names.unique(f"{half.name}_tiles") for half in operands]
    lines = []
    for half, name, pointer, block in zip(operands, names, values, ("BLOCK_M", "BLOCK_N"), strict=True):
        count = parameters.size(half.rows).text
        length = half.length_text(pad)
        batch = f" + batch * {count} * {length}" if axes.batch else ""
        descriptor = descriptor_of_rows(f"{pointer}{batch}", (count, length), length, (block, "BLOCK_K"))
        lines.append(f"{name} = {descriptor}")
    starts = ("m_start", "n_start")
    return lines, lambda side, start: f"{names[side]}.load([{starts[side]}, {start}])" + ".T" * side


def promoted_sum(a: tuple[str, str], b: tuple[str, str]) -> list[str]:
    """Statements that add the three products of a block's (low, high) halves to ``acc``.

    The last ``tl.dot`` accumulates onto the others, so the compiler cannot fuse the FP32 addition into it.
    """
    return [
        f"part = tl.dot({a[0]}, {b[1]})",
        f"part = tl.dot({a[1]}, {b[0]}, part)",
        f"part = tl.dot({a[1]}, {b[1]}, part)",
        "# FP32 units round to nearest; tensor cores round towards zero, and that error accumulates.",
        "acc += part",
    ]


def split_on_load_sum(names: Names, a: str, b: str) -> list[str]:
    """Statements that split a block of each operand and add the three products to ``acc``.

    Each row of the left block and each column of the right block has its own scale.

    Args:
        a: the left block; must be zero beyond the end of K, so that the row maximum is correct.
        b: the right block, likewise.
    """
    lines: list[str] = []
    halves: list[tuple[str, str, str]] = []
    for side, value in enumerate((a, b)):
        prefix = "ab"[side]
        factor, inverse, scaled, high, low = (
            names.unique(f"{prefix}_{part}") for part in ("factor", "inverse", "scaled", "high", "low")
        )
        if not value.isidentifier():
            block = names.unique(f"{prefix}_block")
            lines.append(f"{block} = {value}")
            value = block
        lines += [
            f"{factor}, {inverse} = _unit_scale(tl.max(tl.abs({value}), axis={1 - side}, keep_dims=True))",
            f"{scaled} = {value} * {factor}",
            f"{high} = {scaled}.to(tl.float16)",
            f"{low} = ({scaled} - {high}.to(tl.float32)).to(tl.float16)",
        ]
        halves.append((low, high, inverse))
    (low_a, high_a, inverse_a), (low_b, high_b, inverse_b) = halves
    *dots, last = promoted_sum((low_a, high_a), (low_b, high_b))
    return [*lines, *dots, f"{last} * {inverse_a} * {inverse_b}"]
