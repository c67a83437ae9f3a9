"""Primitives as Triton expressions over one tile: loads, index arithmetic and pointwise operations.

Evaluation is lazy: the value of a primitive at an index requests its operands at the corresponding indices. Views are therefore
free, and repeated loads are emitted once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from mtmc_lsp.codegen.kernel import indexing
from mtmc_lsp.codegen.kernel.axis_groups import Group, Mask, walks_as_one
from mtmc_lsp.codegen.kernel.formulas import REPEATS_OPERAND, render
from mtmc_lsp.codegen.kernel.index import Index, Variable
from mtmc_lsp.codegen.kernel.parameters import Parameters
from mtmc_lsp.codegen.kernel.snippets import ATOM, PRODUCT, SUM, TRITON_DTYPES, UNARY, Code, literal
from mtmc_lsp.codegen.module.naming import value_name
from mtmc_lsp.core.dtypes import compute_dtype, is_float, is_low_precision
from mtmc_lsp.core.graph import TensorType
from mtmc_lsp.core.protocols import CannotCode
from mtmc_lsp.core.sizes import Number, Size, product
from mtmc_lsp.ir.axes import Axis
from mtmc_lsp.ir.primitives import ONE, KernelIR, Prim, PrimOp
from mtmc_lsp.ir.regions import Region

EXPLICIT_CASTS = frozenset({"to_copy", "to", "half", "bfloat16", "type_as", "copy"})
"""ATen operations with which users explicitly round to 16-bit or 8-bit dtypes."""
EXACT_IN_16_BITS = ("bool", "int8", "uint8")
"""Dtypes whose values are all exactly representable in a 16-bit float."""


class Expressions:
    """Evaluates primitives of a region over one tile."""

    def __init__(
        self,
        ir: KernelIR,
        region: Region,
        parameters: Parameters,
        groups: Sequence[Group],
        flat: Sequence[Group],
        masks: Sequence[Mask],
        emit: Callable[[str, bool], None],
        provide: Callable[[Prim, tuple[Index, ...]], Code],
        *,
        widen: bool = True,
    ) -> None:
        """Prepare one tile.

        Args:
            groups: the loop variables; every axis that is used must belong to one of them.
            flat: variables that span several groups; used if an access walks all of them as one dense axis.
            masks: conditions for loads along rows or columns.
            emit: receives each statement, and whether it varies along columns.
            provide: returns the value of reductions, scans and products, which depend on the kernel's structure.
            widen: whether 16-bit floats are converted to float32 on load.
        """
        self.ir = ir
        self.region = region
        self.parameters = parameters
        self.wide = parameters.wide
        """Whether 32-bit row and column indices are converted to 64 bits before they enter an offset."""
        self.groups = tuple(groups)
        self.flat = tuple(flat)
        self.declared: set[str] = set()
        self._widen = widen
        self.masked_value = ""
        """Value of masked-out elements in loads (``other``); empty for zero."""
        self.eviction = ""
        """Eviction policy of loads while a row is read more than once; empty for the default."""
        self.first_column: str | None = None
        """First column (text, a multiple of 4) of a one-row tile with consecutive columns; None for other tiles."""
        self.row_length = ONE
        """Columns per row. Its multiples are multiples of 4 if the constexpr ``QUADS`` is true."""
        self.needs_quads = False
        self.masks = list(masks)
        self.emit = emit
        self.provide = provide
        self.accesses: list[Index] = []
        self.cache: dict[object, Code] = {}
        self.fixed: dict[Axis, Index] = {}
        """Axes that no variable loops over at present, with their index."""
        self.held: dict[str, tuple[tuple[Index, ...], Code]] = {}
        """Inputs that are in registers at one index: the states of a loop."""
        self._uses = _use_counts(ir, region)

    # Indices -----------------------------------------------------------------------------------------------------

    def tile_index(self, name: str) -> tuple[Index, ...]:
        """Indices of the primitive's element at the current tile position."""
        shape = self.ir.prims[name].shape
        return tuple(self.index_of(self.region.table.axes(name, dim)) for dim in range(len(shape)))

    def covers_axes(self, prim: Prim) -> bool:
        """Whether the kernel loops over all axes of the primitive. Operands of a reshape that merges axes may use other axes."""
        known = {*self.fixed, *(axis for group in self.groups for axis in group.axes)}
        return known.issuperset(self.region.table.all_axes(prim.name))

    def index_of(self, axes: tuple[Axis, ...]) -> Index:
        """The index of the current tile position along merged axes."""
        index = Index()
        for axis in axes:
            index = index * axis.size + (self.fixed.get(axis) or Index.of(self._variable(axis)))
        return index

    def _variable(self, axis: Axis) -> Variable:
        for group in self.groups:
            if axis in group.axes:
                return Variable(axis.id, axis.size, rows=group.rows, cols=group.cols)
        raise CannotCode("a value varies along an axis that the kernel does not loop over; fuse fewer operations")

    def index(self, index: Index) -> Code:
        """Expression for ``index``. A group of axes becomes a single variable if the coefficients allow it."""
        self.accesses.append(index)
        summands: list[Code] = []
        remaining = dict(index.terms)
        for group in self.flat:
            coefficients = {
                axis: c for axis in group.axes for v, c in remaining.items() if v.id == axis.id and not v.code
            }
            if coefficients and walks_as_one(group, coefficients):
                remaining = {
                    v: c for v, c in remaining.items() if v.code or all(v.id != axis.id for axis in group.axes)
                }
                flat_variable = Code(self._wide_index(group, group.name), "int64", group.rows, group.cols)
                summands.append(self._product(flat_variable, coefficients[group.axes[-1]]))
        for group in self.groups:
            coefficients = {
                axis: remaining.pop(v) for axis in group.axes for v in list(remaining) if v.id == axis.id and not v.code
            }
            if coefficients:
                summands.append(self._group_term(group, coefficients))
        for variable, coefficient in remaining.items():
            summands.append(self._product(Code(variable.code, "int64", variable.rows, variable.cols), coefficient))
        if index.constant.terms or not summands:
            summands.append(self.parameters.size(index.constant))
        rows, cols = any(p.rows for p in summands), any(p.cols for p in summands)
        # Tile-invariant terms come first: they are added to the pointer once, as scalars.
        summands.sort(key=lambda part: part.rows or part.cols)
        if len(summands) == 1:
            return summands[0]
        return Code(" + ".join(p.at(SUM) for p in summands).replace("+ -", "- "), "int64", rows, cols, SUM)

    def _group_term(self, group: Group, coefficients: dict[Axis, Size]) -> Code:
        if group.derived_from and group.name not in self.declared:
            self.declared.add(group.name)
            self.emit(f"{group.name} = {self._derived_value(group)}", group.cols)
        if walks_as_one(group, coefficients):
            name = group.name if group.derived_from else self._wide_index(group, group.name)
            return self._product(Code(name, "int64", group.rows, group.cols), coefficients[group.axes[-1]])
        # The coefficients do not describe a dense axis: split the variable by division and modulo.
        parts, inner_size = [], Size.of(1)
        for axis in reversed(group.axes):
            coefficient = coefficients.get(axis, Size.of(0))
            if coefficient.terms:
                text = group.name if inner_size == ONE else f"{group.name} // {self.parameters.divisor(inner_size)}"
                if axis is not group.axes[0]:
                    text = (
                        f"({text}) % {self.parameters.divisor(axis.size)}"
                        if inner_size != ONE
                        else (f"{text} % {self.parameters.divisor(axis.size)}")
                    )
                text = f"({text})" if group.derived_from else self._wide_index(group, f"({text})")
                parts.append(self._product(Code(text, "int64", group.rows, group.cols), coefficient))
            inner_size = inner_size * axis.size
        return Code(" + ".join(p.at(SUM) for p in parts), "int64", group.rows, group.cols, SUM)

    def _derived_value(self, group: Group) -> str:
        text = group.derived_from
        if group.below != ONE:
            text += f" // {self.parameters.divisor(group.below)}"
        if not group.outermost:
            size = product([axis.size for axis in group.axes])
            text += f" % {self.parameters.divisor(size)}"
        return self._wide_index(group, f"({text})") if self.wide else text

    def _wide_index(self, group: Group, text: str) -> str:
        """A row or column index, in 64 bits if offsets need them. Divisions before this use 32 bits."""
        return f"{text}.to(tl.int64)" if self.wide and (group.rows or group.cols) else text

    def _product(self, factor: Code, coefficient: Size) -> Code:
        if coefficient == ONE:
            return factor
        size = self.parameters.size(coefficient)
        # The 64-bit index comes first, so that every multiplication is 64-bit.
        return Code(f"{factor.at(PRODUCT)} * {size.at(PRODUCT)}", "int64", factor.rows, factor.cols, PRODUCT)

    # Values ------------------------------------------------------------------------------------------------------

    def value(self, name: str, at: tuple[Index, ...]) -> Code:
        """The value of a primitive at an index, in the dtype it is computed in."""
        prim = self.ir.prims[name]
        if name in self.held:
            held_at, code = self.held[name]
            if held_at != at:
                raise CannotCode("an iteration reads neighbouring elements of its state; leave the loop to PyTorch")
            return code
        key = (name, at, tuple(mask.text for mask in self.masks))
        if key in self.cache:
            return self.cache[key]
        code = self._load(prim, at) if name in self.region.inputs else self._named(prim, self._compute(prim, at))
        self.cache[key] = code
        return code

    def _compute(self, prim: Prim, at: tuple[Index, ...]) -> Code:
        source = prim.inputs[0] if prim.inputs else ""
        if prim.op is PrimOp.POINTWISE:
            return self._pointwise(prim, at)
        if prim.op is PrimOp.CONSTANT:
            value = prim.attrs["value"]
            if isinstance(value, Size):
                # Integers are converted implicitly in arithmetic with floats.
                return Code(self.parameters.divisor(value), compute_dtype(prim.dtype))
            if isinstance(value, Number):
                number = self.parameters.number(value, compute_dtype(prim.dtype))
                is_rounded = bool(prim.attrs.get("rounds")) and is_low_precision(prim.dtype)
                return self._rounded(number, prim.dtype) if is_rounded else number
            typed = float(value) if is_float(prim.dtype) and isinstance(value, (int, float)) else value
            return Code(literal(typed), compute_dtype(prim.dtype), precedence=ATOM if not _negative(typed) else UNARY)
        if prim.op is PrimOp.IOTA:
            return indexing.iota(self, prim, at)
        if prim.op is PrimOp.RANDOM:
            return indexing.random(self, prim, at)
        if prim.op is PrimOp.ALIAS:
            return self.value(source, at)
        if prim.op is PrimOp.EXPAND:
            return self.value(source, self.aligned(source, at))
        if prim.op is PrimOp.PERMUTE:
            dims = prim.attrs["dims"]
            assert isinstance(dims, tuple)
            inner = [Index()] * len(dims)
            for i, d in enumerate(dims):
                inner[d] = at[i]
            return self.value(source, tuple(inner))
        if prim.op is PrimOp.RESHAPE:
            return self.value(source, indexing.reshaped(self, prim, source, at))
        if prim.op is PrimOp.SLICE:
            dim, start, step = prim.attrs["dim"], prim.attrs["start"], prim.attrs["step"]
            assert isinstance(dim, int) and isinstance(start, Size) and isinstance(step, int)
            shifted = (at[dim] * step).plus(start)
            return self.value(source, (*at[:dim], shifted, *at[dim + 1 :]))
        if prim.op is PrimOp.FLIP:
            dims = prim.attrs["dims"]
            assert isinstance(dims, tuple)
            flipped = tuple((index * -1).plus(prim.shape[i] - 1) if i in dims else index for i, index in enumerate(at))
            return self.value(source, flipped)
        if prim.op is PrimOp.WINDOW:
            return self.value(source, indexing.windowed(prim, at))
        if prim.op is PrimOp.CROP:
            return self.value(source, at)
        if prim.op is PrimOp.CAT:
            return indexing.cat(self, prim, at)
        if prim.op is PrimOp.PAD:
            return indexing.pad(self, prim, at)
        if prim.op is PrimOp.GATHER:
            return indexing.gather(self, prim, at)
        return self.provide(prim, at)

    def aligned(self, source: str, at: tuple[Index, ...]) -> tuple[Index, ...]:
        shape = self.ir.prims[source].shape
        offset = len(at) - len(shape)
        return tuple(Index() if size == ONE else at[offset + i] for i, size in enumerate(shape))

    def _is_rounded(self, prim: Prim) -> bool:
        """Whether readers of a cast must see the rounded value: true for the user's explicit casts to 16 or 8 bits.

        Code with such casts often computes the rounding error, or depends on overflow to infinity. Results of 16-bit operations
        are not rounded between operations (except where :attr:`Node.rounds` is set), and matrix products and stores round anyway.
        """
        if prim.attrs.get("rounds"):
            return True
        source, node = self.ir.prims[prim.inputs[0]].dtype, self.ir.graph.named.get(prim.origin)
        if not is_low_precision(prim.dtype) or source in (prim.dtype, *EXACT_IN_16_BITS) or node is None:
            return False
        readers = [reader for name in self.region.prims if prim.name in (reader := self.ir.prims[name]).inputs]
        return node.word in EXPLICIT_CASTS and any(reader.op is not PrimOp.MATMUL for reader in readers)

    def _rounded(self, value: Code, dtype: str) -> Code:
        """``value`` rounded to ``dtype`` and converted back to float32."""
        if _number(value.text) is not None:
            value = _with_dtype(value)
        return Code(f"{value.at(ATOM)}.to({TRITON_DTYPES[dtype]}).to(tl.float32)", value.dtype, value.rows, value.cols)

    def _one_plus_tanh(self, prim: Prim) -> Prim | None:
        """The tanh primitive, if ``prim`` is its only reader and adds 1 to it, as in the tanh form of GELU."""
        prims = [self.ir.prims[name] for name in prim.inputs]
        if prim.fn != "add" or len(prims) != 2 or compute_dtype(prim.dtype) != "float32":
            return None
        ones = [p.op is PrimOp.CONSTANT and p.attrs.get("value") == 1 for p in prims]
        other = prims[ones[0]] if sum(ones) == 1 else None
        if (
            other is None
            or other.fn != "tanh"
            or other.name not in self.region.prims
            or self._uses.get(other.name) != 1
        ):
            return None
        return other

    def _pointwise(self, prim: Prim, at: tuple[Index, ...]) -> Code:
        tanh = self._one_plus_tanh(prim)
        if tanh is not None:
            # 1 + tanh(x) = 2 * sigmoid(2x): a third of the work, and no cancellation near tanh = -1.
            inner = self.cast(self.value(tanh.inputs[0], self.aligned(tanh.inputs[0], at)), "float32")
            text = f"2.0 * tl.sigmoid(2.0 * {inner.at(PRODUCT + 1)})"
            return Code(text, "float32", inner.rows, inner.cols, PRODUCT)
        return self.applied(prim, [self.value(source, self.aligned(source, at)) for source in prim.inputs])

    def applied(self, prim: Prim, operands: list[Code]) -> Code:
        """A pointwise operation on the values of its operands."""
        target = compute_dtype(prim.dtype)
        rows, cols = any(o.rows for o in operands), any(o.cols for o in operands)
        if prim.fn == "cast":
            value = self.cast(operands[0], target)
            return self._rounded(value, prim.dtype) if self._is_rounded(prim) else value
        if prim.fn == "div_by_size":
            size = prim.attrs["size"]
            assert isinstance(size, Size)
            text = f"{operands[0].at(PRODUCT)} / {self.parameters.divisor(size)}"
            return Code(text, target, rows, cols, PRODUCT)
        dtype_override = prim.attrs.get("operand_dtype")
        operand_dtype = str(dtype_override) if dtype_override else ("" if prim.dtype == "bool" else target)
        if operand_dtype:
            operands = [
                o if prim.fn == "where" and i == 0 else self.cast(o, operand_dtype) for i, o in enumerate(operands)
            ]
        if all(_number(o.text) is not None for o in operands):
            # Triton evaluates arithmetic on literals in Python, whose results have no dtype.
            operands = [_with_dtype(operands[0]), *operands[1:]]
        if prim.fn in REPEATS_OPERAND:
            operands = [self._variable_for(o, prim.inputs[i]) for i, o in enumerate(operands)]
        try:
            text, precedence = render(prim.fn, operands, prim.attrs, target)
        except KeyError as missing:
            raise CannotCode(f"{prim.origin}: {missing} cannot be written in Triton; leave it to PyTorch") from None
        return Code(text, target, rows, cols, precedence)

    def cast(self, code: Code, dtype: str) -> Code:
        """Convert ``code`` to ``dtype``. 16-bit floats are computed in float32."""
        dtype = compute_dtype(dtype)
        if code.dtype == dtype:
            return code
        number = _number(code.text)
        if number is not None:
            typed: object = float(number) if is_float(dtype) else (bool(number) if dtype == "bool" else int(number))
            return Code(literal(typed), dtype, precedence=UNARY if _negative(typed) else ATOM)
        if dtype == "bool":
            return Code(f"{code.at(UNARY)} != 0", dtype, code.rows, code.cols, 40)
        return Code(f"{code.at(ATOM)}.to({TRITON_DTYPES[dtype]})", dtype, code.rows, code.cols)

    def _named(self, prim: Prim, code: Code) -> Code:
        """Assign a value to a variable if it is used several times, has a name in the user's code, or is long."""
        if prim.op is PrimOp.CONSTANT or code.text.isidentifier() or not (code.rows or code.cols):
            return code
        is_reused = self._uses.get(prim.name, 0) > 1
        user_name = self._user_name(prim)
        return (
            self.assign(code, user_name or prim.fn or "value")
            if is_reused or user_name or len(code.text) > 80
            else code
        )

    def _variable_for(self, code: Code, name: str) -> Code:
        if code.text.isidentifier() or _number(code.text) is not None:
            return code
        return self.assign(code, self._user_name(self.ir.prims[name]) or "value")

    def assign(self, code: Code, preferred_name: str) -> Code:
        name = self.parameters.names.unique(preferred_name)
        self.emit(f"{name} = {code.text}", code.cols)
        return Code(name, code.dtype, code.rows, code.cols)

    def _user_name(self, prim: Prim) -> str:
        named = self.ir.graph.named
        for ref in self.ir.values_of.get(prim.name, ()):
            if ref.name in named and named[ref.name].variable:
                return value_name(self.ir, ref)
        return ""

    # Memory ------------------------------------------------------------------------------------------------------

    def _load(self, prim: Prim, at: tuple[Index, ...]) -> Code:
        pointer = self.parameters.tensor(prim.name)
        offset = self.offset(self.parameters.buffers[prim.name], at)
        # Set the policy only for data that each row streams, not for data that all rows share.
        is_streamed = (
            bool(self.eviction)
            and offset.cols
            and set(self.region.table.all_axes(prim.name)) > set(self.region.reduced_axes)
        )
        policy = f', eviction_policy="{self.eviction}"' if is_streamed else ""
        text = f"tl.load({self.load_address(pointer, offset)}{self.mask_argument(offset, prim.dtype)}{policy})"
        if is_low_precision(prim.dtype) and self._widen:
            text += ".to(tl.float32)"
        code = Code(text, compute_dtype(prim.dtype) if self._widen else prim.dtype, offset.rows, offset.cols)
        name = pointer.removesuffix("_ptr")
        return self.assign(code, name)

    def offset(self, kind: TensorType, at: tuple[Index, ...]) -> Code:
        """Element offset of an index in a buffer with the strides of ``kind``."""
        total = Index()
        for index, stride in zip(at, kind.stride, strict=True):
            total = total + index * stride
        return self.index(total)

    @staticmethod
    def address(pointer: str, offset: Code) -> str:
        """Pointer plus offset."""
        return pointer if offset.text == "0" else f"{pointer} + {offset.at(SUM)}"

    def load_address(self, pointer: str, offset: Code) -> str:
        """The address of a load, with what the compiler should know of it."""
        return self.address(pointer, offset)

    def mask_argument(self, offset: Code, dtype: str | None) -> str:
        """``, mask=..., other=...`` for a load, or ``, mask=...`` for a store (``dtype`` None); empty if no mask is needed."""
        needed = [
            m for m in self.masks if (m.rows and offset.rows) or (m.cols and offset.cols) or not (m.rows or m.cols)
        ]
        if not needed:
            return ""
        mask = " & ".join(m.text for m in needed)
        zero = "" if dtype is None else f", other={self.masked_value or ('0.0' if is_float(dtype) else '0')}"
        return f", mask={mask}{zero}"


def _negative(value: object) -> bool:
    return isinstance(value, (int, float)) and value < 0


def _with_dtype(number: Code) -> Code:
    """A literal as a typed scalar."""
    return Code(f"tl.full([], {number.text}, {TRITON_DTYPES[number.dtype]})", number.dtype)


def _number(text: str) -> float | int | bool | None:
    """The value of a snippet that is a literal; None for other snippets."""
    if text in ("True", "False"):
        return text == "True"
    if text in ('float("inf")', '-float("inf")', 'float("nan")'):
        return float(text.replace('float("', "").replace('")', ""))
    try:
        return int(text)
    except ValueError:
        pass
    try:
        return float(text) if text.replace("-", "").replace(".", "").replace("e", "").isdigit() else None
    except ValueError:
        return None


def _use_counts(ir: KernelIR, region: Region) -> dict[str, int]:
    counts: dict[str, int] = {}
    for name in region.prims:
        prim = ir.prims[name]
        for source in prim.inputs:
            counts[source] = counts.get(source, 0) + 1
    for root in region.roots(ir):
        counts[root] = counts.get(root, 0) + 1
    return counts
