"""Matmul kernels, with elementwise operations fused into the loads of the operands and the store of the result.

Precision modes of float32 products (``config.precision``): ``ieee``, ``tf32``, and those of
:mod:`mtmc_lsp.codegen.matmul.split_precision`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from mtmc_lsp.codegen.kernel.axis_groups import Mask
from mtmc_lsp.codegen.kernel.expressions import Expressions
from mtmc_lsp.codegen.kernel.index import Index
from mtmc_lsp.codegen.kernel.kernel import Kernel, Scratch, assemble
from mtmc_lsp.codegen.kernel.parameters import Parameters
from mtmc_lsp.codegen.kernel.persistence import hoist_invariants, loop_over_tiles
from mtmc_lsp.codegen.kernel.snippets import PRODUCT, SUM, TRITON_DTYPES, Code, blocks_text
from mtmc_lsp.codegen.matmul.descriptors import OperandLayout, descriptor_text, operand_layout, tile_load
from mtmc_lsp.codegen.matmul.k_loops import BlockLoop
from mtmc_lsp.codegen.matmul.operands import (
    ProductAxes,
    Tile,
    int32_limit,
    mask_needed,
    operand_accesses,
    tile_of_program,
    widened,
)
from mtmc_lsp.codegen.matmul.packed_operands import (
    INTEGERS,
    PackedOperand,
    loop_start,
)
from mtmc_lsp.codegen.matmul.split_operands import SplitOperand, write_both_splits
from mtmc_lsp.codegen.matmul.split_precision import (
    launch_constexprs,
    loop_over_converted,
    loops_over_halves,
    piece_blocks,
    promoted_sum,
    split_on_load_sum,
)
from mtmc_lsp.codegen.module.naming import PRODUCT_NAMES
from mtmc_lsp.core.device_model import DeviceModel
from mtmc_lsp.core.dtypes import compute_dtype, is_low_precision
from mtmc_lsp.core.graph import Ref, TensorType
from mtmc_lsp.core.protocols import CannotCode
from mtmc_lsp.core.sizes import Size, product
from mtmc_lsp.ir.axes import Axis
from mtmc_lsp.ir.primitives import VIEW_OPS, KernelIR, PrimOp, has_split_operands
from mtmc_lsp.ir.regions import Region
from mtmc_lsp.schedule.configs import (
    CONVERTED_MODES,
    PRE_SPLIT_MODES,
    MatmulConfig,
    PrecisionMode,
    SplitOnLoad,
)
from mtmc_lsp.schedule.split_on_load import LEAST_SPLIT_ROWS

Finish = Callable[
    [ProductAxes, Mapping[str, TensorType], MatmulConfig, "list[SplitOperand] | None", str, str],
    list[Kernel],
]
"""Writes the kernels of a product whose operands are prepared."""


def write_product_kernels(
    ir: KernelIR,
    region: Region,
    buffers: Mapping[str, TensorType],
    config: MatmulConfig,
    name: str,
    docstring: str,
    write_product: Finish,
    device: DeviceModel,
) -> list[Kernel]:
    """Write the kernels of a matmul region: first those that split or convert the operands, if the precision mode requires it.

    Args:
        write_product: writes the product from the prepared operands: :func:`write_whole_product`, or a version that splits K.

    Raises:
        CannotCode: the region or the configuration is not supported.
    """
    axes = ProductAxes(ir, region)
    is_promoted = config.precision is PrecisionMode.FP16X3_PROMOTED
    if is_promoted and config.split_on_load is None and not has_split_operands(axes.prim):
        raise CannotCode(
            f"precision {config.precision.value} needs operands that are split on load or float16 pairs; choose another mode"
        )
    if config.precision not in CONVERTED_MODES:
        return write_product(axes, buffers, config, None, name, docstring)
    names = [operand_name(ir, region, axes.prim.inputs[i]) or "ab"[i] for i in (0, 1)]
    if names[0] == names[1]:
        names = [f"{names[0]}_left", f"{names[0]}_right"]
    halves, suffix = (1, "convert") if config.precision is PrecisionMode.FP16_SCALED else (2, "split")
    split_operands = [
        SplitOperand.of(axes, side, names[side], config.block_k, device, halves=halves) for side in (0, 1)
    ]
    split_kernels = write_both_splits(axes, buffers, split_operands, f"{name}_{suffix}")
    return split_kernels + write_product(axes, buffers, config, split_operands, name, docstring)


def write_whole_product(
    axes: ProductAxes,
    buffers: Mapping[str, TensorType],
    config: MatmulConfig,
    split_operands: list[SplitOperand] | None,
    name: str,
    docstring: str,
) -> list[Kernel]:
    """One program instance per tile of the product, or a loop over tiles if it is persistent."""
    return [ProductWriter(axes, buffers, config, split_operands).kernel(name, docstring)]


def operand_name(ir: KernelIR, region: Region, prim: str) -> str:
    """The user's name of an operand that is read unmodified from an input; empty for others."""
    while prim not in region.inputs:
        inner = ir.prims[prim]
        if inner.op not in VIEW_OPS:
            return ""
        prim = inner.inputs[0]
    for item in ir.graph.inputs:
        if ir.values[item.name, 0] == prim:
            return item.name
    return ""


