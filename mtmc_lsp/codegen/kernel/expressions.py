"""Primitives as Triton expressions over one tile: loads, index arithmetic and pointwise work.

Values are pulled: asking for a value at an index asks for its operands at the indices that follow, so views cost nothing
and any load that is asked for twice is made once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from mtmc_lsp.codegen.kernel import indexing as moves
from mtmc_lsp.codegen.kernel.axis_groups import Group, Mask, walks_as_one
from mtmc_lsp.codegen.kernel.formulas import REPEATS_OPERAND, render
from mtmc_lsp.codegen.kernel.index import Index, Variable
from mtmc_lsp.codegen.kernel.parameters import Parameters
from mtmc_lsp.codegen.kernel.snippets import ATOM, PRODUCT, SUM, TRITON_DTYPES, UNARY, Code, literal
from mtmc_lsp.codegen.module.naming import value_name
from mtmc_lsp.core.dtypes import compute_dtype, is_float, is_half
from mtmc_lsp.core.graph import TensorType
from mtmc_lsp.core.protocols import CannotCode
from mtmc_lsp.core.sizes import Size, product
from mtmc_lsp.ir.axes import Axis
from mtmc_lsp.ir.primitives import ONE, KernelIR, Prim, PrimOp
from mtmc_lsp.ir.regions import Region

OWN_CASTS = frozenset({"to_copy", "to", "half", "bfloat16", "type_as", "copy"})
"""Operations by which people round to half precision or eight bits."""
EXACT_IN_HALF = ("bool", "int8", "uint8")
"""Dtypes whose every number a half precision has."""


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
            groups: the loop variables; every axis of the region that is used must be in one of them.
            flat: variables that run over several groups at once, used where an access walks all of them as one.
            masks: conditions that loads along rows or columns need.
            emit: takes a statement and whether it varies along columns.
            provide: gives the value of reductions, scans and products, which depend on the kernel's structure.
            widen: whether half-precision values become float32 as they are loaded.
        """
        self.ir = ir
        self.region = region
        self.parameters = parameters
        self.wide = parameters.wide
        """Whether rows and columns, which are 32-bit, become 64-bit before they are a part of an offset."""
        self.groups = tuple(groups)
        self.flat = tuple(flat)
        self.declared: set[str] = set()
        self._widen = widen
        self.outside = ""
        """What the loads of one value give where a mask forbids them; empty for zero."""
        self.eviction = ""
        """The cache policy of loads, while a row is walked more than once."""
        self.first_column: str | None = None
        """Of a tile of one row, where its columns are consecutive: the first, as an expression; a multiple of 4."""
        self.row_length = ONE
        """Columns of a row; its multiples are multiples of 4 where ``QUADS`` holds."""
        self.needs_quads = False
        self.masks = list(masks)
        self.emit = emit
        self.provide = provide
        self.accesses: list[Index] = []
        self.cache: dict[object, Code] = {}
        self._uses = _use_counts(ir, region)

    # Indices -----------------------------------------------------------------------------------------------------

    def own_index(self, name: str) -> tuple[Index, ...]:
        """The indices at which a primitive's element for this place of the tile lies."""
        shape = self.ir.prims[name].shape
        return tuple(self._dim_index(self.region.table.axes(name, dim)) for dim in range(len(shape)))

    def has_own_index(self, prim: Prim) -> bool:
        """Whether the kernel walks the primitive's axes; an operand is read at another's where two of its are one."""
        known = {axis for group in self.groups for axis in group.axes}
        return known.issuperset(self.region.table.all_axes(prim.name))

    def _dim_index(self, axes: tuple[Axis, ...]) -> Index:
        index = Index()
        for axis in axes:
            index = index * axis.size + Index.of(self._variable(axis))
        return index

    def _variable(self, axis: Axis) -> Variable:
        for group in self.groups:
            if axis in group.axes:
                return Variable(axis.id, axis.size, rows=group.rows, cols=group.cols)
        raise CannotCode("a value runs over an axis that the kernel does not have")

    def index(self, index: Index) -> Code:
        """Integer arithmetic for ``index``, each group of axes as one variable where the coefficients allow."""
        self.accesses.append(index)
        parts: list[Code] = []
        rest = dict(index.terms)
        for group in self.flat:
            own = {axis: c for axis in group.axes for v, c in rest.items() if v.id == axis.id and not v.code}
            if own and walks_as_one(group, own):
                rest = {v: c for v, c in rest.items() if v.code or all(v.id != axis.id for axis in group.axes)}
                whole = Code(self._far(group, group.name), "int64", group.rows, group.cols)
                parts.append(self._product(whole, own[group.axes[-1]]))
        for group in self.groups:
            own = {axis: rest.pop(v) for axis in group.axes for v in list(rest) if v.id == axis.id and not v.code}
            if own:
                parts.append(self._group_term(group, own))
        for variable, coefficient in rest.items():
            parts.append(self._product(Code(variable.code, "int64", variable.rows, variable.cols), coefficient))
        if index.constant.terms or not parts:
            parts.append(self.parameters.size(index.constant))
        rows, cols = any(p.rows for p in parts), any(p.cols for p in parts)
        # What is the same for the whole tile comes first: it is added to the pointer once, as a scalar.
        parts.sort(key=lambda part: part.rows or part.cols)
        if len(parts) == 1:
            return parts[0]
        return Code(" + ".join(p.at(SUM) for p in parts).replace("+ -", "- "), "int64", rows, cols, SUM)

    def _group_term(self, group: Group, coefficients: dict[Axis, Size]) -> Code:
        if group.taken_from and group.name not in self.declared:
            self.declared.add(group.name)
            self.emit(f"{group.name} = {self._taken_out(group)}", group.cols)
        if walks_as_one(group, coefficients):
            name = group.name if group.taken_from else self._far(group, group.name)
            return self._product(Code(name, "int64", group.rows, group.cols), coefficients[group.axes[-1]])
        # Coefficients that do not follow one another: take the variable apart.
        parts, below = [], Size.of(1)
        for axis in reversed(group.axes):
            coefficient = coefficients.get(axis, Size.of(0))
            if coefficient.terms:
                text = group.name if below == ONE else f"{group.name} // {self.parameters.divisor(below)}"
                if axis is not group.axes[0]:
                    text = (
                        f"({text}) % {self.parameters.divisor(axis.size)}"
                        if below != ONE
                        else (f"{text} % {self.parameters.divisor(axis.size)}")
                    )
                text = f"({text})" if group.taken_from else self._far(group, f"({text})")
                parts.append(self._product(Code(text, "int64", group.rows, group.cols), coefficient))
            below = below * axis.size
        return Code(" + ".join(p.at(SUM) for p in parts), "int64", group.rows, group.cols, SUM)

    def _taken_out(self, group: Group) -> str:
        text = group.taken_from
        if group.below != ONE:
            text += f" // {self.parameters.divisor(group.below)}"
        if not group.outermost:
            size = product([axis.size for axis in group.axes])
            text += f" % {self.parameters.divisor(size)}"
        return self._far(group, f"({text})") if self.wide else text

    def _far(self, group: Group, text: str) -> str:
        """A number of rows or columns in 64 bits, where offsets need them: what it was divided by was divided in 32."""
        return f"{text}.to(tl.int64)" if self.wide and (group.rows or group.cols) else text

    def _product(self, factor: Code, coefficient: Size) -> Code:
        if coefficient == ONE:
            return factor
        size = self.parameters.size(coefficient)
        # From the left, so that 64-bit indices make each product 64-bit.
        return Code(f"{factor.at(PRODUCT)} * {size.at(PRODUCT)}", "int64", factor.rows, factor.cols, PRODUCT)

    # Values ------------------------------------------------------------------------------------------------------

    def value(self, name: str, at: tuple[Index, ...]) -> Code:
        """The value of a primitive at an index, in the dtype it is computed in."""
        prim = self.ir.prims[name]
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
                # Arithmetic with floats makes a float of it.
                return Code(self.parameters.divisor(value), compute_dtype(prim.dtype))
            typed = float(value) if is_float(prim.dtype) and isinstance(value, (int, float)) else value
            return Code(literal(typed), compute_dtype(prim.dtype), precedence=ATOM if not _negative(typed) else UNARY)
        if prim.op is PrimOp.IOTA:
            return moves.iota(self, prim, at)
        if prim.op is PrimOp.RANDOM:
            return moves.random(self, prim, at)
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
            return self.value(source, moves.reshaped(self, prim, source, at))
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
            return self.value(source, moves.windowed(prim, at))
        if prim.op is PrimOp.CROP:
            return self.value(source, at)
        if prim.op is PrimOp.CAT:
            return moves.cat(self, prim, at)
        if prim.op is PrimOp.PAD:
            return moves.pad(self, prim, at)
        if prim.op is PrimOp.GATHER:
            return moves.gather(self, prim, at)
        return self.provide(prim, at)

    def aligned(self, source: str, at: tuple[Index, ...]) -> tuple[Index, ...]:
        shape = self.ir.prims[source].shape
        offset = len(at) - len(shape)
        return tuple(Index() if size == ONE else at[offset + i] for i, size in enumerate(shape))

    def _is_rounded(self, prim: Prim) -> bool:
        """Whether what reads a cast here must see it rounded: the user's own, to half precision or eight bits.

        What is left of a number behind its rounding, and what is infinite in half precision, is what such code is about. Results
        of operations in half precision are not rounded between them, and products and stores round by themselves.
        """
        source, node = self.ir.prims[prim.inputs[0]].dtype, self.ir.graph.named.get(prim.origin)
        if not is_half(prim.dtype) or source in (prim.dtype, *EXACT_IN_HALF) or node is None:
            return False
        readers = [own for name in self.region.prims if prim.name in (own := self.ir.prims[name]).inputs]
        return node.word in OWN_CASTS and any(own.op is not PrimOp.MATMUL for own in readers)

    def _rounded(self, value: Code, dtype: str) -> Code:
        """A float32 value with as many bits as ``dtype`` has."""
        if _number(value.text) is not None:
            value = _with_dtype(value)
        return Code(f"{value.at(ATOM)}.to({TRITON_DTYPES[dtype]}).to(tl.float32)", value.dtype, value.rows, value.cols)

    def _one_plus_tanh(self, prim: Prim) -> Prim | None:
        """The tanh, where ``prim`` adds 1 to one that is computed here for it alone, as the tanh form of GELU does."""
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
            # The same by algebra, for a third of the work, and nothing cancels where tanh is near -1.
            inner = self.cast(self.value(tanh.inputs[0], self.aligned(tanh.inputs[0], at)), "float32")
            text = f"2.0 * tl.sigmoid(2.0 * {inner.at(PRODUCT + 1)})"
            return Code(text, "float32", inner.rows, inner.cols, PRODUCT)
        operands = [self.value(source, self.aligned(source, at)) for source in prim.inputs]
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
        wanted = prim.attrs.get("operand_dtype")
        operand_dtype = str(wanted) if wanted else ("" if prim.dtype == "bool" else target)
        if operand_dtype:
            operands = [
                o if prim.fn == "where" and i == 0 else self.cast(o, operand_dtype) for i, o in enumerate(operands)
            ]
        if all(_number(o.text) is not None for o in operands):
            # Arithmetic on numbers alone would be Python's, whose results have no dtype.
            operands = [_with_dtype(operands[0]), *operands[1:]]
        if prim.fn in REPEATS_OPERAND:
            operands = [self._variable_for(o, prim.inputs[i]) for i, o in enumerate(operands)]
        try:
            text, precedence = render(prim.fn, operands, prim.attrs, target)
        except KeyError as missing:
            raise CannotCode(f"no Triton form of {missing}") from None
        return Code(text, target, rows, cols, precedence)

    def cast(self, code: Code, dtype: str) -> Code:
        """``code`` in ``dtype``; half precisions stay in float32, the precision they are computed in."""
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
        """Make a variable of a value that is used more than once, that the user has a name for, or that is long."""
        if prim.op is PrimOp.CONSTANT or code.text.isidentifier() or not (code.rows or code.cols):
            return code
        several = self._uses.get(prim.name, 0) > 1
        wanted = self._user_name(prim)
        return self.assign(code, wanted or prim.fn or "value") if several or wanted or len(code.text) > 80 else code

    def _variable_for(self, code: Code, name: str) -> Code:
        if code.text.isidentifier() or _number(code.text) is not None:
            return code
        return self.assign(code, self._user_name(self.ir.prims[name]) or "value")

    def assign(self, code: Code, wanted: str) -> Code:
        name = self.parameters.names.unique(wanted)
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
        # A policy is for what is walked along the columns of every row, not for what all rows share.
        walked = (
            bool(self.eviction)
            and offset.cols
            and set(self.region.table.all_axes(prim.name)) > set(self.region.reduced_axes)
        )
        policy = f', eviction_policy="{self.eviction}"' if walked else ""
        text = f"tl.load({self.address(pointer, offset)}{self.mask_argument(offset, prim.dtype)}{policy})"
        if is_half(prim.dtype) and self._widen:
            text += ".to(tl.float32)"
        code = Code(text, compute_dtype(prim.dtype) if self._widen else prim.dtype, offset.rows, offset.cols)
        wanted = pointer.removesuffix("_ptr")
        return self.assign(code, wanted)

    def offset(self, kind: TensorType, at: tuple[Index, ...]) -> Code:
        """Element offset of an index in a buffer of that type."""
        total = Index()
        for index, stride in zip(at, kind.stride, strict=True):
            total = total + index * stride
        return self.index(total)

    @staticmethod
    def address(pointer: str, offset: Code) -> str:
        """Pointer plus offset."""
        return pointer if offset.text == "0" else f"{pointer} + {offset.at(SUM)}"

    def mask_argument(self, offset: Code, dtype: str | None) -> str:
        """``, mask=..., other=...`` for a load (``dtype`` given) or a store; empty where nothing can be out of range."""
        needed = [
            m for m in self.masks if (m.rows and offset.rows) or (m.cols and offset.cols) or not (m.rows or m.cols)
        ]
        if not needed:
            return ""
        mask = " & ".join(m.text for m in needed)
        zero = "" if dtype is None else f", other={self.outside or ('0.0' if is_float(dtype) else '0')}"
        return f", mask={mask}{zero}"


def _negative(value: object) -> bool:
    return isinstance(value, (int, float)) and value < 0


def _with_dtype(number: Code) -> Code:
    """A literal as a scalar that has its dtype."""
    return Code(f"tl.full([], {number.text}, {TRITON_DTYPES[number.dtype]})", number.dtype)


def _number(text: str) -> float | int | bool | None:
    """The number that a snippet is, if it is just a literal."""
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
    for own in region.roots(ir):
        counts[own] = counts.get(own, 0) + 1
    return counts
