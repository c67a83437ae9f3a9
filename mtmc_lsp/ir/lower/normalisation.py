"""Lowers layer, RMS, group, instance, batch and weight normalisation."""

from __future__ import annotations

from mtmc_lsp.core.dtypes import EPSILON, compute_dtype
from mtmc_lsp.core.sizes import Size, product
from mtmc_lsp.ir.lower import Call, lowering
from mtmc_lsp.ir.lower.reductions import centred_moments, count, plain_mean, rounded, scale_by_count
from mtmc_lsp.ir.primitives import Builder, Scalar


def normalise(b: Builder, x: str, dims: tuple[int, ...], eps: Scalar) -> str:
    """``(x - mean) * rsqrt(var + eps)`` over ``dims``; ``x`` must have the compute dtype."""
    d, x = b.dtype(x), rounded(b, x)
    deviation, squares, n = centred_moments(b, x, dims)
    inverse = b.pointwise("rsqrt", b.pointwise("add", scale_by_count(b, squares, n, d), eps, dtype=d), dtype=d)
    return b.pointwise("mul", deviation, inverse, dtype=d)


def affine(b: Builder, x: str, weight: str | None, bias: str | None, dtype: str) -> str:
    """``x * weight + bias``, cast to ``dtype``; weight and bias are optional."""
    d = b.dtype(x)
    if weight is not None:
        x = b.pointwise("mul", x, weight, dtype=d)
    if bias is not None:
        x = b.pointwise("add", x, bias, dtype=d)
    return b.cast(x, dtype)


def per_channel(b: Builder, name: str | None, rank: int, channel: int = 1) -> str | None:
    """A vector with one value per channel, reshaped to broadcast."""
    if name is None:
        return None
    return b.reshape(name, [b.shape(name)[0] if i == channel else 1 for i in range(rank)])


def standardised(b: Builder, x: str, mean: str, var: str, eps: Scalar) -> str:
    """``(x - mean) * rsqrt(var + eps)`` with the given statistics per channel."""
    d, rank = b.dtype(x), len(b.shape(x))
    shape = [b.shape(mean)[0] if i == 1 else 1 for i in range(rank)]
    inverse = b.pointwise("rsqrt", b.pointwise("add", b.reshape(var, shape), eps, dtype=d), dtype=d)
    return b.pointwise("mul", b.pointwise("sub", x, b.reshape(mean, shape), dtype=d), inverse, dtype=d)


@lowering("layer_norm", "native_layer_norm")
def layer_norm(c: Call) -> str | tuple[str, ...]:
    if c.op == "native_layer_norm":
        c.reject_other_results("its statistics")
    x, width = c.tensor(0), c.raw(1, "normalized_shape")
    assert isinstance(width, tuple)
    rank = len(c.b.shape(x))
    dims = tuple(range(rank - len(width), rank))
    wide = c.b.cast(x, compute_dtype(c.out.dtype))
    value = normalise(c.b, wide, dims, c.scalar(4, "eps", 1e-5))
    return c.with_unused(affine(c.b, value, c.optional(2, "weight"), c.optional(3, "bias"), c.out.dtype))


@lowering("rms_norm")
def rms_norm(c: Call) -> str:
    x, width = c.tensor(0), c.raw(1, "normalized_shape")
    assert isinstance(width, tuple)
    rank = len(c.b.shape(x))
    dims = tuple(range(rank - len(width), rank))
    d = compute_dtype(c.out.dtype)
    wide = c.b.cast(x, d)
    # Without eps, PyTorch uses the machine epsilon of the compute dtype.
    eps = c.scalar(3, "eps", 0.0) if c.has(3, "eps") else EPSILON[d]
    square = c.b.reduce("sum", c.b.pointwise("square", wide, dtype=d), dims, d)
    mean = scale_by_count(c.b, square, count(c.b.shape(x), dims), d)
    inverse = c.b.pointwise("rsqrt", c.b.pointwise("add", mean, eps, dtype=d), dtype=d)
    return affine(c.b, c.b.pointwise("mul", wide, inverse, dtype=d), c.optional(2, "weight"), None, c.out.dtype)


