"""Lowers elementwise operations."""

from __future__ import annotations

from mtmc_lsp.core.dtypes import MAX_FINITE, compute_dtype, is_float, round_to_dtype
from mtmc_lsp.core.graph import Ref
from mtmc_lsp.core.sizes import Number, Size
from mtmc_lsp.ir.lower import Call, lowering
from mtmc_lsp.ir.primitives import VIEW_OPS, PrimOp, Scalar

UNARY = (
    "exp log sqrt rsqrt sin cos tan tanh sigmoid erf log1p expm1 abs neg floor ceil trunc round sign reciprocal relu silu "
    "exp2 log2 log10 isnan isinf isfinite logical_not bitwise_not mish hardswish hardsigmoid log_sigmoid relu6 square "
    "atan sinh cosh erfc softsign asinh acosh atanh asin acos sgn signbit lgamma digamma erfinv i0 special_erfcx special_ndtri "
    "special_i0e special_i1 special_i1e special_modified_bessel_i0 special_modified_bessel_i1 special_modified_bessel_k0 "
    "special_modified_bessel_k1 special_scaled_modified_bessel_k0 special_scaled_modified_bessel_k1 special_bessel_j0 "
    "special_bessel_j1 special_bessel_y0 special_bessel_y1 special_spherical_bessel_j0"
).split()
BINARY = (
    "mul maximum minimum eq ne lt le gt ge logical_and logical_or logical_xor bitwise_and bitwise_or bitwise_xor fmod "
    "remainder hypot fmax fmin pow copysign atan2 __lshift__ __rshift__ __and__ __or__ __xor__ bitwise_left_shift "
    "bitwise_right_shift"
).split()
FUNCTION_NAMES = {
    "__lshift__": "shift_left",
    "__rshift__": "shift_right",
    "bitwise_left_shift": "shift_left",
    "bitwise_right_shift": "shift_right",
    "__and__": "bitwise_and",
    "__or__": "bitwise_or",
    "__xor__": "bitwise_xor",
    "sgn": "sign",
    "special_modified_bessel_i0": "i0",
    "special_modified_bessel_i1": "i1",
}
"""ATen names whose function has another name: Python's operators, the sign of a real number, and equal special functions."""
ON_BOOLS = {"add": "logical_or", "maximum": "logical_or", "mul": "logical_and", "minimum": "logical_and"}
"""Functions that replace arithmetic on booleans."""
COMPARISONS = frozenset("eq ne lt le gt ge".split())


@lowering(*UNARY)
def unary(c: Call) -> str:
    x = c.tensor(0)
    if is_float(c.out.dtype):
        x = c.b.cast(x, c.out.dtype) if not is_float(c.b.dtype(x)) else x
    if c.op == "round" and c.overload == "decimals":
        return _round_to(c, x, c.integer(1, "decimals"))
    return c.b.pointwise(FUNCTION_NAMES.get(c.op, c.op.removeprefix("special_")), x, dtype=c.out.dtype)


def _round_to(c: Call, x: str, decimals: int) -> str:
    """``x`` rounded to ``decimals``: scaled by a power of ten, rounded and scaled back."""
    d, power = c.out.dtype, float(10 ** abs(decimals))
    if not is_float(d):
        raise c.fail("integers")
    scale, unscale = ("mul", "div") if decimals > 0 else ("div", "mul")
    rounded_value = c.b.pointwise("round", c.b.pointwise(scale, x, power, dtype=d), dtype=d)
    return c.b.pointwise(unscale, rounded_value, power, dtype=d)


@lowering(*BINARY)
def binary(c: Call) -> str:
    fn = FUNCTION_NAMES.get(c.op, c.op)
    if c.out.dtype == "bool":
        fn = ON_BOOLS.get(fn, fn)
    return c.b.pointwise(fn, *_operands(c), dtype=c.out.dtype, **_promotion(c))


