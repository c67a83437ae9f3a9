"""Primitives as Triton expressions over one tile: loads, index arithmetic and pointwise work.

Values are pulled: asking for a value at an index asks for its operands at the indices that follow, so views cost nothing
and any load that is asked for twice is made once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from mtmc_lsp.core.dtypes import compute_dtype, is_float, is_half
from mtmc_lsp.core.graph import Ref, TensorType, contiguous_stride
from mtmc_lsp.core.protocols import CannotCode
from mtmc_lsp.core.sizes import Size, product
from mtmc_lsp.macro.axes import Axis, AxisTable
from mtmc_lsp.macro.prims import ONE, Prim, PrimOp, Program
from mtmc_lsp.macro.regions import Region
from mtmc_lsp.micro.builtin.code import ATOM, PRODUCT, SUM, TRITON_DTYPES, UNARY, Code, literal
from mtmc_lsp.micro.builtin.formulas import REPEATS_OPERAND, render
from mtmc_lsp.micro.builtin.index import Index, Variable
from mtmc_lsp.micro.builtin.naming import RESERVED, Names, identifier, value_name


@dataclass(frozen=True)
class Group:
    """Atomic axes that run as one loop variable, and the vector or scalar that holds it."""

    axes: tuple[Axis, ...]
    """Outermost first."""
    name: str
    rows: bool = False
    cols: bool = False
    taken_from: str = ""
    """The flat variable it is taken out of, where it must be set before it is first used."""
    below: Size = ONE
    """Product of the sizes of the groups inside this one."""
    outermost: bool = True


@dataclass(frozen=True)
class Mask:
    """A condition under which a load may happen."""

    text: str
    rows: bool
    cols: bool


def taken_apart(whole: Group, groups: Sequence[Sequence[Axis]], names: Names, first: int) -> list[Group]:
    """One variable per group of axes out of a flat one; the flat one itself where there is only one group."""
    if len(groups) == 1:
        return [whole]
    result: list[Group] = []
    below = ONE
    for number, axes in reversed(list(enumerate(groups))):
        size = product([axis.size for axis in axes])
        name = names.unique(f"{str(size).lower()}_index" if size.is_symbol else f"i{first + number}")
        result.append(Group(tuple(axes), name, whole.rows, whole.cols, whole.name, below, number == 0))
        below = below * size
    return list(reversed(result))


class Parameters:
    """A kernel's parameters, in the order in which they are first needed."""

    def __init__(
        self, program: Program, buffers: Mapping[str, TensorType], reserved: frozenset[str] = RESERVED
    ) -> None:
        """Start with no parameters.

        Args:
            program: what the kernel is a part of.
            buffers: the type of every primitive that lies in memory.
            reserved: names that the kernel uses for itself.
        """
        self.program = program
        self.buffers = buffers
        self.names = Names(reserved)
        self.tensors: dict[str, str] = {}
        """Primitive (or ``seed``) to the pointer's name."""
        self.outputs: dict[Ref, str] = {}
        self.sizes: dict[Size, str] = {}
        """Sizes with a name of their own, such as ``n_cols``."""
        self.used_sizes: dict[str, Size] = {}
        """Parameter name to the size it carries."""

    def tensor(self, name: str) -> str:
        """The pointer to the primitive's buffer."""
        if name not in self.tensors:
            prim = self.program.prims[name]
            self.tensors[name] = self.names.unique(f"{value_name(self.program, self.ref(prim))}_ptr")
        return self.tensors[name]

    def output(self, ref: Ref) -> str:
        """The pointer to an output's buffer."""
        if ref not in self.outputs:
            self.outputs[ref] = self.names.unique(f"{value_name(self.program, ref)}_ptr")
        return self.outputs[ref]

    def ref(self, prim: Prim) -> Ref:
        """The graph value that a primitive is."""
        for (name, index), own in self.program.values.items():
            if own == prim.name:
                return Ref(name, index)
        raise CannotCode(f"{prim.origin} is computed in part only")

    def name_size(self, size: Size, name: str) -> str:
        """Give a size its own parameter name."""
        if size not in self.sizes:
            self.sizes[size] = self.names.unique(name) if name not in ("n_rows", "n_cols") else name
        return self.sizes[size]

    def size(self, size: Size) -> Code:
        """A size as an expression over parameters and numbers."""
        if size in self.sizes:
            self.used_sizes[self.sizes[size]] = size
            return Code(self.sizes[size], "int64")
        if size.is_constant:
            return Code(str(size.constant), "int64")
        factors, rest = self._named_factors(size)
        if factors and rest.is_constant:
            for name in factors:
                self.used_sizes[name] = next(known for known, own in self.sizes.items() if own == name)
            head = [] if rest == ONE else [str(rest.constant)]
            return Code(" * ".join([*head, *factors]), "int64", precedence=PRODUCT)
        for symbol in size.symbols():
            self.used_sizes[symbol] = Size.symbol(symbol)
        several = len(size.terms) > 1
        return Code(str(size), "int64", precedence=SUM if several else (PRODUCT if "*" in str(size) else ATOM))

    def divisor(self, size: Size) -> str:
        """A size to divide by: a product of sizes, which may pass 32 bits, is worked out by the launcher."""
        if not size.is_constant and not size.is_symbol and size not in self.sizes and len(size.terms) == 1:
            factors, coefficient = size.terms[0]
            self.name_size(size, identifier("_".join([*factors, *([str(coefficient)] if coefficient != 1 else [])])))
        return self.size(size).at(UNARY)

    def _named_factors(self, size: Size) -> tuple[list[str], Size]:
        """The named sizes whose product ``size`` is, and what is left."""
        found: list[str] = []
        for known, name in sorted(self.sizes.items(), key=lambda item: -len(str(item[0]))):
            rest = size.divide_exactly(known) if not known.is_constant else None
            if rest is not None:
                found.append(name)
                size = rest
        return found, size


