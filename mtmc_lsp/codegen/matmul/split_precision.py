"""Sums of products of operands that are split into float16 halves: the walk over them on tensor cores.

The halves of a row lie as :mod:`mtmc_lsp.codegen.matmul.split_operands` writes them: low*high and high*low are one walk over both
halves, and high*high starts in the middle of the left operand and at the beginning of the right.

Tensor cores round every addition of theirs towards zero, so what they lose grows with the number of additions, above all where
no terms cancel. The large term is therefore summed in pieces of K, which fp32 units add up, rounding to nearest. On an H200 a
product of 4096 x 4096 matrices of positive numbers took 684 us with pieces of 256 and had a relative error of 1.1e-6 (720 us and
4.7e-7 with pieces of 128, 614 us and 2.3e-5 in one piece; cuBLAS in float32: 2674 us, 8.4e-7).

A tile of 128 x 128 has an accumulator for the present piece beside that of the whole sum. For a tile twice as large, of which
operands are read less often, registers hold no second one; but a word for two results is enough. When a piece ends, the leading
16 bits of each sum (sign, exponent and seven bits) go there, and the next piece adds to the rest: at most 2**-7 of the sum, so
tensor cores lose about as little as if they began from zero. A float less its leading bits is exact, so a piece rounds the
whole sum once, to nearest. On an H200 the product alone took 577 us so, with pieces of 512 and a relative error of 2.6e-6 (2048
cubed: 77 us, and 89 us with two accumulators).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from mtmc_lsp.codegen.kernel.parameters import Parameters
from mtmc_lsp.codegen.matmul.descriptors import descriptor_of_rows
from mtmc_lsp.codegen.matmul.k_loops import Walk
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
    walk: Walk,
) -> list[str]:
    """Statements of the product's loops: the small terms first, so that little of them is rounded away.

    Args:
        axes: of the product.
        parameters: of its kernel.
        operands: the left one and the right one.
        values: the pointers to their halves.
        config: the product's.
        walk: which blocks of K the program takes.
    """
    for size_name, half in zip("MN", operands, strict=True):
        name_sizes(parameters, size_name, half)
    pad = parameters.size(operands[0].k_pad).text
    tiles = [parameters.names.unique(f"{half.name}_part") for half in operands]
    lines, load = (_descriptors if config.tma else _rows)(axes, parameters, operands, values)

    def step(starts: tuple[str, str], total: str) -> list[str]:
        loads = [f"{tile} = {load(side, starts[side])}" for side, tile in enumerate(tiles)]
        return [*loads, f"{total} = tl.dot({', '.join(tiles)}, {total})"]

    lines += ["# low*high and high*low in one walk.", *walk.both_halves(pad)]
    lines += [f"    {line}" for line in step(("start", "start"), "acc")]
    high = (f"{pad} + start", "start")
    along = f"for start in {walk.places(pad)}:"
    whole = [along, *(f"    {line}" for line in step(high, "acc"))]
    if _is_one_piece(operands[0], config):
        return [*lines, "# Then high*high.", *whole]
    pieces = (
        _apart(walk, pad, along, step(high, "acc"))
        if holds_sums_apart(config)
        else _beside(walk, along, step(high, "part"))
    )
    lines += [
        "# Then high*high, PIECE blocks of K at a time: fp32 units, which add these up, round to nearest; tensor cores round",
        "# towards zero, which would add up over a long sum.",
    ]
    if "ONE_PIECE" in told_by_call(axes, operands[0], config):
        return [
            *lines,
            "if ONE_PIECE:",
            *(f"    {line}" for line in whole),
            "else:",
            *(f"    {line}" for line in pieces),
        ]
    return [*lines, *pieces]


def _beside(walk: Walk, along: str, body: list[str]) -> list[str]:
    """The walk over ``high*high`` with two accumulators."""
    zeros = "tl.zeros([BLOCK_M, BLOCK_N], tl.float32)"
    flush = [f"if ({walk.number} + 1) % PIECE == 0:", "    acc += part", f"    part = {zeros}"]
    return [f"part = {zeros}", along, *(f"    {line}" for line in [*body, *flush]), "acc += part"]


def _apart(walk: Walk, pad: str, along: str, body: list[str]) -> list[str]:
    """The walk over ``high*high`` with one accumulator, and the leading bits of what earlier pieces left apart from it."""
    is_end = f"(({walk.number} + 1) % PIECE == 0) & (start + BLOCK_K < {pad})"
    flush = [f"if {is_end}:", "    acc, apart = _set_apart(acc, apart)"]
    zeros = "apart = tl.zeros([BLOCK_M, BLOCK_N // 2], tl.int32)"
    return [zeros, along, *(f"    {line}" for line in [*body, *flush]), "acc = _with_apart(acc, apart)"]


def _is_one_piece(operand: SplitOperand, config: MatmulConfig) -> bool:
    """Whether no call has so long a K that its sum is taken apart."""
    return operand.k_pad.is_constant and operand.k_pad.constant <= PIECES[config.precision]


def told_by_call(axes: ProductAxes, operand: SplitOperand, config: MatmulConfig) -> dict[str, str]:
    """Constants that depend on the call's K, as the launcher's expressions: whether it is one piece, and how long pieces are.

    It is asked for one piece where it is one in the workload and need not be in a call.
    """
    if operand.k_pad.is_constant or config.is_split:
        return {}
    now, most = operand.k_pad.value(axes.ir.graph.sizes), PIECES[config.precision]
    told = {"ONE_PIECE": f"k_pad <= {most}"} if now <= most else {}
    if _may_be_long(config):
        usual, long = (blocks_of_piece(config, terms) for terms in (most, LONG_PIECE))
        told["PIECE"] = f"{long} if k_pad >= {LONG_SUMS} else {usual}"
    return told


def piece_blocks(operand: SplitOperand, config: MatmulConfig) -> dict[str, int]:
    """The constant that says how many blocks of K tensor cores sum up by themselves, where it is the same for each call."""
    if _is_one_piece(operand, config):
        return {}
    terms = PIECES[config.precision]
    if _may_be_long(config) and not config.is_split:
        if not operand.k_pad.is_constant:
            return {}
        terms = LONG_PIECE if operand.k_pad.constant >= LONG_SUMS else terms
    return {"PIECE": blocks_of_piece(config, terms)}


def blocks_of_piece(config: MatmulConfig, terms: int) -> int:
    """Blocks of K that so many terms are; two at least, since of one a piece would be a part of the product."""
    return max(2, terms // config.block_k)


def _may_be_long(config: MatmulConfig) -> bool:
    """Whether long sums may have longer pieces: where no sum is short of exactness, and each piece takes time by itself."""
    return config.precision is PrecisionMode.FP16X3 and holds_sums_apart(config)


LONG_PIECE, LONG_SUMS = 512, 2048
"""Terms of a piece, where sums are set apart, and of the whole sum from which on it may be so long: cuBLAS's error grows with it.
Of 2048 positive terms, pieces of 512 have a relative error of 2.6e-6, which is 4.3 times cuBLAS's (256: 1.1e-6, 1.9 times)."""


