"""Matrix-product kernels: elementwise work on the operands as they are read and on the result before it is written.

Precision modes of a float32 product (``config["precision"]``): ``ieee``, ``tf32``, and ``fp16x3``, in which a first kernel
scales each row of an operand by a power of two and splits it into two float16 halves (x = high + low, 22 of the 24 bits), and
the product walks K three times on tensor cores, as low*high + high*low + high*high, summed in float32 (after Ootomo & Yokota,
arXiv 2203.03341).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from mtmc_lsp.core.dtypes import is_half
from mtmc_lsp.core.graph import Ref, TensorType
from mtmc_lsp.core.protocols import CannotCode
from mtmc_lsp.core.sizes import Size, product
from mtmc_lsp.macro.axes import Axis
from mtmc_lsp.macro.prims import VIEW_OPS, Prim, PrimOp, Program
from mtmc_lsp.macro.regions import Region
from mtmc_lsp.micro.builtin.code import TRITON_DTYPES, Code
from mtmc_lsp.micro.builtin.expressions import Expressions, Group, Mask, Parameters, taken_apart
from mtmc_lsp.micro.builtin.index import Index
from mtmc_lsp.micro.builtin.kernel import Kernel, Scratch, assemble
from mtmc_lsp.micro.builtin.naming import PRODUCT_NAMES
from mtmc_lsp.micro.builtin.persistence import one_tile_after_another
from mtmc_lsp.micro.builtin.tile_kernel import merge_axes

Config = Mapping[str, "int | str | bool"]
SPLIT_ROWS, SPLIT_DEPTH = 16, 128
"""Rows of a program that splits an operand, and how much of K it takes at a time."""
LEAST_SPLIT = 32
"""Rows of a product from which on its operands are split."""


@dataclass(frozen=True)
class Halves:
    """The buffers of a split operand."""

    values: Scratch
    """High halves, then low ones."""
    scale: Scratch
    """What each row of halves must be multiplied by to give the operand."""


Finish = Callable[
    ["ProductAxes", Mapping[str, TensorType], Config, "list[Halves] | None", str, str],
    list[Kernel],
]
"""Renders a product whose operands are prepared."""


def write_product_kernels(
    program: Program,
    region: Region,
    buffers: Mapping[str, TensorType],
    config: Config,
    name: str,
    docstring: str,
    finished: Finish,
) -> list[Kernel]:
    """Render a matmul region: the product's kernel, after those that split its operands where the precision asks for it.

    Args:
        finished: renders the product itself, once its operands are prepared: :func:`whole_product`, or in parts along K.

    Raises:
        CannotCode: something in it has no Triton form.
    """
    axes = ProductAxes(program, region)
    if config.get("precision") != "fp16x3":
        return finished(axes, buffers, config, None, name, docstring)
    names = [_operand_name(program, region, axes.prim.inputs[i]) or "ab"[i] for i in (0, 1)]
    if names[0] == names[1]:
        names = [f"{names[0]}_left", f"{names[0]}_right"]
    halves = [
        Halves(
            Scratch(f"{names[i]}_halves", axes.halves_shape(i), "float16"),
            Scratch(f"{names[i]}_scale", (axes.n_batch * axes.sizes["MN"[i]],), "float32"),
        )
        for i in (0, 1)
    ]
    kernels = [_write_split(axes, buffers, side, halves[side], f"{name}_split_{names[side]}") for side in (0, 1)]
    return kernels + finished(axes, buffers, config, halves, name, docstring)


def whole_product(
    axes: ProductAxes,
    buffers: Mapping[str, TensorType],
    config: Config,
    halves: list[Halves] | None,
    name: str,
    docstring: str,
) -> list[Kernel]:
    """One program per tile of the product (or one after another, where it is persistent)."""
    return [ProductWriter(axes, buffers, config, halves).kernel(name, docstring)]


def _operand_name(program: Program, region: Region, prim: str) -> str:
    """The user's name of an operand that is read as it lies in memory."""
    while prim not in region.inputs:
        inner = program.prims[prim]
        if inner.op not in VIEW_OPS:
            return ""
        prim = inner.inputs[0]
    for item in program.graph.inputs:
        if program.values[item.name, 0] == prim:
            return item.name
    return ""


