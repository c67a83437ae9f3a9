"""Expressions of a block: the value of each primitive of an iteration."""

from __future__ import annotations

from mtmc_lsp.codegen.kernel.snippets import ATOM, PRODUCT, SUM, Code
from mtmc_lsp.codegen.loop.block_sums import BlockSums
from mtmc_lsp.codegen.loop.block_values import Positions
from mtmc_lsp.core.sizes import Size
from mtmc_lsp.ir.primitives import ONE, Prim, PrimOp


class BlockExpressions(BlockSums):
    """Evaluates the body of a loop on blocks."""

    def _computed(self, prim: Prim) -> tuple[Code, Positions]:
        source = prim.inputs[0] if prim.inputs else ""
        if prim.op is PrimOp.CONSTANT:
            return self._compute(prim, ()), ()
        if prim.op is PrimOp.POINTWISE:
            return self._pointwise_of(prim)
        if prim.op is PrimOp.IOTA:
            return self._iota(prim)
        if prim.op in (PrimOp.ALIAS, PrimOp.EXPAND):
            return self.value(source), self._moved(source, prim, self._aligned_dims(source, prim))
        if prim.op is PrimOp.RESHAPE:
            return self.value(source), self.positions[source]
        if prim.op is PrimOp.PERMUTE:
            return self._permuted(prim)
        if self.form.is_view_of_memory(prim):
            return self.loaded(self.ir.prims[source], prim.name)
        if prim.op is PrimOp.SLICE:
            return self._sliced(prim)
        if prim.op is PrimOp.FLIP:
            return self._flipped(prim)
        if prim.op is PrimOp.CAT:
            return self._concatenated(prim)
        if prim.op is PrimOp.PAD:
            return self._padded(prim)
        if prim.op is PrimOp.SCAN:
            return self._scanned(prim)
        if prim.op is PrimOp.MATMUL:
            return self._product_of(prim)
        return self._reduced(prim)

    def _pointwise_of(self, prim: Prim) -> tuple[Code, Positions]:
        moved = [self._moved(source, prim, self._aligned_dims(source, prim)) for source in prim.inputs]
        positions = tuple(sorted({position for each in moved for position in each}))
        operands = []
        for source, each in zip(prim.inputs, moved, strict=True):
            code = self.value(source)
            text = self._expanded(code, each, positions)
            precedence = code.precedence if text == code.text else ATOM
            operands.append(Code(text, code.dtype, bool(each), False, precedence))
        return self.applied(prim, operands), positions

    def _iota(self, prim: Prim) -> tuple[Code, Positions]:
        layout = self._layout(prim.name)
        start, step = prim.attrs["start"], prim.attrs["step"]
        assert isinstance(start, (int, Size)) and isinstance(step, (int, Size))
        if not layout:
            return Code(self.parameters.size(Size.of(start)).text, "int64"), ()
        text, precedence = f"{self.axes.index(layout[0])}.to(tl.int64)", ATOM
        if Size.of(step) != ONE:
            text, precedence = f"{text} * {self.parameters.size(Size.of(step)).at(PRODUCT)}", PRODUCT
        if Size.of(start).terms:
            text, precedence = f"{text} + {self.parameters.size(Size.of(start)).at(SUM)}", SUM
        code = Code(text, "int64", True, False, precedence)
        return self.cast(code, prim.dtype), (0,)

    def _permuted(self, prim: Prim) -> tuple[Code, Positions]:
        order, source = prim.attrs["dims"], prim.inputs[0]
        assert isinstance(order, tuple)
        positions = self._moved(source, prim, [order.index(dim) for dim in range(len(order))])
        code, sorted_positions = self.value(source), tuple(sorted(positions))
        if positions == sorted_positions:
            return code, positions
        new = ", ".join(str(positions.index(position)) for position in sorted_positions)
        text = f"tl.trans({code.text})" if len(positions) == 2 else f"tl.permute({code.text}, ({new}))"
        return Code(text, code.dtype, True), sorted_positions
