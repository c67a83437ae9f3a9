"""Gradients of an attention: a program holds a block of keys and loops over the queries, or the other way round.

Each tile of probabilities is computed again from the queries, the keys and the log-sum-exp of each row, so nothing with an
element for each pair of a query and a key is in memory, and no atomic addition is needed (Dao, arXiv 2307.08691, algorithm 2).
"""

from __future__ import annotations

from collections.abc import Mapping

from mtmc_lsp.codegen.attention.tiles import AttentionTiles
from mtmc_lsp.codegen.kernel.axis_groups import Mask
from mtmc_lsp.codegen.kernel.expressions import Expressions
from mtmc_lsp.codegen.kernel.index import Index
from mtmc_lsp.codegen.kernel.kernel import Kernel, assemble
from mtmc_lsp.codegen.kernel.snippets import TRITON_DTYPES, Code, blocks_text
from mtmc_lsp.codegen.matmul.operands import ProductAxes, mask_needed
from mtmc_lsp.codegen.module.naming import GRADIENT_NAMES, value_name
from mtmc_lsp.core.dtypes import is_low_precision
from mtmc_lsp.core.graph import Ref, TensorType
from mtmc_lsp.core.protocols import CannotCode
from mtmc_lsp.ir.attention_mask import attention_band
from mtmc_lsp.ir.attention_pattern import GradientForm, gradient_form
from mtmc_lsp.ir.axes import Axis
from mtmc_lsp.ir.primitives import VIEW_OPS, KernelIR, Prim
from mtmc_lsp.ir.regions import Region
from mtmc_lsp.schedule.column_tiles import next_power_of_two
from mtmc_lsp.schedule.configs import AttentionConfig

Axes = tuple[Axis, ...]


def write_gradient_kernel(
    ir: KernelIR,
    region: Region,
    buffers: Mapping[str, TensorType],
    config: AttentionConfig,
    name: str,
    docstring: str,
) -> Kernel:
    """Write the kernel of a region that computes gradients of an attention.

    Raises:
        CannotCode: the region contains an unsupported operation or size.
    """
    form = gradient_form([ir.prims[prim] for prim in region.prims])
    if form is None:
        raise CannotCode("the region does not compute gradients of an attention; use matmul kernels")
    return _GradientWriter(ir, region, buffers, config, form).kernel(name, docstring)


