"""Lowers reductions, softmax and scans."""

from __future__ import annotations

import math
from dataclasses import replace

from mtmc_lsp.core.dtypes import compute_dtype
from mtmc_lsp.core.sizes import Size, product
from mtmc_lsp.ir.lower import Call, lowering
from mtmc_lsp.ir.primitives import CENTRED, ONE, Builder, PrimOp


def rank_of(c: Call, name: str) -> int:
    """Number of dimensions."""
    return len(c.b.shape(name))


def count(shape: tuple[Size, ...], dims: tuple[int, ...]) -> Size:
    """Number of reduced elements."""
    return product([shape[d] for d in dims])


def scale_by_count(b: Builder, total: str, size: Size, dtype: str) -> str:
    """``total / size``."""
    if size.is_constant:
        return b.pointwise("mul" if _power_of_two(size.constant) else "div", total, _factor(size.constant), dtype=dtype)
    return b.pointwise("div_by_size", total, dtype=dtype, size=size)


def _power_of_two(n: int) -> bool:
    return n > 0 and n & (n - 1) == 0


def _factor(n: int) -> float:
    return 1.0 / n if _power_of_two(n) else float(n)


def finish(c: Call, name: str) -> str:
    """A reduction's result, whose reduced dimensions have size 1, in the node's shape and dtype."""
    return c.b.cast(c.b.reshape(name, c.out.shape), c.out.dtype)


@lowering("sum", "prod", "amax", "amin", "any", "all", "mean")
def reduce(c: Call) -> str:
    x = c.tensor(0)
    over_all_dims = c.overload == "default" and c.op in ("sum", "prod", "any", "all", "mean")
    dims = tuple(range(rank_of(c, x))) if over_all_dims else c.dims(1, "dim", rank_of(c, x))
    fn = _function_for(c.b.dtype(x), {"amax": "max", "amin": "min", "mean": "sum"}.get(c.op, c.op))
    if fn in ("any", "all"):
        x = c.b.cast(x, "bool")
        return finish(c, c.b.reduce(fn, x, dims, "bool"))
    d = compute_dtype(c.out.dtype)
    total = c.b.reduce(fn, c.b.cast(x, d), dims, d)
    return finish(c, scale_by_count(c.b, total, count(c.b.shape(x), dims), d) if c.op == "mean" else total)


def _function_for(dtype: str, fn: str) -> str:
    """The reduction function for a dtype: max and min of booleans are any and all."""
    return {"max": "any", "min": "all"}.get(fn, fn) if dtype == "bool" else fn


@lowering("max", "min")
def extremum(c: Call) -> str | tuple[str, ...]:
    x = c.tensor(0)
    if c.overload == "other":
        return c.b.pointwise("maximum" if c.op == "max" else "minimum", x, c.tensor(1), dtype=c.out.dtype)
    rank, dtype = rank_of(c, x), c.b.dtype(x)
    fn = _function_for(dtype, c.op)
    if c.overload == "default":
        return finish(c, c.b.reduce(fn, x, tuple(range(rank)), dtype))
    dims = c.dims(1, "dim", rank)
    value = c.b.reduce(fn, x, dims, dtype)
    index = c.b.reduce(f"arg{c.op}", c.b.cast(x, "int32") if dtype == "bool" else x, dims, "int64")
    return c.b.reshape(value, c.node.outputs[0].shape), c.b.reshape(index, c.node.outputs[1].shape)


@lowering("argmax", "argmin")
def argmax(c: Call) -> str:
    x = c.tensor(0)
    if not c.has(1, "dim"):
        x = c.b.reshape(x, [product(c.b.shape(x))])
    dims = c.dims(1, "dim", rank_of(c, x)) if c.has(1, "dim") else (0,)
    return finish(c, c.b.reduce(c.op, x, dims, "int64"))