class ProductWriter:
    """Writes the matmul kernel."""

    def __init__(
        self,
        axes: ProductAxes,
        buffers: Mapping[str, TensorType],
        config: MatmulConfig,
        split_operands: list[SplitOperand] | None,
    ) -> None:
        self.axes = axes
        self.buffers = buffers
        self.config = config
        self.split_operands = split_operands
        self.wide = axes.are_wide(self._offset_bounds())
        """Whether offsets within a matrix need 64 bits."""
        self.wide_indices = axes.are_wide(self._index_bounds())
        """Whether row or column indices need 64 bits."""
        self.parameters = Parameters(axes.ir, buffers, self._reserved)
        self.parameters.wide = self.wide
        if axes.kernel_positions:
            # The compiler detects contiguous loads along K only if the number of channels is a compile-time constant.
            self.parameters.static_symbols = frozenset(axes.sizes["K"].symbols())
        self.lines: list[str] = []
        for name, size in axes.sizes.items():
            self.parameters.name_size(size, name)
        self.scratch = [self.parameters.names.unique(f"{half.values.name}_ptr") for half in split_operands or []]

        self.tiles = self._tiles()
        """The operands that are loaded by tensor descriptors, by index."""
        self.scales = [self.parameters.names.unique(f"{half.scale.name}_ptr") for half in split_operands or []]

    def _tiles(self) -> dict[int, OperandLayout]:
        if not self.config.tma or self.split_operands is not None or self.wide_indices or self.axes.kernel_positions:
            return {}
        layouts = {side: operand_layout(self.axes, self.buffers, side) for side in range(len(self.axes.operands))}
        return {side: operand for side, operand in layouts.items() if operand is not None}

    _sum_shape = "[BLOCK_M, BLOCK_N]"
    _walk = BlockLoop()
    _reserved = PRODUCT_NAMES

    @property
    def _sum_dtype(self) -> str:
        return compute_dtype(self.axes.prim.dtype)

    @property
    def _accumulators(self) -> list[str]:
        """The variable with the sums of each product."""
        return ["acc", *(f"acc_{number}" for number in range(2, len(self.axes.products) + 1))]

    def _size(self, name: str) -> str:
        return self.parameters.size(self.axes.sizes[name]).text

    def kernel(self, name: str, docstring: str) -> Kernel:
        """The finished kernel."""
        self._body()
        blocks = self._blocks()
        sizes = {"n_m": self.axes.sizes["M"], "n_n": self.axes.sizes["N"]}
        dynamic: dict[str, str] = {}
        if self.split_operands:
            sizes["k_pad"] = self.split_operands[0].k_pad
            if self.config.precision in PRE_SPLIT_MODES:
                dynamic = launch_constexprs(self.axes, self.split_operands[0], self.config)
        if self.axes.batch:
            sizes["n_batch"] = self.axes.n_batch
        return assemble(
            name,
            self.parameters,
            blocks,
            docstring,
            self.lines,
            grid=self._grid(blocks),
            grid_sizes=sizes,
            num_warps=self.config.warps,
            num_stages=self.config.stages,
            dynamic=dynamic,
            limits=self._limits(),
            scratch_read=self._scratch_read(),
            scratch_written=self._scratch_written(),
            described=tuple(operand.prim for operand in self.tiles.values()),
        )

    def _body(self) -> None:
        """Write the body."""
        self._program_order()
        self._product()
        if self.config.persist:
            self.lines = loop_over_tiles(self.lines, flatten=self.config.flatten)

    def _product(self) -> None:
        """Write the computation of the tile at ``m`` and ``n``."""
        self.lines += [
            f"{acc} = tl.zeros({self._sum_shape}, {TRITON_DTYPES[self._sum_dtype]})" for acc in self._accumulators
        ]
        if self.split_operands is not None:
            self._loop_over_split_operands()
        else:
            self._loop()
        self._finish()

    def _grid(self, blocks: Mapping[str, int]) -> tuple[str, ...]:
        """Grid dimensions: tiles, batch, and those that a subclass adds."""
        tiles = f"{blocks_text('n_m', blocks['BLOCK_M'])} * ({blocks_text('n_n', blocks['BLOCK_N'])})"
        if self.config.persist:
            tiles = f"min({self.config.persist}, {tiles})"
        return (tiles, *(["n_batch"] if self.axes.batch else []), *self._more_grid())

    def _blocks(self) -> dict[str, int]:
        config = self.config
        blocks = {
            "BLOCK_M": config.block_m, "BLOCK_N": config.block_n, "BLOCK_K": config.block_k, "GROUP_M": config.group_m,
        }  # fmt: skip
        if self.split_operands is None or config.precision not in PRE_SPLIT_MODES:
            return blocks
        return {**blocks, **piece_blocks(self.split_operands[0], config)}

    def _more_grid(self) -> tuple[str, ...]:
        """Additional grid dimensions after tiles and batch."""
        return ()

    def _scratch_written(self) -> tuple[tuple[str, Scratch], ...]:
        return ()

    def _finish(self) -> None:
        """Write the processing of the sums in ``acc``."""
        self._unscale()
        self._epilogue()

    def _unscale(self) -> None:
        """Undo the scaling of split operands."""
        if self.split_operands is None:
            return
        loads: list[str] = []
        for half, scale in zip(self.split_operands, self.scales, strict=True):
            row, is_row = "mn"[half.side], half.side == 0
            batch = f"batch * {self._size(row.upper())} + " if self.axes.batch else ""
            mask = f", mask={row}_mask, other=0.0" if self._mask(row, rows=is_row) else ""
            loads.append(f"tl.load({scale} + {batch}{row}{mask})")
        if self.config.precision is PrecisionMode.FP16_SCALED:
            # Sums of converted operands are large: one scale after the other could overflow.
            self.lines.append(f"acc *= {' * '.join(loads)}")
        else:
            self.lines += [f"acc *= {load}" for load in loads]

    def _scratch_read(self) -> tuple[tuple[str, Scratch], ...]:
        split_operands = self.split_operands or []
        values = tuple((pointer, half.values) for pointer, half in zip(self.scratch, split_operands, strict=True))
        return values + tuple((pointer, half.scale) for pointer, half in zip(self.scales, split_operands, strict=True))

    def _limits(self) -> tuple[str, ...]:
        """Conditions on dynamic sizes, above all that 32-bit offsets suffice."""
        m = self.axes.sizes["M"]
        narrow_bounds = () if self.wide_indices else (self._index_bounds() if self.wide else self._offset_bounds())
        limits = [int32_limit(size) for size in narrow_bounds if not size.is_constant]
        limits += [condition for operand in self.tiles.values() for condition in operand.conditions]
        if self.split_operands is not None:
            # Splitting pays off only if each half is used many times. With few rows the library's product is also more
            # accurate.
            limits += [f"{m} >= {LEAST_SPLIT_ROWS}"] if not m.is_constant else []
        return tuple(limits)

    def _index_bounds(self) -> tuple[Size, ...]:
        """Upper bounds of row and column indices, including masked ones in the last block."""
        return (self.axes.sizes["M"] * 2, self.axes.sizes["N"] * 2)

    def _offset_bounds(self) -> tuple[Size, ...]:
        """Upper bounds of offsets within a matrix, or within any tensor that a convolution reads or writes."""
        m, n, k = (self.axes.sizes[name] for name in "MNK")
        if self.axes.halves is not None:
            n = n * 2
        return self._tensor_elements() if self.axes.kernel_positions else (m * k, n * k, m * n)

    def _tensor_elements(self) -> tuple[Size, ...]:
        """Element counts of all tensors that are read or written; an im2col view has more elements than its tensor."""
        graph, region = self.axes.ir.graph, self.axes.region
        types = [*(self.buffers[name] for name in region.inputs), *(graph.type_of(ref) for ref in region.outputs)]
        return tuple(dict.fromkeys(kind.numel for kind in types))

    def _program_order(self) -> None:
        m, n = self._size("M"), self._size("N")
        self.lines += [
            "# Grouped order: programs that share operands run close together, so operands stay in the L2 cache.",
            f"pid = {widened('tl.program_id(0)', wide=self.wide_indices)}",
            f"blocks_m = tl.cdiv({m}, BLOCK_M)",
            f"blocks_n = tl.cdiv({n}, BLOCK_N)",
            *tile_of_program("BLOCK_M", "BLOCK_N"),
            "m = (m_start + tl.arange(0, BLOCK_M))[:, None]",
            "n = (n_start + tl.arange(0, BLOCK_N))[None, :]",
        ]
        if self.axes.batch:
            self.lines.append("batch = tl.program_id(1).to(tl.int64)")
        self._masks()

    def _masks(self) -> None:
        """Define the masks of rows and columns."""
        for name in "mn":
            if self._needs_mask(name):
                self.lines.append(f"{name}_mask = {name} < {self._size(name.upper())}")

    def _needs_mask(self, name: str) -> bool:
        """Whether some tile extends beyond the last row (or column)."""
        tall, wide = self._tile
        return mask_needed(self.axes.sizes[name.upper()], tall if name == "m" else wide)

    @property
    def _tile(self) -> tuple[int, int]:
        """Rows and columns of the tiles that partition the result."""
        return self.config.block_m, self.config.block_n

    def _mask(self, name: str, *, rows: bool) -> list[Mask]:
        return [Mask(f"{name}_mask", rows, not rows)] if self._needs_mask(name) else []

    def _loop(self) -> None:
        """Write the loop over K; operands are loaded (and computed) inside it."""
        kernel_positions = self.axes.kernel_positions if self.config.kernel_positions else ()
        axes = self.axes.k[len(kernel_positions) :]
        depth = product([axis.size for axis in axes])
        k_size = self.parameters.size(depth).text
        body: list[str] = []
        needs_mask = mask_needed(depth, self.config.block_k)
        k_row, k_column = "k[None, :]", "k[:, None]"
        inside_a, inside_b = (f"({at} < {k_size})" if needs_mask else "" for at in (k_row, k_column))
        masks_a, masks_b = self._mask("m", rows=True), self._mask("n", rows=False)
        if needs_mask:
            masks_a = [*masks_a, Mask(inside_a, False, True)]
            masks_b = [Mask(inside_b, True, False), *masks_b]
        packed = {
            i: PackedOperand(self.axes, self.buffers, self.parameters, i, axis, body)
            for i in range(len(self.axes.operands))
            if self.config.split_on_load is None and (axis := self.axes.packed_axis(i)) is not None
        }
        along_k = {i: operand.axis for i, operand in packed.items() if operand.axis == axes[-1]}
        operands = [
            packed[i].along_k(self._mask("n", rows=False), is_masked=needs_mask)
            if i in along_k
            else packed[i].along_columns(
                masks_b[:-1] if self._needs_mask("n") else masks_b,
                inside=inside_b,
                is_masked=self._needs_mask("n"),
            )
            if i in packed
            else self._descriptor_load(i, self.tiles[i], body)
            if i in self.tiles
            else self._operand(i, (axes, k_column), (self.axes.n, "n"), masks_b, body, kernel_positions, inside_b)
            if self.axes.side_of(i)
            else self._operand(i, (self.axes.m, "m"), (axes, k_row), masks_a, body, kernel_positions, inside_a)
            for i in range(len(self.axes.operands))
        ]
        dots = self._dots(operands)
        if kernel_positions:
            n_positions = self.parameters.size(product([axis.size for axis in kernel_positions])).text
            self.lines += [
                "# A block of K is a block of channels at one kernel position.",
                f"blocks_k = tl.cdiv({k_size}, BLOCK_K)",
            ]
            head = f"for step in {self._walk.steps(f'{n_positions} * blocks_k')}:"
            first_lines = [
                f"kernel_position = {widened('step // blocks_k', wide=self.wide)}",
                "k = step % blocks_k * BLOCK_K + tl.arange(0, BLOCK_K)",
            ]
        else:
            head = f"for start in {self._walk.starts(k_size)}:"
            uses_k = len(self.tiles) + len(along_k) < len(operands)
            first_lines = ["k = start + tl.arange(0, BLOCK_K)"] if uses_k else []
            first_lines += dict.fromkeys(map(loop_start, along_k.values()))
        before, inside = hoist_invariants([*body, *dots], {"kernel_position", "k", "start", INTEGERS})
        self.lines += [*before, head, *(f"    {line}" for line in [*first_lines, *inside])]

    def _dots(self, operands: Sequence[str]) -> list[str]:
        """The statements that multiply the loaded operands and add the products to the accumulators."""
        a, b = operands[:2]
        dtype = self.axes.ir.prims[self.axes.prim.inputs[0]].dtype
        if has_split_operands(self.axes.prim):
            return promoted_sum((operands[2], a), (operands[3], b))
        if self.config.split_on_load is SplitOnLoad.BOTH:
            return split_on_load_sum(self.parameters.names, a, b)
        if is_low_precision(dtype) or dtype == "float64":
            # Triton 3.6 does not infer the dtype of float64 products.
            options = ", out_dtype=tl.float64" if dtype == "float64" else ""
            return [
                f"{acc} = tl.dot({a}, {each}, {acc}{options})"
                for acc, each in zip(self._accumulators, [b, *operands[2:]], strict=True)
            ]
        if self.config.precision is PrecisionMode.TF32:
            return [f'acc = tl.dot(_tf32({a}), _tf32({b}), acc, input_precision="tf32")']
        return [f'acc = tl.dot({a}, {b}, acc, input_precision="{self.config.precision.value}")']

    def _descriptor_load(self, index: int, operand: OperandLayout, body: list[str]) -> str:
        """Write the load of a tile by a descriptor that is created before the loop; returns the tile's variable."""
        side = self.axes.side_of(index)
        rows, size = "mn"[side], "MN"[side]
        pointer = self.parameters.tensor(operand.prim)
        if self.axes.batch:
            pointer += f" + batch * {self.parameters.size(operand.batch_stride).at(PRODUCT)}"
        name = pointer.partition("_ptr")[0]
        tiles, tile = self.parameters.names.unique(f"{name}_tiles"), self.parameters.names.unique(name)
        lengths = (self.axes.sizes[size], self.axes.sizes["K"])
        self.lines.append(f"{tiles} = {descriptor_text(self.parameters, pointer, operand, *lengths, f'BLOCK_{size}')}")
        body.append(f"{tile} = {tile_load(tiles, operand, f'{rows}_start', side)}")
        return tile

    def _operand(
        self,
        index: int,
        rows: tuple[tuple[Axis, ...], str],
        cols: tuple[tuple[Axis, ...], str],
        masks: list[Mask],
        body: list[str],
        kernel_positions: tuple[Axis, ...],
        inside: str,
    ) -> str:
        is_plain = self.axes.is_plain(index)
        tile = Tile(
            self.axes,
            self.parameters,
            rows,
            cols,
            masks,
            body,
            scalar=(kernel_positions, "kernel_position"),
            widen=not is_plain,
            accesses=operand_accesses(self.axes, self.buffers, index, kernel_positions),
        )
        tile.expressions.fixed = self.axes.fixed(index, tile.expressions)
        name = self.axes.operands[index]
        is_right = self.axes.side_of(index) == 1
        shape, contracted = ("[BLOCK_K, BLOCK_N]", rows[0]) if is_right else ("[BLOCK_M, BLOCK_K]", cols[0])
        value = self.axes.over_tile(index, tile.value(name), shape, contracted, inside)
        dtype = self.axes.ir.prims[name].dtype
        return value.text if is_plain or not is_low_precision(dtype) else f"{value.at(100)}.to({TRITON_DTYPES[dtype]})"

    def _loop_over_split_operands(self) -> None:
        assert self.split_operands is not None
        left, right = self.split_operands
        is_split = self.config.precision is not PrecisionMode.FP16_SCALED
        self.lines += (loops_over_halves if is_split else loop_over_converted)(
            self.axes, self.parameters, (left, right), self.scratch, self.config, self._walk
        )

    def _epilogue(self) -> None:
        masks = self._mask("m", rows=True) + self._mask("n", rows=False)
        masks += self._crop_masks()
        values = {
            prim.name: Code(acc, self._sum_dtype, True, True)
            for prim, acc in zip(self.axes.products, self._accumulators, strict=True)
        }
        second: Code | None = None
        if self.axes.halves is not None:
            first, second = (Code(acc, self._sum_dtype, True, True) for acc in self._accumulators)
            values = {self.axes.prim.name: first}
        accesses: list[Index] = []
        for is_final in (False, True):
            lines: list[str] = self.lines if is_final else []
            parameters = self.parameters if is_final else Parameters(self.axes.ir, self.buffers, PRODUCT_NAMES)
            tile = Tile(
                self.axes,
                parameters,
                (self.axes.m, "m"),
                (self.axes.n, "n"),
                masks,
                lines,
                known=values,
                second=second,
                separate_axes=not is_final,
                accesses=accesses,
            )
            for ref in self.axes.region.outputs:
                self._store(tile, parameters, ref, lines)
            accesses = tile.expressions.accesses

    def _crop_masks(self) -> list[Mask]:
        """Masks of crops: conditions that exclude elements outside a cropped result."""
        prims = [self.axes.ir.prims[name] for name in self.axes.region.prims]
        crops = [prim for prim in prims if prim.op is PrimOp.CROP]
        if not crops:
            return []
        tile = Tile(
            self.axes, self.parameters, (self.axes.m, "m"), (self.axes.n, "n"), [], self.lines, separate_axes=True
        )
        conditions: list[str] = []
        for prim in crops:
            source = self.axes.ir.prims[prim.inputs[0]]
            for index, full_size, size in zip(
                tile.expressions.tile_index(source.name), source.shape, prim.shape, strict=True
            ):
                if full_size != size:
                    conditions.append(f"({tile.expressions.index(index).text} < {self.parameters.size(size).text})")
        self.lines.append(f"in_crop = {' & '.join(dict.fromkeys(conditions))}")
        return [Mask("in_crop", True, True)]

    def _store(self, tile: Tile, parameters: Parameters, ref: Ref, lines: list[str]) -> None:
        prim = self.axes.ir.of(ref)
        value = tile.value(prim.name)
        at = tile.expressions.tile_index(prim.name)
        offset = tile.expressions.offset(self.axes.ir.graph.type_of(ref), at)
        # The offset of a single row or column has no term for that axis. The tile has more rows or columns; the mask
        # keeps one.
        if value.rows and not self.axes.m:
            offset = Code(f"{offset.at(SUM)} + m", offset.dtype, True, offset.cols, SUM)
        if value.cols and not self.axes.n:
            offset = Code(f"{offset.at(SUM)} + n", offset.dtype, offset.rows, True, SUM)
        mask = tile.expressions.mask_argument(offset, None)
        lines.append(f"tl.store({Expressions.address(parameters.output(ref), offset)}, {value.text}{mask})")
