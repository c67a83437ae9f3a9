"""Primitives that look elsewhere: reshapes, concatenation, padding, look-ups, positions and random numbers.

Each is a function of the tile, the primitive and the index at which its value is wanted.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mtmc_lsp.codegen.kernel.axis_groups import Mask, walks_as_one
from mtmc_lsp.codegen.kernel.index import Index, Variable
from mtmc_lsp.codegen.kernel.snippets import PRODUCT, SUM, Code, literal
from mtmc_lsp.core.dtypes import compute_dtype
from mtmc_lsp.core.graph import contiguous_stride
from mtmc_lsp.core.sizes import Size, product
from mtmc_lsp.ir.axes import AxisTable
from mtmc_lsp.ir.primitives import ONE, VIEW_OPS, Prim, is_zero_padding

if TYPE_CHECKING:
    from mtmc_lsp.codegen.kernel.expressions import Expressions


def reshaped(tile: Expressions, prim: Prim, source: str, at: tuple[Index, ...]) -> tuple[Index, ...]:
    """Indices into the source of a reshape: linear in the result's shape, taken apart in the source's."""
    table = tile.region.table
    if tile.has_own_index(prim) and at == tile.own_index(prim.name) and _tied(table, prim.name, source):
        return tile.own_index(source)
    result: list[Index] = []
    own = tile.ir.prims[source].shape
    for mine, theirs in _segments(prim.shape, own):
        result += _taken_apart(tile, prim.shape[mine], at[mine], own[theirs])
    return tuple(result)


def _segments(first: tuple[Size, ...], second: tuple[Size, ...]) -> list[tuple[slice, slice]]:
    """The shapes cut into as many pieces as hold the same number of elements each."""
    found: list[tuple[slice, slice]] = []
    start, other = 0, 0
    ends = {product(second[:end]): end for end in range(1, len(second))}
    for end in range(1, len(first)):
        match = ends.get(product(first[:end]))
        if match is not None and match > other:
            found.append((slice(start, end), slice(other, match)))
            start, other = end, match
    return [*found, (slice(start, len(first)), slice(other, len(second)))]


def _taken_apart(
    tile: Expressions, shape: tuple[Size, ...], at: tuple[Index, ...], wanted: tuple[Size, ...]
) -> list[Index]:
    """The indices in the shape ``wanted`` of the element at ``at`` in ``shape``."""
    linear = Index()
    for index, stride in zip(at, contiguous_stride(shape), strict=True):
        linear = linear + index * stride
    result: list[Index] = []
    large = [position for position, size in enumerate(wanted) if size != ONE]
    for position, size in reversed(list(enumerate(wanted))):
        if size == ONE:
            result.append(Index())
        elif position == large[0]:
            result.append(linear)
        else:
            parts = linear.divmod(size)
            if parts is None:
                parts = _computed_divmod(tile, linear, size)
            linear, remainder = parts
            result.append(remainder)
    return list(reversed(result))


def _computed_divmod(tile: Expressions, linear: Index, size: Size) -> tuple[Index, Index]:
    code = tile.assign(tile.index(linear), "position") if linear.terms else tile.index(linear)
    divisor = tile.parameters.divisor(size)
    bound = Size.of(1 << 30)
    quotient = Variable(-1, bound, f"({code.text} // {divisor})", code.rows, code.cols)
    remainder = Variable(-1, size, f"({code.text} % {divisor})", code.rows, code.cols)
    return Index.of(quotient), Index.of(remainder)


def cat(tile: Expressions, prim: Prim, at: tuple[Index, ...]) -> Code:
    """The input that the place along the joined dimension falls into."""
    dim = prim.attrs["dim"]
    assert isinstance(dim, int)
    known = _piece_at(tile, prim, dim, at[dim])
    if known is not None:
        source, inside_it = known
        return tile.cast(tile.value(source, (*at[:dim], inside_it, *at[dim + 1 :])), prim.dtype)
    position = tile.index(at[dim])
    start = Size.of(0)
    pieces: list[tuple[str, Code]] = []
    for number, source in enumerate(prim.inputs):
        length = tile.ir.prims[source].shape[dim]
        end = tile.parameters.size(start + length).at(SUM)
        low, high = f"({position.text} >= {tile.parameters.size(start).at(SUM)})", f"({position.text} < {end})"
        first, last = number == 0, number == len(prim.inputs) - 1
        inside = high if first else (low if last else f"({low} & {high})")
        shifted = at[dim].plus(start * -1)
        with_guard = Mask(inside, position.rows, position.cols)
        tile.masks.append(with_guard)
        value = tile.value(source, (*at[:dim], shifted, *at[dim + 1 :]))
        tile.masks.pop()
        pieces.append((f"{position.text} < {end}", tile.cast(value, prim.dtype)))
        start = start + length
    text = pieces[-1][1].text
    for condition, value in reversed(pieces[:-1]):
        text = f"tl.where({condition}, {value.text}, {text})"
    rows = position.rows or any(v.rows for _, v in pieces)
    cols = position.cols or any(v.cols for _, v in pieces)
    return Code(text, compute_dtype(prim.dtype), rows, cols)


def _piece_at(tile: Expressions, prim: Prim, dim: int, place: Index) -> tuple[str, Index] | None:
    """The one input that a constant place falls into, and the place in it; None where neither is known before it runs."""
    if place.terms or not place.constant.is_constant:
        return None
    start = 0
    for source in prim.inputs:
        length = tile.ir.prims[source].shape[dim]
        if not length.is_constant:
            return None
        if start <= place.constant.constant < start + length.constant:
            return source, place.plus(-start)
        start += length.constant
    return None


def pad(tile: Expressions, prim: Prim, at: tuple[Index, ...]) -> Code:
    """The input where the index is within it, else the fill value."""
    before = prim.attrs["before"]
    assert isinstance(before, tuple)
    source = prim.inputs[0]
    inner, conditions, rows, cols = [], [], False, False
    for dim, (index, amount) in enumerate(zip(at, before, strict=True)):
        length = tile.ir.prims[source].shape[dim]
        inner.append(index.plus(-amount))
        if length != prim.shape[dim]:
            position = tile.index(index.plus(-amount))
            # With nothing in front, or nothing behind, there is one end to look at.
            if amount:
                conditions.append(f"({position.text} >= 0)")
            if length + amount != prim.shape[dim]:
                conditions.append(f"({position.text} < {tile.parameters.size(length).at(SUM)})")
            rows, cols = rows or position.rows, cols or position.cols
    if not conditions:
        return tile.value(source, tuple(inner))
    inside = tile.assign(Code(" & ".join(conditions), "bool", rows, cols), "inside")
    fill = prim.attrs["value"]
    assert isinstance(fill, (bool, int, float))
    tile.masks.append(Mask(inside.text, rows, cols))
    tile.outside = literal(fill) if _is_loaded(tile, source, or_padded=False) else ""
    value = tile.value(source, tuple(inner))
    loaded = bool(tile.outside) or (is_zero_padding(prim) and _is_loaded(tile, source))
    tile.outside = ""
    tile.masks.pop()
    if loaded and value.rows >= rows and value.cols >= cols:
        # The load itself gives the fill value outside.
        return value
    if value.dtype != prim.dtype:
        value = tile.cast(value, prim.dtype)
    number = tile.cast(Code(literal(fill), ""), prim.dtype).text
    return Code(f"tl.where({inside.text}, {value.text}, {number})", value.dtype, rows or value.rows, cols or value.cols)


def _is_loaded(tile: Expressions, name: str, *, or_padded: bool = True) -> bool:
    """Whether a value is read as it lies in memory, with zeros around it perhaps where ``or_padded``."""
    while name not in tile.region.inputs:
        prim = tile.ir.prims[name]
        if prim.op not in VIEW_OPS and not (or_padded and is_zero_padding(prim)):
            return False
        name = prim.inputs[0]
    return True


def windowed(prim: Prim, at: tuple[Index, ...]) -> tuple[Index, ...]:
    """The place in the source of a place in a window."""
    dim, step, dilation = prim.attrs["dim"], prim.attrs["step"], prim.attrs["dilation"]
    assert isinstance(dim, int) and isinstance(step, int) and isinstance(dilation, int)
    *outer, kernel_position = at
    outer[dim] = outer[dim] * step + kernel_position * dilation
    return tuple(outer)


def gather(tile: Expressions, prim: Prim, at: tuple[Index, ...]) -> Code:
    """The input at the index that is looked up."""
    dim = prim.attrs["dim"]
    assert isinstance(dim, int)
    source, index = prim.inputs
    place = looked_up(tile, index, at, tile.ir.prims[source].shape[dim])
    inner = [Index.of(place) if d == dim else own for d, own in enumerate(at)]
    return tile.value(source, tuple(inner))


def looked_up(tile: Expressions, index: str, at: tuple[Index, ...], size: Size) -> Variable:
    """The place below ``size`` that a primitive of indices says."""
    # Offsets into a large table pass 32 bits.
    found = tile.cast(tile.value(index, tile.aligned(index, at)), "int64")
    if not found.text.isidentifier():
        found = tile.assign(found, "index")
    return Variable(-1, size, found.text, found.rows, found.cols)


def iota(tile: Expressions, prim: Prim, at: tuple[Index, ...]) -> Code:
    """The place itself, times a step plus a start."""
    dim, start, step = prim.attrs["dim"], prim.attrs["start"], prim.attrs["step"]
    assert isinstance(dim, int)
    if isinstance(start, float) or isinstance(step, float):
        plain = tile.cast(tile.index(at[dim]), prim.dtype)
        scaled = f"{plain.at(PRODUCT)} * {literal(step)} + {literal(start)}"
        return Code(scaled, plain.dtype, plain.rows, plain.cols, SUM)
    assert isinstance(step, int)
    code = tile.index((at[dim] * step).plus(start if isinstance(start, (int, Size)) else 0))
    return tile.cast(code, prim.dtype)


def random(tile: Expressions, prim: Prim, at: tuple[Index, ...]) -> Code:
    """Element i of the tensor gets word i % 4 of Philox's counter i // 4, whatever the shape of the tile."""
    tile.parameters.tensors.setdefault("seed", "seed_ptr")
    stream = prim.attrs["stream"]
    seed = "tl.load(seed_ptr)" if stream == 0 else f"tl.load(seed_ptr + {stream})"
    linear = Index()
    for index, stride in zip(at, contiguous_stride(prim.shape), strict=True):
        linear = linear + index * stride
    code = tile.index(linear)
    apart = Code(f"_uniform_at({seed}, {code.text})", "float32", code.rows, code.cols)
    start = _start_of_run(tile, linear)
    if start is None:
        return apart
    together = f"_uniform({seed}, {start}, BLOCK)"
    if not tile.needs_quads:
        return Code(together, "float32", False, True)
    return Code(f"{together} if QUADS else {apart.text}", "float32", False, True, 0)


def _start_of_run(tile: Expressions, linear: Index) -> str | None:
    """Where a tile of consecutive elements begins, where that is a multiple of 4; None for other tiles.

    Sets ``needs_quads`` where it is one only if rows are.
    """
    columns = next((group for group in tile.flat if group.cols), None)
    if columns is None or tile.first_column is None:
        return None
    own = {axis: c for axis in columns.axes for v, c in linear.terms if v.id == axis.id and not v.code}
    if not walks_as_one(columns, own) or own.get(columns.axes[-1]) != ONE:
        return None
    rest = tuple((v, c) for v, c in linear.terms if all(v.id != axis.id for axis in columns.axes))
    if linear.constant.terms or any(v.rows or v.cols for v, _ in rest):
        return None
    if any(c.divide_exactly(Size.of(4)) is None for _, c in rest):
        if any(c.divide_exactly(tile.row_length) is None for _, c in rest):
            return None
        tile.needs_quads = True
    base = tile.index(Index(rest)).text if rest else ""
    return " + ".join(text for text in (base, tile.first_column) if text) or "0"


def _tied(table: AxisTable, name: str, source: str) -> bool:
    """Whether a reshape's two sides run over the same axes in the same order."""
    return table.all_axes(name) == table.all_axes(source)