class ProductAxes:
    """The axes of the product: batch, rows (m), columns (n) and the contracted ones (k)."""

    def __init__(self, program: Program, region: Region, product_prim: Prim | None = None) -> None:
        self.program = program
        self.region = region
        self.prim: Prim = product_prim or next(
            p for p in map(program.prims.__getitem__, region.prims) if p.op is PrimOp.MATMUL
        )
        table, rank = region.table, len(self.prim.shape)
        self.m, self.n = table.axes(self.prim.name, rank - 2), table.axes(self.prim.name, rank - 1)
        self.k = table.axes(self.prim.inputs[0], len(program.prims[self.prim.inputs[0]].shape) - 1)
        self.batch = tuple(axis for dim in range(rank - 2) for axis in table.axes(self.prim.name, dim))
        if set(self.m) & set(self.n) or set(self.batch) & (set(self.m) | set(self.n)):
            raise CannotCode("a product of a tensor with itself along one axis")

    @property
    def sizes(self) -> dict[str, Size]:
        """``M``, ``N`` and ``K``."""
        return {
            name: product([axis.size for axis in axes])
            for name, axes in zip("MNK", (self.m, self.n, self.k), strict=True)
        }

    @property
    def n_batch(self) -> Size:
        return product([axis.size for axis in self.batch])

    def halves_shape(self, side: int) -> tuple[Size, ...]:
        """High halves, then low halves, each with K dense."""
        rows = self.sizes["MN"[side]]
        return (Size.of(2), self.n_batch * rows, self.sizes["K"])

    def is_plain(self, side: int) -> bool:
        """Whether the operand is read just as it lies in memory, in a half precision that tensor cores take."""
        prim = self.program.prims[self.prim.inputs[side]]
        if not is_half(prim.dtype):
            return False
        name = prim.name
        while name not in self.region.inputs:
            inner = self.program.prims[name]
            if inner.op not in VIEW_OPS:
                return False
            name = inner.inputs[0]
        return True


class Tile:
    """One operand's (or the result's) tile: its expressions, written into a list of lines."""

    def __init__(
        self,
        axes: ProductAxes,
        parameters: Parameters,
        rows: tuple[tuple[Axis, ...], str],
        cols: tuple[tuple[Axis, ...], str],
        masks: Sequence[Mask],
        lines: list[str],
        *,
        known: Mapping[str, Code] | None = None,
        widen: bool = True,
        apart: bool = False,
        accesses: Sequence[Index] = (),
    ) -> None:
        self.lines = lines
        self.axes = axes
        self.known = known or {}
        groups: list[Group] = []
        flat: list[Group] = []
        for (own, name), is_rows in ((rows, True), (cols, False)):
            if not own:
                continue
            whole = Group(own, name, rows=is_rows, cols=not is_rows)
            pieces = [[axis] for axis in own] if apart else merge_axes(own, accesses)
            groups += taken_apart(whole, pieces, parameters.names, 0)
            flat.append(whole)
        if axes.batch:
            whole = Group(axes.batch, "batch")
            pieces = [[axis] for axis in axes.batch] if apart else merge_axes(axes.batch, accesses)
            groups += taken_apart(whole, pieces, parameters.names, 10)
            flat.append(whole)
        self.expressions = Expressions(
            axes.program,
            axes.region,
            parameters,
            groups,
            flat,
            masks,
            lambda text, cols: self.lines.append(text),
            self._provide,
            widen=widen,
        )

    def _provide(self, prim: Prim, at: tuple[Index, ...]) -> Code:
        if prim.name in self.known:
            return self.known[prim.name]
        raise CannotCode(f"{prim.op.value} beside a matrix product")

    def value(self, prim: str) -> Code:
        return self.expressions.value(prim, self.expressions.own_index(prim))


