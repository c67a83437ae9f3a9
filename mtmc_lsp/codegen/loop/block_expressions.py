"""Expressions of a block: each value of an iteration is a tensor of the axes that a program instance holds.

A value may lack axes along which it is constant; it is broadcast where it meets others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from mtmc_lsp.codegen.kernel.expressions import Expressions
from mtmc_lsp.codegen.kernel.index import Index
from mtmc_lsp.codegen.kernel.parameters import Parameters
from mtmc_lsp.codegen.kernel.snippets import ATOM, COMPARE, PRODUCT, SUM, TRITON_DTYPES, Code, literal
from mtmc_lsp.codegen.loop.block_axes import BlockAxes
from mtmc_lsp.codegen.tile.reduction_formulas import neutral, only_for_softmax
from mtmc_lsp.core.dtypes import compute_dtype, is_float, is_low_precision
from mtmc_lsp.core.protocols import CannotCode
from mtmc_lsp.core.sizes import Size
from mtmc_lsp.ir.axes import Axis
from mtmc_lsp.ir.loops.blocks import BlockForm, changed_dims
from mtmc_lsp.ir.primitives import ONE, Prim, PrimOp, ProductDims

LEAST_DOT = 16
"""Elements of the shortest axis of a product that ``tl.dot`` computes."""
DOT_DTYPES = ("float32", "float16", "bfloat16")
COMBINED = {"max": "_max_nan", "min": "_min_nan"}
"""Functions that combine two elements of a running extremum."""
Positions = tuple[int, ...]
"""Axes of a value in memory order, as positions in the layout of its primitive."""


class BlockExpressions(Expressions):
    """Evaluates the body of a loop on blocks. Each value is computed once."""

    def __init__(
        self,
        form: BlockForm,
        parameters: Parameters,
        axes: BlockAxes,
        emit: Callable[[str, bool], None],
        precision: str,
    ) -> None:
        super().__init__(form.ir, form.region, parameters, [], [], [], emit, self._provide)
        self.form, self.axes, self.precision = form, axes, precision
        self.codes: dict[str, Code] = {}
        self.positions: dict[str, Positions] = {}
        """The axes that the value of a primitive has."""

    def hold(self, name: str, code: Code, positions: Positions) -> None:
        """Set the value of a primitive: a state, or the number of the iteration."""
        self.codes[name], self.positions[name] = code, positions

    def value(self, name: str, at: tuple[Index, ...] = ()) -> Code:
        """The value of a primitive, without the axes along which it is constant."""
        if name not in self.codes:
            prim = self.ir.prims[name]
            if name in self.region.inputs:
                code, positions = self.loaded(prim, name)
            else:
                code, positions = self._computed(prim)
                is_computed = prim.op is not PrimOp.CONSTANT
                code = self._named(prim, Code(code.text, code.dtype, is_computed, False, code.precedence))
            self.codes[name], self.positions[name] = code, positions
        return self.codes[name]

    def whole(self, name: str) -> str:
        """The value of a primitive with all axes of its layout."""
        code = self.value(name)
        return self.spread(code, self.positions[name], self._layout(name))

    def spread(self, code: Code, positions: Positions, layout: Sequence[Axis]) -> str:
        """A value broadcast to a layout, of which it has the axes at ``positions``."""
        if len(positions) == len(layout):
            return code.text
        if not positions:
            return f"tl.full({self.axes.shape(layout)}, {code.text}, {TRITON_DTYPES[code.dtype]})"
        text = self._expanded(code, positions, range(len(layout)))
        return f"tl.broadcast_to({text}, {self.axes.shape(layout)})"

    def _layout(self, name: str) -> list[Axis]:
        return [axis for _, axis in self.form.layout(name)]

    @staticmethod
    def _expanded(code: Code, positions: Positions, target: Iterable[int]) -> str:
        """A value with an axis of one element where ``target`` has an axis that it lacks."""
        target = list(target)
        if not positions or len(target) == len(positions):
            return code.text
        index = ", ".join(":" if position in positions else "None" for position in target)
        return f"{code.at(ATOM)}[{index}]"

    def _moved(self, source: str, prim: Prim, dims: Sequence[int]) -> Positions:
        """Where the axes of an operand are in the layout of ``prim``; ``dims`` are its dimensions there."""
        target = [(dim, number) for dim, number in _numbered(self.form.layout(prim.name))]
        axes = [(dims[dim], number) for dim, number in _numbered(self.form.layout(source))]
        self.value(source)
        return tuple(target.index(axes[position]) for position in self.positions[source])

    def _aligned_dims(self, source: str, prim: Prim) -> list[int]:
        rank = len(self.ir.prims[source].shape)
        return [dim + len(prim.shape) - rank for dim in range(rank)]

    # Values ------------------------------------------------------------------------------------------------------

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

    def _provide(self, prim: Prim, at: tuple[Index, ...]) -> Code:
        raise CannotCode(f"{prim.origin}: {prim.op.value} is not supported in a block")

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

    # Elements along one axis -------------------------------------------------------------------------------------

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
        code, at = self.value(source), self._along(self.ir.prims[source], dim)
        positions = self.positions[source]
        if at is None or at not in positions:
            kept = tuple(position for position in positions if position != at)
            return code, kept if prim.shape[dim] != ONE or at is None else _without(kept, at)
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
            kept = _without(tuple(position for position in positions if position != at), at)
            return Code(text, code.dtype, bool(kept)), kept
        index = self.axes.index(axis := self._layout(prim.name)[at])
        index = index if step == 1 else f"{index} * {step}"
        index = f"{index} + {first.at(SUM)}" if start.terms else index
        return self._element(
            self._taken(source, dim, self._clipped(index, source, dim, low=False, high=True), axis), code
        ), positions

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
        positions = self._moved_except(source, prim, dim)
        code, inner = self.value(source), self._along(self.ir.prims[source], dim)
        if inner is None or inner not in self.positions[source]:
            return code, positions
        axis = self._layout(prim.name)[at]
        index = self.axes.index(axis)
        index = f"{index} - {self.parameters.size(start).at(SUM + 1)}" if start.terms else index
        return self._element(
            self._taken(source, dim, self._clipped(index, source, dim, low=low, high=True), axis), code
        ), positions

    def _moved_except(self, source: str, prim: Prim, changed: int) -> Positions:
        """Where the axes of an operand are in the layout of ``prim``, with the changed dimension where it has one axis."""
        self.value(source)
        target = list(_numbered(self.form.layout(prim.name)))
        axes = list(_numbered(self.form.layout(source)))
        return tuple(target.index(axes[position]) for position in self.positions[source])

    def _concatenated(self, prim: Prim) -> tuple[Code, Positions]:
        dim, start = int(str(prim.attrs["dim"])), Size.of(0)
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
        typed = float(fill) if is_float(prim.dtype) else fill
        text = f"tl.where({inside}, {self._expanded(code, positions, everything)}, {literal(typed)})"
        return Code(text, code.dtype, True), everything

    # Reductions and products -------------------------------------------------------------------------------------

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
                self.value(prim.inputs[1]), self._source_positions(prim.inputs[1], source), self.positions[source]
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
        for position in reversed(along):
            text = self._collapsed(prim, text, needed.index(position))
        if prim.fn in ("any", "all"):
            text = f"({text} != 0)"
        return Code(text, compute_dtype(prim.dtype), bool(positions)), positions

    def _source_positions(self, name: str, source: str) -> Positions:
        """Where the axes of a reduced value are in the layout of what was reduced."""
        target = list(_numbered(self.form.layout(source)))
        axes = list(_numbered(self.form.layout(name)))
        self.value(name)
        return tuple(target.index(axes[position]) for position in self.positions[name])

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
        if text.isidentifier():
            return text
        name = self.parameters.names.unique(preferred_name)
        self.emit(f"{name} = {text}", False)
        return name

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
            for (dim, number), axis in zip(_numbered(self.form.layout(name)), self._layout(name), strict=True):
                terms[places[dim], number] = axis
        order = sorted(terms)
        along = tuple(i for i, (dim, _) in enumerate(order) if rows <= dim < summed)
        layout = [terms[key] for key in order]
        operands: list[tuple[Code, Positions]] = []
        for name, places in ((left, left_dims), (right, right_dims)):
            keys = [(places[dim], number) for dim, number in _numbered(self.form.layout(name))]
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

    # Memory ------------------------------------------------------------------------------------------------------

    def loaded(self, prim: Prim, name: str) -> tuple[Code, Positions]:
        """A tensor in memory as the primitive ``name``: a slice of it, or a value with its dimensions."""
        pointer = self.parameters.tensor(prim.name)
        kind = self.parameters.buffers[prim.name]
        starts, steps = [Size.of(0)] * len(kind.stride), [1] * len(kind.stride)
        if self.form.is_view_of_memory(part := self.ir.prims[name]):
            dim, start, step = int(str(part.attrs["dim"])), part.attrs["start"], part.attrs["step"]
            assert isinstance(start, Size) and isinstance(step, int)
            starts[dim], steps[dim] = start, step
        layout = self._layout(name)
        address, positions = self.axes.address(pointer, name, kind.stride, starts, steps)
        mask = self.axes.mask_argument(layout, positions, "0.0" if is_float(prim.dtype) else "0")
        text = f"tl.load({address}{mask})"
        if is_low_precision(prim.dtype):
            text += ".to(tl.float32)"
        code = Code(text, compute_dtype(prim.dtype), bool(positions))
        return self.assign(code, pointer.removesuffix("_ptr")), positions


def _numbered(layout: Sequence[tuple[int, Axis]]) -> list[tuple[int, int]]:
    """Each axis of a layout as its dimension and its number in it."""
    counts: dict[int, int] = {}
    result = []
    for dim, _ in layout:
        result.append((dim, counts.get(dim, 0)))
        counts[dim] = counts.get(dim, 0) + 1
    return result


def _without(positions: Positions, removed: int) -> Positions:
    """Positions in a layout from which an axis was removed."""
    return tuple(position - (position > removed) for position in positions)
