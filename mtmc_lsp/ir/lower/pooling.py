"""Pooling: a fold of each window, or a reduction where one window is the whole input."""

from __future__ import annotations

from mtmc_lsp.core.dtypes import compute_dtype, is_float
from mtmc_lsp.core.sizes import Size, SizeLike, product
from mtmc_lsp.ir.lower import Call, rule
from mtmc_lsp.ir.lower.reductions import count, finish, scale_by_count
from mtmc_lsp.ir.lower.resampling import clamped, looked_up
from mtmc_lsp.ir.lower.windows import constant_sizes, per_dim, sliding, windowed
from mtmc_lsp.ir.primitives import ONE, Builder, PrimOp


def _spatial(c: Call) -> int:
    return int(c.op.removeprefix("adaptive_").split("pool")[1][0])


@rule("max_pool1d", "max_pool2d", "max_pool3d", "max_pool2d_with_indices", "max_pool3d_with_indices")
def max_pool(c: Call) -> str | tuple[str, ...]:
    """The largest of each window; padding is never it, and NaN always is."""
    c.refuse_other_results("the places of the largest")
    x, n = c.tensor(0), _spatial(c)
    if not is_float(c.out.dtype):
        raise c.fail("integers")
    taps = per_dim(c, 1, "kernel_size", 1, n)
    steps = per_dim(c, 2, "stride", 1, n) if _given(c, 2, "stride") else taps
    before, dilations = per_dim(c, 3, "padding", 0, n), per_dim(c, 4, "dilation", 1, n)
    d, places = compute_dtype(c.out.dtype), c.out.shape[-n:]
    windows = sliding(c.b, x, places, taps, steps=steps, dilations=dilations, before=before, outside=float("-inf"))
    rank = len(c.out.shape)
    return c.alone(c.b.cast(c.b.unrolled_reduce("max", windows, range(rank, rank + n), d), c.out.dtype))


def _given(c: Call, position: int, name: str) -> bool:
    return c.raw(position, name) not in (None, ())


@rule("avg_pool1d", "avg_pool2d", "avg_pool3d")
def average_pool(c: Call) -> str:
    """The mean of each window, of those elements that PyTorch counts."""
    x, n = c.tensor(0), _spatial(c)
    if not is_float(c.out.dtype):
        raise c.fail("integers")
    taps = per_dim(c, 1, "kernel_size", 1, n)
    steps = per_dim(c, 2, "stride", 1, n) if _given(c, 2, "stride") else taps
    before = per_dim(c, 3, "padding", 0, n)
    total = _window_sums(c, x, c.out.shape[-n:], taps, steps, before)
    d = c.b.dtype(total)
    divisor = c.raw(6, "divisor_override")
    if isinstance(divisor, int):
        return c.b.cast(c.b.pointwise("div", total, float(divisor), dtype=d), c.out.dtype)
    inner = c.flag(5, "count_include_pad", True)
    sizes = c.b.shape(x)[-n:]
    whole = product([Size.of(tap) for tap in taps])
    clipped = any(before) and not inner
    clipped = clipped or any(
        not _reaches_inside(place, tap, step, amount, size)
        for place, tap, step, amount, size in zip(c.out.shape[-n:], taps, steps, before, sizes, strict=True)
    )
    if not clipped:
        return c.b.cast(scale_by_count(c.b, total, whole, d), c.out.dtype)
    for i, (tap, step, amount, size) in enumerate(zip(taps, steps, before, sizes, strict=True)):
        counted = _counted(c.b, c.out.shape[i - n], tap, step, amount, size, inner)
        shaped = c.b.reshape(counted, [c.out.shape[i - n], *[1] * (n - 1 - i)])
        total = c.b.pointwise("div", total, c.b.cast(shaped, d), dtype=d)
    return c.b.cast(total, c.out.dtype)


def _window_sums(
    c: Call, x: str, places: tuple[Size, ...], taps: tuple[int, ...], steps: tuple[int, ...], before: tuple[int, ...]
) -> str:
    n, rank = len(taps), len(c.b.shape(x))
    windows = sliding(c.b, x, places, taps, steps=steps, dilations=(1,) * n, before=before, outside=0.0)
    return c.b.unrolled_reduce("sum", windows, range(rank, rank + n), compute_dtype(c.out.dtype))


def _reaches_inside(places: Size, taps: int, step: int, before: int, size: Size) -> bool:
    """Whether even the last window ends within the padded input, as it does but for ``ceil_mode``."""
    rest = size + 2 * before - ((places - 1) * step + taps)
    return rest.is_constant and rest.constant >= 0


def _counted(b: Builder, places: Size, taps: int, step: int, before: int, size: Size, inner: bool) -> str:
    """How many elements count along one dimension, for each place of a window."""
    start = b.add(PrimOp.IOTA, (), [places], "int64", dim=0, start=-before, step=step)
    end = b.pointwise("add", start, taps, dtype="int64")
    if inner:
        # Padding counts, but not what lies beyond it.
        end = b.pointwise("minimum", end, b.size(size + before, "int64"), dtype="int64")
    else:
        end = b.pointwise("minimum", end, b.size(size, "int64"), dtype="int64")
        start = b.pointwise("maximum", start, 0, dtype="int64")
    return b.pointwise("sub", end, start, dtype="int64")


