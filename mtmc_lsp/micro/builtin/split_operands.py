"""Operands of a float32 product as sums of two float16 halves, and the walk over them on tensor cores.

Each row is scaled by a power of two and split, x = high + low, which keeps 22 of the 24 bits. The product is then
low*high + high*low + high*high, summed in float32 (after Ootomo & Yokota, arXiv 2203.03341). The halves of a row lie side by
side with K dense: [low | high] for the left operand, [high | low] for the right one. So the first two terms are one walk over
both halves, and the third starts in the middle of the left and at the beginning of the right.

Promoted, all three terms of a block of K are summed by the tensor cores, small ones first, and that sum is added to the whole
by fp32 units, which round to nearest: what tensor cores lose by rounding towards zero then grows with a block of K, not with K.

A row with an infinity gives NaN throughout, since infinity has no low half, and results within a few powers of two of float32's
largest become infinite before they are scaled back.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from mtmc_lsp.core.graph import TensorType
from mtmc_lsp.core.sizes import Size
from mtmc_lsp.macro.columns import next_power_of_two
from mtmc_lsp.macro.few_rows import STRIDED_ROWS, WHOLE_LIMIT
from mtmc_lsp.micro.builtin.groups import Mask
from mtmc_lsp.micro.builtin.kernel import Kernel, Scratch, assemble
from mtmc_lsp.micro.builtin.naming import PRODUCT_NAMES, Names
from mtmc_lsp.micro.builtin.parameters import Parameters
from mtmc_lsp.micro.builtin.product_axes import ProductAxes, Tile, int32_limit, operand_accesses

PAD = 128
"""K is padded to a multiple of this where it is a number, so that no block of K is cut."""
STRIDED_DEPTH = 128
"""Depth of the tile of a program that splits an operand whose K is not dense, or too large to be held."""


@dataclass(frozen=True)
class Halves:
    """The buffers of a split operand."""

    name: str
    """Of the operand."""
    side: int
    """0 for the left operand, 1 for the right one."""
    rows: Size
    """M or N, without the batch."""
    k: Size
    k_pad: Size
    """Elements from a row's first half to its second."""
    values: Scratch
    wide: bool
    """Whether offsets into the values take 64 bits at the workload's sizes."""
    scale: Scratch
    """What each row of halves must be multiplied by to give the operand."""

    @staticmethod
    def of(axes: ProductAxes, side: int, name: str) -> Halves:
        """The buffers for one operand of a product."""
        rows, k = axes.sizes["MN"[side]], axes.sizes["K"]
        k_pad = Size.of(-(-k.constant // PAD) * PAD) if k.is_constant else k
        total = axes.n_batch * rows
        values = Scratch(f"{name}_halves", (total, Size.of(2) * k_pad), "float16")
        wide = (total * Size.of(2) * k_pad).value(axes.program.graph.sizes) >= 2**31
        return Halves(name, side, rows, k, k_pad, values, wide, Scratch(f"{name}_scale", (total,), "float32"))


def write_split(axes: ProductAxes, buffers: Mapping[str, TensorType], halves: Halves, name: str) -> Kernel:
    """The kernel that writes an operand's scaled halves and each row's scale."""
    return _SplitWriter(axes, buffers, halves).kernel(name)


class _SplitWriter:
    def __init__(self, axes: ProductAxes, buffers: Mapping[str, TensorType], halves: Halves) -> None:
        self.axes = axes
        self.buffers = buffers
        self.halves = halves
        self.parameters = Parameters(axes.program, buffers, PRODUCT_NAMES)
        size_name = "MN"[halves.side]
        self.row = size_name.lower()
        self.values = self.parameters.names.unique(f"{halves.values.name}_ptr")
        self.scale = self.parameters.names.unique(f"{halves.scale.name}_ptr")
        self.parameters.name_size(halves.rows, size_name)
        self.parameters.name_size(halves.k, "K")
        self.n_rows, self.k = (self.parameters.size(size).text for size in (halves.rows, halves.k))
        self.k_pad = self.parameters.size(halves.k_pad).text
        self.accesses = operand_accesses(axes, buffers, halves.side)
        self.parameters.wide = axes.are_wide([halves.rows * halves.k])

    def kernel(self, name: str) -> Kernel:
        """The finished kernel."""
        whole = self._is_dense() and self.halves.k.is_constant and self.halves.k.constant <= WHOLE_LIMIT
        lines, blocks, warps = self._whole() if whole else self._looped()
        rows = blocks["ROWS"]
        grid, sizes = [f"triton.cdiv(rows_{self.row}, {rows})"], {f"rows_{self.row}": self.halves.rows}
        start = [f"{self.row} = (tl.program_id(0) * ROWS + tl.arange(0, ROWS))[:, None]"]
        if self.axes.batch:
            start.append("batch = tl.program_id(1).to(tl.int64)")
            grid.append("n_batch")
            sizes["n_batch"] = self.axes.n_batch
        order = "low and high" if self.halves.side == 0 else "high and low"
        what = (
            f"Each row of {self.halves.name}, scaled, as the sum of two float16 numbers: {order} half side by side.\n\n"
            "high holds the leading 11 bits of each significand, low the next 11."
        )
        return assemble(
            name,
            self.parameters,
            blocks,
            what,
            [*start, *lines],
            grid=tuple(grid),
            grid_sizes=sizes,
            num_warps=warps,
            num_stages=2,
            limits=(int32_limit(self.axes.n_batch * self.halves.rows * Size.of(2) * self.halves.k_pad),)
            * (not self.halves.wide),
            scratch_written=((self.values, self.halves.values), (self.scale, self.halves.scale)),
        )

    def _is_dense(self) -> bool:
        """Whether neighbours along K are neighbours in every tensor that the operand is read from."""
        for access in self.accesses:
            for variable, step in access.terms:
                if variable.cols and step != Size.of(1) and variable.size != Size.of(1):
                    return False
        return True

    def _tile(self, lines: list[str]) -> str:
        """Write what reads (and computes) a tile of the operand; the name or expression that holds it."""
        side = self.halves.side
        rows = (self.axes.m, self.axes.n)[side]
        mask = [Mask("inside", True, True)]
        tile = Tile(
            self.axes, self.parameters, (rows, self.row), (self.axes.k, "k"), mask, lines, accesses=self.accesses
        )
        operand = self.axes.prim.inputs[side]
        value = tile.value(operand)
        if value.text.isidentifier() and self.axes.is_zero_outside(operand, self.axes.k):
            return value.text
        name = self.parameters.names.unique("value")
        # What lies outside is no part of the row: its size must not count.
        lines.append(f"{name} = tl.where(inside, {value.text}, 0.0)")
        return name

    def _inside(self) -> str:
        return f"inside = ({self.row} < {self.n_rows}) & (k < {self.k})"

    def _whole(self) -> tuple[list[str], dict[str, int], int]:
        """A row at once, read once."""
        depth = max(16, next_power_of_two(self.halves.k_pad.constant))
        lines = ["k = tl.arange(0, DEPTH)[None, :]", self._inside()]
        value = self._tile(lines)
        lines += [
            f"factor, inverse = _unit_scale(tl.max(tl.abs({value}), axis=1, keep_dims=True))",
            *self._store_scale(),
        ]
        lines += self._store_halves(value)
        return lines, {"ROWS": max(1, 2048 // depth), "DEPTH": depth}, max(4, min(16, depth // 1024))

    def _looped(self) -> tuple[list[str], dict[str, int], int]:
        """A few rows at a time, walked twice: for their largest element, then to be split."""
        body = ["k = (start + tl.arange(0, DEPTH))[None, :]", self._inside()]
        value = self._tile(body)
        lines = ["largest = tl.zeros([ROWS, DEPTH], tl.float32)", f"for start in range(0, {self.k}, DEPTH):"]
        lines += [f"    {line}" for line in [*body, f"largest = tl.maximum(largest, tl.abs({value}))"]]
        lines += ["factor, inverse = _unit_scale(tl.max(largest, axis=1, keep_dims=True))", *self._store_scale()]
        lines += [f"for start in range(0, {self.k_pad}, DEPTH):"]
        lines += [f"    {line}" for line in [*body, *self._store_halves(value)]]
        return lines, {"ROWS": STRIDED_ROWS, "DEPTH": STRIDED_DEPTH}, 8

    def _store_scale(self) -> list[str]:
        batch = f"batch * {self.n_rows} + " if self.axes.batch else ""
        return [f"tl.store({self.scale} + {batch}{self.row}, inverse, mask={self.row} < {self.n_rows})"]

    def _store_halves(self, value: str) -> list[str]:
        batch = f"batch * {self.n_rows} * 2 * {self.k_pad} + " if self.axes.batch else ""
        first, second = ("low", "high") if self.halves.side == 0 else ("high", "low")
        return [
            f"scaled = {value} * factor",
            "high = scaled.to(tl.float16)",
            "low = (scaled - high.to(tl.float32)).to(tl.float16)",
            f"place = {self.values} + {batch}{self.row}{'.to(tl.int64)' * self.halves.wide} * (2 * {self.k_pad}) + k",
            f"stored = ({self.row} < {self.n_rows}) & (k < {self.k_pad})",
            f"tl.store(place, {first}, mask=stored)",
            f"tl.store(place + {self.k_pad}, {second}, mask=stored)",
        ]


def walk_halves(
    axes: ProductAxes,
    parameters: Parameters,
    a: Halves,
    b: Halves,
    values: list[str],
    block_k: int,
) -> list[str]:
    """Statements of the product's loop: the small terms first, so that little of them is rounded away."""
    k, pad = (parameters.size(size).text for size in (a.k, a.k_pad))
    tile_a, tile_b = (parameters.names.unique(f"{half.name}_part") for half in (a, b))
    row_a, row_b, lines = _rows_of_halves(axes, parameters, a, b, values)
    if a.k_pad.is_constant and a.k_pad.constant % block_k == 0:
        return [
            *lines,
            "# low*high and high*low in one walk, then high*high.",
            f"for start in range(0, 3 * {pad}, BLOCK_K):",
            f"    last = start >= 2 * {pad}",
            f"    {tile_a} = tl.load({row_a} + tl.where(last, start - {pad}, start))",
            f"    {tile_b} = tl.load({row_b} + tl.where(last, start - 2 * {pad}, start))",
            f"    acc = tl.dot({tile_a}, {tile_b}, acc)",
        ]
    return [
        *lines,
        "# low*high, high*low, high*high.",
        "for part in tl.static_range(3):",
        f"    for start in range(0, {k}, BLOCK_K):",
        f"        inside = start + k < {k}",
        f"        {tile_a} = tl.load({row_a} + start + (part + 1) // 2 * {pad}, mask=inside[None, :], other=0.0)",
        f"        {tile_b} = tl.load({row_b} + start + part % 2 * {pad}, mask=inside[:, None], other=0.0)",
        f"        acc = tl.dot({tile_a}, {tile_b}, acc)",
    ]


def _rows_of_halves(
    axes: ProductAxes, parameters: Parameters, a: Halves, b: Halves, values: list[str]
) -> tuple[str, str, list[str]]:
    """The names of both operands' pointers to their first halves, and the statements that make them."""
    m, n, pad = (parameters.size(size).text for size in (a.rows, b.rows, a.k_pad))
    batch_a, batch_b = (f"batch * {rows} * 2 * {pad} + " if axes.batch else "" for rows in (m, n))
    row_a, row_b = (parameters.names.unique(f"{half.name}_row") for half in (a, b))
    lines = [
        "k = tl.arange(0, BLOCK_K)",
        "# Rows beyond the last wrap around; what they give is not stored.",
        f"{row_a} = {values[0]} + {batch_a}(m % {m}){'.to(tl.int64)' * a.wide} * (2 * {pad}) + k[None, :]",
        f"{row_b} = {values[1]} + {batch_b}(n % {n}){'.to(tl.int64)' * b.wide} * (2 * {pad}) + k[:, None]",
    ]
    return row_a, row_b, lines


def walk_promoted(
    axes: ProductAxes,
    parameters: Parameters,
    a: Halves,
    b: Halves,
    values: list[str],
    block_k: int,
) -> list[str]:
    """Statements of the product's loop where each block of K is summed apart and then added by fp32 units."""
    k, pad = (parameters.size(size).text for size in (a.k, a.k_pad))
    row_a, row_b, lines = _rows_of_halves(axes, parameters, a, b, values)
    low_a, high_a, low_b, high_b = (
        parameters.names.unique(f"{half.name}_{part}") for half in (a, b) for part in ("low", "high")
    )
    even = a.k_pad.is_constant and a.k_pad.constant % block_k == 0
    mask_a, mask_b = ("", "") if even else (f", mask=inside[{at}], other=0.0" for at in ("None, :", ":, None"))
    body = [] if even else [f"inside = start + k < {k}"]
    body += [
        f"{low_a} = tl.load({row_a} + start{mask_a})",
        f"{high_a} = tl.load({row_a} + start + {pad}{mask_a})",
        f"{high_b} = tl.load({row_b} + start{mask_b})",
        f"{low_b} = tl.load({row_b} + start + {pad}{mask_b})",
        *promoted_sum((low_a, high_a), (low_b, high_b)),
    ]
    return [*lines, f"for start in range(0, {pad if even else k}, BLOCK_K):", *(f"    {line}" for line in body)]


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
