"""Operations that read their input at places computed from the result's: interpolation, and padding by what is inside.

Each dimension is looked up by itself, at an index that is arithmetic on the result's place; nothing of it is in memory.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

from mtmc_lsp.core.dtypes import compute_dtype, is_float
from mtmc_lsp.core.sizes import Size
from mtmc_lsp.ir.lower import Call, rule
from mtmc_lsp.ir.lower.windows import constant_sizes, per_dim, sliding
from mtmc_lsp.ir.primitives import Builder, PrimOp

CUBIC = -0.75
"""The free parameter of PyTorch's cubic kernel."""


def looked_up(b: Builder, x: str, dim: int, index: str) -> str:
    """``x`` with dimension ``dim`` read at ``index``, a vector."""
    shape, places = list(b.shape(x)), b.shape(index)[0]
    spread = b.reshape(index, [places if i == dim else 1 for i in range(len(shape))])
    shape[dim] = places
    return b.add(PrimOp.GATHER, (x, spread), shape, b.dtype(x), dim=dim)


def positions(b: Builder, size: Size, start: int = 0, step: int = 1) -> str:
    """``start``, ``start + step`` and so on, ``size`` of them."""
    return b.add(PrimOp.IOTA, (), [size], "int64", dim=0, start=start, step=step)


def clamped(b: Builder, index: str, size: Size) -> str:
    """``index`` brought within a dimension of that size."""
    index = b.pointwise("maximum", index, 0, dtype="int64")
    return b.pointwise("minimum", index, b.size(size - 1, "int64"), dtype="int64")


@rule("upsample_nearest1d", "upsample_nearest2d", "upsample_nearest3d")
@rule("_upsample_nearest_exact1d", "_upsample_nearest_exact2d", "_upsample_nearest_exact3d")
def nearest(c: Call) -> str:
    """Each place reads ``floor(place * scale)``, of the middle of the place where the operation is the exact one."""
    x, n = c.tensor(0), _spatial(c)
    exact = "exact" in c.op
    for dim, scale in enumerate(_scales(c, n, 2), start=len(c.out.shape) - n):
        size, places = c.b.shape(x)[dim], c.out.shape[dim]
        if _unchanged(c, size, places, scale):
            continue
        ratio = _ratio(c, size, places, scale)
        times = _whole_times(size, places, ratio, 0.5 if exact else 0.0)
        if times:
            shape = c.b.shape(x)
            x = c.b.reshape(x, [*shape[: dim + 1], 1, *shape[dim + 1 :]])
            x = c.b.expand(x, [*shape[: dim + 1], times, *shape[dim + 1 :]])
            x = c.b.reshape(x, [*shape[:dim], places, *shape[dim + 1 :]])
            continue
        # In float32 whatever the dtype of the values, as PyTorch does: another rounding would be another element.
        place = c.b.cast(positions(c.b, places), "float32")
        place = c.b.pointwise("add", place, 0.5, dtype="float32") if exact else place
        place = c.b.pointwise("floor", c.b.pointwise("mul", place, ratio, dtype="float32"), dtype="float32")
        x = looked_up(c.b, x, dim, clamped(c.b, c.b.cast(place, "int64"), size))
    return x


def _spatial(c: Call) -> int:
    return int(c.op[-2])


def _scales(c: Call, n: int, position: int) -> tuple[float | None, ...]:
    """How many times longer each dimension is to be, where the call says it; else the sizes do."""
    if c.overload == "vec":
        given = c.raw(position, "scale_factors")
        items: Sequence[object] = given if isinstance(given, tuple) else (None,) * n
    else:
        names = ("scales",) if n == 1 else ("scales_d", "scales_h", "scales_w")[-n:]
        items = [c.raw(position + i, name) for i, name in enumerate(names)]
    return tuple(float(item) if isinstance(item, (int, float)) and item > 0 else None for item in items)


def _unchanged(c: Call, size: Size, places: Size, scale: float | None) -> bool:
    """Whether a dimension stays as it is.

    Raises:
        CannotLower: it stays as long as it is, but by a scale that moves its places: devices differ in what they do then.
    """
    if size == places and scale not in (None, 1.0):
        raise c.fail("a scale that changes no size")
    return size == places