@rule("adaptive_avg_pool1d", "adaptive_avg_pool2d", "adaptive_avg_pool3d")
def adaptive_average_pool(c: Call) -> str:
    """To one place the mean of all; otherwise the mean of each window."""
    x, n = c.tensor(0), _spatial(c)
    shape, rank = c.b.shape(x), len(c.out.shape)
    d, dims = compute_dtype(c.out.dtype), tuple(range(rank - n, rank))
    if all(size == ONE for size in c.out.shape[-n:]):
        total = c.b.reduce("sum", c.b.cast(x, d), dims, d)
        return finish(c, scale_by_count(c.b, total, count(shape, dims), d))
    taps = _equal_windows(c, x, n)
    if taps is not None:
        total = _window_sums(c, x, c.out.shape[-n:], taps, taps, (0,) * n)
        return c.b.cast(scale_by_count(c.b, total, product([Size.of(tap) for tap in taps]), d), c.out.dtype)
    total, lengths = _uneven_windows(c, c.b.cast(x, d), n, "sum", 0.0)
    for i, length in enumerate(lengths):
        shaped = c.b.reshape(c.b.cast(length, d), [c.out.shape[i - n], *[1] * (n - 1 - i)])
        total = c.b.pointwise("div", total, shaped, dtype=d)
    return c.b.cast(total, c.out.dtype)


@rule("adaptive_max_pool1d", "adaptive_max_pool2d", "adaptive_max_pool3d")
def adaptive_max_pool(c: Call) -> str | tuple[str, ...]:
    """The largest of all, or of each window."""
    c.refuse_other_results("the places of the largest")
    x, n = c.tensor(0), _spatial(c)
    if not is_float(c.out.dtype):
        raise c.fail("integers")
    rank, d = len(c.out.shape), compute_dtype(c.out.dtype)
    x = c.b.cast(x, d)
    if all(size == ONE for size in c.out.shape[-n:]):
        return c.alone(finish(c, c.b.reduce("max", x, tuple(range(rank - n, rank)), d)))
    taps = _equal_windows(c, x, n)
    if taps is None:
        largest = _uneven_windows(c, x, n, "max", float("-inf"))[0]
    else:
        ones, none = (1,) * n, (0,) * n
        places = c.out.shape[-n:]
        windows = sliding(c.b, x, places, taps, steps=taps, dilations=ones, before=none, outside=float("-inf"))
        largest = c.b.unrolled_reduce("max", windows, range(rank, rank + n), d)
    return c.alone(c.b.cast(largest, c.out.dtype))


def _equal_windows(c: Call, x: str, n: int) -> tuple[int, ...] | None:
    """The sizes of adaptive windows that lie side by side; None where they do not."""
    taps: list[int] = []
    for size, places in zip(c.b.shape(x)[-n:], c.out.shape[-n:], strict=True):
        each = size.divide_exactly(places)
        if each is None or not each.is_constant:
            return None
        taps.append(each.constant)
    return tuple(taps)


def _uneven_windows(c: Call, x: str, n: int, fn: str, neutral: float) -> tuple[str, list[str]]:
    """A fold of windows from ``floor(place * size / places)`` to ``ceil((place + 1) * size / places)``, and their lengths.

    Each window is as many taps long as the longest one; those beyond its own end count as ``neutral``.
    """
    b, rank = c.b, len(c.out.shape)
    sizes = constant_sizes(c, b.shape(x)[-n:], "pooled size")
    lengths: list[str] = []
    for i, (size, places) in enumerate(zip(sizes, constant_sizes(c, c.out.shape[-n:], "pooled size"), strict=True)):
        taps = max(-(-(place + 1) * size // places) - place * size // places for place in range(places))
        start = _floor_divided(b, places, size, 0)
        length = b.pointwise("sub", _floor_divided(b, places, size, size + places - 1), start, dtype="int64")
        lengths.append(length)
        tap = b.add(PrimOp.IOTA, (), [1, taps], "int64", dim=1, start=0, step=1)
        own = b.pointwise("add", b.reshape(start, [places, 1]), tap, dtype="int64")
        inside = b.pointwise("lt", tap, b.reshape(length, [places, 1]), dtype="bool", operand_dtype="int64")
        # The places of the windows before this dimension's have their taps at the end already.
        dim = rank - n + i
        after = len(b.shape(x)) - dim - 1
        shape: list[SizeLike] = [*b.shape(x)[:dim], places, taps, *b.shape(x)[dim + 1 :]]
        x = looked_up(b, x, dim, b.reshape(clamped(b, own, Size.of(size)), [places * taps]))
        inside = b.reshape(inside, [places, taps, *[1] * after])
        x = b.pointwise("where", inside, b.reshape(x, shape), neutral, dtype=b.dtype(x))
        x = b.permute(x, (*range(dim + 1), *range(dim + 2, len(shape)), dim + 1))
    return b.unrolled_reduce(fn, x, range(rank, rank + n), b.dtype(x)), lengths


def _floor_divided(b: Builder, places: int, size: int, start: int) -> str:
    """``(place * size + start) // places`` for each place."""
    dividend = b.add(PrimOp.IOTA, (), [places], "int64", dim=0, start=start, step=size)
    return b.pointwise("floor_div", dividend, places, dtype="int64")


@rule("unfold")
def unfold(c: Call) -> str:
    """``x.unfold(dim, size, step)``: overlapping windows of a tensor."""
    x = c.tensor(0)
    dim = c.dim(1, "dimension", len(c.b.shape(x)))
    return windowed(c.b, x, dim, c.out.shape[dim], c.integer(2, "size"), c.integer(3, "step", 1), 1)