def operand_accesses(axes: ProductAxes, buffers: Mapping[str, TensorType], side: int) -> list[Index]:
    """How an operand is read, with every axis apart: shows which axes run as one."""
    rows = (axes.m, axes.n)[side]
    probe = Tile(axes, Parameters(axes.program, buffers, PRODUCT_NAMES), (rows, "r"), (axes.k, "k"), [], [], apart=True)
    probe.value(axes.prim.inputs[side])
    return probe.expressions.accesses


def int32_limit(size: Size) -> str:
    """The guard's condition under which offsets below ``size`` fit in 32 bits."""
    return f"{size} < 2147483648"


def mask_needed(size: Size, block: int) -> bool:
    """Whether the last block may reach beyond ``size``."""
    return any(coefficient % block for _, coefficient in size.terms)


def _write_split(
    axes: ProductAxes,
    buffers: Mapping[str, TensorType],
    side: int,
    halves: Halves,
    name: str,
) -> Kernel:
    """The kernel that writes an operand's scaled high and low halves, with K dense, and each row's scale."""
    parameters = Parameters(axes.program, buffers, PRODUCT_NAMES)
    size_name = "MN"[side]
    row = size_name.lower()
    n_rows, k_size = axes.sizes[size_name], axes.sizes["K"]
    values_ptr = parameters.names.unique(f"{halves.values.name}_ptr")
    scale_ptr = parameters.names.unique(f"{halves.scale.name}_ptr")
    parameters.name_size(n_rows, size_name)
    parameters.name_size(k_size, "K")
    rows_text, k_text = parameters.size(n_rows).text, parameters.size(k_size).text
    lines = [f"{row} = (tl.program_id(0) * ROWS + tl.arange(0, ROWS))[:, None]"]
    if axes.batch:
        lines.append("batch = tl.program_id(1).to(tl.int64)")
    lines.append("largest = tl.zeros([ROWS, DEPTH], tl.float32)")
    body, source = _split_body(axes, buffers, parameters, side, row, rows_text, k_text)
    lines.append(f"for start in range(0, {k_text}, DEPTH):")
    lines += [f"    {line}" for line in [*body, f"largest = tl.maximum(largest, tl.abs({source}))"]]
    batch = f"batch * {rows_text} * {k_text} + " if axes.batch else ""
    batch_row = f"batch * {rows_text} + " if axes.batch else ""
    total = parameters.size(axes.n_batch * n_rows * k_size)
    lines += [
        "# A power of two brings the row's largest element between 64 and 128; it rounds nothing.",
        "exponent = tl.ceil(tl.log2(tl.maximum(tl.max(largest, axis=1, keep_dims=True), 1e-30)))",
        f"tl.store({scale_ptr} + {batch_row}{row}, tl.exp2(exponent - 7.0), mask={row} < {rows_text})",
        "factor = tl.exp2(7.0 - exponent)",
        f"for start in range(0, {k_text}, DEPTH):",
    ]
    second = [
        *body,
        f"scaled = {source} * factor",
        "high = scaled.to(tl.float16)",
        "low = (scaled - high.to(tl.float32)).to(tl.float16)",
        f"place = {values_ptr} + {batch}{row} * {k_text} + k",
        "tl.store(place, high, mask=inside)",
        f"tl.store(place + {total.at(60)}, low, mask=inside)",
    ]
    lines += [f"    {line}" for line in second]
    grid, sizes = [f"triton.cdiv(rows_{row}, {SPLIT_ROWS})"], {f"rows_{row}": n_rows}
    if axes.batch:
        grid.append("n_batch")
        sizes["n_batch"] = axes.n_batch
    what = (
        f"The operand {halves.values.name.removesuffix('_halves')} as the sum of two float16 halves, each with K dense.\n\n"
        "high holds the leading 11 bits of each scaled significand, low the next 11."
    )
    return assemble(
        name,
        parameters,
        {"ROWS": SPLIT_ROWS, "DEPTH": SPLIT_DEPTH},
        what,
        lines,
        grid=tuple(grid),
        grid_sizes=sizes,
        num_warps=4,
        num_stages=2,
        limits=(int32_limit(Size.of(2) * axes.n_batch * n_rows * k_size),),
        scratch_written=((values_ptr, halves.values), (scale_ptr, halves.scale)),
    )