def _operands(c: Call) -> list[str | Scalar]:
    """Both operands; a number compared with a 16-bit float is rounded to that dtype, as in PyTorch."""
    operands = [c.operand(i) for i in (0, 1)]
    floats = {d for x in operands if isinstance(x, str) and is_float(d := c.b.dtype(x))}
    if c.op not in COMPARISONS or len(floats) != 1:
        return operands
    dtype = floats.pop()

    def rounded(x: str | Scalar) -> str | Scalar:
        if isinstance(x, Number):
            return c.b.add(PrimOp.CONSTANT, (), (), dtype, value=x, rounds=True)
        return x if isinstance(x, (str, bool)) else round_to_dtype(float(x), dtype)

    return [rounded(x) for x in operands]


def _promotion(c: Call) -> dict[str, object]:
    """The dtype in which a comparison's operands are compared (PyTorch's type promotion); empty for other operations."""
    if c.op not in COMPARISONS:
        return {}
    tensors = [c.b.dtype(c.tensor(i)) for i in (0, 1) if isinstance(c.raw(i), Ref)]
    floats = [d for d in tensors if is_float(d)]
    if floats:
        return {"operand_dtype": "float64" if "float64" in floats else "float32"}
    numbers = [c.raw(i) for i in (0, 1)]
    if any(isinstance(x, float) or (isinstance(x, Number) and x.kind == "float") for x in numbers):
        return {"operand_dtype": "float32"}
    return {"operand_dtype": "int64" if "int64" in tensors else "int32"}


@lowering("add", "sub", "rsub")
def add(c: Call) -> str:
    left, right = c.operand(0), c.operand(1)
    alpha = c.scalar(2, "alpha", 1)
    if c.op == "rsub":
        left, right = right, left
    if alpha != 1:
        scaled = c.b.pointwise("mul", right if c.op != "rsub" else left, alpha, dtype=c.out.dtype)
        left, right = (left, scaled) if c.op != "rsub" else (scaled, right)
        if c.op == "rsub":
            raise c.fail("rsub with alpha")
    if c.out.dtype == "bool":
        return c.b.pointwise(ON_BOOLS["add"], left, right, dtype="bool")
    return c.b.pointwise("add" if c.op == "add" else "sub", left, right, dtype=c.out.dtype)


@lowering("div", "true_divide", "floor_divide")
def div(c: Call) -> str:
    mode = "floor" if c.op == "floor_divide" else c.raw(2, "rounding_mode")
    fn = {None: "div", "floor": "floor_div", "trunc": "trunc_div"}[mode if isinstance(mode, str) else None]
    return c.b.pointwise(fn, c.operand(0), c.operand(1), dtype=c.out.dtype)


@lowering("where")
def where(c: Call) -> str:
    if len(c.node.args) != 3:
        raise c.fail("where with one argument has a data-dependent shape")
    return c.b.pointwise("where", c.tensor(0), c.operand(1), c.operand(2), dtype=c.out.dtype)


@lowering("masked_fill")
def masked_fill(c: Call) -> str:
    value = c.operand(2)
    if isinstance(value, Number) and value.kind == "float" and not is_float(c.out.dtype):
        raise c.fail("integers filled with a float that is known at run time")
    return c.b.pointwise("where", c.tensor(1), value, c.tensor(0), dtype=c.out.dtype)


@lowering("clamp", "clamp_min", "clamp_max", "hardtanh")
def clamp(c: Call) -> str:
    x = c.tensor(0)
    if c.op == "hardtanh":
        low: object = c.scalar(1, "min_val", -1.0)
        high: object = c.scalar(2, "max_val", 1.0)
    else:
        low = c.operand(1, "min") if c.op != "clamp_max" and c.has(1, "min") else None
        high = c.operand(2, "max") if c.op == "clamp" and c.has(2, "max") else None
        high = c.operand(1, "max") if c.op == "clamp_max" else high
    if isinstance(low, (str, int, float, Number)):
        x = c.b.pointwise("maximum", x, low, dtype=c.out.dtype)
    if isinstance(high, (str, int, float, Number)):
        x = c.b.pointwise("minimum", x, high, dtype=c.out.dtype)
    return x


