"""Convolutions as products of windows with weights (implicit GEMM): no window is ever written to memory.

``out[n, o, p] = sum_{t, c} x[n, c, p * stride + t * dilation - padding] * w[o, c, t]``: rows are the places of the output,
columns the output channels, and the sum runs over the places ``t`` of a window and the channels. A group is a batch of it. One
channel per group (depthwise) leaves no sum over channels: then the few products are added in an elementwise kernel.
"""

from __future__ import annotations

from mtmc_lsp.core.dtypes import compute_dtype, is_float
from mtmc_lsp.core.sizes import Size, SizeLike
from mtmc_lsp.ir.lower import Call, rule
from mtmc_lsp.ir.lower.windows import constant_sizes, padded, per_dim, sliding
from mtmc_lsp.ir.primitives import ONE, Builder, PrimOp, ProductDims

SPLIT = "mtmc.halves_"
"""In front of a convolution's name: its operands are high halves, those called ``x_low`` and ``weight_low`` the low ones."""
LOW_HALF = "mtmc.low_half.default"
"""What float16 leaves of a float32 number: the number less its nearest float16. PyTorch's own casts may be left out where a
value stays in registers; here rounding is what is computed."""

IN_ORDER = "mtmc.in_order.default"
"""A copy that is written before it is read: what reads it would gather the same numbers one by one from where they were."""


@rule(IN_ORDER)
def in_order(c: Call) -> str:
    return c.b.pointwise("cast", c.tensor(0), dtype=c.out.dtype)


@rule(LOW_HALF)
def low_half(c: Call) -> str:
    return c.b.pointwise("low_half", c.tensor(0), dtype="float32")