class Expressions:
    """Evaluates primitives of a region over one tile."""

    def __init__(
        self,
        program: Program,
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
        self.program = program
        self.region = region
        self.parameters = parameters
        self.groups = tuple(groups)
        self.flat = tuple(flat)
        self.declared: set[str] = set()
        self._widen = widen
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
        self._uses = _use_counts(program, region)

    # Indices -----------------------------------------------------------------------------------------------------

    def own_index(self, name: str) -> tuple[Index, ...]:
        """The indices at which a primitive's element for this place of the tile lies."""
        shape = self.program.prims[name].shape
        return tuple(self._dim_index(self.region.table.axes(name, dim)) for dim in range(len(shape)))

    def _has_own_index(self, prim: Prim) -> bool:
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
            if own and _walks_as_one(group, own):
                rest = {v: c for v, c in rest.items() if v.code or all(v.id != axis.id for axis in group.axes)}
                parts.append(self._product(Code(group.name, "int64", group.rows, group.cols), own[group.axes[-1]]))
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
        if _walks_as_one(group, coefficients):
            return self._product(Code(group.name, "int64", group.rows, group.cols), coefficients[group.axes[-1]])
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
                parts.append(self._product(Code(f"({text})", "int64", group.rows, group.cols), coefficient))
            below = below * axis.size
        return Code(" + ".join(p.at(SUM) for p in parts), "int64", group.rows, group.cols, SUM)

    def _taken_out(self, group: Group) -> str:
        text = group.taken_from
        if group.below != ONE:
            text += f" // {self.parameters.divisor(group.below)}"
        if not group.outermost:
            size = product([axis.size for axis in group.axes])
            text += f" % {self.parameters.divisor(size)}"
        return text

    def _product(self, factor: Code, coefficient: Size) -> Code:
        if coefficient == ONE:
            return factor
        size = self.parameters.size(coefficient)
        # From the left, so that 64-bit indices make each product 64-bit.
        return Code(f"{factor.at(PRODUCT)} * {size.at(PRODUCT)}", "int64", factor.rows, factor.cols, PRODUCT)

    # Values ------------------------------------------------------------------------------------------------------

    def value(self, name: str, at: tuple[Index, ...]) -> Code:
        """The value of a primitive at an index, in the dtype it is computed in."""
        prim = self.program.prims[name]
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
                size = self.parameters.size(value)
                return Code(size.text, compute_dtype(prim.dtype), precedence=size.precedence)
            typed = float(value) if is_float(prim.dtype) and isinstance(value, (int, float)) else value
            return Code(literal(typed), compute_dtype(prim.dtype), precedence=ATOM if not _negative(typed) else UNARY)
        if prim.op is PrimOp.IOTA:
            return self._iota(prim, at)
        if prim.op is PrimOp.RANDOM:
            return self._random(prim, at)
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
            return self.value(source, self._reshaped(prim, source, at))
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
        if prim.op is PrimOp.CAT:
            return self._cat(prim, at)
        if prim.op is PrimOp.PAD:
            return self._pad(prim, at)
        if prim.op is PrimOp.GATHER:
            return self._gather(prim, at)
        return self.provide(prim, at)

    def aligned(self, source: str, at: tuple[Index, ...]) -> tuple[Index, ...]:
        shape = self.program.prims[source].shape
        offset = len(at) - len(shape)
        return tuple(Index() if size == ONE else at[offset + i] for i, size in enumerate(shape))

    def _pointwise(self, prim: Prim, at: tuple[Index, ...]) -> Code:
        operands = [self.value(source, self.aligned(source, at)) for source in prim.inputs]
        target = compute_dtype(prim.dtype)
        rows, cols = any(o.rows for o in operands), any(o.cols for o in operands)
        if prim.fn == "cast":
            return self.cast(operands[0], target)
        if prim.fn == "div_by_size":
            size = prim.attrs["size"]
            assert isinstance(size, Size)
            count = self.parameters.size(size)
            return Code(f"{operands[0].at(PRODUCT)} / {count.at(UNARY)}", target, rows, cols, PRODUCT)
        wanted = prim.attrs.get("operand_dtype")
        operand_dtype = str(wanted) if wanted else ("" if prim.dtype == "bool" else target)
        if operand_dtype:
            operands = [
                o if prim.fn == "where" and i == 0 else self.cast(o, operand_dtype) for i, o in enumerate(operands)
            ]
        if all(_number(o.text) is not None for o in operands):
            # Arithmetic on numbers alone would be Python's, whose results have no dtype.
            first = operands[0]
            operands = [
                Code(f"tl.full([], {first.text}, {TRITON_DTYPES[first.dtype]})", first.dtype),
                *operands[1:],
            ]
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
        return self._assign(code, wanted or prim.fn or "value") if several or wanted or len(code.text) > 80 else code

    def _variable_for(self, code: Code, name: str) -> Code:
        if code.text.isidentifier() or _number(code.text) is not None:
            return code
        return self._assign(code, self._user_name(self.program.prims[name]) or "value")

    def _assign(self, code: Code, wanted: str) -> Code:
        name = self.parameters.names.unique(wanted)
        self.emit(f"{name} = {code.text}", code.cols)
        return Code(name, code.dtype, code.rows, code.cols)

    def _user_name(self, prim: Prim) -> str:
        for (node, index), own in self.program.values.items():
            if own == prim.name:
                graph_nodes = [n for n in self.program.graph.nodes if n.name == node]
                if graph_nodes and graph_nodes[0].variable:
                    return value_name(self.program, Ref(node, index))
        return ""

    # Memory ------------------------------------------------------------------------------------------------------

    def _load(self, prim: Prim, at: tuple[Index, ...]) -> Code:
        pointer = self.parameters.tensor(prim.name)
        offset = self.offset(self.parameters.buffers[prim.name], at)
        # A policy is for what is walked along the columns of every row, not for what all rows share.
        walked = (
            bool(self.eviction)
            and offset.cols
            and set(self.region.table.all_axes(prim.name)) > set(self.region.reduced)
        )
        policy = f', eviction_policy="{self.eviction}"' if walked else ""
        text = f"tl.load({self.address(pointer, offset)}{self.mask_argument(offset, prim.dtype)}{policy})"
        if is_half(prim.dtype) and self._widen:
            text += ".to(tl.float32)"
        code = Code(text, compute_dtype(prim.dtype) if self._widen else prim.dtype, offset.rows, offset.cols)
        wanted = pointer.removesuffix("_ptr")
        return self._assign(code, wanted)

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
        needed = [m for m in self.masks if (m.rows and offset.rows) or (m.cols and offset.cols)]
        if not needed:
            return ""
        mask = " & ".join(m.text for m in needed)
        zero = "" if dtype is None else f", other={'0.0' if is_float(dtype) else '0'}"
        return f", mask={mask}{zero}"

    # Index-changing primitives -----------------------------------------------------------------------------------

    def _reshaped(self, prim: Prim, source: str, at: tuple[Index, ...]) -> tuple[Index, ...]:
        """Indices into the source of a reshape: linear in the result's shape, taken apart in the source's."""
        table = self.region.table
        if self._has_own_index(prim) and at == self.own_index(prim.name) and _tied(table, prim.name, source):
            return self.own_index(source)
        linear = Index()
        for index, stride in zip(at, contiguous_stride(prim.shape), strict=True):
            linear = linear + index * stride
        result: list[Index] = []
        for position, size in enumerate(reversed(self.program.prims[source].shape)):
            if size == ONE:
                result.append(Index())
                continue
            if position == len(self.program.prims[source].shape) - 1:
                result.append(linear)
                break
            parts = linear.divmod(size)
            if parts is None:
                parts = self._computed_divmod(linear, size)
            linear, remainder = parts
            result.append(remainder)
        return tuple(reversed(result))

    def _computed_divmod(self, linear: Index, size: Size) -> tuple[Index, Index]:
        code = self._assign(self.index(linear), "position") if linear.terms else self.index(linear)
        divisor = self.parameters.divisor(size)
        bound = Size.of(1 << 30)
        quotient = Variable(-1, bound, f"({code.text} // {divisor})", code.rows, code.cols)
        remainder = Variable(-1, size, f"({code.text} % {divisor})", code.rows, code.cols)
        return Index.of(quotient), Index.of(remainder)

    def _cat(self, prim: Prim, at: tuple[Index, ...]) -> Code:
        dim = prim.attrs["dim"]
        assert isinstance(dim, int)
        position = self.index(at[dim])
        start = Size.of(0)
        pieces: list[tuple[str, Code]] = []
        for number, source in enumerate(prim.inputs):
            length = self.program.prims[source].shape[dim]
            end = self.parameters.size(start + length).at(SUM)
            low, high = f"({position.text} >= {self.parameters.size(start).at(SUM)})", f"({position.text} < {end})"
            first, last = number == 0, number == len(prim.inputs) - 1
            inside = high if first else (low if last else f"({low} & {high})")
            shifted = at[dim].plus(start * -1)
            with_guard = Mask(inside, position.rows, position.cols)
            self.masks.append(with_guard)
            value = self.value(source, (*at[:dim], shifted, *at[dim + 1 :]))
            self.masks.pop()
            pieces.append((f"{position.text} < {end}", self.cast(value, prim.dtype)))
            start = start + length
        text = pieces[-1][1].text
        for condition, value in reversed(pieces[:-1]):
            text = f"tl.where({condition}, {value.text}, {text})"
        rows = position.rows or any(v.rows for _, v in pieces)
        cols = position.cols or any(v.cols for _, v in pieces)
        return Code(text, compute_dtype(prim.dtype), rows, cols)

    def _pad(self, prim: Prim, at: tuple[Index, ...]) -> Code:
        before = prim.attrs["before"]
        assert isinstance(before, tuple)
        source = prim.inputs[0]
        inner, conditions, rows, cols = [], [], False, False
        for dim, (index, amount) in enumerate(zip(at, before, strict=True)):
            length = self.program.prims[source].shape[dim]
            inner.append(index.plus(-amount))
            if length != prim.shape[dim]:
                position = self.index(index.plus(-amount))
                conditions.append(
                    f"({position.text} >= 0) & ({position.text} < {self.parameters.size(length).at(SUM)})"
                )
                rows, cols = rows or position.rows, cols or position.cols
        if not conditions:
            return self.value(source, tuple(inner))
        inside = self._assign(Code(" & ".join(conditions), "bool", rows, cols), "inside")
        self.masks.append(Mask(inside.text, rows, cols))
        value = self.cast(self.value(source, tuple(inner)), prim.dtype)
        self.masks.pop()
        fill = prim.attrs["value"]
        assert isinstance(fill, (bool, int, float))
        number = self.cast(Code(literal(fill), ""), prim.dtype).text
        return Code(
            f"tl.where({inside.text}, {value.text}, {number})", value.dtype, rows or value.rows, cols or value.cols
        )

    def _gather(self, prim: Prim, at: tuple[Index, ...]) -> Code:
        dim = prim.attrs["dim"]
        assert isinstance(dim, int)
        source, index = prim.inputs
        # Offsets into a large table pass 32 bits.
        looked_up = self.cast(self.value(index, self.aligned(index, at)), "int64")
        if not looked_up.text.isidentifier():
            looked_up = self._assign(looked_up, "index")
        size = self.program.prims[source].shape[dim]
        variable = Variable(-1, size, looked_up.text, looked_up.rows, looked_up.cols)
        inner = [Index.of(variable) if d == dim else own for d, own in enumerate(at)]
        return self.value(source, tuple(inner))

    def _iota(self, prim: Prim, at: tuple[Index, ...]) -> Code:
        dim, start, step = prim.attrs["dim"], prim.attrs["start"], prim.attrs["step"]
        assert isinstance(dim, int)
        if isinstance(start, float) or isinstance(step, float):
            plain = self.cast(self.index(at[dim]), prim.dtype)
            scaled = f"{plain.at(PRODUCT)} * {literal(step)} + {literal(start)}"
            return Code(scaled, plain.dtype, plain.rows, plain.cols, SUM)
        assert isinstance(step, int)
        code = self.index((at[dim] * step).plus(start if isinstance(start, (int, Size)) else 0))
        return self.cast(code, prim.dtype)

    def _random(self, prim: Prim, at: tuple[Index, ...]) -> Code:
        """Element i of the tensor gets word i % 4 of Philox's counter i // 4, whatever the shape of the tile."""
        self.parameters.tensors.setdefault("seed", "seed_ptr")
        stream = prim.attrs["stream"]
        seed = "tl.load(seed_ptr)" if stream == 0 else f"tl.load(seed_ptr + {stream})"
        linear = Index()
        for index, stride in zip(at, contiguous_stride(prim.shape), strict=True):
            linear = linear + index * stride
        code = self.index(linear)
        apart = Code(f"_uniform_at({seed}, {code.text})", "float32", code.rows, code.cols)
        start = self._start_of_run(linear)
        if start is None:
            return apart
        together = f"_uniform({seed}, {start}, BLOCK)"
        if not self.needs_quads:
            return Code(together, "float32", False, True)
        return Code(f"{together} if QUADS else {apart.text}", "float32", False, True, 0)

    def _start_of_run(self, linear: Index) -> str | None:
        """Where a tile of consecutive elements begins, where that is a multiple of 4; None for other tiles.

        Sets ``needs_quads`` where it is one only if rows are.
        """
        columns = next((group for group in self.flat if group.cols), None)
        if columns is None or self.first_column is None:
            return None
        own = {axis: c for axis in columns.axes for v, c in linear.terms if v.id == axis.id and not v.code}
        if not _walks_as_one(columns, own) or own.get(columns.axes[-1]) != ONE:
            return None
        rest = tuple((v, c) for v, c in linear.terms if all(v.id != axis.id for axis in columns.axes))
        if linear.constant.terms or any(v.rows or v.cols for v, _ in rest):
            return None
        if any(c.divide_exactly(Size.of(4)) is None for _, c in rest):
            if any(c.divide_exactly(self.row_length) is None for _, c in rest):
                return None
            self.needs_quads = True
        base = self.index(Index(rest)).text if rest else ""
        return " + ".join(text for text in (base, self.first_column) if text) or "0"


def _walks_as_one(group: Group, coefficients: Mapping[Axis, Size]) -> bool:
    """Whether an access steps over the group's axes as over one dense axis."""
    expected = coefficients.get(group.axes[-1])
    if expected is None:
        return False
    for axis in reversed(group.axes):
        if coefficients.get(axis) != expected:
            return False
        expected = expected * axis.size
    return True


def _tied(table: AxisTable, name: str, source: str) -> bool:
    """Whether a reshape's two sides run over the same axes in the same order."""
    return table.all_axes(name) == table.all_axes(source)


def _negative(value: object) -> bool:
    return isinstance(value, (int, float)) and value < 0


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


def _use_counts(program: Program, region: Region) -> dict[str, int]:
    counts: dict[str, int] = {}
    for name in region.prims:
        prim = program.prims[name]
        for source in prim.inputs:
            counts[source] = counts.get(source, 0) + 1
    for ref in region.outputs:
        own = program.of(ref).name
        counts[own] = counts.get(own, 0) + 1
    return counts
