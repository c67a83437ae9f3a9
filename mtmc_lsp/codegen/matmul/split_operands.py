"""Kernels that split float32 operands into sums of two float16 values (halves) for tensor cores.

Each row is scaled by a power of two and split into x = high + low, which keeps 22 of the 24 significand bits. The product is
low*high + high*low + high*high with float32 accumulation (Ootomo & Yokota, arXiv 2203.03341). The halves of a row are stored next
to each other with K dense: [low | high] for the left operand, [high | low] for the right one.
:mod:`mtmc_lsp.codegen.matmul.split_precision` multiplies them.

Limitations: an infinity makes its whole row NaN, because it has no low half. Results within a few powers of two of the float32
maximum overflow before they are scaled back.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mtmc_lsp.codegen.kernel.axis_groups import Mask
from mtmc_lsp.codegen.kernel.kernel import Kernel, Scratch, assemble
from mtmc_lsp.codegen.kernel.parameters import Parameters
from mtmc_lsp.codegen.kernel.snippets import blocks_text, next_power_of_2_text
from mtmc_lsp.codegen.matmul.operands import ProductAxes, Tile, int32_limit, operand_accesses
from mtmc_lsp.codegen.module.naming import PRODUCT_NAMES
from mtmc_lsp.codegen.module.side_by_side import side_by_side
from mtmc_lsp.core.device_model import DeviceModel
from mtmc_lsp.core.graph import TensorType
from mtmc_lsp.core.sizes import Size
from mtmc_lsp.schedule.column_tiles import next_power_of_two
from mtmc_lsp.schedule.device_limits import max_row_elements, max_warps
from mtmc_lsp.schedule.split_on_load import rows_held, split_elements, strided_rows

STRIDED_DEPTH = 256
"""Tile depth for operands whose K is not dense or too long to be held at once."""
MIN_DYNAMIC_HELD_DEPTH = 512
"""Minimum length of rows with dynamic K that are held at once."""
MAX_ELEMENTS_PER_THREAD = 128
"""Maximum number of elements per thread. They take half of the registers of a thread (NVIDIA; CDNA has twice as many)."""
LAUNCHES_PER_SPLIT = 8
"""Time of moving the operands, in kernel launches, up to which one launch splits both operands. For larger operands the launch
overhead is negligible, and each split uses its best number of warps. H200, 4096 cubed: 730 us with one launch, 720 us with two
(2048: 111, 134)."""


@dataclass(frozen=True)
class SplitOperand:
    """Sizes and buffers of a split operand."""

    name: str
    """Name of the operand."""
    side: int
    """0 for the left operand, 1 for the right one."""
    rows: Size
    """M or N, without the batch."""
    k: Size
    k_pad: Size
    """K padded to whole blocks: the distance between the two halves of a row, in elements."""
    values: Scratch
    wide: bool
    """Whether offsets into the values need 64 bits at the workload's sizes."""
    scale: Scratch
    """Inverse scale of each row: the factor that restores the operand."""
    device: DeviceModel
    """The GPU that the kernels are for."""
    halves: int = 2
    """Float16 numbers of each element: 2, or 1 where the operand is only scaled and rounded."""

    @staticmethod
    def of(
        axes: ProductAxes, side: int, name: str, block_k: int, device: DeviceModel, *, halves: int = 2
    ) -> SplitOperand:
        """Describe one operand of a product. K is padded with zeros to a multiple of ``block_k``."""
        rows, k = axes.sizes["MN"[side]], axes.sizes["K"]
        k_pad = (k + (block_k - 1)) // block_k * block_k
        total = axes.n_batch * rows
        length = Size.of(halves) * k_pad
        values = Scratch(f"{name}_{'halves' if halves > 1 else 'fp16'}", (total, length), "float16")
        wide = (total * length).value(axes.ir.graph.sizes) >= 2**31
        scale = Scratch(f"{name}_scale", (total,), "float32")
        return SplitOperand(name, side, rows, k, k_pad, values, wide, scale, device, halves)

    @property
    def length(self) -> Size:
        """Elements of a row of :attr:`values`."""
        return Size.of(self.halves) * self.k_pad

    def length_text(self, k_pad: str) -> str:
        """The expression of :attr:`length` in a kernel, given that of :attr:`k_pad`."""
        return f"{self.halves} * {k_pad}" if self.halves > 1 else k_pad


def write_split(axes: ProductAxes, buffers: Mapping[str, TensorType], operand: SplitOperand, name: str) -> Kernel:
    """The kernel that writes an operand's scaled halves and the inverse scale of each row."""
    return _SplitWriter(axes, buffers, operand).kernel(name)


