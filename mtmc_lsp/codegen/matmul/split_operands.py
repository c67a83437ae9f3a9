"""Operands of a float32 product as sums of two float16 halves, and the walk over them on tensor cores.

Each row is scaled by a power of two and split, x = high + low, which keeps 22 of the 24 bits. The product is then
low*high + high*low + high*high, summed in float32 (after Ootomo & Yokota, arXiv 2203.03341). The halves of a row are stored
side by side with K dense: [low | high] for the left operand, [high | low] for the right one.
:mod:`mtmc_lsp.codegen.matmul.split_precision` sums them.

A row with an infinity gives NaN throughout, since infinity has no low half, and results within a few powers of two of float32's
largest become infinite before they are scaled back.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mtmc_lsp.codegen.kernel.axis_groups import Mask
from mtmc_lsp.codegen.kernel.kernel import Kernel, Scratch, assemble
from mtmc_lsp.codegen.kernel.parameters import Parameters
from mtmc_lsp.codegen.kernel.snippets import blocks_text
from mtmc_lsp.codegen.matmul.operands import ProductAxes, Tile, int32_limit, operand_accesses
from mtmc_lsp.codegen.module.naming import PRODUCT_NAMES
from mtmc_lsp.codegen.module.side_by_side import side_by_side
from mtmc_lsp.core.graph import TensorType
from mtmc_lsp.core.sizes import Size
from mtmc_lsp.schedule.column_tiles import next_power_of_two
from mtmc_lsp.schedule.split_on_load import MAX_DEPTH_IN_REGISTERS, SPLIT_ELEMENTS, rows_held, strided_rows

MOST_TOGETHER = 2**24
"""Elements of both operands up to which one launch splits both. Beyond, the launch is nothing beside the pass, and each operand
is better split by as many warps as suit it: a product of 4096 cubed took an H200 730 us so, and 720 with two (2048: 111, 134)."""
STRIDED_DEPTH = 256
"""Depth of the tile of a program that splits an operand whose K is not dense, or too large to be held."""
HELD_DEPTH, HELD_ELEMENTS = 2048, 16384
"""Depth up to which rows are held at once whose K is not dense, and elements of such a tile: 128 to a thread of four warps."""
LEAST_HELD = 512
"""Depth from which on rows are held at once whose K differs from call to call."""
MOST_OF_A_THREAD = 128
"""Most elements that a thread holds."""


@dataclass(frozen=True)
class SplitOperand:
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
    def of(axes: ProductAxes, side: int, name: str, block_k: int) -> SplitOperand:
        """The buffers for one operand of a product, whose K is filled up with zeros so that no block of it is cut."""
        rows, k = axes.sizes["MN"[side]], axes.sizes["K"]
        k_pad = (k + (block_k - 1)) // block_k * block_k
        total = axes.n_batch * rows
        values = Scratch(f"{name}_halves", (total, Size.of(2) * k_pad), "float16")
        wide = (total * Size.of(2) * k_pad).value(axes.ir.graph.sizes) >= 2**31
        return SplitOperand(name, side, rows, k, k_pad, values, wide, Scratch(f"{name}_scale", (total,), "float32"))


def write_split(axes: ProductAxes, buffers: Mapping[str, TensorType], operand: SplitOperand, name: str) -> Kernel:
    """The kernel that writes an operand's scaled halves and each row's scale."""
    return _SplitWriter(axes, buffers, operand).kernel(name)


def write_both_splits(
    axes: ProductAxes, buffers: Mapping[str, TensorType], operands: Sequence[SplitOperand], name: str
) -> list[Kernel]:
    """The kernel that does so for both operands in one launch, or the two that do."""
    sizes = axes.ir.graph.sizes
    elements = sum((axes.n_batch * half.rows * half.k).value(sizes) for half in operands)
    if elements > MOST_TOGETHER:
        return [write_split(axes, buffers, half, f"{name}_{half.name}") for half in operands]
    # What takes longest comes first: rows whose elements lie apart.
    writers = sorted((_SplitWriter(axes, buffers, half) for half in operands), key=_SplitWriter.is_dense)
    parts = [writer.kernel(f"{name}_{writer.operand.name}") for writer in writers]
    what = f"Each row of {operands[0].name} and of {operands[1].name}, scaled, as the sum of two float16 numbers."
    return [side_by_side(name, parts, what)]


class _SplitWriter:
    def __init__(self, axes: ProductAxes, buffers: Mapping[str, TensorType], operand: SplitOperand) -> None:
        self.axes = axes
        self.buffers = buffers
        self.operand = operand
        self.parameters = Parameters(axes.ir, buffers, PRODUCT_NAMES)
        size_name = "MN"[operand.side]
        self.row = size_name.lower()
        self.values = self.parameters.names.unique(f"{operand.values.name}_ptr")
        self.scale = self.parameters.names.unique(f"{operand.scale.name}_ptr")
        name_sizes(self.parameters, size_name, operand)
        self.n_rows, self.k, self.k_pad = (
            self.parameters.size(size).text for size in (operand.rows, operand.k, operand.k_pad)
        )
        self.accesses = operand_accesses(axes, buffers, operand.side)
        self.parameters.wide = axes.are_wide([operand.rows * operand.k])

    def kernel(self, name: str) -> Kernel:
        """The finished kernel."""
        # Of any length, a short K is walked: a row that is held as it is now could not be much longer.
        least = 0 if self.operand.k.is_constant else LEAST_HELD
        whole = least <= self._k_pad_now <= (MAX_DEPTH_IN_REGISTERS if self.is_dense() else HELD_DEPTH)
        lines, blocks, warps = self._whole() if whole else self._looped()
        rows = blocks["ROWS"]
        grid = [blocks_text(f"rows_{self.row}", rows)]
        sizes = {f"rows_{self.row}": self.operand.rows, "k_pad": self.operand.k_pad}
        limits: list[str] = []
        if not self.operand.wide:
            limits.append(int32_limit(self.axes.n_batch * self.operand.rows * Size.of(2) * self.operand.k_pad))
        dynamic = {}
        if whole and not self.operand.k.is_constant:
            dynamic["DEPTH"] = "triton.next_power_of_2(k_pad)"
            limits.append(f"{self.operand.k_pad} <= {MOST_OF_A_THREAD * 32 * warps // rows}")
        start = [f"{self.row} = (tl.program_id(0) * ROWS + tl.arange(0, ROWS))[:, None]"]
        if self.axes.batch:
            start.append("batch = tl.program_id(1).to(tl.int64)")
            grid.append("n_batch")
            sizes["n_batch"] = self.axes.n_batch
        order = "low and high" if self.operand.side == 0 else "high and low"
        what = (
            f"Each row of {self.operand.name}, scaled, as the sum of two float16 numbers: {order} half side by side.\n\n"
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
            dynamic=dynamic,
            limits=tuple(limits),
            scratch_written=((self.values, self.operand.values), (self.scale, self.operand.scale)),
        )

    @property
    def _k_pad_now(self) -> int:
        return self.operand.k_pad.value(self.axes.ir.graph.sizes)

    @property
    def _rows_now(self) -> int:
        return (self.axes.n_batch * self.operand.rows).value(self.axes.ir.graph.sizes)

    @property
    def _strided_rows(self) -> int:
        return strided_rows(self._rows_now)

    def is_dense(self) -> bool:
        """Whether neighbours along K are neighbours in every tensor that the operand is read from."""
        for access in self.accesses:
            for variable, step in access.terms:
                if variable.cols and step != Size.of(1) and variable.size != Size.of(1):
                    return False
        return True

    def _tile(self, lines: list[str]) -> str:
        """Write what reads (and computes) a tile of the operand; the name or expression that holds it."""
        side = self.operand.side
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
        """Rows held at once, read once: one or few where K is dense, else enough for what lies together to be read together."""
        depth = next_power_of_two(self._k_pad_now)
        rows, warps = rows_held(self._rows_now, depth), 4
        if rows * depth < SPLIT_ELEMENTS or rows == 1:
            # Few programs, which more threads make faster.
            warps = max(4, min(16, depth // 1024))
        if not self.is_dense():
            rows, warps = min(self._strided_rows, HELD_ELEMENTS // depth), 4
        lines = ["k = tl.arange(0, DEPTH)[None, :]", self._inside()]
        value = self._tile(lines)
        lines += [
            f"factor, inverse = _unit_scale(tl.max(tl.abs({value}), axis=1, keep_dims=True))",
            *self._store_scale(),
        ]
        lines += self._store_halves(value)
        blocks = {"ROWS": rows}
        if self.operand.k.is_constant:
            blocks["DEPTH"] = depth
        return lines, blocks, warps

    def _looped(self) -> tuple[list[str], dict[str, int], int]:
        """A few rows at a time, walked twice: for their largest element, then to be split."""
        body = ["k = (start + tl.arange(0, DEPTH))[None, :]", self._inside()]
        value = self._tile(body)
        lines = ["largest = tl.zeros([ROWS, DEPTH], tl.float32)", f"for start in range(0, {self.k}, DEPTH):"]
        lines += [f"    {line}" for line in [*body, f"largest = tl.maximum(largest, tl.abs({value}))"]]
        lines += ["factor, inverse = _unit_scale(tl.max(largest, axis=1, keep_dims=True))", *self._store_scale()]
        lines += [f"for start in range(0, {self.k_pad}, DEPTH):"]
        lines += [f"    {line}" for line in [*body, *self._store_halves(value)]]
        return lines, {"ROWS": self._strided_rows, "DEPTH": STRIDED_DEPTH}, 8

    def _store_scale(self) -> list[str]:
        batch = f"batch * {self.n_rows} + " if self.axes.batch else ""
        return [f"tl.store({self.scale} + {batch}{self.row}, inverse, mask={self.row} < {self.n_rows})"]

    def _store_halves(self, value: str) -> list[str]:
        batch = f"batch * {self.n_rows} * 2 * {self.k_pad} + " if self.axes.batch else ""
        first, second = ("low", "high") if self.operand.side == 0 else ("high", "low")
        return [
            f"scaled = {value} * factor",
            "high = scaled.to(tl.float16)",
            "low = (scaled - high.to(tl.float32)).to(tl.float16)",
            f"place = {self.values} + {batch}{self.row}{'.to(tl.int64)' * self.operand.wide} * (2 * {self.k_pad}) + k",
            f"stored = ({self.row} < {self.n_rows}) & (k < {self.k_pad})",
            f"tl.store(place, {first}, mask=stored)",
            f"tl.store(place + {self.k_pad}, {second}, mask=stored)",
        ]


def name_sizes(parameters: Parameters, rows: str, operand: SplitOperand) -> None:
    """Give the sizes of an operand their names in a kernel: ``M`` or ``N``, ``K``, and K with the zeros behind it."""
    for size, name in ((operand.rows, rows), (operand.k, "K"), (operand.k_pad, "K_PAD")):
        if not size.is_constant:
            parameters.name_size(size, name)