@lowering("var", "std", "var_mean", "std_mean")
def variance(c: Call) -> str | tuple[str, ...]:
    x = c.tensor(0)
    rank = rank_of(c, x)
    d = compute_dtype(c.out.dtype)
    if c.overload == "default":
        dims, correction = tuple(range(rank)), 1.0 if c.flag(1, "unbiased", True) else 0.0
    elif c.overload == "dim":
        dims, correction = c.dims(1, "dim", rank), 1.0 if c.flag(2, "unbiased", True) else 0.0
    else:
        dims, correction = c.dims(1, "dim", rank), c.number(99, "correction", 1.0)
    x = c.b.cast(x, d)
    _, squares, n = centred_moments(c.b, x, dims)
    value = scale_by_count(c.b, squares, n - int(correction), d)
    if c.op.startswith("std"):
        value = c.b.pointwise("sqrt", value, dtype=d)
    result = finish(c, value)
    if c.op.endswith("mean"):
        mean = plain_mean(c.b, x, dims)
        return result, c.b.cast(c.b.reshape(mean, c.node.outputs[1].shape), c.node.outputs[1].dtype)
    return result


def plain_mean(b: Builder, x: str, dims: tuple[int, ...]) -> str:
    """The mean as an output. The mean inside :func:`centred_moments` has the rounding error of the first element, which may be
    much larger than the mean."""
    return scale_by_count(b, b.reduce("sum", x, dims, b.dtype(x)), count(b.shape(x), dims), b.dtype(x))


def centred_moments(b: Builder, x: str, dims: tuple[int, ...]) -> tuple[str, str, Size]:
    """Deviations from the mean, the sum of their squares, and the count.

    Computed in two passes, or in one pass with running means, to avoid cancellation. Everything uses differences from each
    row's first element: for equal or nearly equal elements they are exact, and so are the results, as with the library's
    running means. Otherwise normalisation would amplify pure rounding errors.
    """
    d, n = b.dtype(x), count(b.shape(x), dims)
    x = rounded(b, x)
    first = x
    for dim in dims:
        first = b.slice(first, dim, 0, 1)
    difference_from_first = b.pointwise("sub", x, first, dtype=d)
    difference = b.reduce("sum", difference_from_first, dims, d)
    deviation = b.pointwise("sub", difference_from_first, scale_by_count(b, difference, n, d), dtype=d)
    squares = b.reduce("sum", b.pointwise("square", deviation, dtype=d), dims, d)
    squares_prim = b.prims[squares]
    if squares_prim.op is PrimOp.REDUCE and b.prims[difference].op is PrimOp.REDUCE:
        b.prims[squares] = replace(squares_prim, attrs={**squares_prim.attrs, CENTRED: difference})
    return deviation, squares, n


@lowering("logsumexp")
def logsumexp(c: Call) -> str:
    x = c.tensor(0)
    d = compute_dtype(c.out.dtype)
    top, total = softmax_statistics(c.b, rounded(c.b, c.b.cast(x, d)), c.dims(1, "dim", rank_of(c, x)))
    value = c.b.pointwise("add", c.b.pointwise("log", total, dtype=d), top, dtype=d)
    # The exponentials of what is infinite, less an infinite maximum, are no numbers.
    return finish(
        c, c.b.pointwise("where", c.b.pointwise("isinf", top, dtype="bool", operand_dtype=d), top, value, dtype=d)
    )


def rounded(b: Builder, x: str) -> str:
    """``x`` rounded before a maximum is subtracted from it.

    Otherwise the compiler may fuse a product into the subtraction: then the maximum minus itself is not 0.
    """
    prim = b.prims[x]
    computed = prim.op is PrimOp.POINTWISE and prim.fn not in ("cast", "rounded")
    return b.pointwise("rounded", x, dtype=b.dtype(x)) if computed else x


def softmax_statistics(b: Builder, x: str, dims: tuple[int, ...]) -> tuple[str, str]:
    """Maximum, and sum of ``exp(x - maximum)``; one pass can compute both (online softmax, arXiv 1805.02867)."""
    maximum = b.reduce("max", x, dims, b.dtype(x))
    return maximum, b.reduce("sum_exp", x, dims, b.dtype(x), maximum)