@rule(
    "conv1d",
    "conv2d",
    "conv3d",
    "convolution",
    *(f"{SPLIT}conv{n}d.{o}" for n in (1, 2, 3) for o in ("default", "padding")),
)
def convolution(c: Call) -> str:
    x, weight, bias = c.tensor(0), c.tensor(1), c.optional(2, "bias")
    if not is_float(c.out.dtype):
        raise c.fail("integers")
    spatial = len(c.b.shape(weight)) - 2
    steps = per_dim(c, 3, "stride", 1, spatial)
    dilations = per_dim(c, 5, "dilation", 1, spatial)
    kernel_sizes = constant_sizes(c, c.b.shape(weight)[2:], "kernel size")
    if c.op == "convolution" and c.flag(6, "transposed"):
        margin = per_dim(c, 4, "padding", 0, spatial)
        return _transposed(c, x, weight, bias, steps, margin, dilations, c.integer(8, "groups", 1))
    groups = c.integer(8 if c.op == "convolution" else 6, "groups", 1)
    if c.overload == "padding":
        same = c.raw(4, "padding") == "same"
        before = tuple(same * d * (k - 1) // 2 for d, k in zip(dilations, kernel_sizes, strict=True))
    else:
        before = per_dim(c, 4, "padding", 0, spatial)
    shape = _batched(c, x, spatial)[1]
    pairs: list[tuple[str, str]] = []
    for own, factors in _pairs(c, x, weight):
        batched = _batched(c, own, spatial)[0]
        windows = sliding(
            c.b, batched, shape[2:], kernel_sizes, steps=steps, dilations=dilations, before=before, outside=0.0
        )
        pairs.append((windows, factors))
    depth = c.b.shape(weight)[1]
    if groups > 1 and depth == ONE:
        result = _depthwise(c.b, *pairs[0], shape, compute_dtype(c.out.dtype))
    else:
        result = _product(c.b, pairs, shape, groups, c.out.dtype)
    return _with_bias(c, result, bias)


def _pairs(c: Call, x: str, weight: str) -> list[tuple[str, str]]:
    """The operands, and behind them those of the low halves where they are split."""
    low = c.optional(len(c.node.args), "x_low"), c.optional(len(c.node.args), "weight_low")
    return [(x, weight), *([(low[0], low[1])] if low[0] is not None and low[1] is not None else [])]


def _batched(c: Call, x: str, spatial: int) -> tuple[str, tuple[Size, ...]]:
    """The input, and the shape of the result, with a batch dimension."""
    if len(c.b.shape(x)) == spatial + 2:
        return x, c.out.shape
    return c.b.reshape(x, [1, *c.b.shape(x)]), (ONE, *c.out.shape)


def _with_bias(c: Call, result: str, bias: str | None) -> str:
    """One number per channel added, in the shape and dtype of the result."""
    if bias is not None:
        ones = [1] * (len(c.b.shape(result)) - 2)
        shaped = c.b.reshape(bias, [1, c.b.shape(bias)[0], *ones])
        result = c.b.pointwise("add", result, shaped, dtype=c.b.dtype(result))
    return c.b.cast(c.b.reshape(result, c.out.shape), c.out.dtype)


def _depthwise(b: Builder, windows: str, weight: str, shape: tuple[Size, ...], d: str) -> str:
    """``windows`` is ``[N, C, places, positions]``, ``weight`` ``[C * m, 1, positions]``."""
    own, spatial = b.shape(windows), len(shape) - 2
    kernel_sizes, channels = b.shape(weight)[2:], own[1]
    times = shape[1].divide_exactly(channels)
    assert times is not None
    if times == ONE:
        factors = b.reshape(weight, [1, channels, *[1] * spatial, *kernel_sizes])
    else:
        # Each channel makes several: they lie side by side.
        windows = b.reshape(windows, [own[0], channels, 1, *own[2:]])
        factors = b.reshape(weight, [1, channels, times, *[1] * spatial, *kernel_sizes])
    terms = b.pointwise("mul", windows, factors, dtype=d)
    rank = len(b.shape(terms))
    return b.reshape(b.unrolled_reduce("sum", terms, range(rank - spatial, rank), d), shape)


def _product(b: Builder, pairs: list[tuple[str, str]], shape: tuple[Size, ...], groups: int, dtype: str) -> str:
    """Windows are ``[N, G * C, places, positions]``, weights ``[G * O, C, positions]``.

    A second pair is the low halves of the first.
    """
    own, spatial = b.shape(pairs[0][0]), len(shape) - 2
    kernel_sizes, channels = b.shape(pairs[0][1])[2:], b.shape(pairs[0][1])[1]
    outputs = b.shape(pairs[0][1])[0] // groups
    places, after = range(2, 2 + spatial), range(2 + spatial, 2 + 2 * spatial)
    operands: list[str] = []
    for windows, weight in pairs:
        if groups == 1:
            operands.append(b.permute(windows, (0, *places, *after, 1)))
            operands.append(b.permute(weight, (*range(2, 2 + spatial), 1, 0)))
        else:
            grouped = b.reshape(windows, [own[0], groups, channels, *own[2:]])
            operands.append(b.permute(grouped, (1, 0, *(i + 1 for i in places), *(i + 1 for i in after), 2)))
            apart = b.reshape(weight, [groups, outputs, channels, *kernel_sizes])
            operands.append(b.permute(apart, (0, *range(3, 3 + spatial), 2, 1)))
    windowed = spatial if any(tap != ONE for tap in kernel_sizes) else 0
    dims = ProductDims(int(groups > 1), 1 + spatial, spatial + 1, 1, windowed)
    made: list[SizeLike] = [*([groups] if groups > 1 else []), own[0], *shape[2:], outputs]
    result = b.add(PrimOp.MATMUL, operands, made, dtype, dims=dims, convolution=True)
    rank = len(made)
    order = (0, rank - 1, *range(1, rank - 1)) if groups == 1 else (1, 0, rank - 1, *range(2, rank - 1))
    return b.reshape(b.permute(result, order), shape)


@rule(
    "conv_transpose1d",
    "conv_transpose2d",
    "conv_transpose3d",
    *(f"{SPLIT}conv_transpose{n}d.{o}" for n in (1, 2, 3) for o in ("default", "input")),
)
def transposed_convolution(c: Call) -> str:
    x, weight, bias = c.tensor(0), c.tensor(1), c.optional(2, "bias")
    spatial = len(c.b.shape(weight)) - 2
    steps, before = per_dim(c, 3, "stride", 1, spatial), per_dim(c, 4, "padding", 0, spatial)
    # The padding of the output only says how long the result is, which is known.
    return _transposed(
        c, x, weight, bias, steps, before, per_dim(c, 7, "dilation", 1, spatial), c.integer(6, "groups", 1)
    )


def _transposed(
    c: Call,
    x: str,
    weight: str,
    bias: str | None,
    steps: tuple[int, ...],
    before: tuple[int, ...],
    dilations: tuple[int, ...],
    groups: int,
) -> str:
    """As a plain convolution with one set of output channels per phase, whose results lie side by side.

    Output place ``f = s * q + r`` is ``sum_{i, k} x[i] * w[k]`` over ``s * i + d * k = f + padding``. For a phase ``r`` the
    places ``i = q + t - T0`` that can meet a tap do not depend on ``r``; the tap they meet is ``r + padding + s * (T0 - t)``
    of the kernel with ``d - 1`` zeros between its elements, and zero beyond it. So it is a convolution of ``x`` with steps of
    1 and as many times the output channels as there are phases, after which phases and places are one dimension again.
    No product with the zeros of a stretched input is computed.
    """
    b, spatial = c.b, len(steps)
    if not is_float(c.out.dtype):
        raise c.fail("integers")
    kernel_sizes = constant_sizes(c, b.shape(weight)[2:], "kernel size")
    shape = _batched(c, x, spatial)[1]
    depth, outputs = b.shape(weight)[0] // groups, b.shape(weight)[1]
    starts: list[int] = []
    phases: list[int] = []
    windows: list[int] = []
    places: list[Size] = []
    margins: list[tuple[int, int]] = []
    for i, (s, p, d, k) in enumerate(zip(steps, before, dilations, kernel_sizes, strict=True)):
        length = d * (k - 1) + 1
        if p >= length:
            raise c.fail("padding beyond the kernel")
        start = (length - 1 - p) // s
        last = (s - 1 + p) // s
        starts.append(start)
        phases.append(s)
        windows.append(start + last + 1)
        size = shape[2 + i]
        exact = size.divide_exactly(s)
        places.append(exact if exact is not None else (size + (s - 1)) // s)
        margins.append((s * last - p, s * windows[i]))
    ones = (1,) * spatial
    pairs: list[tuple[str, str]] = []
    for own, factors in _pairs(c, x, weight):
        stretched = b.reshape(factors, [groups, depth, outputs, *kernel_sizes]) if groups > 1 else factors
        lead = len(b.shape(stretched)) - spatial
        for i, (d, k, (before_it, whole_size)) in enumerate(zip(dilations, kernel_sizes, margins, strict=True)):
            stretched = _spread(b, stretched, lead + i, d, k)
            stretched = padded(b, stretched, {lead + i: (before_it, Size.of(whole_size))}, 0.0)
        split = [part for s, t in zip(phases, windows, strict=True) for part in (t, s)]
        kernels = b.reshape(stretched, [*b.shape(stretched)[:lead], *split])
        turned = tuple(lead + 2 * i for i in range(spatial))
        kernels = b.add(PrimOp.FLIP, (kernels,), b.shape(kernels), b.dtype(kernels), dims=turned)
        batched = _batched(c, own, spatial)[0]
        left = sliding(
            b, batched, tuple(places), tuple(windows), steps=ones, dilations=ones, before=tuple(starts), outside=0.0
        )
        pairs.append((left, kernels))
    result = _phase_product(b, pairs, (groups, depth, outputs), tuple(phases), c.out.dtype)
    whole = [s * q for s, q in zip(phases, places, strict=True)]
    result = b.reshape(result, [shape[0], shape[1], *whole])
    if b.shape(result) != shape:
        result = b.add(PrimOp.CROP, (result,), shape, b.dtype(result))
    return _with_bias(c, result, bias)


def _spread(b: Builder, x: str, dim: int, dilation: int, kernel_sizes: int) -> str:
    """``dilation - 1`` zeros between the elements along ``dim``."""
    if dilation == 1 or kernel_sizes == 1:
        return x
    shape = b.shape(x)
    x = b.reshape(x, [*shape[: dim + 1], 1, *shape[dim + 1 :]])
    x = padded(b, x, {dim + 1: (0, Size.of(dilation))}, 0.0)
    x = b.reshape(x, [*shape[:dim], kernel_sizes * dilation, *shape[dim + 1 :]])
    return b.slice(x, dim, 0, dilation * (kernel_sizes - 1) + 1)


def _phase_product(
    b: Builder,
    pairs: list[tuple[str, str]],
    sizes: tuple[int, Size, Size],
    phases: tuple[int, ...],
    dtype: str,
) -> str:
    """``[N, (G, O), places and phases in turn]``.

    The windows are ``[N, G * C, places, positions]`` and the kernels ``[G, C, O, (position, phase)...]``. A second pair of
    them is the low halves of the first.
    """
    groups, depth, outputs = sizes
    own, spatial, grouped = b.shape(pairs[0][0]), len(phases), int(groups > 1)
    first = 2 + grouped
    places, kernel_sizes = range(first, first + spatial), range(first + spatial, first + 2 * spatial)
    operands: list[str] = []
    for windows, kernels in pairs:
        shaped = b.reshape(windows, [own[0], groups, depth, *own[2:]]) if grouped else windows
        operands.append(b.permute(shaped, (*((1,) if grouped else ()), 0, *places, *kernel_sizes, 1 + grouped)))
        lead = len(b.shape(kernels)) - 2 * spatial
        tap_dims, phase_dims = range(lead, lead + 2 * spatial, 2), range(lead + 1, lead + 2 * spatial, 2)
        operands.append(b.permute(kernels, (*((0,) if grouped else ()), *tap_dims, lead - 2, lead - 1, *phase_dims)))
    dims = ProductDims(grouped, 1 + spatial, spatial + 1, 1 + spatial, spatial)
    made: list[SizeLike] = [*([groups] if grouped else []), own[0], *own[2 : 2 + spatial], outputs, *phases]
    result = b.add(PrimOp.MATMUL, operands, made, dtype, dims=dims, convolution=True)
    rows = grouped + 1
    mixed = [dim for i in range(spatial) for dim in (rows + i, rows + spatial + 1 + i)]
    return b.permute(result, (grouped, *range(grouped), rows + spatial, *mixed))
