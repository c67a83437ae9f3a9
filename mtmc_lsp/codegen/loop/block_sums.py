"""Reductions, scans and products of blocks."""

from __future__ import annotations

from collections.abc import Sequence

from mtmc_lsp.codegen.kernel.snippets import ATOM, PRODUCT, SUM, TRITON_DTYPES, Code
from mtmc_lsp.codegen.loop.block_moves import BlockMoves
from mtmc_lsp.codegen.loop.block_values import Positions, numbered
from mtmc_lsp.codegen.tile.reduction_formulas import neutral, only_for_softmax
from mtmc_lsp.core.dtypes import compute_dtype, is_float, is_low_precision
from mtmc_lsp.ir.axes import Axis
from mtmc_lsp.ir.loops.blocks import changed_dims
from mtmc_lsp.ir.primitives import Prim, ProductDims

LEAST_DOT = 16
"""Elements of the shortest axis of a product that ``tl.dot`` computes."""
DOT_DTYPES = ("float32", "float16", "bfloat16")
COMBINED = {"max": "_max_nan", "min": "_min_nan"}
"""Functions that combine two elements of a running extremum."""


class BlockSums(BlockMoves):
    """Combines elements along axes of a block."""

    def _over(self, prim: Prim, neutral_element: str, code: Code, along: Positions) -> tuple[str, Positions]:
        """An operand with the axes ``along`` and the neutral element outside of the tensor."""
        source = prim.inputs[0]
        layout, positions = self._layout(source), self.positions[source]
        needed = tuple(sorted({*positions, *along}))
        text = code.text
        if needed != positions:
            chosen = [layout[position] for position in needed]
            back = tuple(needed.index(position) for position in positions)
            text = self.spread(code, back, chosen)
        masks = [
            self._expanded(Code(mask, "bool"), (position,), needed)
            for position in along
            if (mask := self.axes.mask(layout[position]))
        ]
        return (f"tl.where({' & '.join(masks)}, {text}, {neutral_element})" if masks else text), needed

    def _reduced(self, prim: Prim) -> tuple[Code, Positions]:
        source = prim.inputs[0]
        dims = changed_dims(prim, self.ir)
        layout = self.form.layout(source)
        along = tuple(position for position, (dim, _) in enumerate(layout) if dim in dims)
        code = self.value(source)
        if prim.fn == "sum_exp":
            top = self._expanded(
                self.value(prim.inputs[1]), self._places(prim.inputs[1], source), self.positions[source]
            )
            code = Code(f"tl.exp({code.at(SUM)} - {top})", prim.dtype, True)
        elif prim.fn in ("any", "all"):
            code = Code(f"{code.at(ATOM)}.to(tl.int32)", "int32", True)
        elif not prim.fn.startswith("arg"):
            code = self.cast(code, prim.dtype)
        text, needed = self._over(prim, neutral(prim, self.ir), code, along)
        kept = tuple(position for position in needed if position not in along)
        remaining = [position for position in range(len(layout)) if position not in along]
        positions = tuple(remaining.index(position) for position in kept)
        if prim.fn.startswith("arg"):
            return self._position(prim, text, needed, along[0]), positions
        has_position = self._has_position(prim)
        text = self._as_variable(text, "values") if has_position else text
        for position in reversed(along):
            text = self._collapsed(prim, text, needed.index(position))
        text = self._as_variable(text, "extreme") if has_position else text
        if prim.fn in ("any", "all"):
            text = f"({text} != 0)"
        return Code(text, compute_dtype(prim.dtype), bool(positions)), positions

    def _has_position(self, prim: Prim) -> bool:
        """Whether the position of an extreme value is computed as well. Then both share the tile and the extreme value."""
        others = (self.ir.prims[name] for name in self.region.prims)
        same = (
            other for other in others if other.inputs == prim.inputs and other.attrs.get("dims") == prim.attrs["dims"]
        )
        return any(other.fn == f"arg{prim.fn}" for other in same)

    def _collapsed(self, prim: Prim, text: str, axis: int) -> str:
        if prim.fn in ("sum", "sum_exp"):
            return f"tl.sum({text}, axis={axis})"
        if prim.fn in ("any", "all"):
            return f"tl.{'max' if prim.fn == 'any' else 'min'}({text}, axis={axis})"
        if prim.fn == "prod":
            return f"tl.reduce({text}, {axis}, _multiply)"
        if not is_float(prim.dtype) or only_for_softmax(prim, self.region, self.ir):
            return f"tl.{prim.fn}({text}, axis={axis})"
        return f"tl.reduce({text}, {axis}, {COMBINED[prim.fn]})"

    def _position(self, prim: Prim, text: str, needed: Positions, along: int) -> Code:
        """The first position of an extreme value; NaN counts as the extreme of both maximum and minimum."""
        values = self._as_variable(text, "values")
        dtype = self.ir.prims[prim.inputs[0]].dtype
        rank, fn = needed.index(along), prim.fn.removeprefix("arg")
        best = f"tl.reduce({values}, {rank}, {COMBINED[fn]})" if is_float(dtype) else f"tl.{fn}({values}, axis={rank})"
        rest = tuple(position for position in needed if position != along)
        best = self._expanded(Code(self._as_variable(best, "extreme"), dtype), rest, needed)
        is_best = f"({values} == {best}) | ({values} != {values})" if is_float(dtype) else f"{values} == {best}"
        axis = self._layout(prim.inputs[0])[along]
        index = self._expanded(Code(self.axes.index(axis), "int32"), (along,), needed)
        first = f"tl.min(tl.where({is_best}, {index}, {self.axes.block(axis)}), axis={rank})"
        return Code(f"{first}.to(tl.int64)", "int64", bool(rest))

    def _as_variable(self, text: str, preferred_name: str) -> str:
        """A variable for an expression, the same one each time."""
        if text.isidentifier():
            return text
        if text not in self.variables:
            self.variables[text] = self.parameters.names.unique(preferred_name)
            self.emit(f"{self.variables[text]} = {text}", False)
        return self.variables[text]

    def _scanned(self, prim: Prim) -> tuple[Code, Positions]:
        source, (dim,) = prim.inputs[0], changed_dims(prim, self.ir)
        at = self._along(self.ir.prims[source], dim)
        assert at is not None
        text, needed = self._over(prim, neutral(prim, self.ir), self.cast(self.value(source), prim.dtype), (at,))
        rank, backwards = needed.index(at), ", reverse=True" if prim.attrs.get("reverse") else ""
        function = {"sum": "tl.cumsum", "prod": "tl.cumprod"}.get(prim.fn)
        if function is not None:
            return Code(f"{function}({text}, axis={rank}{backwards})", compute_dtype(prim.dtype), True), needed
        text = f"tl.associative_scan({text}, {rank}, {COMBINED[prim.fn]}{backwards})"
        return Code(text, compute_dtype(prim.dtype), True), needed

    def _product_of(self, prim: Prim) -> tuple[Code, Positions]:
        """A product of two blocks: by ``tl.dot``, or as a sum of terms where an axis is short."""
        left, right = prim.inputs[:2]
        dims = ProductDims.of(prim)
        rows, summed = dims.batch + dims.rows, dims.batch + dims.rows + dims.summed
        # Dimensions of the terms: batch, rows, summed, columns.
        left_dims = list(range(summed))
        right_dims = [*range(dims.batch), *range(rows, rows + dims.summed), *range(summed, summed + dims.columns)]
        result_dims = [*range(rows), *range(summed, summed + dims.columns)]
        terms: dict[tuple[int, int], Axis] = {}
        for name, places in ((left, left_dims), (right, right_dims)):
            for (dim, number), axis in zip(numbered(self.form.layout(name)), self._layout(name), strict=True):
                terms[places[dim], number] = axis
        order = sorted(terms)
        along = tuple(i for i, (dim, _) in enumerate(order) if rows <= dim < summed)
        layout = [terms[key] for key in order]
        operands: list[tuple[Code, Positions]] = []
        for name, places in ((left, left_dims), (right, right_dims)):
            keys = [(places[dim], number) for dim, number in numbered(self.form.layout(name))]
            code = self.cast(self.value(name), self.ir.prims[name].dtype)
            operands.append((code, tuple(order.index(keys[position]) for position in self.positions[name])))
        dtype = compute_dtype(prim.dtype)
        result = [i for i, (dim, _) in enumerate(order) if dim in result_dims]
        if self._is_dot(prim, layout, along, order, operands):
            return Code(self._dot(prim, layout, operands, along[0]), dtype, True), (0, 1)
        present = tuple(sorted({position for _, positions in operands for position in positions} | set(along)))
        factors = [self._expanded(code, positions, present) for code, positions in operands]
        text = f"{self._bracket(factors[0], operands[0][0])} * {self._bracket(factors[1], operands[1][0])}"
        if not along:
            # The summed dimension has one element.
            return Code(text, dtype, True, False, PRODUCT), tuple(result.index(position) for position in present)
        masks = [
            self._expanded(Code(mask, "bool"), (position,), present)
            for position in along
            if (mask := self.axes.mask(layout[position]))
        ]
        if not set(along) <= {position for _, positions in operands for position in positions}:
            text = f"tl.broadcast_to({text}, {self.axes.shape([layout[position] for position in present])})"
        text = f"tl.where({' & '.join(masks)}, {text}, 0.0)" if masks else text
        for position in reversed(along):
            text = f"tl.sum({text}, axis={present.index(position)})"
        kept = tuple(result.index(position) for position in present if position not in along)
        return Code(text, dtype, bool(kept)), kept

    @staticmethod
    def _bracket(text: str, code: Code) -> str:
        return code.at(PRODUCT) if text == code.text else text

    def _is_dot(
        self,
        prim: Prim,
        layout: Sequence[Axis],
        along: Positions,
        order: Sequence[tuple[int, int]],
        operands: Sequence[tuple[Code, Positions]],
    ) -> bool:
        is_plain = len(order) == 3 and along == (1,) and [len(positions) for _, positions in operands] == [2, 2]
        return is_plain and prim.dtype in DOT_DTYPES and all(self.form.extent(axis) >= LEAST_DOT for axis in layout)

    def _dot(self, prim: Prim, layout: Sequence[Axis], operands: Sequence[tuple[Code, Positions]], along: int) -> str:
        texts = []
        for number, (code, _) in enumerate(operands):
            text = code.text
            if mask := self.axes.mask(layout[along]):
                text = f"tl.where({mask}[{'None, :' if number == 0 else ':, None'}], {text}, 0.0)"
            texts.append(f"({text}).to({TRITON_DTYPES[prim.dtype]})" if is_low_precision(prim.dtype) else text)
        options = f', input_precision="{self.precision}"' if prim.dtype == "float32" else ""
        return f"tl.dot({texts[0]}, {texts[1]}{options})"
