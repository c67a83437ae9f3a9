"""Lowers convolutions to matrix products of windows with weights (implicit GEMM); the windows are never stored.

``out[n, o, p] = sum_{t, c} x[n, c, p * stride + t * dilation - padding] * w[o, c, t]``: the rows are output positions, the
columns output channels, and the sum runs over kernel positions ``t`` and channels. Groups become a batch dimension. With one
channel per group (depthwise) there is no sum over channels, and an elementwise kernel adds the few products.
"""

from __future__ import annotations

from mtmc_lsp.core.dtypes import compute_dtype, is_float
from mtmc_lsp.core.sizes import Size, SizeLike
from mtmc_lsp.ir.lower import Call, lowering
from mtmc_lsp.ir.lower.windows import constant_sizes, padded, per_dim, sliding_windows
from mtmc_lsp.ir.primitives import ONE, Builder, PrimOp, ProductDims

SPLIT = "mtmc.split_"
"""Prefix of a convolution's name: the operands are high parts, and ``x_low`` and ``weight_low`` the low parts."""
LOW_PART = "mtmc.low_part.default"
"""The rounding error of a float32 number in float16: the number minus its nearest float16. A pair of casts could be removed
for values in registers; this operation always rounds."""

STORED_COPY = "mtmc.stored_copy.default"
"""A copy that must be stored: fused into its readers, they would gather its elements one by one from the source."""


@lowering(STORED_COPY)
def stored_copy(c: Call) -> str:
    return c.b.pointwise("cast", c.tensor(0), dtype=c.out.dtype)


@lowering(LOW_PART)
def low_part(c: Call) -> str:
    return c.b.pointwise("low_part", c.tensor(0), dtype="float32")


