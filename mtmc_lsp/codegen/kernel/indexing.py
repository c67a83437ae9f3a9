"""Primitives that change indices: reshape, concatenation, padding, gather, iota and random numbers.

Each function takes the tile, the primitive and the index at which its value is needed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mtmc_lsp.codegen.kernel.axis_groups import Mask, walks_as_one
from mtmc_lsp.codegen.kernel.index import Index, Variable
from mtmc_lsp.codegen.kernel.snippets import PRODUCT, SUM, Code, literal
from mtmc_lsp.core.dtypes import compute_dtype
from mtmc_lsp.core.graph import contiguous_stride
from mtmc_lsp.core.sizes import Size, product
from mtmc_lsp.ir.primitives import ONE, VIEW_OPS, Prim, is_zero_padding

if TYPE_CHECKING:
    from mtmc_lsp.codegen.kernel.expressions import Expressions


def reshaped(tile: Expressions, prim: Prim, source: str, at: tuple[Index, ...]) -> tuple[Index, ...]:
    """Indices into the source of a reshape: linearised in the result's shape, then split by the source's shape."""
    table = tile.region.table
    has_same_axes = table.all_axes(prim.name) == table.all_axes(source)
    if has_same_axes and tile.covers_axes(prim) and at == tile.tile_index(prim.name):
        return tile.tile_index(source)
    result: list[Index] = []
    source_shape = tile.ir.prims[source].shape
    for result_part, source_part in _segments(prim.shape, source_shape):
        result += _split_linear_index(tile, prim.shape[result_part], at[result_part], source_shape[source_part])
    return tuple(result)


def _segments(first: tuple[Size, ...], second: tuple[Size, ...]) -> list[tuple[slice, slice]]:
    """Split both shapes into the largest number of matching segments with equal element counts."""
    segments: list[tuple[slice, slice]] = []
    start, other = 0, 0
    ends = {product(second[:end]): end for end in range(1, len(second))}
    for end in range(1, len(first)):
        match = ends.get(product(first[:end]))
        if match is not None and match > other:
            segments.append((slice(start, end), slice(other, match)))
            start, other = end, match
    return [*segments, (slice(start, len(first)), slice(other, len(second)))]


def _split_linear_index(
    tile: Expressions, shape: tuple[Size, ...], at: tuple[Index, ...], target_shape: tuple[Size, ...]
) -> list[Index]:
    """Indices in ``target_shape`` of the element at ``at`` in ``shape``."""
    linear = Index()
    for index, stride in zip(at, contiguous_stride(shape), strict=True):
        linear = linear + index * stride
    result: list[Index] = []
    non_unit = [position for position, size in enumerate(target_shape) if size != ONE]
    for position, size in reversed(list(enumerate(target_shape))):
        if size == ONE:
            result.append(Index())
        elif position == non_unit[0]:
            result.append(linear)
        else:
            parts = linear.divmod(size)
            if parts is None:
                parts = _computed_divmod(tile, linear, size, product(target_shape[:position]))
            linear, remainder = parts
            result.append(remainder)
    return list(reversed(result))


def _computed_divmod(tile: Expressions, linear: Index, size: Size, bound: Size) -> tuple[Index, Index]:
    """Quotient and remainder as arithmetic in the kernel; the quotient is below ``bound``."""
    code = tile.assign(tile.index(linear), "position") if linear.terms else tile.index(linear)
    divisor = tile.parameters.divisor(size)
    quotient = Variable(-1, bound, f"({code.text} // {divisor})", code.rows, code.cols)
    remainder = Variable(-1, size, f"({code.text} % {divisor})", code.rows, code.cols)
    return Index.of(quotient), Index.of(remainder)


def cat(tile: Expressions, prim: Prim, at: tuple[Index, ...]) -> Code:
    """The value of a concatenation: selects the input that contains the index along the concatenated dimension."""
    dim = prim.attrs["dim"]
    assert isinstance(dim, int)
    constant_input = _input_at(tile, prim, dim, at[dim])
    if constant_input is not None:
        source, inner_index = constant_input
        return tile.cast(tile.value(source, (*at[:dim], inner_index, *at[dim + 1 :])), prim.dtype)
    position = tile.index(at[dim])
    start = Size.of(0)
    inputs: list[tuple[str, Code]] = []
    for number, source in enumerate(prim.inputs):
        length = tile.ir.prims[source].shape[dim]
        end = tile.parameters.size(start + length).at(SUM)
        low, high = f"({position.text} >= {tile.parameters.size(start).at(SUM)})", f"({position.text} < {end})"
        first, last = number == 0, number == len(prim.inputs) - 1
        inside = high if first else (low if last else f"({low} & {high})")
        shifted = at[dim].plus(start * -1)
        mask = Mask(inside, position.rows, position.cols)
        tile.masks.append(mask)
        value = tile.value(source, (*at[:dim], shifted, *at[dim + 1 :]))
        tile.masks.pop()
        inputs.append((f"{position.text} < {end}", tile.cast(value, prim.dtype)))
        start = start + length
    text = inputs[-1][1].text
    for condition, value in reversed(inputs[:-1]):
        text = f"tl.where({condition}, {value.text}, {text})"
    rows = position.rows or any(v.rows for _, v in inputs)
    cols = position.cols or any(v.cols for _, v in inputs)
    return Code(text, compute_dtype(prim.dtype), rows, cols)


def _input_at(tile: Expressions, prim: Prim, dim: int, index: Index) -> tuple[str, Index] | None:
    """The input that contains a constant index, and the index in it; None if the index or a length is not constant."""
    if index.terms or not index.constant.is_constant:
        return None
    start = 0
    for source in prim.inputs:
        length = tile.ir.prims[source].shape[dim]
        if not length.is_constant:
            return None
        if start <= index.constant.constant < start + length.constant:
            return source, index.plus(-start)
        start += length.constant
    return None


def pad(tile: Expressions, prim: Prim, at: tuple[Index, ...]) -> Code:
    """The input value inside its bounds, and the fill value outside."""
    before = prim.attrs["before"]
    assert isinstance(before, tuple)
    source = prim.inputs[0]
    inner, conditions, rows, cols = [], [], False, False
    for dim, (index, amount) in enumerate(zip(at, before, strict=True)):
        length = tile.ir.prims[source].shape[dim]
        inner.append(index.plus(-amount))
        # Without padding on one side, one bound is enough. A window that leaves out the last elements may cut off as many
        # as the padding adds, so equal lengths do not mean that there is no padding.
        after = prim.shape[dim] - length - amount
        is_padded_after = not after.is_constant or after.constant > 0
        if amount or is_padded_after:
            position = tile.index(index.plus(-amount))
            if amount:
                conditions.append(f"({position.text} >= 0)")
            if is_padded_after:
                conditions.append(f"({position.text} < {tile.parameters.size(length).at(SUM)})")
            rows, cols = rows or position.rows, cols or position.cols
    if not conditions:
        return tile.value(source, tuple(inner))
    inside = tile.assign(Code(" & ".join(conditions), "bool", rows, cols), "inside")
    fill = prim.attrs["value"]
    assert isinstance(fill, (bool, int, float))
    tile.masks.append(Mask(inside.text, rows, cols))
    tile.masked_value = literal(fill) if _is_loaded(tile, source, or_padded=False) else ""
    value = tile.value(source, tuple(inner))
    is_loaded = bool(tile.masked_value) or (is_zero_padding(prim) and _is_loaded(tile, source))
    tile.masked_value = ""
    tile.masks.pop()
    if is_loaded and value.rows >= rows and value.cols >= cols:
        # The masked load already returns the fill value.
        return value
    if value.dtype != prim.dtype:
        value = tile.cast(value, prim.dtype)
    number = tile.cast(Code(literal(fill), ""), prim.dtype).text
    return Code(f"tl.where({inside.text}, {value.text}, {number})", value.dtype, rows or value.rows, cols or value.cols)


def _is_loaded(tile: Expressions, name: str, *, or_padded: bool = True) -> bool:
    """Whether a value is loaded without computation; with ``or_padded``, zero padding is allowed as well."""
    while name not in tile.region.inputs:
        prim = tile.ir.prims[name]
        if prim.op not in VIEW_OPS and not (or_padded and is_zero_padding(prim)):
            return False
        name = prim.inputs[0]
    return True


def windowed(prim: Prim, at: tuple[Index, ...]) -> tuple[Index, ...]:
    """Source index of a window element."""
    dim, step, dilation = prim.attrs["dim"], prim.attrs["step"], prim.attrs["dilation"]
    assert isinstance(dim, int) and isinstance(step, int) and isinstance(dilation, int)
    *outer, kernel_position = at
    outer[dim] = outer[dim] * step + kernel_position * dilation
    return tuple(outer)


def gather(tile: Expressions, prim: Prim, at: tuple[Index, ...]) -> Code:
    """The input value at the gathered index."""
    dim = prim.attrs["dim"]
    assert isinstance(dim, int)
    source, index = prim.inputs
    row = gathered_index(tile, index, at, tile.ir.prims[source].shape[dim])
    inner = [Index.of(row) if d == dim else outer_index for d, outer_index in enumerate(at)]
    return tile.value(source, tuple(inner))


def gathered_index(tile: Expressions, index: str, at: tuple[Index, ...], size: Size) -> Variable:
    """The value of an index tensor, as an index below ``size``."""
    # Offsets into a large table may exceed 32 bits.
    value = tile.cast(tile.value(index, tile.aligned(index, at)), "int64")
    if not value.text.isidentifier():
        value = tile.assign(value, "index")
    return Variable(-1, size, value.text, value.rows, value.cols)


def iota(tile: Expressions, prim: Prim, at: tuple[Index, ...]) -> Code:
    """The position along the dimension, times a step plus a start."""
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
    """Random numbers: element i uses word i % 4 of Philox counter i // 4, independent of the tile shape."""
    tile.parameters.tensors.setdefault("seed", "seed_ptr")
    stream = prim.attrs["stream"]
    seed = "tl.load(seed_ptr)" if stream == 0 else f"tl.load(seed_ptr + {stream})"
    linear = Index()
    for index, stride in zip(at, contiguous_stride(prim.shape), strict=True):
        linear = linear + index * stride
    code = tile.index(linear)
    per_element = Code(f"_uniform_at({seed}, {code.text})", "float32", code.rows, code.cols)
    start = _start_of_run(tile, linear)
    if start is None:
        return per_element
    per_run = f"_uniform({seed}, {start}, BLOCK)"
    if not tile.needs_quads:
        return Code(per_run, "float32", False, True)
    return Code(f"{per_run} if QUADS else {per_element.text}", "float32", False, True, 0)


def _start_of_run(tile: Expressions, linear: Index) -> str | None:
    """First element of a tile of consecutive elements, if it is a multiple of 4; None for other tiles.

    Sets ``needs_quads`` if this additionally requires a row length that is a multiple of 4.
    """
    columns = next((group for group in tile.flat if group.cols), None)
    if columns is None or tile.first_column is None:
        return None
    coefficients = {axis: c for axis in columns.axes for v, c in linear.terms if v.id == axis.id and not v.code}
    if not walks_as_one(columns, coefficients) or coefficients.get(columns.axes[-1]) != ONE:
        return None
    other_terms = tuple((v, c) for v, c in linear.terms if all(v.id != axis.id for axis in columns.axes))
    if linear.constant.terms or any(v.rows or v.cols for v, _ in other_terms):
        return None
    if any(c.divide_exactly(Size.of(4)) is None for _, c in other_terms):
        if any(c.divide_exactly(tile.row_length) is None for _, c in other_terms):
            return None
        tile.needs_quads = True
    base = tile.index(Index(other_terms)).text if other_terms else ""
    return " + ".join(text for text in (base, tile.first_column) if text) or "0"
