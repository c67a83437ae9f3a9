"""Lowers operations that read their input at computed indices: interpolation, and padding with values of the input.

Each dimension is gathered separately, at an index computed from the output position; no index tensor is stored.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

from mtmc_lsp.core.dtypes import compute_dtype, is_float
from mtmc_lsp.core.sizes import Size
from mtmc_lsp.ir.lower import Call, lowering
from mtmc_lsp.ir.lower.windows import constant_sizes, per_dim, sliding_windows
from mtmc_lsp.ir.primitives import Builder, PrimOp

CUBIC = -0.75
"""The free parameter of PyTorch's cubic kernel."""


def gathered(b: Builder, x: str, dim: int, index: str) -> str:
    """``x`` gathered along ``dim`` at the vector ``index``."""
    shape, outputs = list(b.shape(x)), b.shape(index)[0]
    spread = b.reshape(index, [outputs if i == dim else 1 for i in range(len(shape))])
    shape[dim] = outputs
    return b.add(PrimOp.GATHER, (x, spread), shape, b.dtype(x), dim=dim)


def positions(b: Builder, size: Size, start: int = 0, step: int = 1) -> str:
    """The ``size`` integers ``start``, ``start + step``, ..."""
    return b.add(PrimOp.IOTA, (), [size], "int64", dim=0, start=start, step=step)


def clamped(b: Builder, index: str, size: Size) -> str:
    """``index`` clamped to the range of a dimension of that size."""
    index = b.pointwise("maximum", index, 0, dtype="int64")
    return b.pointwise("minimum", index, b.size(size - 1, "int64"), dtype="int64")


@lowering("upsample_nearest1d", "upsample_nearest2d", "upsample_nearest3d")
@lowering("_upsample_nearest_exact1d", "_upsample_nearest_exact2d", "_upsample_nearest_exact3d")
def nearest(c: Call) -> str:
    """Output i reads input ``floor(i * ratio)``; the exact variants read ``floor((i + 0.5) * ratio)``."""
    x, n = c.tensor(0), _spatial(c)
    exact = "exact" in c.op
    for dim, scale in enumerate(_scales(c, n, 2), start=len(c.out.shape) - n):
        size, outputs = c.b.shape(x)[dim], c.out.shape[dim]
        if _unchanged(c, size, outputs, scale):
            continue
        ratio = _ratio(c, size, outputs, scale)
        repeats = _repeats(size, outputs, ratio, 0.5 if exact else 0.0)
        if repeats:
            shape = c.b.shape(x)
            x = c.b.reshape(x, [*shape[: dim + 1], 1, *shape[dim + 1 :]])
            x = c.b.expand(x, [*shape[: dim + 1], repeats, *shape[dim + 1 :]])
            x = c.b.reshape(x, [*shape[:dim], outputs, *shape[dim + 1 :]])
            continue
        # In float32 for all dtypes, as PyTorch does: another rounding would select another element.
        position = c.b.cast(positions(c.b, outputs), "float32")
        position = c.b.pointwise("add", position, 0.5, dtype="float32") if exact else position
        position = c.b.pointwise("floor", c.b.pointwise("mul", position, ratio, dtype="float32"), dtype="float32")
        x = gathered(c.b, x, dim, clamped(c.b, c.b.cast(position, "int64"), size))
    return x


def _spatial(c: Call) -> int:
    return int(c.op[-2])


def _scales(c: Call, n: int, position: int) -> tuple[float | None, ...]:
    """The scale factor of each dimension, if the call has one; ``None`` if only the sizes determine it."""
    if c.overload == "vec":
        factors = c.raw(position, "scale_factors")
        items: Sequence[object] = factors if isinstance(factors, tuple) else (None,) * n
    else:
        names = ("scales",) if n == 1 else ("scales_d", "scales_h", "scales_w")[-n:]
        items = [c.raw(position + i, name) for i, name in enumerate(names)]
    return tuple(float(item) if isinstance(item, (int, float)) and item > 0 else None for item in items)