@lowering(
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
    for operand, factors in _pairs(c, x, weight):
        batched = _batched(c, operand, spatial)[0]
        windows = sliding_windows(
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
    """The operands, followed by the operands' low parts if they are split."""
    low = c.optional(len(c.node.args), "x_low"), c.optional(len(c.node.args), "weight_low")
    return [(x, weight), *([(low[0], low[1])] if low[0] is not None and low[1] is not None else [])]


def _batched(c: Call, x: str, spatial: int) -> tuple[str, tuple[Size, ...]]:
    """The input and the shape of the result, both with a batch dimension."""
    if len(c.b.shape(x)) == spatial + 2:
        return x, c.out.shape
    return c.b.reshape(x, [1, *c.b.shape(x)]), (ONE, *c.out.shape)


def _with_bias(c: Call, result: str, bias: str | None) -> str:
    """The result plus one number per channel, in the node's shape and dtype."""
    if bias is not None:
        ones = [1] * (len(c.b.shape(result)) - 2)
        shaped = c.b.reshape(bias, [1, c.b.shape(bias)[0], *ones])
        result = c.b.pointwise("add", result, shaped, dtype=c.b.dtype(result))
    return c.b.cast(c.b.reshape(result, c.out.shape), c.out.dtype)


def _depthwise(b: Builder, windows: str, weight: str, shape: tuple[Size, ...], d: str) -> str:
    """Depthwise convolution; ``windows`` is ``[N, C, outputs..., kernel positions...]``, ``weight`` ``[C * m, 1, ...]``."""
    windows_shape, spatial = b.shape(windows), len(shape) - 2
    kernel_sizes, channels = b.shape(weight)[2:], windows_shape[1]
    multiplier = shape[1].divide_exactly(channels)
    assert multiplier is not None
    if multiplier == ONE:
        factors = b.reshape(weight, [1, channels, *[1] * spatial, *kernel_sizes])
    else:
        # Each input channel gives several adjacent output channels.
        windows = b.reshape(windows, [windows_shape[0], channels, 1, *windows_shape[2:]])
        factors = b.reshape(weight, [1, channels, multiplier, *[1] * spatial, *kernel_sizes])
    terms = b.pointwise("mul", windows, factors, dtype=d)
    rank = len(b.shape(terms))
    return b.reshape(b.unrolled_reduce("sum", terms, range(rank - spatial, rank), d), shape)


def _product(b: Builder, pairs: list[tuple[str, str]], shape: tuple[Size, ...], groups: int, dtype: str) -> str:
    """Windows are ``[N, G * C, outputs..., kernel positions...]``, weights ``[G * O, C, kernel positions...]``.

    A second pair is the low parts of the first.
    """
    windows_shape, spatial = b.shape(pairs[0][0]), len(shape) - 2
    kernel_sizes, channels = b.shape(pairs[0][1])[2:], b.shape(pairs[0][1])[1]
    outputs = b.shape(pairs[0][1])[0] // groups
    output_dims, kernel_dims = range(2, 2 + spatial), range(2 + spatial, 2 + 2 * spatial)
    operands: list[str] = []
    for windows, weight in pairs:
        if groups == 1:
            operands.append(b.permute(windows, (0, *output_dims, *kernel_dims, 1)))
            operands.append(b.permute(weight, (*range(2, 2 + spatial), 1, 0)))
        else:
            grouped = b.reshape(windows, [windows_shape[0], groups, channels, *windows_shape[2:]])
            operands.append(b.permute(grouped, (1, 0, *(i + 1 for i in output_dims), *(i + 1 for i in kernel_dims), 2)))
            split_weight = b.reshape(weight, [groups, outputs, channels, *kernel_sizes])
            operands.append(b.permute(split_weight, (0, *range(3, 3 + spatial), 2, 1)))
    windowed = spatial if any(kernel_size != ONE for kernel_size in kernel_sizes) else 0
    dims = ProductDims(int(groups > 1), 1 + spatial, spatial + 1, 1, windowed)
    result_shape: list[SizeLike] = [*([groups] if groups > 1 else []), windows_shape[0], *shape[2:], outputs]
    result = b.add(PrimOp.MATMUL, operands, result_shape, dtype, dims=dims, convolution=True)
    rank = len(result_shape)
    order = (0, rank - 1, *range(1, rank - 1)) if groups == 1 else (1, 0, rank - 1, *range(2, rank - 1))
    return b.reshape(b.permute(result, order), shape)


@lowering(
    "conv_transpose1d",
    "conv_transpose2d",
    "conv_transpose3d",
    *(f"{SPLIT}conv_transpose{n}d.{o}" for n in (1, 2, 3) for o in ("default", "input")),
)
def transposed_convolution(c: Call) -> str:
    x, weight, bias = c.tensor(0), c.tensor(1), c.optional(2, "bias")
    spatial = len(c.b.shape(weight)) - 2
    steps, before = per_dim(c, 3, "stride", 1, spatial), per_dim(c, 4, "padding", 0, spatial)
    # output_padding only determines the output size, which is known.
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
    """A transposed convolution as a plain one with one set of output channels per phase; the phases are then interleaved.

    Output ``f = s * q + r`` is ``sum_{i, k} x[i] * w[k]`` over ``s * i + d * k = f + padding``. For a phase ``r``, the inputs
    ``i = q + t - T0`` that contribute do not depend on ``r``. Their weight is element ``r + padding + s * (T0 - t)`` of the
    kernel with ``d - 1`` zeros between its elements, or zero outside it. So it is a convolution of ``x`` with stride 1 and
    output channels multiplied by the number of phases; then phases and positions merge into one dimension. Unlike a
    convolution of the zero-stretched input, it computes no products with zeros.
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
    positions: list[Size] = []
    margins: list[tuple[int, int]] = []
    for i, (s, p, d, k) in enumerate(zip(steps, before, dilations, kernel_sizes, strict=True)):
        length = d * (k - 1) + 1
        if p >= length:
            raise c.fail("padding larger than the kernel")
        start = (length - 1 - p) // s
        last = (s - 1 + p) // s
        starts.append(start)
        phases.append(s)
        windows.append(start + last + 1)
        size = shape[2 + i]
        exact = size.divide_exactly(s)
        positions.append(exact if exact is not None else (size + (s - 1)) // s)
        margins.append((s * last - p, s * windows[i]))
    ones = (1,) * spatial
    pairs: list[tuple[str, str]] = []
    for operand, factors in _pairs(c, x, weight):
        spread_weight = b.reshape(factors, [groups, depth, outputs, *kernel_sizes]) if groups > 1 else factors
        lead = len(b.shape(spread_weight)) - spatial
        for i, (d, k, (front, padded_size)) in enumerate(zip(dilations, kernel_sizes, margins, strict=True)):
            spread_weight = _spread(b, spread_weight, lead + i, d, k)
            spread_weight = padded(b, spread_weight, {lead + i: (front, Size.of(padded_size))}, 0.0)
        split = [part for s, t in zip(phases, windows, strict=True) for part in (t, s)]
        kernels = b.reshape(spread_weight, [*b.shape(spread_weight)[:lead], *split])
        flipped_dims = tuple(lead + 2 * i for i in range(spatial))
        kernels = b.add(PrimOp.FLIP, (kernels,), b.shape(kernels), b.dtype(kernels), dims=flipped_dims)
        batched = _batched(c, operand, spatial)[0]
        left = sliding_windows(
            b, batched, tuple(positions), tuple(windows), steps=ones, dilations=ones, before=tuple(starts), outside=0.0
        )
        pairs.append((left, kernels))
    result = _phase_product(b, pairs, (groups, depth, outputs), tuple(phases), c.out.dtype)
    full_sizes = [s * q for s, q in zip(phases, positions, strict=True)]
    result = b.reshape(result, [shape[0], shape[1], *full_sizes])
    if b.shape(result) != shape:
        result = b.add(PrimOp.CROP, (result,), shape, b.dtype(result))
    return _with_bias(c, result, bias)


def _spread(b: Builder, x: str, dim: int, dilation: int, kernel_sizes: int) -> str:
    """``x`` with ``dilation - 1`` zeros between the elements along ``dim``."""
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
    """The product of windows and kernels, as ``[N, (G, O), (position, phase)...]``.

    The windows are ``[N, G * C, outputs..., kernel positions...]`` and the kernels ``[G, C, O, (kernel position, phase)...]``.
    A second pair is the low parts of the first.
    """
    groups, depth, outputs = sizes
    windows_shape, spatial, grouped = b.shape(pairs[0][0]), len(phases), int(groups > 1)
    first = 2 + grouped
    output_dims, kernel_sizes = range(first, first + spatial), range(first + spatial, first + 2 * spatial)
    operands: list[str] = []
    for windows, kernels in pairs:
        shaped = b.reshape(windows, [windows_shape[0], groups, depth, *windows_shape[2:]]) if grouped else windows
        operands.append(b.permute(shaped, (*((1,) if grouped else ()), 0, *output_dims, *kernel_sizes, 1 + grouped)))
        lead = len(b.shape(kernels)) - 2 * spatial
        kernel_position_dims, phase_dims = range(lead, lead + 2 * spatial, 2), range(lead + 1, lead + 2 * spatial, 2)
        operands.append(
            b.permute(kernels, (*((0,) if grouped else ()), *kernel_position_dims, lead - 2, lead - 1, *phase_dims))
        )
    dims = ProductDims(grouped, 1 + spatial, spatial + 1, 1 + spatial, spatial)
    result_shape: list[SizeLike] = [
        *([groups] if grouped else []),
        windows_shape[0],
        *windows_shape[2 : 2 + spatial],
        outputs,
        *phases,
    ]
    result = b.add(PrimOp.MATMUL, operands, result_shape, dtype, dims=dims, convolution=True)
    rows = grouped + 1
    interleaved = [dim for i in range(spatial) for dim in (rows + i, rows + spatial + 1 + i)]
    return b.permute(result, (grouped, *range(grouped), rows + spatial, *interleaved))
