"""Elements of a block at other positions: slices, reversed and shifted values, concatenations and padding."""

from __future__ import annotations

from mtmc_lsp.codegen.kernel.snippets import ATOM, COMPARE, SUM, Code, literal
from mtmc_lsp.codegen.loop.block_values import BlockValues, Positions, without
from mtmc_lsp.core.dtypes import compute_dtype, is_float
from mtmc_lsp.core.protocols import CannotCode
from mtmc_lsp.core.sizes import Size
from mtmc_lsp.ir.axes import Axis
from mtmc_lsp.ir.loops.blocks import changed_dims
from mtmc_lsp.ir.primitives import ONE, Prim, PrimOp


class BlockMoves(BlockValues):
    """Moves elements along one axis of a block, by ``tl.gather``."""

    def _along(self, prim: Prim, dim: int) -> int | None:
        """The position of a dimension in the layout of a primitive; ``None`` if it has one element."""
        return next((i for i, (each, _) in enumerate(self.form.layout(prim.name)) if each == dim), None)

    def _taken(self, source: str, dim: int, index: str, axis: Axis) -> str:
        """The elements of an operand at ``index`` along a dimension; ``index`` has the axis ``axis`` of the result.

        Indices must be inside of the operand's block.
        """
        code, at = self.value(source), self._along(self.ir.prims[source], dim)
        assert at is not None
        positions = self.positions[source]
        layout = self._layout(source)
        axes = [axis if position == at else layout[position] for position in positions]
        rank = positions.index(at)
        dims = ", ".join(":" if i == rank else "None" for i in range(len(axes)))
        wide = index if len(axes) == 1 else f"tl.broadcast_to(({index})[{dims}], {self.axes.shape(axes)})"
        text = code.text if code.dtype != "bool" else f"{code.at(ATOM)}.to(tl.int32)"
        taken = f"tl.gather({text}, {wide}, {rank})"
        return f"({taken} != 0)" if code.dtype == "bool" else taken

    def _clipped(self, index: str, source: str, dim: int, *, low: bool, high: bool) -> str:
        """An index, limited to the operand's block."""
        at = self._along(self.ir.prims[source], dim)
        assert at is not None
        index = f"tl.maximum({index}, 0)" if low else index
        return f"tl.minimum({index}, {self.axes.block(self._layout(source)[at])} - 1)" if high else index

    def _sliced(self, prim: Prim) -> tuple[Code, Positions]:
        source, dim = prim.inputs[0], int(str(prim.attrs["dim"]))
        start, step = prim.attrs["start"], prim.attrs["step"]
        assert isinstance(start, Size) and isinstance(step, int)
        if (piece := self._piece(prim, dim, start)) is not None:
            return self.value(piece), self._places(piece, prim.name)
        code, at = self.value(source), self._along(self.ir.prims[source], dim)
        positions = self.positions[source]
        if at is None or at not in positions:
            kept = tuple(position for position in positions if position != at)
            return code, kept if prim.shape[dim] != ONE or at is None else without(kept, at)
        first = self.parameters.size(start)
        if prim.shape[dim] == ONE:
            rank = positions.index(at)
            where = self._expanded(
                Code(f"({self.axes.index(self._layout(source)[at])} == {first.at(COMPARE + 1)})", "bool"),
                (at,),
                positions,
            )
            text = code.text if code.dtype != "bool" else f"{code.at(ATOM)}.to(tl.int32)"
            zero = "0.0" if is_float(code.dtype) else "0"
            text = f"tl.sum(tl.where({where}, {text}, {zero}), axis={rank})"
            text = f"({text} != 0)" if code.dtype == "bool" else text
            kept = without(tuple(position for position in positions if position != at), at)
            return Code(text, code.dtype, bool(kept)), kept
        index = self.axes.index(axis := self._layout(prim.name)[at])
        index = index if step == 1 else f"{index} * {step}"
        index = f"{index} + {first.at(SUM)}" if start.terms else index
        return self._element(
            self._taken(source, dim, self._clipped(index, source, dim, low=False, high=True), axis), code
        ), positions

    def _piece(self, prim: Prim, dim: int, start: Size) -> str | None:
        """The operand of a concatenation whose only element along ``dim`` a slice takes, as of a stack."""
        joined = self.ir.prims[prim.inputs[0]]
        if joined.op is not PrimOp.CAT or joined.attrs["dim"] != dim or prim.shape[dim] != ONE:
            return None
        at = Size.of(0)
        for source in joined.inputs:
            length = self.ir.prims[source].shape[dim]
            if at == start and length == ONE and joined.dtype == self.ir.prims[source].dtype:
                return source
            at = at + length
        return None

    @staticmethod
    def _element(text: str, like: Code) -> Code:
        return Code(text, like.dtype, True)

    def _flipped(self, prim: Prim) -> tuple[Code, Positions]:
        source, (dim, *others) = prim.inputs[0], changed_dims(prim, self.ir)
        if others:
            raise CannotCode(f"{prim.origin}: a block cannot be flipped along several dimensions")
        code, at = self.value(source), self._along(prim, dim)
        if at is None or at not in self.positions[source]:
            return code, self.positions[source]
        axis = self._layout(prim.name)[at]
        index = f"{self.parameters.size(prim.shape[dim] - 1).at(SUM)} - {self.axes.index(axis)}"
        text = self._taken(source, dim, self._clipped(index, source, dim, low=True, high=False), axis)
        return self._element(text, code), self.positions[source]

    def _placed(self, prim: Prim, source: str, dim: int, start: Size, *, low: bool) -> tuple[Code, Positions]:
        """The elements of an operand that is placed at ``start`` of a dimension of the result; others are undefined."""
        at = self._along(prim, dim)
        assert at is not None
        positions = self._places(source, prim.name)
        code, inner = self.value(source), self._along(self.ir.prims[source], dim)
        if inner is None or inner not in self.positions[source]:
            return code, positions
        axis = self._layout(prim.name)[at]
        index = self.axes.index(axis)
        index = f"{index} - {self.parameters.size(start).at(SUM + 1)}" if start.terms else index
        return self._element(
            self._taken(source, dim, self._clipped(index, source, dim, low=low, high=True), axis), code
        ), positions

    def _concatenated(self, prim: Prim) -> tuple[Code, Positions]:
        dim, start = int(str(prim.attrs["dim"])), Size.of(0)
        if len(prim.inputs) == 1:
            return self.value(prim.inputs[0]), self.positions[prim.inputs[0]]
        at = self._along(prim, dim)
        if at is None:
            raise CannotCode(f"{prim.origin}: a concatenation of a dimension that is split among programs")
        axis = self._layout(prim.name)[at]
        pieces: list[tuple[Code, Positions, Size]] = []
        for number, source in enumerate(prim.inputs):
            code, positions = self._placed(prim, source, dim, start, low=number > 0)
            start = start + self.ir.prims[source].shape[dim]
            pieces.append((self.cast(code, prim.dtype), positions, start))
        everything = tuple(sorted({at, *(position for _, positions, _ in pieces for position in positions)}))
        last, positions, _ = pieces[-1]
        text = self._expanded(last, positions, everything)
        for code, positions, end in reversed(pieces[:-1]):
            condition = Code(f"({self.axes.index(axis)} < {self.parameters.size(end).at(COMPARE + 1)})", "bool")
            where = self._expanded(condition, (at,), everything)
            text = f"tl.where({where}, {self._expanded(code, positions, everything)}, {text})"
        return Code(text, compute_dtype(prim.dtype), True), everything

    def _padded(self, prim: Prim) -> tuple[Code, Positions]:
        source, before = prim.inputs[0], prim.attrs["before"]
        dims = changed_dims(prim, self.ir)
        assert isinstance(before, tuple)
        if len(dims) > 1:
            raise CannotCode(f"{prim.origin}: a block cannot be padded along several dimensions")
        if not dims:
            return self.value(source), self.positions[source]
        (dim,) = dims
        at, amount = self._along(prim, dim), before[dim]
        assert at is not None and isinstance(amount, int)
        start, length = Size.of(amount), self.ir.prims[source].shape[dim]
        code, positions = self._placed(prim, source, dim, start, low=amount > 0)
        everything = tuple(sorted({at, *positions}))
        index, end = self.axes.index(self._layout(prim.name)[at]), self.parameters.size(start + length)
        bounds = [f"({index} >= {amount})"] if amount > 0 else []
        bounds += [f"({index} < {end.at(COMPARE + 1)})"]
        inside = self._expanded(Code(f"({' & '.join(bounds)})", "bool"), (at,), everything)
        fill = prim.attrs["value"]
        assert isinstance(fill, (bool, int, float))
        typed = float(fill) if is_float(prim.dtype) else bool(fill) if prim.dtype == "bool" else int(fill)
        text = f"tl.where({inside}, {self._expanded(code, positions, everything)}, {literal(typed)})"
        return Code(text, code.dtype, True), everything