def _without_maximum(b: Builder, x: str, dims: tuple[int, ...]) -> str:
    """The logits, where the user's code has subtracted the maximum of each row, which a softmax does anyway."""
    shifted = _uncast(b, x)
    if b.prims[shifted].fn != "sub":
        return x
    logits, maximum = b.prims[shifted].inputs
    reduced = b.prims[_uncast(b, maximum)]
    is_maximum = reduced.op is PrimOp.REDUCE and reduced.fn == "max" and reduced.attrs["dims"] == dims
    return logits if is_maximum and _uncast(b, reduced.inputs[0]) == _uncast(b, logits) else x


def _uncast(b: Builder, name: str) -> str:
    while b.prims[name].fn in ("cast", "rounded"):
        name = b.prims[name].inputs[0]
    return name


@lowering("softmax", "_softmax", "log_softmax", "_log_softmax", "special_log_softmax", "special_softmax")
def softmax(c: Call) -> str:
    x = c.tensor(0)
    d = compute_dtype(c.out.dtype)
    dims = c.dims(1, "dim", rank_of(c, x))
    x = rounded(c.b, c.b.cast(_without_maximum(c.b, x, dims), d))
    maximum, total = softmax_statistics(c.b, x, dims)
    shifted = c.b.pointwise("sub", x, maximum, dtype=d)
    if "log" in c.op:
        value = c.b.pointwise("sub", shifted, c.b.pointwise("log", total, dtype=d), dtype=d)
    else:
        value = c.b.pointwise("div", c.b.pointwise("exp", shifted, dtype=d), total, dtype=d)
    return c.b.cast(value, c.out.dtype)


@lowering("linalg_vector_norm", "norm", "frobenius_norm")
def vector_norm(c: Call) -> str:
    x = c.tensor(0)
    order = c.number(1, "ord", 2.0) if c.op != "frobenius_norm" else 2.0
    dims = c.dims(1 if c.op == "frobenius_norm" else 2, "dim", rank_of(c, x))
    d = compute_dtype(c.out.dtype)
    x = c.b.cast(x, d)
    if order == 2:
        return finish(
            c, c.b.pointwise("sqrt", c.b.reduce("sum", c.b.pointwise("square", x, dtype=d), dims, d), dtype=d)
        )
    magnitude = c.b.pointwise("abs", x, dtype=d)
    if order == 1:
        return finish(c, c.b.reduce("sum", magnitude, dims, d))
    if math.isinf(order):
        return finish(c, c.b.reduce("max" if order > 0 else "min", magnitude, dims, d))
    if order == 0:
        nonzero = c.b.pointwise("ne", magnitude, 0.0, dtype="bool", operand_dtype=d)
        return finish(c, c.b.reduce("sum", c.b.cast(nonzero, d), dims, d))
    powers = c.b.reduce("sum", c.b.pointwise("pow", magnitude, order, dtype=d), dims, d)
    return finish(c, c.b.pointwise("pow", powers, 1.0 / order, dtype=d))


@lowering("cumsum", "cumprod", "cummax", "cummin", "logcumsumexp")
def scan(c: Call) -> str | tuple[str, ...]:
    x = c.tensor(0)
    if c.op in ("cummax", "cummin"):
        raise c.fail("a scan with indices")
    d = compute_dtype(c.out.dtype)
    x = c.b.cast(x, d)
    dims = c.dims(1, "dim", rank_of(c, x))
    if all(c.b.shape(x)[dim] == ONE for dim in dims):
        return c.b.cast(x, c.out.dtype)
    fn = {"cumsum": "sum", "cumprod": "prod", "logcumsumexp": "log_sum_exp"}[c.op]
    name = c.b.add(PrimOp.SCAN, (x,), c.b.shape(x), d, fn=fn, dim=dims[0])
    return c.b.cast(name, c.out.dtype)