def _unchanged(c: Call, size: Size, outputs: Size, scale: float | None) -> bool:
    """Whether a dimension is not resampled.

    Raises:
        CannotLower: the size stays the same but the scale is not 1; CPU and GPU then give different results.
    """
    if size == outputs and scale not in (None, 1.0):
        raise c.fail("a scale factor that does not change the size")
    return size == outputs


def _ratio(c: Call, size: Size, outputs: Size, scale: float | None) -> float:
    """Input elements per output element, rounded to float32.

    Raises:
        CannotLower: the sizes are symbolic, so the ratio is not a constant.
    """
    if scale is None and not (size.is_constant and outputs.is_constant):
        raise c.fail("a ratio of symbolic sizes")
    return _to_float32(1.0 / scale if scale is not None else size.constant / outputs.constant)


def _to_float32(value: float) -> float:
    """The nearest float32."""
    return float(struct.unpack("f", struct.pack("f", value))[0])


def _repeats(size: Size, outputs: Size, ratio: float, offset: float) -> int:
    """How many times each element repeats; 0 if the counts differ.

    Rounding of the ratio can select a neighbouring element, so every output position is checked.
    """
    if not (size.is_constant and outputs.is_constant) or outputs.constant % size.constant:
        return 0
    repeats = outputs.constant // size.constant
    indices = (int(_to_float32(_to_float32(output + offset) * ratio)) for output in range(outputs.constant))
    return repeats if all(index == output // repeats for output, index in enumerate(indices)) else 0


@lowering("upsample_linear1d", "upsample_bilinear2d", "upsample_trilinear3d")
def linear(c: Call) -> str:
    """The weighted mean of the two neighbours in each dimension."""
    x, d = c.tensor(0), compute_dtype(c.out.dtype)
    if not is_float(c.out.dtype):
        raise c.fail("integers")
    x = c.b.cast(x, d)
    n, corners = _spatial(c), c.flag(2, "align_corners")
    for dim, scale in enumerate(_scales(c, n, 3), start=len(c.out.shape) - n):
        size = c.b.shape(x)[dim]
        if _unchanged(c, size, c.out.shape[dim], scale):
            continue
        position = _source_position(c, d, size, c.out.shape[dim], scale, corners)
        position = position if corners else c.b.pointwise("maximum", position, 0.0, dtype=d)
        floor = c.b.pointwise("floor", position, dtype=d)
        upper_weight = c.b.reshape(c.b.pointwise("sub", position, floor, dtype=d), _along(dim, len(c.out.shape), c))
        lower = clamped(c.b, c.b.cast(floor, "int64"), size)
        upper = clamped(c.b, c.b.pointwise("add", lower, 1, dtype="int64"), size)
        lower_weight = c.b.pointwise("sub", 1.0, upper_weight, dtype=d)
        terms = [
            c.b.pointwise("mul", gathered(c.b, x, dim, index), factor, dtype=d)
            for index, factor in ((lower, lower_weight), (upper, upper_weight))
        ]
        x = c.b.pointwise("add", *terms, dtype=d)
    return c.b.cast(x, c.out.dtype)


@lowering("upsample_bicubic2d")
def cubic(c: Call) -> str:
    """Four neighbours in each dimension, weighted by Keys' cubic kernel; positions beyond the edge repeat the last element."""
    x, d = c.tensor(0), compute_dtype(c.out.dtype)
    if not is_float(c.out.dtype):
        raise c.fail("integers")
    x = c.b.cast(x, d)
    for dim, scale in enumerate(_scales(c, 2, 3), start=len(c.out.shape) - 2):
        size = c.b.shape(x)[dim]
        if _unchanged(c, size, c.out.shape[dim], scale):
            continue
        position = _source_position(c, d, size, c.out.shape[dim], scale, c.flag(2, "align_corners"))
        floor = c.b.pointwise("floor", position, dtype=d)
        fraction = c.b.pointwise("sub", position, floor, dtype=d)
        start = c.b.cast(floor, "int64")
        terms = []
        for offset, weight in enumerate(_cubic_weights(c.b, fraction, d), start=-1):
            index = clamped(c.b, c.b.pointwise("add", start, offset, dtype="int64"), size)
            shaped_weight = c.b.reshape(weight, _along(dim, len(c.out.shape), c))
            terms.append(c.b.pointwise("mul", gathered(c.b, x, dim, index), shaped_weight, dtype=d))
        x = terms[0]
        for term in terms[1:]:
            x = c.b.pointwise("add", x, term, dtype=d)
    return c.b.cast(x, c.out.dtype)


def _along(dim: int, rank: int, c: Call) -> list[Size | int]:
    """The shape of a vector along one dimension of the result."""
    return [c.out.shape[dim] if i == dim else 1 for i in range(rank)]


def _source_position(c: Call, d: str, size: Size, outputs: Size, scale: float | None, corners: bool) -> str:
    """The fractional input position of each output position."""
    position = c.b.cast(positions(c.b, outputs), d)
    if corners:
        if not (size.is_constant and outputs.is_constant):
            raise c.fail("a ratio of symbolic sizes")
        gaps = outputs.constant - 1
        return c.b.pointwise("mul", position, (size.constant - 1) / gaps if gaps else 0.0, dtype=d)
    if scale is None and not (size.is_constant and outputs.is_constant):
        raise c.fail("a ratio of symbolic sizes")
    ratio = 1.0 / scale if scale is not None else size.constant / outputs.constant
    source = c.b.pointwise("mul", c.b.pointwise("add", position, 0.5, dtype=d), ratio, dtype=d)
    return c.b.pointwise("sub", source, 0.5, dtype=d)


def _cubic_weights(b: Builder, t: str, d: str) -> list[str]:
    """Weights of the four neighbours of a position that is ``t`` beyond the second one (0 <= t < 1)."""

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


def padded_with_values(c: Call, x: str, amounts: Sequence[int], mode: str) -> str:
    """``x`` padded with its values: mirrored, repeating the edge, or wrapping around.

    Args:
        amounts: elements before and after the last dimension, then those of the second to last, and so on.
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
        position, last = positions(b, c.out.shape[dim], -amounts[2 * i]), b.size(size - 1, "int64")
        if mode == "replicate":
            index = clamped(b, position, size)
        elif mode == "reflect":
            distance = b.pointwise("sub", last, b.pointwise("abs", position, dtype="int64"), dtype="int64")
            index = b.pointwise("sub", last, b.pointwise("abs", distance, dtype="int64"), dtype="int64")
        else:
            index = b.pointwise("remainder", position, b.size(size, "int64"), dtype="int64")
        x = gathered(b, x, dim, index)
    return x


@lowering("reflection_pad1d", "reflection_pad2d", "reflection_pad3d")
@lowering("replication_pad1d", "replication_pad2d", "replication_pad3d")
def named_pad(c: Call) -> str:
    amounts = c.raw(1, "padding")
    if not isinstance(amounts, tuple) or not all(isinstance(item, int) for item in amounts):
        raise c.fail("a symbolic list")
    mode = "reflect" if c.op.startswith("reflection") else "replicate"
    return padded_with_values(c, c.tensor(0), [int(str(item)) for item in amounts], mode)


@lowering("im2col")
def windows_as_columns(c: Call) -> str:
    """``F.unfold``: each window of an image becomes one column, with channels outermost."""
    x = c.tensor(0)
    kernel_sizes, dilations, before, steps = (
        per_dim(c, i, name, default, 2)
        for i, (name, default) in enumerate(
            (("kernel_size", 1), ("dilation", 1), ("padding", 0), ("stride", 1)),
            start=1,
        )
    )
    inner = c.b.shape(x)[-2:]
    sizes = constant_sizes(c, inner, "image")
    outputs = tuple(
        Size.of((size + 2 * padding - dilation * (kernel_size - 1) - 1) // step + 1)
        for size, padding, dilation, kernel_size, step in zip(
            sizes, before, dilations, kernel_sizes, steps, strict=True
        )
    )
    windows = sliding_windows(
        c.b, x, outputs, kernel_sizes, steps=steps, dilations=dilations, before=before, outside=0.0
    )
    rank = len(c.b.shape(x))
    order = (*range(rank - 2), rank, rank + 1, rank - 2, rank - 1)
    return c.b.reshape(c.b.permute(windows, order), c.out.shape)