Loads = tuple[list[str], Callable[[int, str], str]]
"""Statements before a loop, and what gives the expression of an operand's tile at a place along K."""


def _rows(
    axes: ProductAxes, parameters: Parameters, operands: tuple[SplitOperand, SplitOperand], values: Sequence[str]
) -> Loads:
    """Tiles by pointers to the first of each row."""
    pad = parameters.size(operands[0].k_pad).text
    rows = [parameters.names.unique(f"{half.name}_row") for half in operands]
    lines = ["k = tl.arange(0, BLOCK_K)", "# Rows beyond the last wrap around; what they give is not stored."]
    for half, row, pointer, index, k in zip(operands, rows, values, "mn", ("k[None, :]", "k[:, None]"), strict=True):
        count = parameters.size(half.rows).text
        batch = f"batch * {count} * 2 * {pad} + " if axes.batch else ""
        wide = ".to(tl.int64)" * half.wide
        lines.append(f"{row} = {pointer} + {batch}({index} % {count}){wide} * (2 * {pad}) + {k}")
    return lines, lambda side, start: f"tl.load({rows[side]} + {start})"


def _descriptors(
    axes: ProductAxes, parameters: Parameters, operands: tuple[SplitOperand, SplitOperand], values: Sequence[str]
) -> Loads:
    """Tiles that the hardware moves."""
    pad = parameters.size(operands[0].k_pad).text
    names = [parameters.names.unique(f"{half.name}_tiles") for half in operands]
    lines = []
    for half, name, pointer, block in zip(operands, names, values, ("BLOCK_M", "BLOCK_N"), strict=True):
        count = parameters.size(half.rows).text
        batch = f" + batch * {count} * 2 * {pad}" if axes.batch else ""
        made = descriptor_of_rows(f"{pointer}{batch}", (count, f"2 * {pad}"), f"2 * {pad}", (block, "BLOCK_K"))
        lines.append(f"{name} = {made}")
    starts = ("m_start", "n_start")
    return lines, lambda side, start: f"{names[side]}.load([{starts[side]}, {start}])" + ".T" * side


def promoted_sum(a: tuple[str, str], b: tuple[str, str]) -> list[str]:
    """Statements that add a block's three products of (low, high) halves to ``acc``.

    The last product starts from the sum of the others, so the compiler cannot make the fp32 addition a part of it.
    """
    return [
        f"part = tl.dot({a[0]}, {b[1]})",
        f"part = tl.dot({a[1]}, {b[0]}, part)",
        f"part = tl.dot({a[1]}, {b[1]}, part)",
        "# fp32 units round to nearest; tensor cores round towards zero, which would add up over a long sum.",
        "acc += part",
    ]


def split_as_read(names: Names, a: str, b: str) -> list[str]:
    """Statements that split a block of both operands and add its three products to ``acc``.

    Each row of the left block and each column of the right one has a scale of its own.

    Args:
        names: of the kernel's variables.
        a: the left block, which holds zeros beyond the last of K: what lies there is no part of a row, whose size it must not be.
        b: the right block, likewise.
    """
    lines: list[str] = []
    made: list[tuple[str, str, str]] = []
    for side, value in enumerate((a, b)):
        own = "ab"[side]
        factor, inverse, scaled, high, low = (
            names.unique(f"{own}_{part}") for part in ("factor", "inverse", "scaled", "high", "low")
        )
        if not value.isidentifier():
            block = names.unique(f"{own}_block")
            lines.append(f"{block} = {value}")
            value = block
        lines += [
            f"{factor}, {inverse} = _unit_scale(tl.max(tl.abs({value}), axis={1 - side}, keep_dims=True))",
            f"{scaled} = {value} * {factor}",
            f"{high} = {scaled}.to(tl.float16)",
            f"{low} = ({scaled} - {high}.to(tl.float32)).to(tl.float16)",
        ]
        made.append((low, high, inverse))
    (low_a, high_a, inverse_a), (low_b, high_b, inverse_b) = made
    *dots, last = promoted_sum((low_a, high_a), (low_b, high_b))
    return [*lines, *dots, f"{last} * {inverse_a} * {inverse_b}"]