@lowering("nan_to_num")
def nan_to_num(c: Call) -> str:
    x, d = c.tensor(0), c.out.dtype
    if not is_float(d):
        return x
    largest = MAX_FINITE[d]
    nan = c.number(1, "nan", 0.0) if c.has(1, "nan") else 0.0
    high = c.number(2, "posinf", largest) if c.has(2, "posinf") else largest
    low = c.number(3, "neginf", -largest) if c.has(3, "neginf") else -largest
    wide = c.b.cast(x, compute_dtype(d))
    inf = float("inf")
    for fn, bound, value in (("ne", wide, nan), ("eq", inf, high), ("eq", -inf, low)):
        is_replaced = c.b.pointwise(fn, wide, bound, dtype="bool", operand_dtype=compute_dtype(d))
        x = c.b.pointwise("where", is_replaced, float(value), x, dtype=d)
    return x


@lowering("gelu")
def gelu(c: Call) -> str:
    approximate = c.raw(1, "approximate", "none")
    return c.b.pointwise("gelu_tanh" if approximate == "tanh" else "gelu", c.tensor(0), dtype=c.out.dtype)


@lowering("leaky_relu", "elu", "celu", "selu", "softplus", "threshold", "hardshrink", "softshrink")
def activation(c: Call) -> str:
    """Activations with parameters, which become attributes of one pointwise function."""
    x, d = c.tensor(0), c.out.dtype
    if c.op == "leaky_relu" and isinstance(slope := c.scalar(1, "negative_slope", 0.01), Number):
        is_negative = c.b.pointwise("lt", x, 0.0, dtype="bool", operand_dtype=compute_dtype(d))
        return c.b.pointwise("where", is_negative, c.b.pointwise("mul", x, slope, dtype=d), x, dtype=d)
    if c.op == "leaky_relu":
        return c.b.pointwise("leaky_relu", x, dtype=d, slope=c.number(1, "negative_slope", 0.01))
    if c.op in ("elu", "celu", "selu"):
        alpha = c.number(1, "alpha", 1.0) if c.op != "selu" else 1.6732632423543772
        scale = 1.0507009873554805 if c.op == "selu" else (c.number(2, "scale", 1.0) if c.op == "elu" else 1.0)
        inner = c.number(3, "input_scale", 1.0) if c.op == "elu" else (1.0 / alpha if c.op == "celu" else 1.0)
        return c.b.pointwise("elu", x, dtype=d, alpha=alpha, scale=scale, inner=inner)
    if c.op == "softplus":
        beta, threshold = c.number(1, "beta", 1.0), c.number(2, "threshold", 20.0)
        return c.b.pointwise("softplus", x, dtype=d, beta=beta, threshold=threshold)
    if c.op == "threshold":
        # NaN is not below the threshold and stays.
        below = c.b.pointwise("le", x, c.number(1, "threshold", 0.0), dtype="bool", operand_dtype=compute_dtype(d))
        return c.b.pointwise("where", below, c.number(2, "value", 0.0), x, dtype=d)
    return c.b.pointwise(c.op, x, dtype=d, lambd=c.number(1, "lambd", 0.5))


@lowering(
    "_to_copy",
    "to",
    "type_as",
    "float",
    "half",
    "bfloat16",
    "clone",
    "contiguous",
    "alias",
    "detach",
    "lift_fresh_copy",
    "positive",
)
def cast(c: Call) -> str:
    # A copy with another layout has the same values; the node's output type has the strides.
    device = c.node.kwargs.get("device")
    if isinstance(device, str) and device == "cpu":
        raise c.fail("a copy between devices")
    if c.out.dtype in ("float8_e4m3fn", "float8_e5m2") and not _is_bounded(c, MAX_FINITE[c.out.dtype]):
        raise c.fail("GPUs and PyTorch versions convert numbers beyond the largest float8 differently")
    if str(c.node.kwargs.get("memory_format", "")).startswith("torch.channels_last"):
        # A separate value: its readers expect it in that memory format.
        return c.b.pointwise("cast", c.tensor(0), dtype=c.out.dtype)
    return c.b.cast(c.tensor(0), c.out.dtype)