def write_both_splits(
    axes: ProductAxes, buffers: Mapping[str, TensorType], operands: Sequence[SplitOperand], name: str
) -> list[Kernel]:
    """One kernel that splits both operands in one launch, or two kernels if the operands are large."""
    sizes = axes.ir.graph.sizes
    elements = sum((axes.n_batch * half.rows * half.k).value(sizes) for half in operands)
    if elements > _max_elements_in_one_launch(operands[0].device):
        return [write_split(axes, buffers, half, f"{name}_{half.name}") for half in operands]
    # The slowest part starts first: strided rows.
    writers = sorted((_SplitWriter(axes, buffers, half) for half in operands), key=_SplitWriter.is_dense)
    parts = [writer.kernel(f"{name}_{writer.operand.name}") for writer in writers]
    verb, result = (
        ("Split", "into scaled float16 halves") if operands[0].halves > 1 else ("Convert", "to scaled float16")
    )
    summary = f"{verb} each row of {operands[0].name} and {operands[1].name} {result}."
    return [side_by_side(name, parts, summary)]


def _max_elements_in_one_launch(device: DeviceModel) -> int:
    """Elements of both operands up to which one launch splits both, a power of two (H200: 2^24). Eight bytes move for each."""
    elements = int(LAUNCHES_PER_SPLIT * device.launch_us * 1e-6 * device.bandwidth / 8)
    return 1 << (elements.bit_length() - 1)