def _split_body(
    axes: ProductAxes,
    buffers: Mapping[str, TensorType],
    parameters: Parameters,
    side: int,
    row: str,
    rows_text: str,
    k_text: str,
) -> tuple[list[str], str]:
    """Statements that make one tile of the operand, and the variable that holds it."""
    body = [
        "k = (start + tl.arange(0, DEPTH))[None, :]",
        f"inside = ({row} < {rows_text}) & (k < {k_text})",
    ]
    rows = (axes.m, axes.n)[side]
    accesses = operand_accesses(axes, buffers, side)
    tile = Tile(axes, parameters, (rows, row), (axes.k, "k"), [Mask("inside", True, True)], body, accesses=accesses)
    value = tile.value(axes.prim.inputs[side])
    if value.text.isidentifier():
        return body, value.text
    name = parameters.names.unique("value")
    # What lies outside is no part of the row: its size must not count.
    body.append(f"{name} = tl.where(inside, {value.text}, 0.0)")
    return body, name


class ProductWriter:
    """Writes the kernel of the product itself."""

    def __init__(
        self,
        axes: ProductAxes,
        buffers: Mapping[str, TensorType],
        config: Config,
        halves: list[Halves] | None,
    ) -> None:
        self.axes = axes
        self.buffers = buffers
        self.config = config
        self.halves = halves
        self.parameters = Parameters(axes.program, buffers, PRODUCT_NAMES)
        self.lines: list[str] = []
        for name, size in axes.sizes.items():
            self.parameters.name_size(size, name)
        self.scratch = (
            [self.parameters.names.unique(f"{half.values.name}_ptr") for half in halves] if halves is not None else []
        )

        self.scales = [self.parameters.names.unique(f"{half.scale.name}_ptr") for half in halves or []]

    def _size(self, name: str) -> str:
        return self.parameters.size(self.axes.sizes[name]).text

    def kernel(self, name: str, docstring: str) -> Kernel:
        """The finished kernel."""
        self._program_order()
        self.lines.append("acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)")
        if self.halves is not None:
            self._loop_over_halves()
        else:
            self._loop()
        self._finish()
        blocks = self._blocks()
        grid = [f"triton.cdiv(n_m, {blocks['BLOCK_M']}) * triton.cdiv(n_n, {blocks['BLOCK_N']})"]
        sizes = {"n_m": self.axes.sizes["M"], "n_n": self.axes.sizes["N"]}
        if self.axes.batch:
            grid.append("n_batch")
            sizes["n_batch"] = self.axes.n_batch
        if self.config.get("persist"):
            grid[0] = f"min({self.config['persist']}, {grid[0]})"
            self.lines = one_tile_after_another(self.lines)
        return assemble(
            name,
            self.parameters,
            blocks,
            docstring,
            self.lines,
            grid=(*grid, *self._more_grid()),
            grid_sizes=sizes,
            num_warps=int(self.config["warps"]),
            num_stages=int(self.config["stages"]),
            limits=self._limits(),
            scratch_read=self._scratch_read(),
            scratch_written=self._scratch_written(),
        )

    def _blocks(self) -> dict[str, int]:
        return {key.upper(): int(self.config[key]) for key in ("block_m", "block_n", "block_k", "group_m")}

    def _more_grid(self) -> tuple[str, ...]:
        """Grid dimensions behind those of tiles and batch."""
        return ()

    def _scratch_written(self) -> tuple[tuple[str, Scratch], ...]:
        return ()

    def _finish(self) -> None:
        """What is done with the sums in ``acc``."""
        self._unscale()
        self._epilogue()

    def _unscale(self) -> None:
        """Undo the scaling of split operands."""
        if self.halves is None:
            return
        m, n = self._size("M"), self._size("N")
        batch_m, batch_n = (f"batch * {m} + ", f"batch * {n} + ") if self.axes.batch else ("", "")
        mask_m = ", mask=m_mask, other=0.0" if self._mask("m", "block_m", rows=True) else ""
        mask_n = ", mask=n_mask, other=0.0" if self._mask("n", "block_n", rows=False) else ""
        self.lines += [
            f"acc *= tl.load({self.scales[0]} + {batch_m}m{mask_m})",
            f"acc *= tl.load({self.scales[1]} + {batch_n}n{mask_n})",
        ]

    def _scratch_read(self) -> tuple[tuple[str, Scratch], ...]:
        halves = self.halves or []
        values = tuple((pointer, half.values) for pointer, half in zip(self.scratch, halves, strict=True))
        return values + tuple((pointer, half.scale) for pointer, half in zip(self.scales, halves, strict=True))

    def _limits(self) -> tuple[str, ...]:
        """Offsets inside one matrix are 32-bit, so each matrix must be smaller than that."""
        m, n, k = (self.axes.sizes[name] for name in "MNK")
        limits = [int32_limit(size) for size in (m * k, n * k, m * n) if not size.is_constant]
        if self.halves is not None:
            # Splitting pays where each half is used many times; with few rows the library's product is also more exact.
            limits += [f"{m} >= {LEAST_SPLIT}"] if not m.is_constant else []
        return tuple(limits)

    def _program_order(self) -> None:
        m, n = self._size("M"), self._size("N")
        self.lines += [
            "# Programs that share operands run near each other, so the operands stay in the L2 cache.",
            "pid = tl.program_id(0)",
            f"blocks_m = tl.cdiv({m}, BLOCK_M)",
            f"blocks_n = tl.cdiv({n}, BLOCK_N)",
            "first_m = pid // (GROUP_M * blocks_n) * GROUP_M",
            "group_m = min(blocks_m - first_m, GROUP_M)",
            "m = ((first_m + pid % group_m) * BLOCK_M + tl.arange(0, BLOCK_M))[:, None]",
            "n = (pid % (GROUP_M * blocks_n) // group_m * BLOCK_N + tl.arange(0, BLOCK_N))[None, :]",
        ]
        if self.axes.batch:
            self.lines.append("batch = tl.program_id(1).to(tl.int64)")
        for name, block in (("m", "block_m"), ("n", "block_n")):
            if mask_needed(self.axes.sizes[name.upper()], int(self.config[block])):
                self.lines.append(f"{name}_mask = {name} < {self._size(name.upper())}")

    def _mask(self, name: str, block: str, *, rows: bool) -> list[Mask]:
        if not mask_needed(self.axes.sizes[name.upper()], int(self.config[block])):
            return []
        return [Mask(f"{name}_mask", rows, not rows)]

    def _loop(self) -> None:
        """One block of K after the other, operands read (and computed) in place."""
        operand = self.axes.program.prims[self.axes.prim.inputs[0]]
        body = ["k = start + tl.arange(0, BLOCK_K)"]
        masked = mask_needed(self.axes.sizes["K"], int(self.config["block_k"]))
        k_row, k_column = "k[None, :]", "k[:, None]"
        masks_a, masks_b = self._mask("m", "block_m", rows=True), self._mask("n", "block_n", rows=False)
        if masked:
            masks_a = [*masks_a, Mask(f"({k_row} < {self._size('K')})", False, True)]
            masks_b = [Mask(f"({k_column} < {self._size('K')})", True, False), *masks_b]
        a = self._operand(0, (self.axes.m, "m"), (self.axes.k, k_row), masks_a, body)
        b = self._operand(1, (self.axes.k, k_column), (self.axes.n, "n"), masks_b, body)
        if is_half(operand.dtype) or operand.dtype == "float64":
            dot = f"acc = tl.dot({a}, {b}, acc)"
        else:
            dot = f'acc = tl.dot({a}, {b}, acc, input_precision="{self.config["precision"]}")'
        self.lines.append(f"for start in range(0, {self._size('K')}, BLOCK_K):")
        self.lines += [f"    {line}" for line in [*body, dot]]

    def _operand(
        self,
        side: int,
        rows: tuple[tuple[Axis, ...], str],
        cols: tuple[tuple[Axis, ...], str],
        masks: list[Mask],
        body: list[str],
    ) -> str:
        plain = self.axes.is_plain(side)
        tile = Tile(
            self.axes,
            self.parameters,
            rows,
            cols,
            masks,
            body,
            widen=not plain,
            accesses=operand_accesses(self.axes, self.buffers, side),
        )
        name = self.axes.prim.inputs[side]
        value = tile.value(name)
        dtype = self.axes.program.prims[name].dtype
        return value.text if plain or not is_half(dtype) else f"{value.at(100)}.to({TRITON_DTYPES[dtype]})"

    def _loop_over_halves(self) -> None:
        """K three times: low*high, high*low, high*high; the small terms first, so that little of them is rounded away."""
        a, b = self.scratch
        tile_a, tile_b = (self.parameters.names.unique(f"{name.removesuffix('_halves_ptr')}_part") for name in (a, b))
        k, m, n = self._size("K"), self._size("M"), self._size("N")
        size_a = self.parameters.size(self.axes.n_batch * self.axes.sizes["M"] * self.axes.sizes["K"]).at(60)
        size_b = self.parameters.size(self.axes.n_batch * self.axes.sizes["N"] * self.axes.sizes["K"]).at(60)
        masked = mask_needed(self.axes.sizes["K"], int(self.config["block_k"]))
        batch_a = f"batch * {m} * {k} + " if self.axes.batch else ""
        batch_b = f"batch * {n} * {k} + " if self.axes.batch else ""
        masks_a = [m.text for m in self._mask("m", "block_m", rows=True)] + ([f"(k[None, :] < {k})"] if masked else [])
        masks_b = ([f"(k[:, None] < {k})"] if masked else []) + [m.text for m in self._mask("n", "block_n", rows=False)]
        mask_a = f", mask={' & '.join(masks_a)}, other=0.0" if masks_a else ""
        mask_b = f", mask={' & '.join(masks_b)}, other=0.0" if masks_b else ""
        self.lines += [
            f"steps = tl.cdiv({k}, BLOCK_K)",
            "for step in range(0, 3 * steps):",
            "    part = step // steps",
            "    k = step % steps * BLOCK_K + tl.arange(0, BLOCK_K)",
            f"    low_a = tl.where(part == 0, {size_a}, 0)",
            f"    low_b = tl.where(part == 1, {size_b}, 0)",
            f"    {tile_a} = tl.load({a} + low_a + {batch_a}m * {k} + k[None, :]{mask_a})",
            f"    {tile_b} = tl.load({b} + low_b + {batch_b}n * {k} + k[:, None]{mask_b})",
            f"    acc = tl.dot({tile_a}, {tile_b}, acc)",
        ]

    def _epilogue(self) -> None:
        masks = self._mask("m", "block_m", rows=True) + self._mask("n", "block_n", rows=False)
        known = {self.axes.prim.name: Code("acc", "float32", True, True)}
        accesses: list[Index] = []
        for final in (False, True):
            lines: list[str] = self.lines if final else []
            parameters = self.parameters if final else Parameters(self.axes.program, self.buffers, PRODUCT_NAMES)
            tile = Tile(
                self.axes,
                parameters,
                (self.axes.m, "m"),
                (self.axes.n, "n"),
                masks,
                lines,
                known=known,
                apart=not final,
                accesses=accesses,
            )
            for ref in self.axes.region.outputs:
                self._store(tile, parameters, ref, lines)
            accesses = tile.expressions.accesses

    def _store(self, tile: Tile, parameters: Parameters, ref: Ref, lines: list[str]) -> None:
        prim = self.axes.program.of(ref)
        value = tile.value(prim.name)
        at = tile.expressions.own_index(prim.name)
        offset = tile.expressions.offset(self.axes.program.graph.type_of(ref), at)
        mask = tile.expressions.mask_argument(offset, None)
        lines.append(f"tl.store({Expressions.address(parameters.output(ref), offset)}, {value.text}{mask})")
