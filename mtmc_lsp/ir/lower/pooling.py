"""Lowers pooling: an unrolled reduction of each window, or a reduction if one window is the whole input."""

from __future__ import annotations

from mtmc_lsp.core.dtypes import compute_dtype, is_float
from mtmc_lsp.core.sizes import Size, SizeLike, product
from mtmc_lsp.ir.lower import Call, lowering
from mtmc_lsp.ir.lower.reductions import count, finish, scale_by_count
from mtmc_lsp.ir.lower.resampling import clamped, gathered
from mtmc_lsp.ir.lower.windows import constant_sizes, per_dim, sliding_windows, windowed
from mtmc_lsp.ir.primitives import ONE, Builder, PrimOp


def _spatial(c: Call) -> int:
    return int(c.op.removeprefix("adaptive_").split("pool")[1][0])


@lowering("max_pool1d", "max_pool2d", "max_pool3d", "max_pool2d_with_indices", "max_pool3d_with_indices")
def max_pool(c: Call) -> str | tuple[str, ...]:
    """The maximum of each window; padding is ignored and NaN propagates."""
    c.reject_other_results("the indices of the maxima")
    x, n = c.tensor(0), _spatial(c)
    if not is_float(c.out.dtype):
        raise c.fail("integers")
    kernel_sizes = per_dim(c, 1, "kernel_size", 1, n)
    steps = per_dim(c, 2, "stride", 1, n) if _is_given(c, 2, "stride") else kernel_sizes
    before, dilations = per_dim(c, 3, "padding", 0, n), per_dim(c, 4, "dilation", 1, n)
    d, outputs = compute_dtype(c.out.dtype), c.out.shape[-n:]
    windows = sliding_windows(
        c.b, x, outputs, kernel_sizes, steps=steps, dilations=dilations, before=before, outside=float("-inf")
    )
    rank = len(c.out.shape)
    return c.with_unused(c.b.cast(c.b.unrolled_reduce("max", windows, range(rank, rank + n), d), c.out.dtype))


def _is_given(c: Call, position: int, name: str) -> bool:
    return c.raw(position, name) not in (None, ())


@lowering("avg_pool1d", "avg_pool2d", "avg_pool3d")
def average_pool(c: Call) -> str:
    """The mean of each window over the elements that PyTorch counts."""
    x, n = c.tensor(0), _spatial(c)
    if not is_float(c.out.dtype):
        raise c.fail("integers")
    kernel_sizes = per_dim(c, 1, "kernel_size", 1, n)
    steps = per_dim(c, 2, "stride", 1, n) if _is_given(c, 2, "stride") else kernel_sizes
    before = per_dim(c, 3, "padding", 0, n)
    total = _window_sums(c, x, c.out.shape[-n:], kernel_sizes, steps, before)
    d = c.b.dtype(total)
    divisor = c.raw(6, "divisor_override")
    if isinstance(divisor, int):
        return c.b.cast(c.b.pointwise("div", total, float(divisor), dtype=d), c.out.dtype)
    inner = c.flag(5, "count_include_pad", True)
    sizes = c.b.shape(x)[-n:]
    window_size = product([Size.of(kernel_size) for kernel_size in kernel_sizes])
    clipped = any(before) and not inner
    clipped = clipped or any(
        not _ends_inside(output, kernel_size, step, padding, size)
        for output, kernel_size, step, padding, size in zip(
            c.out.shape[-n:], kernel_sizes, steps, before, sizes, strict=True
        )
    )
    if not clipped:
        return c.b.cast(scale_by_count(c.b, total, window_size, d), c.out.dtype)
    for i, (kernel_size, step, padding, size) in enumerate(zip(kernel_sizes, steps, before, sizes, strict=True)):
        counted = _counted(c.b, c.out.shape[i - n], kernel_size, step, padding, size, inner)
        shaped = c.b.reshape(counted, [c.out.shape[i - n], *[1] * (n - 1 - i)])
        total = c.b.pointwise("div", total, c.b.cast(shaped, d), dtype=d)
    return c.b.cast(total, c.out.dtype)


def _window_sums(
    c: Call,
    x: str,
    outputs: tuple[Size, ...],
    kernel_sizes: tuple[int, ...],
    steps: tuple[int, ...],
    before: tuple[int, ...],
) -> str:
    n, rank = len(kernel_sizes), len(c.b.shape(x))
    windows = sliding_windows(
        c.b, x, outputs, kernel_sizes, steps=steps, dilations=(1,) * n, before=before, outside=0.0
    )
    return c.b.unrolled_reduce("sum", windows, range(rank, rank + n), compute_dtype(c.out.dtype))