class _GradientWriter(AttentionTiles):
    def __init__(
        self,
        ir: KernelIR,
        region: Region,
        buffers: Mapping[str, TensorType],
        config: AttentionConfig,
        form: GradientForm,
    ) -> None:
        super().__init__(ir, region, buffers, config, form.scores, GRADIENT_NAMES)
        self.region = region
        self.form = form
        self.members = {name: ir.prims[name] for name in region.prims}
        self.queries, self.keys = self.result.m, self.result.n
        self.sums_queries = ProductAxes(ir, region, form.results[0]).k == self.queries
        self.band = attention_band(ir, region, form)
        self.features: dict[Axes, str] = {}
        """The name of the tile's variable for the elements of a query, a key or a value."""
        self.widths: dict[int, str] = {}
        """The same by the number of elements."""
        self.blocks: dict[str, int] = {"BLOCK_M": config.block_m, "BLOCK_N": config.block_n}
        self.dynamic: dict[str, str] = {}
        self.masks: dict[Axes, str] = {}
        """The bounds check of the queries and of the keys; missing if no block extends beyond the last one."""
        self.loaded: dict[tuple[object, ...], str] = {}
        """The variable that holds a loaded tile, by the tensor, the axes of its rows and its index."""
        self.parameters.name_size(self.size_of(self.queries), "n_queries")
        self.parameters.name_size(self.size_of(self.keys), "n_keys")

    def kernel(self, name: str, docstring: str) -> Kernel:
        """The finished kernel."""
        held, looped = (self.keys, self.queries) if self.sums_queries else (self.queries, self.keys)
        queries, keys = self.size_of(self.queries), self.size_of(self.keys)
        self.lines += self._held_block()
        if self.result.batch:
            self.lines.append("batch = tl.program_id(1).to(tl.int64)")
        self._check_bounds(held, self.lines)
        products = [*self.form.inner, *self.form.results]
        for prim in products:
            axes = ProductAxes(self.ir, self.region, prim)
            for feature in (axes.m, axes.n, axes.k):
                self._name_feature(feature)
        body = [self._looped_block()]
        self._check_bounds(looped, body)
        for prim in products:
            for side in (0, 1):
                if not self._is_tile(prim, side):
                    self._operand(prim, side, self.lines, only=held)
        accumulators = {prim.name: self._accumulator(prim) for prim in self.form.results}
        values = {prim.name: self._inner(prim, body) for prim in self.form.inner}
        self._sums(values, accumulators, body)
        self.lines += self._loop(body)
        for ref in self.region.outputs:
            self._store(ref, held, accumulators)
        block = self.config.block_n if self.sums_queries else self.config.block_m
        grid, sizes = [blocks_text("n_k" if self.sums_queries else "n_q", block)], {"n_q": queries, "n_k": keys}
        if self.result.batch:
            grid.append("n_batch")
            sizes["n_batch"] = self.size_of(self.result.batch)
        return assemble(
            name,
            self.parameters,
            self.blocks,
            docstring,
            self.lines,
            grid=tuple(grid),
            grid_sizes=sizes,
            num_warps=self.config.warps,
            num_stages=self.config.stages,
            dynamic=self.dynamic,
            limits=tuple(dict.fromkeys(self.limits)),
        )

    def _held_block(self) -> list[str]:
        if not self.sums_queries:
            return self.block_of_queries(self.band)
        return ["first_key = tl.program_id(0) * BLOCK_N", "n = first_key + tl.arange(0, BLOCK_N)"]

    def _looped_block(self) -> str:
        if self.sums_queries:
            return "m = (start + tl.arange(0, BLOCK_M))[:, None]"
        return "n = start + tl.arange(0, BLOCK_N)"

    def _check_bounds(self, axes: Axes, lines: list[str]) -> None:
        is_query = axes == self.queries
        name, even, block = ("m", "EVEN_M", self.config.block_m) if is_query else ("n", "EVEN_N", self.config.block_n)
        size = self.size_of(axes)
        if not mask_needed(size, block):
            return
        lines.append(f"{name}_mask = {even} | ({name} < {self.parameters.size(size).text})")
        self.masks[axes] = "m_mask" if is_query else "n_mask[None, :]"
        self.dynamic[even] = f"{'n_q' if is_query else 'n_k'} % {block} == 0"

    def _name_feature(self, axes: Axes) -> None:
        """Declare the variable for the axes of a query's, a key's or a value's elements."""
        if axes in (self.queries, self.keys) or axes in self.features:
            return
        size = self.constant(axes)
        if size in self.widths:
            self.features[axes] = self.widths[size]
            return
        name = ("head", "width")[len(self.widths)] if len(self.widths) < 2 else f"width_{len(self.widths)}"
        self.features[axes] = self.widths[size] = name
        self.blocks[name.upper()] = max(16, next_power_of_two(size))
        self.lines.append(f"{name} = tl.arange(0, {name.upper()})[None, :]")

    def _feature_masks(self, axes: Axes) -> list[Mask]:
        name = self.features[axes]
        return self.masks_of(self.edge(name, self.constant(axes), self.blocks[name.upper()]), rows=False)

    def _row_masks(self, axes: Axes) -> list[Mask]:
        """The bounds check of queries or keys as rows of a tile."""
        text = self.masks.get(axes, "")
        return self.masks_of("n_mask[:, None]" if text and axes == self.keys else text, rows=True)

    def _rows(self, axes: Axes) -> str:
        return "m" if axes == self.queries else "n[:, None]"

    def _is_tile(self, prim: Prim, side: int) -> bool:
        return self.form.is_tile(self.members, prim.inputs[side])

    def _operand(self, prim: Prim, side: int, lines: list[str], only: Axes = ()) -> tuple[str, Axes]:
        """A loaded operand with queries or keys as rows and features as columns, and the axes of its rows.

        Args:
            only: the axes of the rows that are loaded; operands with others are left for later.
        """
        roles = ProductAxes(self.ir, self.region, prim)
        sides = ((roles.m, roles.k), (roles.n, roles.k))[side]
        rows, features = sides if sides[0] in (self.queries, self.keys) else sides[::-1]
        name = prim.inputs[side]
        key = self._key(name, rows, features)
        if key not in self.loaded and (not only or rows == only):
            masks = [*self._row_masks(rows), *self._feature_masks(features)]
            code = self.tile(
                (rows, self._rows(rows)), (features, self.features[features]), masks, lines, {}, name, widen=False
            )
            text = code.text
            if not (code.rows and code.cols):
                block = "BLOCK_M" if rows == self.queries else "BLOCK_N"
                text = f"tl.broadcast_to({text}, [{block}, {self.features[features].upper()}])"
            self.loaded[key] = text
        return self.loaded.get(key, ""), rows

    def _key(self, name: str, rows: Axes, features: Axes) -> tuple[object, ...]:
        """Identifies a loaded tile, whichever views and axes lead to it."""
        source = name
        while source not in self.region.inputs and self.ir.prims[source].op in VIEW_OPS:
            source = self.ir.prims[source].inputs[0]
        probe = self.make_tile((rows, "r"), (features, "f"), [], [], {}, [], False, widen=False)
        probe.value(name)
        columns = {axis.id: -1 - i for i, axis in enumerate(features)}
        steps = {
            (columns.get(variable.id, variable.id), str(step))
            for index in probe.expressions.accesses
            for variable, step in index.terms
        }
        return source, rows, len(features), frozenset(steps)

    def _precision(self, prim: Prim) -> str:
        return "" if is_low_precision(self.ir.prims[prim.inputs[1]].dtype) else ', input_precision="ieee"'

    def _inner(self, prim: Prim, lines: list[str]) -> Code:
        """The statement of a product with an element for each pair of a query and a key."""
        (first, rows), (second, _) = (self._operand(prim, side, lines) for side in (0, 1))
        queries, keys = (first, second) if rows == self.queries else (second, first)
        name = self.parameters.names.unique("grad_weights") if prim is not self.form.scores else "scores"
        lines.append(f"{name} = tl.dot({queries}, tl.trans({keys}){self._precision(prim)})")
        return Code(name, "float32", True, True)

    def _accumulator(self, prim: Prim) -> str:
        roles = ProductAxes(self.ir, self.region, prim)
        features = roles.n if self._is_tile(prim, 0) else roles.m
        name = self.parameters.names.unique(value_name(self.ir, self._output_of(prim)))
        block = "BLOCK_N" if self.sums_queries else "BLOCK_M"
        self.lines.append(f"{name} = tl.zeros([{block}, {self.features[features].upper()}], tl.float32)")
        return name

    def _output_of(self, prim: Prim) -> Ref:
        return next(ref for ref in self.region.outputs if self._product_of(ref) is prim)

    def _product_of(self, ref: Ref) -> Prim:
        """The product whose elements an output has."""
        prim = self.ir.of(ref)
        while prim not in self.form.results:
            prim = self.ir.prims[prim.inputs[0]]
        return prim

    def _sums(self, values: Mapping[str, Code], accumulators: Mapping[str, str], lines: list[str]) -> None:
        """Statements that add a tile's share to each gradient."""
        masks = [*self.masks_of(self.masks.get(self.queries, ""), rows=True),
                 *self.masks_of(self.masks.get(self.keys, ""), rows=False)]  # fmt: skip
        tiles = [(prim, 0 if self._is_tile(prim, 0) else 1) for prim in self.form.results]
        codes: list[Code] = []
        accesses: list[Index] = []
        for is_final in (False, True):
            tile = self.make_tile(
                (self.queries, "m"), (self.keys, "n[None, :]"), masks, lines if is_final else [], values, accesses, is_final,
                widen=True,
            )  # fmt: skip
            codes = [tile.value(prim.inputs[side]) for prim, side in tiles]
            accesses = tile.expressions.accesses
        self.limit(accesses)
        inside = self.masks.get(self.queries if self.sums_queries else self.keys, "")
        for (prim, side), code in zip(tiles, codes, strict=True):
            other, _ = self._operand(prim, 1 - side, lines)
            text = f"tl.where({inside}, {code.text}, 0.0)" if inside else code.at(100)
            dtype = self.ir.prims[prim.inputs[side]].dtype
            if is_low_precision(dtype):
                text = f"{text.removesuffix(f'.to({TRITON_DTYPES[dtype]}).to(tl.float32)')}.to({TRITON_DTYPES[dtype]})"
            text = f"tl.trans({text})" if self.sums_queries else text
            total = accumulators[prim.name]
            lines.append(f"{total} = tl.dot({text}, {other}, {total}{self._precision(prim)})")

    def _loop(self, body: list[str]) -> list[str]:
        """The loop over the blocks that the mask does not hide from the held block."""
        if self.sums_queries:
            # Query m sees the keys m + first to m + last, so the queries n - last to n - first see key n.
            low, high = (None if size is None else size * -1 for size in (self.band.last, self.band.first))
            noun, block, looped, held = "query", "BLOCK_M", self.queries, ("first_key", "first_key + BLOCK_N")
            comment = "# Only queries in this range see keys of this block."
        else:
            low, high = self.band.first, self.band.last
            noun, block, looped, held = "key", "BLOCK_N", self.keys, ("first_query", "first_query + BLOCK_M")
            comment = "# The queries of this block see only keys in this range."
        count = self.parameters.size(self.size_of(looped)).text
        lines = [comment] if self.band.limits else []
        first, end = "0", count
        if low is not None:
            first = f"first_{noun}"
            lines.append(f"{first} = tl.maximum({self.shifted(held[0], low)}, 0) // {block} * {block}")
        if high is not None:
            end = f"end_{noun}"
            lines.append(f"{end} = tl.minimum({self.shifted(held[1], high)}, {count})")
        return [*lines, f"for start in range({first}, {end}, {block}):", *(f"    {line}" for line in body)]

    def _store(self, ref: Ref, held: Axes, accumulators: Mapping[str, str]) -> None:
        prim = self._product_of(ref)
        roles = ProductAxes(self.ir, self.region, prim)
        features = roles.n if roles.m == held else roles.m
        values = {prim.name: Code(accumulators[prim.name], "float32", True, True)}
        masks = [*self._row_masks(held), *self._feature_masks(features)]
        accesses: list[Index] = []
        for is_final in (False, True):
            lines: list[str] = self.lines if is_final else []
            tile = self.make_tile(
                (held, self._rows(held)), (features, self.features[features]), masks, lines, values, accesses, is_final,
                widen=True,
            )  # fmt: skip
            name = self.ir.of(ref).name
            value = tile.value(name)
            offset = tile.expressions.offset(self.ir.graph.type_of(ref), tile.expressions.tile_index(name))
            accesses = tile.expressions.accesses
        self.limit(accesses)
        pointer = self.parameters.output(ref)
        mask = tile.expressions.mask_argument(offset, None)
        self.lines.append(f"tl.store({Expressions.address(pointer, offset)}, {value.text}{mask})")
