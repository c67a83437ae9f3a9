"""Attention in one pass: a block of queries stays in registers while a loop streams keys and values.

With few queries (decoding), several programs share the keys of each block of queries, and a second kernel combines their
unnormalised results, maxima and sums in a fixed order. Heads that read the same keys and values (grouped heads) are then rows of
one block of queries, so that each key is loaded once for all of them.

Running maximum and sum: online softmax (Milakov & Gimelshein, arXiv 1805.02867; Dao et al., arXiv 2205.14135). Elementwise
operations on the scores before the softmax (scale, mask, bias, causality) are applied to the tile.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from mtmc_lsp.codegen.attention.logits import Logits
from mtmc_lsp.codegen.attention.tiles import AttentionTiles, Side
from mtmc_lsp.codegen.kernel.axis_groups import Mask
from mtmc_lsp.codegen.kernel.expressions import Expressions
from mtmc_lsp.codegen.kernel.index import Index
from mtmc_lsp.codegen.kernel.kernel import Kernel, Scratch, assemble
from mtmc_lsp.codegen.kernel.snippets import PRODUCT, SUM, TRITON_DTYPES, Code, blocks_text
from mtmc_lsp.codegen.matmul.operands import ProductAxes, mask_needed
from mtmc_lsp.codegen.tile.tile_reductions import LOWEST
from mtmc_lsp.core.dtypes import is_low_precision
from mtmc_lsp.core.graph import Ref, TensorType
from mtmc_lsp.core.sizes import Size, product
from mtmc_lsp.ir.attention_mask import attention_band
from mtmc_lsp.ir.attention_pattern import AttentionForm, grouped_axes
from mtmc_lsp.ir.axes import Axis
from mtmc_lsp.ir.primitives import KernelIR
from mtmc_lsp.ir.regions import Region
from mtmc_lsp.schedule.attention_configs import FEW_QUERIES
from mtmc_lsp.schedule.column_tiles import next_power_of_two
from mtmc_lsp.schedule.configs import AttentionConfig

LOG2E, LN2 = 1.4426950408889634, 0.6931471805599453
MOST_SPLIT_QUERIES = 256
"""Queries (with the heads of a group) up to which a kernel for few queries runs: its buffers hold each result once per part."""


def _all(conditions: Sequence[str]) -> str:
    return " & ".join(f"({text})" if len(conditions) > 1 and not text.isidentifier() else text for text in conditions)


class AttentionWriter(AttentionTiles):
    """Writes the kernel of an attention, or the kernel of its parts if programs share the keys."""

    def __init__(
        self,
        ir: KernelIR,
        region: Region,
        buffers: Mapping[str, TensorType],
        config: AttentionConfig,
        form: AttentionForm,
    ) -> None:
        super().__init__(ir, region, buffers, config, form.result)
        self.form = form
        self.band = attention_band(ir, region, form)
        self.logits = Logits(ir, region, form, self.band)
        self.visible_before: Size | None = None
        """Offset from a query's position to the first key that the mask may hide; None if unknown."""
        self.unit: float | None = None
        """Factor of the running maximum in the logits; None if the maximum is that of exponents of 2."""
        self.scores = ProductAxes(ir, region, form.scores)
        self.grouped = self._group_heads()
        """Heads that are rows of a block of queries; keys and values are the same for all of them."""
        self.batch = tuple(dict.fromkeys((*self.result.batch, *self.scores.batch)))
        self.head, self.width = (self.constant(axes) for axes in (self.scores.k, self.result.n))
        self.parameters.name_size(product([a.size for a in self.scores.m]), "n_queries")
        self.parameters.name_size(product([a.size for a in self.scores.n]), "n_keys")

    def _group_heads(self) -> tuple[Axis, ...]:
        """Make batch axes that keys and values do not depend on (heads of a group) rows, if there are few queries."""
        few = self.size_of(self.scores.m).value(self.ir.graph.sizes) < FEW_QUERIES
        if self.band.limits or not few or self.scores.m != self.result.m:
            return ()
        region = self.result.region
        grouped = tuple(grouped_axes(self.ir.prims, region.inputs, region.table, self.form))
        for axes in (self.scores, self.result):
            axes.batch = tuple(axis for axis in axes.batch if axis not in grouped)
            axes.m = (*grouped, *axes.m)
        return grouped

    def kernel(self, name: str, docstring: str) -> Kernel:
        """The finished kernel."""
        block_m, block_n = self.config.block_m, self.config.block_n
        blocks = {"BLOCK_M": block_m, "BLOCK_N": block_n}
        head_block, width_block = (max(16, next_power_of_two(n)) for n in (self.head, self.width))
        blocks["HEAD"] = head_block
        blocks["WIDTH"] = width_block
        queries, keys = self.size_of(self.scores.m), self.size_of(self.scores.n)
        n_queries, n_keys = self.parameters.size(queries).text, self.parameters.size(keys).text
        dynamic: dict[str, str] = {}
        self.lines += self.block_of_queries(self.band)
        if self.batch:
            self.lines.append("batch = tl.program_id(1).to(tl.int64)")
        m_masks: list[Mask] = []
        if mask_needed(queries, block_m):
            self.lines.append(f"m_mask = EVEN_M | (m < {n_queries})")
            m_masks = [Mask("m_mask", True, False)]
            dynamic["EVEN_M"] = f"n_q % {block_m} == 0"
        self.lines += ["head = tl.arange(0, HEAD)", "width = tl.arange(0, WIDTH)[None, :]"]
        head_row, head_column = (
            self.edge("head[None, :]", self.head, head_block),
            self.edge("head[:, None]", self.head, head_block),
        )
        q = self._operand(self.scores, 0, (self.scores.m, "m"), (self.scores.k, "head[None, :]"),
                          [*m_masks, *self.masks_of(head_row, rows=False)], self.lines,
                          "[BLOCK_M, HEAD]", head_row)  # fmt: skip
        first_statistics = len(self.lines)
        self.lines.append("acc = tl.zeros([BLOCK_M, WIDTH], tl.float32)")
        body = ["n = start + tl.arange(0, BLOCK_N)"]
        n_row = n_column = ""
        if mask_needed(keys, block_n):
            body.append(f"n_mask = EVEN_N | (n < {n_keys})")
            n_row, n_column = "n_mask[None, :]", "n_mask[:, None]"
            dynamic["EVEN_N"] = f"n_k % {block_n} == 0"
        k = self._operand(self.scores, 1, (self.scores.k, "head[:, None]"), (self.scores.n, "n[None, :]"),
                          [*self.masks_of(head_column, rows=True), *self.masks_of(n_row, rows=False)], body,
                          "[HEAD, BLOCK_N]", head_column)  # fmt: skip
        precision = "" if is_low_precision(self._dtype(self.scores)) else ', input_precision="ieee"'
        body.append(f"scores = tl.dot({q}, {k}{precision})")
        body += self._softmax([*m_masks, *self.masks_of(n_row, rows=False)], body, n_row)
        width_edge = self.edge("width", self.width, width_block)
        v = self._operand(self.result, 1, (self.result.k, "n[:, None]"), (self.result.n, "width"),
                          [*self.masks_of(n_column, rows=True), *self.masks_of(width_edge, rows=False)], body,
                          "[BLOCK_N, WIDTH]", n_column)  # fmt: skip
        dtype = self._dtype(self.result)
        weights = f"weights.to({TRITON_DTYPES[dtype]})" if is_low_precision(dtype) else "weights"
        body += [
            f"acc = tl.dot({weights}, {v}, acc * shrink[:, None]{precision})",
            "row_total = row_total * shrink + tl.sum(weights, axis=1)",
            "row_max = new_max",
        ]
        # The unit of the maximum is known now.
        self.lines[first_statistics:first_statistics] = self.first_statistics(
            m_masks, "[BLOCK_M]", has_sink=not self.config.is_split
        )
        self.lines += self._loops(n_keys, body)
        if self.config.is_split:
            self._store_parts(m_masks)
        else:
            self.normalise()
            self.lines += self.statistics()
            self.store(m_masks, width_block)
        grid, sizes = [blocks_text("n_q", block_m)], {"n_q": queries, "n_k": keys}
        if self.batch:
            grid.append("n_batch")
            sizes["n_batch"] = self.size_of(self.batch)
        if self.config.is_split:
            if not queries.is_constant:
                most = max(MOST_SPLIT_QUERIES, queries.value(self.ir.graph.sizes))
                self.limits.append(f"{queries} <= {most}")
            blocks["PARTS"] = self.config.split
            grid.append(str(self.config.split))
        return assemble(
            name,
            self.parameters,
            blocks,
            docstring,
            self.lines,
            grid=tuple(grid),
            grid_sizes=sizes,
            num_warps=self.config.warps,
            num_stages=self.config.stages,
            dynamic=dynamic,
            limits=tuple(dict.fromkeys(self.limits)),
            scratch_written=self.scratch() if self.config.is_split else (),
        )

    @property
    def exponent_factor(self) -> float:
        """Factor of the row maxima in the exponents of base 2."""
        return 1.0 if self.unit is None else self.unit * LOG2E

    def first_statistics(self, m_masks: list[Mask], shape: str, *, has_sink: bool) -> list[str]:
        """The statements that set the maximum and the sum of each row before the first key: those of the sink, or of no logit."""
        if not self.form.sink or not has_sink:
            return [
                f"row_max = tl.full({shape}, {LOWEST['float32']}, tl.float32)",
                f"row_total = tl.zeros({shape}, tl.float32)",
            ]
        lines: list[str] = []
        sink = self.tile((self.result.m, "m"), ((), ""), m_masks, lines, {}, self.form.sink, widen=True)
        text = sink.text if sink.rows else f"tl.full([BLOCK_M, 1], {sink.text}, tl.float32)"
        factor = LOG2E if self.unit is None else 1.0 / self.unit
        scaled = text if factor == 1.0 else f"{sink.at(PRODUCT) if sink.rows else text} * {factor!r}"
        return [
            "# The sink is a logit of each row, without a value.",
            *lines,
            f"row_max = tl.reshape(tl.broadcast_to({scaled}, [BLOCK_M, 1]), {shape})",
            f"row_total = tl.full({shape}, 1.0, tl.float32)",
        ]

    def normalise(self) -> None:
        """Add the statements that divide the results by the sums of their weights."""
        if self.form.zero_if_fully_masked:
            self.lines.append("row_total = tl.where(row_total == 0.0, 1.0, row_total)")
        self.lines.append("acc = acc / row_total[:, None]")

    def scratch(self) -> tuple[tuple[str, Scratch], ...]:
        """Pointers to the parts' results, maxima and sums, and their buffers."""
        rows = Size.of(self.config.split) * self.size_of(self.batch) * self.size_of(self.scores.m)
        width = Size.of(max(16, next_power_of_two(self.width)))
        buffers = (
            Scratch("parts", (rows, width), "float32"),
            Scratch("maxima", (rows,), "float32"),
            Scratch("totals", (rows,), "float32"),
        )
        return tuple((f"{buffer.name}_ptr", buffer) for buffer in buffers)

    def row_of_part(self) -> str:
        """The statement that computes the rows of a part in the buffers."""
        queries = self.parameters.size(self.size_of(self.scores.m)).text
        block = "tl.cast(part, tl.int64)"
        if self.batch:
            block = f"({block} * {self.parameters.size(self.size_of(self.batch)).at(PRODUCT)} + batch)"
        return f"row = {block} * {queries} + m"

    def _store_parts(self, m_masks: list[Mask]) -> None:
        mask = f", mask={m_masks[0].text}" if m_masks else ""
        self.lines += [
            self.row_of_part(),
            f"tl.store(parts_ptr + row * WIDTH + width, acc{mask})",
            f"tl.store(maxima_ptr + row, row_max[:, None]{mask})",
            f"tl.store(totals_ptr + row, row_total[:, None]{mask})",
        ]

    def _loops(self, n_keys: str, body: list[str]) -> list[str]:
        """The loop over the keys that any query of the block may see; it starts at a multiple of the block size."""
        if self.config.is_split:
            return [
                "# Each part of the keys has a separate program.",
                f"part = tl.program_id({2 if self.batch else 1})",
                f"part_keys = tl.cdiv(tl.cdiv({n_keys}, BLOCK_N), PARTS) * BLOCK_N",
                f"for start in range(part * part_keys, tl.minimum((part + 1) * part_keys, {n_keys}), BLOCK_N):",
                *(f"    {line}" for line in body),
            ]
        if self.band.first is None and self.band.last is None:
            return [f"for start in range(0, {n_keys}, BLOCK_N):", *(f"    {line}" for line in body)]
        first, end, lines = "0", n_keys, []
        if self.band.first is not None:
            lines += [
                "# The queries of this block see only keys in this range.",
                f"first_key = tl.maximum({self.shifted('first_query', self.band.first)}, 0) // BLOCK_N * BLOCK_N",
            ]
            first = "first_key"
        if self.band.last is not None:
            if self.band.first is None:
                lines.append("# The queries of this block see no key from end_key on.")
            lines.append(f"end_key = tl.minimum({self.shifted('first_query + BLOCK_M', self.band.last)}, {n_keys})")
            end = "end_key"
        if self.visible_before is None:
            return [*lines, f"for start in range({first}, {end}, BLOCK_N):", *(f"    {line}" for line in body)]
        shared = f"tl.minimum({self.shifted('first_query', self.visible_before)}, {end})"
        if not (self.visible_before.is_constant and self.visible_before.constant >= 0):
            shared = f"tl.maximum({shared}, 0)"
        return [
            *lines,
            "# All queries of this block see the keys before edge_key, so these need no mask.",
            f"edge_key = {shared} // BLOCK_N * BLOCK_N",
            "for at_edge in tl.static_range(2):",
            f"    for start in range(edge_key if at_edge else {first}, {end} if at_edge else edge_key, BLOCK_N):",
            *(f"        {line}" for line in body),
        ]

    def _dtype(self, axes: ProductAxes) -> str:
        return self.ir.prims[axes.prim.inputs[1]].dtype

    def _operand(
        self,
        axes: ProductAxes,
        side: int,
        rows: Side,
        cols: Side,
        masks: list[Mask],
        lines: list[str],
        shape: str,
        inside: str,
    ) -> str:
        """A tile of an operand in the product's dtype; 0 where ``inside`` (the bound of the contracted axis) is false."""
        is_plain = axes.is_plain(side)
        name = axes.prim.inputs[side]
        fixed = self.grouped if side == 1 else ()
        code = self.tile(rows, cols, masks, lines, {}, name, widen=not is_plain, fixed=fixed)
        code = axes.over_tile(side, code, shape, axes.k, inside)
        dtype = self.ir.prims[name].dtype
        if is_plain or not is_low_precision(dtype):
            return code.text
        variable = self.parameters.names.unique("operand")
        lines.append(f"{variable} = {code.at(100)}.to({TRITON_DTYPES[dtype]})")
        return variable

    def _softmax(self, masks: list[Mask], lines: list[str], n_row: str) -> list[str]:
        """Statements of one online-softmax step. Operations on the scores before the softmax are appended to ``lines``.

        The exponentials use base 2, for which the hardware has an instruction. The conversion factor and a constant factor of all
        logits form one constant c > 0: ``2 ** (c * x - c * max)``. As a fused multiply-add, the rounding error of c * max (half
        an ulp) is the same for a whole row and cancels in the quotient. Beyond 2^31 it would overflow, as in PyTorch's 16-bit
        attention. For float32, and for logits with operations other than a mask and a factor, the difference is computed first.

        Args:
            lines: the loop body so far.
            n_row: the bounds check of the keys; empty if not needed.
        """
        values = {self.form.scores.name: Code("scores", "float32", True, True)}
        rows, cols = (self.scores.m, "m"), (self.scores.n, "n[None, :]")
        accesses: list[Index] = []
        for is_final in (False, True):
            tile = self.make_tile(rows, cols, masks, lines if is_final else [], values, accesses, is_final, widen=True)
            at = tile.expressions.tile_index(self.form.logits)
            peeled = self.logits.peeled(tile.expressions, self.form.logits, at)
            accesses = tile.expressions.accesses
        self.limit(accesses)
        self.visible_before = peeled.visible_before
        factor = peeled.factor * LOG2E
        # Other operations, such as adding a mask of the lowest finite number, may become infinite in base 2.
        is_fused = is_low_precision(self._dtype(self.scores)) and peeled.text == "scores"
        edge_conditions = [*peeled.at_edge, *([n_row] if n_row else [])]
        statements = [] if peeled.text == "scores" else [f"scores = {peeled.text}"]
        if peeled.allowed:
            statements.append(f'scores = tl.where({_all(peeled.allowed)}, scores, -float("inf"))')
        if self.visible_before is not None:
            statements += ["if at_edge:", f'    scores = tl.where({_all(edge_conditions)}, scores, -float("inf"))']
        elif edge_conditions:
            statements.append(f'scores = tl.where({_all(edge_conditions)}, scores, -float("inf"))')
        if peeled.is_product and not is_fused:
            statements += [
                "# Prevents fusion of the product into the subtraction: it must be rounded as in the maximum.",
                'scores = tl.where(scores == scores, scores, float("nan"))',
            ]
        statements.append("# exp2 is a hardware instruction.")
        if is_fused:
            self.unit = None
            statements += [
                f"new_max = tl.maximum(row_max, tl.max(scores, axis=1) * {factor!r})",
                f"weights = tl.exp2(scores * {factor!r} - new_max[:, None])",
                "shrink = tl.exp2(row_max - new_max)",
            ]
        else:
            self.unit = peeled.factor
            statements += [
                "new_max = tl.maximum(row_max, tl.max(scores, axis=1))",
                f"weights = tl.exp2((scores - new_max[:, None]) * {factor!r})",
                f"shrink = tl.exp2((row_max - new_max) * {factor!r})",
            ]
        return statements

    def store(self, m_masks: list[Mask], width_block: int) -> None:
        """Add the operations after the attention, and the stores."""
        masks = [*m_masks, *self.masks_of(self.edge("width", self.width, width_block), rows=False)]
        values = {self.form.result.name: Code("acc", "float32", True, True)}
        rows, cols = (self.result.m, "m"), (self.result.n, "width")
        accesses: list[Index] = []
        for is_final in (False, True):
            lines: list[str] = self.lines if is_final else []
            tile = self.make_tile(rows, cols, masks, lines, values, accesses, is_final, widen=True)
            for ref in self._results():
                prim = self.ir.of(ref)
                value = tile.value(prim.name)
                offset = tile.expressions.offset(self.ir.graph.type_of(ref), tile.expressions.tile_index(prim.name))
                pointer = tile.expressions.parameters.output(ref)
                if not self.result.m:
                    # A single query has no term in the offset. The tile has more rows; the mask keeps one.
                    offset = Code(f"{offset.at(SUM)} + m", offset.dtype, True, offset.cols, SUM)
                mask = tile.expressions.mask_argument(offset, None)
                lines.append(f"tl.store({Expressions.address(pointer, offset)}, {value.text}{mask})")
            accesses = tile.expressions.accesses
        self.limit(accesses)
        for ref in self.result.region.outputs:
            if ref not in self._results():
                self._store_row(ref, m_masks)

    def _results(self) -> list[Ref]:
        """The outputs that have the axes of the second product."""
        return [
            ref for ref in self.result.region.outputs if not self.form.is_statistic(self.ir.prims, self.ir.of(ref).name)
        ]

    @property
    def saves_statistics(self) -> bool:
        """Whether the backward pass reads the maximum and the sum of each row."""
        return len(self._results()) < len(self.result.region.outputs)

    def statistics(self) -> list[str]:
        """The statements that compute the maximum of each row of logits and the logarithm of its sum, if they are saved."""
        if not self.saves_statistics:
            return []
        if self.unit is None:
            return [f"largest = row_max * {LN2!r}", f"log_total = tl.log2(row_total) * {LN2!r}"]
        largest = "row_max" if self.unit == 1.0 else f"row_max * {self.unit!r}"
        return [f"largest = {largest}", "log_total = tl.log(row_total)"]

    def _store_row(self, ref: Ref, m_masks: list[Mask]) -> None:
        """Store the maximum of each row, or the logarithm of its sum."""
        name = self.ir.of(ref).name
        variable = "log_total" if self.form.is_log_total(self.ir.prims, name) else "largest"
        values = {name: Code(f"{variable}[:, None]", "float32", True, False)}
        accesses: list[Index] = []
        for is_final in (False, True):
            tile = self.make_tile((self.result.m, "m"), ((), ""), m_masks, self.lines if is_final else [], values, accesses,
                                  is_final, widen=True)  # fmt: skip
            offset = tile.expressions.offset(self.ir.graph.type_of(ref), tile.expressions.tile_index(name))
            accesses = tile.expressions.accesses
        pointer = self.parameters.output(ref)
        mask = tile.expressions.mask_argument(offset, None)
        self.lines.append(f"tl.store({Expressions.address(pointer, offset)}, {values[name].text}{mask})")