def _ends_inside(outputs: Size, kernel_size: int, step: int, before: int, size: Size) -> bool:
    """Whether the last window ends within the padded input; with ``ceil_mode`` it may not."""
    remaining = size + 2 * before - ((outputs - 1) * step + kernel_size)
    return remaining.is_constant and remaining.constant >= 0


def _counted(
    b: Builder, outputs: Size, kernel_size: int, step: int, before: int, size: Size, count_padding: bool
) -> str:
    """The number of counted elements along one dimension, for each output position."""
    start = b.add(PrimOp.IOTA, (), [outputs], "int64", dim=0, start=-before, step=step)
    end = b.pointwise("add", start, kernel_size, dtype="int64")
    if count_padding:
        # Padding counts, but positions beyond the padding do not.
        end = b.pointwise("minimum", end, b.size(size + before, "int64"), dtype="int64")
    else:
        end = b.pointwise("minimum", end, b.size(size, "int64"), dtype="int64")
        start = b.pointwise("maximum", start, 0, dtype="int64")
    return b.pointwise("sub", end, start, dtype="int64")


@lowering("adaptive_avg_pool1d", "adaptive_avg_pool2d", "adaptive_avg_pool3d")
@lowering("_adaptive_avg_pool2d", "_adaptive_avg_pool3d")
def adaptive_average_pool(c: Call) -> str:
    """The mean of all elements for output size 1, otherwise the mean of each window."""
    x, n = c.tensor(0), _spatial(c)
    shape, rank = c.b.shape(x), len(c.out.shape)
    d, dims = compute_dtype(c.out.dtype), tuple(range(rank - n, rank))
    if all(size == ONE for size in c.out.shape[-n:]):
        total = c.b.reduce("sum", c.b.cast(x, d), dims, d)
        return finish(c, scale_by_count(c.b, total, count(shape, dims), d))
    windows = _equal_windows(c, x, n)
    if windows is not None:
        if all(size.is_constant for size in windows):
            kernel_sizes = tuple(size.constant for size in windows)
            total = _window_sums(c, x, c.out.shape[-n:], kernel_sizes, kernel_sizes, (0,) * n)
        else:
            total = _reduced_parts(c, c.b.cast(x, d), windows, "sum")
        return c.b.cast(scale_by_count(c.b, total, product(windows), d), c.out.dtype)
    total, lengths = _uneven_windows(c, c.b.cast(x, d), n, "sum", 0.0)
    for i, length in enumerate(lengths):
        shaped = c.b.reshape(c.b.cast(length, d), [c.out.shape[i - n], *[1] * (n - 1 - i)])
        total = c.b.pointwise("div", total, shaped, dtype=d)
    return c.b.cast(total, c.out.dtype)


@lowering("_adaptive_avg_pool2d_backward", "_adaptive_avg_pool3d_backward")
def adaptive_average_gradient(c: Call) -> str:
    """Each element's share of the gradient of its window, for windows of equal size."""
    gradient, n, rank = c.tensor(0), _spatial(c), len(c.out.shape)
    outputs = c.b.shape(gradient)[-n:]
    windows = [size.divide_exactly(count) for size, count in zip(c.out.shape[-n:], outputs, strict=True)]
    if not all(windows):
        raise c.fail("windows of different sizes")
    sizes, d = [size for size in windows if size is not None], compute_dtype(c.out.dtype)
    share = scale_by_count(c.b, c.b.cast(gradient, d), product(sizes), d)
    lead = c.out.shape[: rank - n]
    share = c.b.reshape(share, [*lead, *(part for count in outputs for part in (count, ONE))])
    pairs = zip(outputs, sizes, strict=True)
    spread = c.b.expand(share, [*lead, *(part for pair in pairs for part in pair)])
    return c.b.cast(c.b.reshape(spread, c.out.shape), c.out.dtype)