class _SplitWriter:
    def __init__(self, axes: ProductAxes, buffers: Mapping[str, TensorType], operand: SplitOperand) -> None:
        self.axes = axes
        self.buffers = buffers
        self.operand = operand
        self.device = operand.device
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
        # A short dynamic K uses the loop, because the held version would not support much longer rows.
        min_held_depth = 0 if self.operand.k.is_constant else MIN_DYNAMIC_HELD_DEPTH
        max_held_depth = max_row_elements(self.device) if self.is_dense() else self._held_elements // 8
        holds_rows = min_held_depth <= self._k_pad_now <= max_held_depth
        lines, blocks, warps = self._held_rows() if holds_rows else self._looped_rows()
        rows = blocks["ROWS"]
        grid = [blocks_text(f"rows_{self.row}", rows)]
        sizes = {f"rows_{self.row}": self.operand.rows, "k_pad": self.operand.k_pad}
        limits: list[str] = []
        if not self.operand.wide:
            limits.append(int32_limit(self.axes.n_batch * self.operand.rows * self.operand.length))
        dynamic = {}
        if holds_rows and not self.operand.k.is_constant:
            dynamic["DEPTH"] = next_power_of_2_text("k_pad")
            limits.append(f"{self.operand.k_pad} <= {MAX_ELEMENTS_PER_THREAD * self.device.warp_size * warps // rows}")
        head = [f"{self.row} = (tl.program_id(0) * ROWS + tl.arange(0, ROWS))[:, None]"]
        if self.axes.batch:
            head.append("batch = tl.program_id(1).to(tl.int64)")
            grid.append("n_batch")
            sizes["n_batch"] = self.axes.n_batch
        return assemble(
            name,
            self.parameters,
            blocks,
            self._docstring(),
            [*head, *lines],
            grid=tuple(grid),
            grid_sizes=sizes,
            num_warps=warps,
            num_stages=2,
            dynamic=dynamic,
            limits=tuple(limits),
            scratch_written=((self.values, self.operand.values), (self.scale, self.operand.scale)),
        )

    def _docstring(self) -> str:
        name = self.operand.name
        if self.operand.halves == 1:
            return (
                f"Scale each row of {name} by a power of two and round it to float16.\n\n"
                "Elements from 2**-28 times the largest one on keep 11 bits, as in TF32."
            )
        order = "low and high" if self.operand.side == 0 else "high and low"
        return (
            f"Split each row of {name} into scaled float16 halves: {order} half side by side.\n\n"
            "high holds the leading 11 bits of each significand, low the next 11."
        )

    @property
    def _k_pad_now(self) -> int:
        return self.operand.k_pad.value(self.axes.ir.graph.sizes)

    @property
    def _rows_now(self) -> int:
        return (self.axes.n_batch * self.operand.rows).value(self.axes.ir.graph.sizes)

    @property
    def _strided_rows(self) -> int:
        return strided_rows(self._rows_now, self.device)

    @property
    def _held_elements(self) -> int:
        """Maximum number of elements that four warps hold."""
        return MAX_ELEMENTS_PER_THREAD * 4 * self.device.warp_size

    def is_dense(self) -> bool:
        """Whether K is dense in every tensor that the operand reads."""
        for access in self.accesses:
            for variable, step in access.terms:
                if variable.cols and step != Size.of(1) and variable.size != Size.of(1):
                    return False
        return True

    def _tile(self, lines: list[str]) -> str:
        """Write the load (and computation) of a tile of the operand; returns its variable or expression."""
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
        # Elements outside the row must not affect its maximum.
        lines.append(f"{name} = tl.where(inside, {value.text}, 0.0)")
        return name

    def _inside(self) -> str:
        return f"inside = ({self.row} < {self.n_rows}) & (k < {self.k})"

    def _held_rows(self) -> tuple[list[str], dict[str, int], int]:
        """Statements that hold whole rows: one or few if K is dense, else enough rows for coalesced loads."""
        depth = next_power_of_two(self._k_pad_now)
        rows, warps = rows_held(self._rows_now, depth, self.device), 4
        if rows * depth < split_elements(self.device) or rows == 1:
            # Few program instances: more threads each make them faster, with 32 elements per thread.
            warps = max(4, min(max_warps(self.device) // 2, depth // (32 * self.device.warp_size)))
        if not self.is_dense():
            rows, warps = min(self._strided_rows, self._held_elements // depth), 4
        lines = ["k = tl.arange(0, DEPTH)[None, :]", self._inside()]
        value = self._tile(lines)
        lines += [
            f"factor, inverse = {self._scale_function}(tl.max({self._size_of(value)}, axis=1, keep_dims=True))",
            *self._store_scale(),
        ]
        lines += self._store_halves(value)
        blocks = {"ROWS": rows}
        if self.operand.k.is_constant:
            blocks["DEPTH"] = depth
        return lines, blocks, warps

    def _looped_rows(self) -> tuple[list[str], dict[str, int], int]:
        """Statements that loop over a few rows twice: for their maximum, then to split them."""
        body = ["k = (start + tl.arange(0, DEPTH))[None, :]", self._inside()]
        value = self._tile(body)
        lines = ["largest = tl.zeros([ROWS, DEPTH], tl.float32)", f"for start in range(0, {self.k}, DEPTH):"]
        lines += [f"    {line}" for line in [*body, f"largest = tl.maximum(largest, {self._size_of(value)})"]]
        scale = f"{self._scale_function}(tl.max(largest, axis=1, keep_dims=True))"
        lines += [f"factor, inverse = {scale}", *self._store_scale()]
        lines += [f"for start in range(0, {self.k_pad}, DEPTH):"]
        lines += [f"    {line}" for line in [*body, *self._store_halves(value)]]
        return lines, {"ROWS": self._strided_rows, "DEPTH": STRIDED_DEPTH}, 8

    @property
    def _scale_function(self) -> str:
        return "_unit_scale" if self.operand.halves > 1 else "_half_scale"

    def _size_of(self, value: str) -> str:
        """The absolute value that counts for a row's scale. Float16 has infinities, so the others in the row stay exact."""
        size = f"tl.abs({value})"
        return size if self.operand.halves > 1 else f'tl.where({size} < float("inf"), {size}, 0.0)'

    def _store_scale(self) -> list[str]:
        batch = f"batch * {self.n_rows} + " if self.axes.batch else ""
        return [f"tl.store({self.scale} + {batch}{self.row}, inverse, mask={self.row} < {self.n_rows})"]

    def _store_halves(self, value: str) -> list[str]:
        length = self.operand.length_text(self.k_pad)
        batch = f"batch * {self.n_rows} * {length} + " if self.axes.batch else ""
        first, second = ("low", "high") if self.operand.side == 0 else ("high", "low")
        row = (
            f"{self.row}{'.to(tl.int64)' * self.operand.wide} * {f'({length})' if self.operand.halves > 1 else length}"
        )
        address = f"{self.values} + {batch}{row} + k"
        stored = f"({self.row} < {self.n_rows}) & (k < {self.k_pad})"
        if self.operand.halves == 1:
            return [f"tl.store({address}, _to_half({value}, factor), mask={stored})"]
        return [
            f"scaled = {value} * factor",
            "high = scaled.to(tl.float16)",
            "low = (scaled - high.to(tl.float32)).to(tl.float16)",
            f"address = {address}",
            f"stored = {stored}",
            f"tl.store(address, {first}, mask=stored)",
            f"tl.store(address + {self.k_pad}, {second}, mask=stored)",
        ]


def name_sizes(parameters: Parameters, rows: str, operand: SplitOperand) -> None:
    """Name the sizes of an operand in a kernel: ``M`` or ``N``, ``K``, and ``K_PAD``."""
    for size, name in ((operand.rows, rows), (operand.k, "K"), (operand.k_pad, "K_PAD")):
        if not size.is_constant:
            parameters.name_size(size, name)
