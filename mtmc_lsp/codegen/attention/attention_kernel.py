"""Attention in one pass: a block of queries stays in registers while keys and values go by.

The running maximum and sum follow the online softmax (Milakov & Gimelshein, arXiv 1805.02867; Dao et al., arXiv 2205.14135).
Whatever is done elementwise to the scores before the softmax (scale, mask, bias, causality) is done on the tile.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from mtmc_lsp.codegen.attention.logits import Logits
from mtmc_lsp.codegen.kernel.axis_groups import Mask
from mtmc_lsp.codegen.kernel.expressions import Expressions
from mtmc_lsp.codegen.kernel.index import Index
from mtmc_lsp.codegen.kernel.kernel import Kernel, assemble
from mtmc_lsp.codegen.kernel.parameters import Parameters
from mtmc_lsp.codegen.kernel.snippets import SUM, TRITON_DTYPES, Code, blocks_text
from mtmc_lsp.codegen.matmul.operands import ProductAxes, Tile, int32_limit, mask_needed
from mtmc_lsp.codegen.module.naming import ATTENTION_NAMES
from mtmc_lsp.codegen.tile.tile_reductions import LOWEST
from mtmc_lsp.core.dtypes import is_half
from mtmc_lsp.core.graph import TensorType
from mtmc_lsp.core.protocols import CannotCode
from mtmc_lsp.core.sizes import Size, product
from mtmc_lsp.ir.attention_mask import attention_band
from mtmc_lsp.ir.attention_pattern import AttentionForm, attention_form
from mtmc_lsp.ir.axes import Axis
from mtmc_lsp.ir.primitives import KernelIR
from mtmc_lsp.ir.regions import Region
from mtmc_lsp.schedule.column_tiles import next_power_of_two
from mtmc_lsp.schedule.configs import AttentionConfig

LOG2E = 1.4426950408889634
LARGEST_HEAD = 256
"""Head sizes above this do not fit in registers."""
Side = tuple[tuple[Axis, ...], str]


def _all(conditions: Sequence[str]) -> str:
    return " & ".join(f"({text})" if len(conditions) > 1 and not text.isidentifier() else text for text in conditions)


def write_attention_kernel(
    ir: KernelIR,
    region: Region,
    buffers: Mapping[str, TensorType],
    config: AttentionConfig,
    name: str,
    docstring: str,
) -> Kernel:
    """Render an attention region.

    Raises:
        CannotCode: something in it has no Triton form.
    """
    form = attention_form([ir.prims[prim] for prim in region.prims])
    if form is None:
        raise CannotCode("this is no attention")
    return _AttentionWriter(ir, region, buffers, config, form).kernel(name, docstring)


class _AttentionWriter:
    def __init__(
        self,
        ir: KernelIR,
        region: Region,
        buffers: Mapping[str, TensorType],
        config: AttentionConfig,
        form: AttentionForm,
    ) -> None:
        self.ir = ir
        self.buffers = buffers
        self.config = config
        self.form = form
        self.band = attention_band(ir, region, form)
        self.logits = Logits(ir, region, form, self.band)
        self.sure: Size | None = None
        """Keys this far ahead of a query's own position are the first that the mask may hide from it."""
        self.scores = ProductAxes(ir, region, form.scores)
        self.result = ProductAxes(ir, region, form.result)
        if self.scores.n != self.result.k or self.scores.m != self.result.m:
            raise CannotCode("the second product does not follow the first")
        self.batch = tuple(dict.fromkeys((*self.result.batch, *self.scores.batch)))
        self.parameters = Parameters(ir, buffers, ATTENTION_NAMES)
        self.lines: list[str] = []
        self.limits: list[str] = []
        self.head, self.width = (self._constant(axes) for axes in (self.scores.k, self.result.n))
        self.parameters.name_size(product([a.size for a in self.scores.m]), "n_queries")
        self.parameters.name_size(product([a.size for a in self.scores.n]), "n_keys")

    def _constant(self, axes: tuple[Axis, ...]) -> int:
        """A head size as a number; where it is a named size, the kernel is for the workload's value alone."""
        size = product([axis.size for axis in axes])
        number = size.value(self.ir.graph.sizes)
        if number > LARGEST_HEAD:
            raise CannotCode(f"a head size of {number}")
        if not size.is_constant:
            self.limits.append(f"{size} == {number}")
        return number

    def _size(self, axes: tuple[Axis, ...]) -> Size:
        return product([axis.size for axis in axes])

    def kernel(self, name: str, docstring: str) -> Kernel:
        """The finished kernel."""
        block_m, block_n = self.config.block_m, self.config.block_n
        blocks = {"BLOCK_M": block_m, "BLOCK_N": block_n}
        head_block, width_block = (max(16, next_power_of_two(n)) for n in (self.head, self.width))
        blocks["HEAD"] = head_block
        blocks["WIDTH"] = width_block
        queries, keys = self._size(self.scores.m), self._size(self.scores.n)
        n_queries, n_keys = self.parameters.size(queries).text, self.parameters.size(keys).text
        dynamic: dict[str, str] = {}
        self.lines += self._block_of_queries()
        if self.batch:
            self.lines.append("batch = tl.program_id(1).to(tl.int64)")
        m_masks: list[Mask] = []
        if mask_needed(queries, block_m):
            self.lines.append(f"m_mask = EVEN_M | (m < {n_queries})")
            m_masks = [Mask("m_mask", True, False)]
            dynamic["EVEN_M"] = f"n_q % {block_m} == 0"
        self.lines += ["head = tl.arange(0, HEAD)", "width = tl.arange(0, WIDTH)[None, :]"]
        head_row, head_column = (
            self._edge("head[None, :]", self.head, head_block),
            self._edge("head[:, None]", self.head, head_block),
        )
        q = self._operand(self.scores, 0, (self.scores.m, "m"), (self.scores.k, "head[None, :]"),
                          [*m_masks, *self._masks(head_row, rows=False)], self.lines,
                          "[BLOCK_M, HEAD]", head_row)  # fmt: skip
        self.lines += [
            f"row_max = tl.full([BLOCK_M], {LOWEST['float32']}, tl.float32)",
            "row_total = tl.zeros([BLOCK_M], tl.float32)",
            "acc = tl.zeros([BLOCK_M, WIDTH], tl.float32)",
        ]
        body = ["n = start + tl.arange(0, BLOCK_N)"]
        n_row = n_column = ""
        if mask_needed(keys, block_n):
            body.append(f"n_mask = EVEN_N | (n < {n_keys})")
            n_row, n_column = "n_mask[None, :]", "n_mask[:, None]"
            dynamic["EVEN_N"] = f"n_k % {block_n} == 0"
        k = self._operand(self.scores, 1, (self.scores.k, "head[:, None]"), (self.scores.n, "n[None, :]"),
                          [*self._masks(head_column, rows=True), *self._masks(n_row, rows=False)], body,
                          "[HEAD, BLOCK_N]", head_column)  # fmt: skip
        precision = "" if is_half(self._dtype(self.scores)) else ', input_precision="ieee"'
        body.append(f"scores = tl.dot({q}, {k}{precision})")
        body += self._softmax([*m_masks, *self._masks(n_row, rows=False)], body, n_row)
        width_edge = self._edge("width", self.width, width_block)
        v = self._operand(self.result, 1, (self.result.k, "n[:, None]"), (self.result.n, "width"),
                          [*self._masks(n_column, rows=True), *self._masks(width_edge, rows=False)], body,
                          "[BLOCK_N, WIDTH]", n_column)  # fmt: skip
        dtype = self._dtype(self.result)
        weights = f"weights.to({TRITON_DTYPES[dtype]})" if is_half(dtype) else "weights"
        body += [
            f"acc = tl.dot({weights}, {v}, acc * shrink[:, None]{precision})",
            "row_total = row_total * shrink + tl.sum(weights, axis=1)",
            "row_max = new_max",
        ]
        self.lines += self._loops(n_keys, body)
        if self.form.zero_if_fully_masked:
            self.lines.append("row_total = tl.where(row_total == 0.0, 1.0, row_total)")
        self.lines.append("acc = acc / row_total[:, None]")
        self._store(m_masks, width_block)
        grid, sizes = [blocks_text("n_q", block_m)], {"n_q": queries, "n_k": keys}
        if self.batch:
            grid.append("n_batch")
            sizes["n_batch"] = self._size(self.batch)
            if not self._size(self.batch).is_constant:
                self.limits.append(f"{self._size(self.batch)} <= 65535")
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
        )

    def _block_of_queries(self) -> list[str]:
        if not self.band.limits:
            return ["m = (tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M))[:, None]"]
        # The last blocks of a causal mask have the most keys, so they begin first and none is left over at the end.
        longest_first = self.band.first is None
        block = "tl.num_programs(0) - 1 - tl.program_id(0)" if longest_first else "tl.program_id(0)"
        start = f"({block}) * BLOCK_M" if longest_first else f"{block} * BLOCK_M"
        return [f"first_query = {start}", "m = (first_query + tl.arange(0, BLOCK_M))[:, None]"]

    def _loops(self, n_keys: str, body: list[str]) -> list[str]:
        """The walk over the keys that some query of the block may see, the first a multiple of the block."""
        if self.band.first is None and self.band.last is None:
            return [f"for start in range(0, {n_keys}, BLOCK_N):", *(f"    {line}" for line in body)]
        first, end, lines = "0", n_keys, []
        if self.band.first is not None:
            lines += [
                "# No query of this block sees a key before or behind these.",
                f"first_key = tl.maximum({self._shifted('first_query', self.band.first)}, 0) // BLOCK_N * BLOCK_N",
            ]
            first = "first_key"
        if self.band.last is not None:
            if self.band.first is None:
                lines.append("# No query of this block sees a key behind these.")
            lines.append(f"end_key = tl.minimum({self._shifted('first_query + BLOCK_M', self.band.last)}, {n_keys})")
            end = "end_key"
        if self.sure is None:
            return [*lines, f"for start in range({first}, {end}, BLOCK_N):", *(f"    {line}" for line in body)]
        shared = f"tl.minimum({self._shifted('first_query', self.sure)}, {end})"
        if not (self.sure.is_constant and self.sure.constant >= 0):
            shared = f"tl.maximum({shared}, 0)"
        return [
            *lines,
            "# All of them see the keys before this one, whose scores need no mask.",
            f"edge_key = {shared} // BLOCK_N * BLOCK_N",
            "for at_edge in tl.static_range(2):",
            f"    for start in range(edge_key if at_edge else {first}, {end} if at_edge else edge_key, BLOCK_N):",
            *(f"        {line}" for line in body),
        ]

    def _shifted(self, position: str, size: Size) -> str:
        if size.is_constant:
            number = size.constant
            return position if number == 0 else f"{position} {'-' if number < 0 else '+'} {abs(number)}"
        return f"{position} + {self.parameters.size(size).at(SUM)}"

    def _dtype(self, axes: ProductAxes) -> str:
        return self.ir.prims[axes.prim.inputs[1]].dtype

    @staticmethod
    def _edge(name: str, size: int, block: int) -> str:
        return f"({name} < {size})" if size != block else ""

    @staticmethod
    def _masks(text: str, *, rows: bool) -> list[Mask]:
        return [Mask(text, rows, not rows)] if text else []

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
        """A tile of an operand, in the dtype of the product, 0 where the condition on what is summed does not hold."""
        plain = axes.is_plain(side)
        name = axes.prim.inputs[side]
        code = self._tile(rows, cols, masks, lines, {}, name, widen=not plain)
        code = axes.over_tile(side, code, shape, axes.k, inside)
        dtype = self.ir.prims[name].dtype
        if plain or not is_half(dtype):
            return code.text
        variable = self.parameters.names.unique("operand")
        lines.append(f"{variable} = {code.at(100)}.to({TRITON_DTYPES[dtype]})")
        return variable

    def _tile(
        self,
        rows: Side,
        cols: Side,
        masks: list[Mask],
        lines: list[str],
        known: Mapping[str, Code],
        prim: str,
        *,
        widen: bool = True,
    ) -> Code:
        """Evaluate a primitive over a tile, first with all axes apart to see which run as one."""
        accesses: list[Index] = []
        for final in (False, True):
            tile = self._make_tile(rows, cols, masks, lines if final else [], known, accesses, final, widen=widen)
            code = tile.value(prim)
            accesses = tile.expressions.accesses
        self._limit(accesses)
        return code

    def _make_tile(
        self,
        rows: Side,
        cols: Side,
        masks: list[Mask],
        lines: list[str],
        known: Mapping[str, Code],
        accesses: list[Index],
        final: bool,
        *,
        widen: bool,
    ) -> Tile:
        parameters = self.parameters if final else Parameters(self.ir, self.buffers, ATTENTION_NAMES)
        return Tile(
            self.result,
            parameters,
            rows,
            cols,
            masks,
            lines,
            known=known,
            apart=not final,
            accesses=accesses,
            widen=widen,
        )

    def _softmax(self, masks: list[Mask], lines: list[str], n_row: str) -> list[str]:
        """Statements of one step of the online softmax; what the scores go through before is added to ``lines``.

        Exponentials are in powers of two, which the hardware computes directly, and a constant factor of all logits goes
        into the same multiplication: ``2 ** (c * x - c * max)``, c above 0. In one fused operation an error of c * max, of
        half a unit in its last place, is the same for a whole row and falls out of the quotient; beyond 2^31 it would
        overflow, as in PyTorch's own attentions of half precision. In full precision, and where more than a mask and a
        factor is done to the scores, the difference is taken first.

        Args:
            masks: of the tile.
            lines: the loop's body so far.
            n_row: the condition that keys are there, if there is any.
        """
        known = {self.form.scores.name: Code("scores", "float32", True, True)}
        rows, cols = (self.scores.m, "m"), (self.scores.n, "n[None, :]")
        accesses: list[Index] = []
        for final in (False, True):
            tile = self._make_tile(rows, cols, masks, lines if final else [], known, accesses, final, widen=True)
            at = tile.expressions.own_index(self.form.logits)
            peeled = self.logits.peeled(tile.expressions, self.form.logits, at)
            accesses = tile.expressions.accesses
        self._limit(accesses)
        self.sure = peeled.sure
        factor = peeled.factor * LOG2E
        # What else enters, a mask of the least number say, may be infinite in powers of two.
        fused = is_half(self._dtype(self.scores)) and peeled.text == "scores"
        edge = [*peeled.at_edge, *([n_row] if n_row else [])]
        statements = [] if peeled.text == "scores" else [f"scores = {peeled.text}"]
        if peeled.allowed:
            statements.append(f'scores = tl.where({_all(peeled.allowed)}, scores, -float("inf"))')
        if self.sure is not None:
            statements += ["if at_edge:", f'    scores = tl.where({_all(edge)}, scores, -float("inf"))']
        elif edge:
            statements.append(f'scores = tl.where({_all(edge)}, scores, -float("inf"))')
        if peeled.is_product and not fused:
            statements += [
                "# Rounded as it is for the maximum: a compiler would make the product a part of the subtraction.",
                'scores = tl.where(scores == scores, scores, float("nan"))',
            ]
        statements.append("# In powers of two, which the hardware computes directly.")
        if fused:
            statements += [
                f"new_max = tl.maximum(row_max, tl.max(scores, axis=1) * {factor!r})",
                f"weights = tl.exp2(scores * {factor!r} - new_max[:, None])",
                "shrink = tl.exp2(row_max - new_max)",
            ]
        else:
            statements += [
                "new_max = tl.maximum(row_max, tl.max(scores, axis=1))",
                f"weights = tl.exp2((scores - new_max[:, None]) * {factor!r})",
                f"shrink = tl.exp2((row_max - new_max) * {factor!r})",
            ]
        return statements

    def _limit(self, accesses: list[Index]) -> None:
        """Offsets inside a tile are 32-bit; those from batch to batch are not."""
        for access in accesses:
            extent = product([])
            for variable, step in access.terms:
                if variable.rows or variable.cols:
                    extent = extent + step * variable.size
            if not extent.is_constant:
                self.limits.append(int32_limit(extent))

    def _store(self, m_masks: list[Mask], width_block: int) -> None:
        masks = [*m_masks, *self._masks(self._edge("width", self.width, width_block), rows=False)]
        known = {self.form.result.name: Code("acc", "float32", True, True)}
        rows, cols = (self.result.m, "m"), (self.result.n, "width")
        accesses: list[Index] = []
        for final in (False, True):
            lines: list[str] = self.lines if final else []
            tile = self._make_tile(rows, cols, masks, lines, known, accesses, final, widen=True)
            for ref in self.result.region.outputs:
                prim = self.ir.of(ref)
                value = tile.value(prim.name)
                offset = tile.expressions.offset(self.ir.graph.type_of(ref), tile.expressions.own_index(prim.name))
                pointer = tile.expressions.parameters.output(ref)
                mask = tile.expressions.mask_argument(offset, None)
                lines.append(f"tl.store({Expressions.address(pointer, offset)}, {value.text}{mask})")
            accesses = tile.expressions.accesses