@lowering("adaptive_max_pool1d", "adaptive_max_pool2d", "adaptive_max_pool3d")
def adaptive_max_pool(c: Call) -> str | tuple[str, ...]:
    """The maximum of all elements for output size 1, otherwise the maximum of each window."""
    c.reject_other_results("the indices of the maxima")
    x, n = c.tensor(0), _spatial(c)
    if not is_float(c.out.dtype):
        raise c.fail("integers")
    rank, d = len(c.out.shape), compute_dtype(c.out.dtype)
    x = c.b.cast(x, d)
    if all(size == ONE for size in c.out.shape[-n:]):
        return c.with_unused(finish(c, c.b.reduce("max", x, tuple(range(rank - n, rank)), d)))
    windows = _equal_windows(c, x, n)
    if windows is None:
        maximum = _uneven_windows(c, x, n, "max", float("-inf"))[0]
    elif all(size.is_constant for size in windows):
        kernel_sizes, ones = tuple(size.constant for size in windows), (1,) * n
        parts = sliding_windows(
            c.b,
            x,
            c.out.shape[-n:],
            kernel_sizes,
            steps=kernel_sizes,
            dilations=ones,
            before=(0,) * n,
            outside=float("-inf"),
        )
        maximum = c.b.unrolled_reduce("max", parts, range(rank, rank + n), d)
    else:
        maximum = _reduced_parts(c, x, windows, "max")
    return c.with_unused(c.b.cast(maximum, c.out.dtype))


def _equal_windows(c: Call, x: str, n: int) -> tuple[Size, ...] | None:
    """The sizes of adaptive windows of equal size; ``None`` if their sizes differ."""
    windows = [size.divide_exactly(outputs) for size, outputs in zip(c.b.shape(x)[-n:], c.out.shape[-n:], strict=True)]
    return tuple(size for size in windows if size is not None) if all(windows) else None


def _reduced_parts(c: Call, x: str, windows: tuple[Size, ...], fn: str) -> str:
    """Reduces adjacent windows of symbolic sizes: each dimension is divided into windows and their elements."""
    rank, n = len(c.out.shape), len(windows)
    divided = [part for parts in zip(c.out.shape[-n:], windows, strict=True) for part in parts]
    parts = c.b.reshape(x, [*c.out.shape[:-n], *divided])
    elements = range(rank - n + 1, rank + n, 2)
    return c.b.reshape(c.b.reduce(fn, parts, elements, c.b.dtype(x)), c.out.shape)


def _uneven_windows(c: Call, x: str, n: int, fn: str, neutral: float) -> tuple[str, list[str]]:
    """Reduces windows from ``floor(i * size / outputs)`` to ``ceil((i + 1) * size / outputs)``; also returns their lengths.

    Every window is read at the size of the largest one; elements beyond its end count as ``neutral``.
    """
    b, rank = c.b, len(c.out.shape)
    sizes = constant_sizes(c, b.shape(x)[-n:], "pooled size")
    lengths: list[str] = []
    for i, (size, outputs) in enumerate(zip(sizes, constant_sizes(c, c.out.shape[-n:], "pooled size"), strict=True)):
        kernel_size = max(-(-(output + 1) * size // outputs) - output * size // outputs for output in range(outputs))
        start = _floor_divided(b, outputs, size, 0)
        length = b.pointwise("sub", _floor_divided(b, outputs, size, size + outputs - 1), start, dtype="int64")
        lengths.append(length)
        offset = b.add(PrimOp.IOTA, (), [1, kernel_size], "int64", dim=1, start=0, step=1)
        position = b.pointwise("add", b.reshape(start, [outputs, 1]), offset, dtype="int64")
        inside = b.pointwise("lt", offset, b.reshape(length, [outputs, 1]), dtype="bool", operand_dtype="int64")
        # The window elements of the previous dimensions are already the last dimensions.
        dim = rank - n + i
        after = len(b.shape(x)) - dim - 1
        shape: list[SizeLike] = [*b.shape(x)[:dim], outputs, kernel_size, *b.shape(x)[dim + 1 :]]
        x = gathered(b, x, dim, b.reshape(clamped(b, position, Size.of(size)), [outputs * kernel_size]))
        inside = b.reshape(inside, [outputs, kernel_size, *[1] * after])
        x = b.pointwise("where", inside, b.reshape(x, shape), neutral, dtype=b.dtype(x))
        x = b.permute(x, (*range(dim + 1), *range(dim + 2, len(shape)), dim + 1))
    return b.unrolled_reduce(fn, x, range(rank, rank + n), b.dtype(x)), lengths


def _floor_divided(b: Builder, outputs: int, size: int, start: int) -> str:
    """``(i * size + start) // outputs`` for each output position i."""
    dividend = b.add(PrimOp.IOTA, (), [outputs], "int64", dim=0, start=start, step=size)
    return b.pointwise("floor_div", dividend, outputs, dtype="int64")


@lowering("unfold")
def unfold(c: Call) -> str:
    """``x.unfold(dim, size, step)``: sliding windows of a tensor."""
    x = c.tensor(0)
    dim = c.dim(1, "dimension", len(c.b.shape(x)))
    return windowed(c.b, x, dim, c.out.shape[dim], c.integer(2, "size"), c.integer(3, "step", 1), 1)