def _is_bounded(c: Call, limit: float) -> bool:
    """Whether the argument already has the target dtype, or is clamped to at most ``limit`` in magnitude."""
    prim, below, above = c.b.prims[c.tensor(0)], False, False
    if prim.dtype == c.out.dtype:
        return True
    while prim.op in (*VIEW_OPS, PrimOp.POINTWISE) and not (below and above):
        values = [c.b.prims[name].attrs.get("value") for name in prim.inputs]
        numbers = [value for value in values if isinstance(value, (int, float)) and abs(value) <= limit]
        below, above = (
            below or (prim.fn == "minimum" and bool(numbers)),
            above or (prim.fn == "maximum" and bool(numbers)),
        )
        if not (prim.op in VIEW_OPS or prim.fn == "cast" or (prim.fn in ("minimum", "maximum") and numbers)):
            break
        prim = c.b.prims[next(name for name, value in zip(prim.inputs, values, strict=True) if value is None)]
    return below and above


@lowering(
    "full",
    "zeros",
    "ones",
    "full_like",
    "zeros_like",
    "ones_like",
    "scalar_tensor",
    "new_zeros",
    "new_ones",
    "new_full",
)
def full(c: Call) -> str:
    value: Scalar = 0.0 if "zeros" in c.op else 1.0
    if "full" in c.op:
        number = c.operand(2 if c.op == "new_full" else 1, "fill_value")
        if isinstance(number, str):
            raise c.fail("filled from a tensor")
        value = number
    if c.op == "scalar_tensor":
        value = c.scalar(0, "s", 0.0)
    return _filled(c, value)


def _filled(c: Call, value: Scalar) -> str:
    d = c.out.dtype
    if isinstance(value, Number):
        if not is_float(d) and value.kind == "float":
            raise c.fail("integers from a float that is known at run time")
        return c.b.expand(c.b.constant(value, d), c.out.shape)
    typed = bool(value) if d == "bool" else (float(value) if is_float(d) else int(value))
    return c.b.expand(c.b.constant(typed, d), c.out.shape)


@lowering("arange")
def arange(c: Call) -> str:
    numbers = [c.raw(i) for i in range(len(c.node.args))]
    start = numbers[0] if len(numbers) > 1 else 0
    step = numbers[2] if len(numbers) > 2 else 1
    if isinstance(start, Size):
        start = start.constant if start.is_constant else start
    if not isinstance(start, (int, float)) or not isinstance(step, (int, float)):
        raise c.fail("arange from a symbolic start")
    return c.b.add(PrimOp.IOTA, (), c.out.shape, c.out.dtype, dim=0, start=start, step=step)


@lowering("fill", "empty_like", "new_empty")
def fill(c: Call) -> str:
    """A filled tensor; an empty tensor may hold anything, so it becomes zeros."""
    value = c.operand(1, "value") if c.op == "fill" else 0
    if isinstance(value, str):
        return c.b.expand(c.b.cast(value, c.out.dtype), c.out.shape)
    return _filled(c, value)


@lowering("_prelu_kernel")
def prelu(c: Call) -> str:
    x, d = c.tensor(0), c.out.dtype
    positive = c.b.pointwise("gt", x, 0.0, dtype="bool", operand_dtype=compute_dtype(d))
    return c.b.pointwise("where", positive, x, c.b.pointwise("mul", x, c.tensor(1), dtype=d), dtype=d)