def _ratio(c: Call, size: Size, places: Size, scale: float | None) -> float:
    """Elements of the input per place of the result, as float32 holds it.

    Raises:
        CannotLower: that is no number, as the sizes are named ones.
    """
    if scale is None and not (size.is_constant and places.is_constant):
        raise c.fail("a ratio of named sizes")
    return _single(1.0 / scale if scale is not None else size.constant / places.constant)


def _single(value: float) -> float:
    """The nearest float32."""
    return float(struct.unpack("f", struct.pack("f", value))[0])


def _whole_times(size: Size, places: Size, ratio: float, middle: float) -> int:
    """How often each element comes one after another; 0 where they do not all come as often.

    The ratio's rounding could move a place to the neighbouring element, so that every place is looked at.
    """
    if not (size.is_constant and places.is_constant) or places.constant % size.constant:
        return 0
    times = places.constant // size.constant
    read = (int(_single(_single(place + middle) * ratio)) for place in range(places.constant))
    return times if all(index == place // times for place, index in enumerate(read)) else 0


@rule("upsample_linear1d", "upsample_bilinear2d", "upsample_trilinear3d")
def linear(c: Call) -> str:
    """The mean of the two neighbours in each dimension, weighted by how near they are."""
    x, d = c.tensor(0), compute_dtype(c.out.dtype)
    if not is_float(c.out.dtype):
        raise c.fail("integers")
    x = c.b.cast(x, d)
    n, corners = _spatial(c), c.flag(2, "align_corners")
    for dim, scale in enumerate(_scales(c, n, 3), start=len(c.out.shape) - n):
        size = c.b.shape(x)[dim]
        if _unchanged(c, size, c.out.shape[dim], scale):
            continue
        source = _source(c, d, size, c.out.shape[dim], scale, corners)
        source = source if corners else c.b.pointwise("maximum", source, 0.0, dtype=d)
        below = c.b.pointwise("floor", source, dtype=d)
        weight = c.b.reshape(c.b.pointwise("sub", source, below, dtype=d), _along(dim, len(c.out.shape), c))
        lower = clamped(c.b, c.b.cast(below, "int64"), size)
        upper = clamped(c.b, c.b.pointwise("add", lower, 1, dtype="int64"), size)
        rest = c.b.pointwise("sub", 1.0, weight, dtype=d)
        parts = [
            c.b.pointwise("mul", looked_up(c.b, x, dim, index), share, dtype=d)
            for index, share in ((lower, rest), (upper, weight))
        ]
        x = c.b.pointwise("add", *parts, dtype=d)
    return c.b.cast(x, c.out.dtype)


@rule("upsample_bicubic2d")
def cubic(c: Call) -> str:
    """Four neighbours in each dimension, weighted by Keys' cubic kernel; beyond the edge the last element counts again."""
    x, d = c.tensor(0), compute_dtype(c.out.dtype)
    if not is_float(c.out.dtype):
        raise c.fail("integers")
    x = c.b.cast(x, d)
    for dim, scale in enumerate(_scales(c, 2, 3), start=len(c.out.shape) - 2):
        size = c.b.shape(x)[dim]
        if _unchanged(c, size, c.out.shape[dim], scale):
            continue
        source = _source(c, d, size, c.out.shape[dim], scale, c.flag(2, "align_corners"))
        below = c.b.pointwise("floor", source, dtype=d)
        rest = c.b.pointwise("sub", source, below, dtype=d)
        start = c.b.cast(below, "int64")
        terms = []
        for tap, share in enumerate(_cubic_weights(c.b, rest, d), start=-1):
            index = clamped(c.b, c.b.pointwise("add", start, tap, dtype="int64"), size)
            shaped = c.b.reshape(share, _along(dim, len(c.out.shape), c))
            terms.append(c.b.pointwise("mul", looked_up(c.b, x, dim, index), shaped, dtype=d))
        x = terms[0]
        for term in terms[1:]:
            x = c.b.pointwise("add", x, term, dtype=d)
    return c.b.cast(x, c.out.dtype)


def _along(dim: int, rank: int, c: Call) -> list[Size | int]:
    """The shape of a vector along one dimension of the result."""
    return [c.out.shape[dim] if i == dim else 1 for i in range(rank)]


def _source(c: Call, d: str, size: Size, places: Size, scale: float | None, corners: bool) -> str:
    """The place in the input that each place of the result shows, with its fraction."""
    place = c.b.cast(positions(c.b, places), d)
    if corners:
        if not (size.is_constant and places.is_constant):
            raise c.fail("a ratio of named sizes")
        gaps = places.constant - 1
        return c.b.pointwise("mul", place, (size.constant - 1) / gaps if gaps else 0.0, dtype=d)
    if scale is None and not (size.is_constant and places.is_constant):
        raise c.fail("a ratio of named sizes")
    ratio = 1.0 / scale if scale is not None else size.constant / places.constant
    middle = c.b.pointwise("mul", c.b.pointwise("add", place, 0.5, dtype=d), ratio, dtype=d)
    return c.b.pointwise("sub", middle, 0.5, dtype=d)


def _cubic_weights(b: Builder, t: str, d: str) -> list[str]:
    """Of the four neighbours of a place ``t`` beyond the second one."""

    def polynomial(x: str, *coefficients: float) -> str:
        value = b.pointwise("mul", x, coefficients[0], dtype=d)
        for coefficient in coefficients[1:-1]:
            value = b.pointwise("mul", b.pointwise("add", value, coefficient, dtype=d), x, dtype=d)
        return b.pointwise("add", value, coefficients[-1], dtype=d)

    near, far = (CUBIC + 2, -(CUBIC + 3), 0.0, 1.0), (CUBIC, -5 * CUBIC, 8 * CUBIC, -4 * CUBIC)
    after = b.pointwise("sub", 1.0, t, dtype=d)
    return [
        polynomial(b.pointwise("add", t, 1.0, dtype=d), *far),
        polynomial(t, *near),
        polynomial(after, *near),
        polynomial(b.pointwise("add", after, 1.0, dtype=d), *far),
    ]


PAD_MODES = ("reflect", "replicate", "circular")


def padded_from_inside(c: Call, x: str, amounts: Sequence[int], mode: str) -> str:
    """``x`` continued beyond its ends: mirrored, by its last element, or from its other end.

    Args:
        c: the call.
        x: what is padded.
        amounts: elements before and after the last dimension, then those of the one before, and so on.
        mode: one of :data:`PAD_MODES`.
    """
    if min(amounts, default=0) < 0:
        raise c.fail("negative padding")
    b, rank = c.b, len(c.out.shape)
    for i in range(len(amounts) // 2):
        dim = rank - 1 - i
        size = b.shape(x)[dim]
        if size == c.out.shape[dim]:
            continue
        place, last = positions(b, c.out.shape[dim], -amounts[2 * i]), b.size(size - 1, "int64")
        if mode == "replicate":
            index = clamped(b, place, size)
        elif mode == "reflect":
            inner = b.pointwise("sub", last, b.pointwise("abs", place, dtype="int64"), dtype="int64")
            index = b.pointwise("sub", last, b.pointwise("abs", inner, dtype="int64"), dtype="int64")
        else:
            index = b.pointwise("remainder", place, b.size(size, "int64"), dtype="int64")
        x = looked_up(b, x, dim, index)
    return x


@rule("reflection_pad1d", "reflection_pad2d", "reflection_pad3d")
@rule("replication_pad1d", "replication_pad2d", "replication_pad3d")
def named_pad(c: Call) -> str:
    amounts = c.raw(1, "padding")
    if not isinstance(amounts, tuple) or not all(isinstance(item, int) for item in amounts):
        raise c.fail("a symbolic list")
    mode = "reflect" if c.op.startswith("reflection") else "replicate"
    return padded_from_inside(c, c.tensor(0), [int(str(item)) for item in amounts], mode)


@rule("im2col")
def windows_as_columns(c: Call) -> str:
    """``F.unfold``: each window of an image as one column, its channels outermost."""
    x = c.tensor(0)
    taps, dilations, before, steps = (
        per_dim(c, i, name, default, 2)
        for i, (name, default) in enumerate(
            (("kernel_size", 1), ("dilation", 1), ("padding", 0), ("stride", 1)),
            start=1,
        )
    )
    inner = c.b.shape(x)[-2:]
    sizes = constant_sizes(c, inner, "image")
    places = tuple(
        Size.of((size + 2 * amount - dilation * (tap - 1) - 1) // step + 1)
        for size, amount, dilation, tap, step in zip(sizes, before, dilations, taps, steps, strict=True)
    )
    windows = sliding(c.b, x, places, taps, steps=steps, dilations=dilations, before=before, outside=0.0)
    rank = len(c.b.shape(x))
    order = (*range(rank - 2), rank, rank + 1, rank - 2, rank - 1)
    return c.b.reshape(c.b.permute(windows, order), c.out.shape)