@lowering("group_norm")
def group_norm(c: Call) -> str:
    x, groups = c.tensor(0), c.integer(1, "num_groups")
    shape = c.b.shape(x)
    channels = shape[1]
    grouped = [shape[0], Size.of(groups), (channels // groups) * product(shape[2:])]
    wide = c.b.reshape(c.b.cast(x, compute_dtype(c.out.dtype)), grouped)
    value = c.b.reshape(normalise(c.b, wide, (2,), c.scalar(4, "eps", 1e-5)), shape)
    weight = per_channel(c.b, c.optional(2, "weight"), len(shape))
    bias = per_channel(c.b, c.optional(3, "bias"), len(shape))
    return affine(c.b, value, weight, bias, c.out.dtype)


@lowering("instance_norm")
def instance_norm(c: Call) -> str:
    x = c.tensor(0)
    shape = c.b.shape(x)
    wide = c.b.cast(x, compute_dtype(c.out.dtype))
    if c.flag(5, "use_input_stats", True):
        value = normalise(c.b, wide, tuple(range(2, len(shape))), c.number(7, "eps", 1e-5))
    else:
        value = standardised(c.b, wide, c.tensor(3), c.tensor(4), c.number(7, "eps", 1e-5))
    weight = per_channel(c.b, c.optional(1, "weight"), len(shape))
    bias = per_channel(c.b, c.optional(2, "bias"), len(shape))
    return affine(c.b, value, weight, bias, c.out.dtype)


@lowering("batch_norm", "_native_batch_norm_legit_no_training")
def batch_norm(c: Call) -> str | tuple[str, ...]:
    """Batch norm with running statistics (evaluation): one scale and shift per channel."""
    if c.op == "batch_norm" and (c.flag(5, "training") or not c.has(3)):
        raise c.fail("with batch statistics")
    x = c.tensor(0)
    rank = len(c.b.shape(x))
    eps = c.number(7 if c.op == "batch_norm" else 6, "eps", 1e-5)
    value = standardised(c.b, c.b.cast(x, compute_dtype(c.out.dtype)), c.tensor(3), c.tensor(4), eps)
    weight, bias = per_channel(c.b, c.optional(1), rank), per_channel(c.b, c.optional(2), rank)
    value = affine(c.b, value, weight, bias, c.out.dtype)
    # The tensors that training saves for the backward pass are empty in evaluation.
    empty = [c.b.expand(c.b.constant(0.0, kind.dtype), kind.shape) for kind in c.node.outputs[1:]]
    return (value, *empty) if empty else value


@lowering("_native_batch_norm_legit_functional", "_native_batch_norm_legit")
def batch_norm_training(c: Call) -> tuple[str, ...]:
    """Batch norm with batch statistics, and the updated running statistics (with unbiased variance, as in PyTorch)."""
    x = c.tensor(0)
    shape, d = c.b.shape(x), compute_dtype(c.out.dtype)
    has_no_running_stats = c.overload == "no_stats"
    if not c.flag(3 if has_no_running_stats else 5, "training") or (
        c.op == "_native_batch_norm_legit" and not has_no_running_stats
    ):
        raise c.fail("without batch statistics")
    dims = tuple(i for i in range(len(shape)) if i != 1)
    wide = rounded(c.b, c.b.cast(x, d))
    deviation, squares, n = centred_moments(c.b, wide, dims)
    var = scale_by_count(c.b, squares, n, d)
    eps = c.number(5 if has_no_running_stats else 7, "eps", 1e-5)
    inverse = c.b.pointwise("rsqrt", c.b.pointwise("add", var, eps, dtype=d), dtype=d)
    value = c.b.pointwise("mul", deviation, inverse, dtype=d)
    weight, bias = per_channel(c.b, c.optional(1), len(shape)), per_channel(c.b, c.optional(2), len(shape))
    result = affine(c.b, value, weight, bias, c.out.dtype)
    mean = plain_mean(c.b, wide, dims)
    saved = c.b.reshape(mean, [shape[1]]), c.b.reshape(inverse, [shape[1]])
    if has_no_running_stats:
        return (result, *saved)
    momentum = c.number(6, "momentum", 0.1)
    unbiased = scale_by_count(c.b, squares, n - 1, d)

    def updated(running: str, batch: str) -> str:
        old = c.b.pointwise("mul", running, 1.0 - momentum, dtype=d)
        new = c.b.pointwise("mul", c.b.reshape(batch, [shape[1]]), momentum, dtype=d)
        return c.b.cast(c.b.pointwise("add", old, new, dtype=d), c.b.dtype(running))

    return (result, *saved, updated(c.tensor(3), mean), updated(c.tensor(4), unbiased))


@lowering("_weight_norm")
def weight_norm(c: Call) -> str:
    """``v * (g / norm(v))``, with the norm over all dimensions except ``dim``."""
    v, g = c.tensor(0), c.tensor(1)
    d, rank = compute_dtype(c.out.dtype), len(c.b.shape(v))
    dim = c.dim(2, "dim", rank)
    v_cast = c.b.cast(v, d)
    others = tuple(i for i in range(rank) if i != dim)
    norm = c.b.pointwise("sqrt", c.b.reduce("sum", c.b.pointwise("square", v_cast, dtype=d), others, d), dtype=d)
    return c.b.cast(c.b.pointwise("mul", v_cast, c.b.pointwise("div", g, norm, dtype=d), dtype=d), c.out.dtype)