@lowering("silu_backward", "mish_backward")
def gated_backward(c: Call) -> str:
    """The gradient of ``x * sigmoid(x)`` or ``x * tanh(softplus(x))``; autograd has one operator for each."""
    gradient, x, d = c.tensor(0), c.tensor(1), compute_dtype(c.out.dtype)
    sigmoid = c.b.pointwise("sigmoid", x, dtype=d)
    if c.op == "silu_backward":
        slope = c.b.pointwise("mul", x, c.b.pointwise("sub", 1.0, sigmoid, dtype=d), dtype=d)
        slope = c.b.pointwise("mul", sigmoid, c.b.pointwise("add", slope, 1.0, dtype=d), dtype=d)
    else:
        gate = c.b.pointwise("tanh", c.b.pointwise("softplus", x, dtype=d, beta=1.0, threshold=20.0), dtype=d)
        rest = c.b.pointwise("sub", 1.0, c.b.pointwise("mul", gate, gate, dtype=d), dtype=d)
        slope = c.b.pointwise("mul", c.b.pointwise("mul", x, sigmoid, dtype=d), rest, dtype=d)
        slope = c.b.pointwise("add", gate, slope, dtype=d)
    return c.b.cast(c.b.pointwise("mul", gradient, slope, dtype=d), c.out.dtype)


@lowering("outer")
def outer(c: Call) -> str:
    left, right = c.tensor(0), c.tensor(1)
    return c.b.pointwise("mul", c.b.reshape(left, [*c.b.shape(left), 1]), right, dtype=c.out.dtype)


@lowering("lerp")
def lerp(c: Call) -> str:
    """Interpolates from the nearer end, as PyTorch does, so that both ends are exact."""
    start, end, d, weight = c.tensor(0), c.tensor(1), c.out.dtype, c.operand(2)
    difference = c.b.pointwise("sub", end, start, dtype=d)
    if isinstance(weight, Number):
        weight = c.b.constant(weight, d)
    if isinstance(weight, str):
        size = c.b.pointwise("abs", weight, dtype=d)
        near = c.b.pointwise("lt", size, 0.5, dtype="bool", operand_dtype=compute_dtype(d))
        weight = c.b.pointwise("where", near, weight, c.b.pointwise("sub", weight, 1.0, dtype=d), dtype=d)
        start = c.b.pointwise("where", near, start, end, dtype=d)
    elif abs(weight) >= 0.5:
        start, weight = end, weight - 1.0
    return c.b.pointwise("add", start, c.b.pointwise("mul", weight, difference, dtype=d), dtype=d)


@lowering("addcmul", "addcdiv")
def addcmul(c: Call) -> str:
    d = c.out.dtype
    term = c.b.pointwise("mul" if c.op == "addcmul" else "div", c.tensor(1), c.tensor(2), dtype=d)
    value = c.scalar(3, "value", 1.0)
    if value != 1:
        term = c.b.pointwise("mul", term, value, dtype=d)
    return c.b.pointwise("add", c.tensor(0), term, dtype=d)


@lowering("native_dropout", "dropout")
def dropout(c: Call) -> str | tuple[str, ...]:
    """``x * keep / (1 - p)`` with ``keep = rand >= p``; the random numbers are Philox of the flat element index."""
    x, d = c.tensor(0), c.out.dtype
    p = c.number(1, "p", 0.5)
    if not c.flag(2, "train", True):
        raise c.fail("dropout in evaluation mode does nothing") if c.op == "native_dropout" else c.fail("eval dropout")
    draw = c.b.add(PrimOp.RANDOM, (), c.out.shape, "float32", stream=c.b.streams)
    c.b.streams += 1
    keep = c.b.pointwise("ge", draw, p, dtype="bool", operand_dtype="float32")
    scaled = c.b.pointwise("mul", x, 1.0 / (1.0 - p) if p < 1 else 0.0, dtype=d)
    value = c.b.pointwise("where", keep, scaled, 0.0, dtype=d)
    return (value, keep) if c.op == "native_dropout" else value
