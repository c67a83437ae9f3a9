"""Pointwise functions as Triton expressions, with PyTorch's semantics for NaN, infinities and integers.

The Triton interpreter lacks libdevice functions. They are written out as formulas, or as small functions if a formula would be
unreadable (:mod:`mtmc_lsp.codegen.kernel.device_functions`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from mtmc_lsp.codegen.kernel.snippets import ATOM, BITS, COMPARE, PRODUCT, SUM, TRITON_DTYPES, UNARY, Code, literal
from mtmc_lsp.core.dtypes import is_float

Operands = Sequence[Code]
Attrs = Mapping[str, object]
Formula = Callable[[Operands, Attrs, str], "tuple[str, int]"]


def _call(name: str) -> Formula:
    return lambda x, attrs, dtype: (f"{name}({', '.join(operand.text for operand in x)})", ATOM)


def _infix(symbol: str, precedence: int, right: int | None = None) -> Formula:
    """A left-associative operator; the right operand needs a higher precedence."""
    tight = precedence + 1 if right is None else right
    return lambda x, attrs, dtype: (f"{x[0].at(precedence)} {symbol} {x[1].at(tight)}", precedence)


def _text(template: str, precedence: int = ATOM) -> Formula:
    """A template with ``{0}``, ``{1}`` (operands, in brackets if needed) and attributes by name."""

    def render(x: Operands, attrs: Attrs, dtype: str) -> tuple[str, int]:
        names = {key: literal(value) for key, value in attrs.items() if key not in ("fn", "size")}
        return template.format(*(operand.at(UNARY) for operand in x), **names), precedence

    return render


def _cast(x: Operands, attrs: Attrs, dtype: str) -> tuple[str, int]:
    if dtype == "bool":
        return f"{x[0].at(COMPARE + 1)} != 0", COMPARE
    return f"{x[0].at(ATOM)}.to({TRITON_DTYPES[dtype]})", ATOM


def _power(x: Operands, attrs: Attrs, dtype: str) -> tuple[str, int]:
    exponent = x[1].text
    base = x[0].at(PRODUCT + 1)
    if exponent in ("2", "2.0"):
        return f"{base} * {base}", PRODUCT
    if exponent in ("3", "3.0"):
        return f"{base} * {base} * {base}", PRODUCT
    if exponent == "0.5":
        return f"tl.sqrt({x[0].text})", ATOM
    if exponent == "-0.5":
        return f"tl.rsqrt({x[0].text})", ATOM
    if exponent in ("-1", "-1.0"):
        return f"1.0 / {base}", PRODUCT
    if not is_float(dtype):
        raise KeyError("integer power")
    return f"_pow({x[0].text}, {x[1].text})", ATOM


def _square(x: Operands, attrs: Attrs, dtype: str) -> tuple[str, int]:
    return f"{x[0].at(PRODUCT + 1)} * {x[0].at(PRODUCT + 1)}", PRODUCT


def _extremum(name: str) -> Formula:
    def render(x: Operands, attrs: Attrs, dtype: str) -> tuple[str, int]:
        if is_float(dtype):
            return f"tl.{name}({x[0].text}, {x[1].text}, propagate_nan=tl.PropagateNan.ALL)", ATOM
        return f"tl.{name}({x[0].text}, {x[1].text})", ATOM

    return render


def _floor_div(x: Operands, attrs: Attrs, dtype: str) -> tuple[str, int]:
    if is_float(dtype):
        return f"_floor_div({x[0].text}, {x[1].text})", ATOM
    # Triton's integer division truncates; PyTorch's floors.
    a, b = x[0].at(UNARY), x[1].at(UNARY)
    return f"{a} // {b} - tl.where(({a} % {b} != 0) & (({a} < 0) != ({b} < 0)), 1, 0)", SUM


def _remainder(x: Operands, attrs: Attrs, dtype: str) -> tuple[str, int]:
    a, b = x[0].at(UNARY), x[1].at(UNARY)
    if is_float(dtype):
        return f"_remainder({x[0].text}, {x[1].text})", ATOM
    return f"{a} % {b} + tl.where(({a} % {b} != 0) & (({a} < 0) != ({b} < 0)), {b}, 0)", SUM


def _add(x: Operands, attrs: Attrs, dtype: str) -> tuple[str, int]:
    """A sum. The brackets of a sum of floats on the right stay: ``a + (b - c)`` is exact where b equals c, whatever a is."""
    return f"{x[0].at(SUM)} + {x[1].at(SUM + 1 if is_float(dtype) else SUM)}", SUM


def _logical(symbol: str) -> Formula:
    """Booleans are used directly; other values are compared with zero."""

    def render(x: Operands, attrs: Attrs, dtype: str) -> tuple[str, int]:
        parts = [o.at(BITS + 1) if o.dtype == "bool" else f"({o.at(BITS)} != 0)" for o in x]
        return f" {symbol} ".join(parts), BITS

    return render


def _sign(x: Operands, attrs: Attrs, dtype: str) -> tuple[str, int]:
    if is_float(dtype):
        return _text("tl.where({0} > 0, 1.0, tl.where({0} < 0, -1.0, 0.0))")(x, attrs, dtype)
    return _text("tl.where({0} > 0, 1, tl.where({0} < 0, -1, 0))")(x, attrs, dtype)


def _signbit(x: Operands, attrs: Attrs, dtype: str) -> tuple[str, int]:
    """Whether the number is negative; the sign of a zero or of NaN counts, so the bit itself is read."""
    if is_float(x[0].dtype):
        return f"{x[0].at(ATOM)}.to({'tl.int64' if x[0].dtype == 'float64' else 'tl.int32'}, bitcast=True) < 0", COMPARE
    return f"{x[0].at(COMPARE + 1)} < 0", COMPARE


def _relu(x: Operands, attrs: Attrs, dtype: str) -> tuple[str, int]:
    zero = "0.0" if is_float(dtype) else "0"
    return _text(f"tl.where({{0}} < 0, {zero}, {{0}})")(x, attrs, dtype)


def _abs(x: Operands, attrs: Attrs, dtype: str) -> tuple[str, int]:
    return f"tl.abs({x[0].text})", ATOM


def _identity_for_integers(name: str) -> Formula:
    return lambda x, attrs, dtype: (
        (f"tl.{name}({x[0].text})", ATOM) if is_float(dtype) else (x[0].text, x[0].precedence)
    )


SPECIAL_FUNCTIONS = (
    "lgamma digamma trigamma erfinv erfcx ndtri i0 i0e i1 i1e bessel_j0 bessel_j1 bessel_y0 bessel_y1 modified_bessel_k0 "
    "modified_bessel_k1 scaled_modified_bessel_k0 scaled_modified_bessel_k1 spherical_bessel_j0"
).split()
"""Functions whose helper has their name."""

FORMULAS: dict[str, Formula] = {
    "cast": _cast,
    "add": _add,
    "sub": _infix("-", SUM),
    "mul": _infix("*", PRODUCT),
    "div": _infix("/", PRODUCT),
    "div_rn": _call("tl.div_rn"),
    "reciprocal_rn": lambda x, attrs, dtype: (f"tl.div_rn(1.0, {x[0].text})", ATOM),
    "times_reciprocal": lambda x, attrs, dtype: (f"{x[0].at(PRODUCT)} * {literal(attrs['reciprocal'])}", PRODUCT),
    "floor_div": _floor_div,
    "trunc_div": lambda x, attrs, dtype: (
        _text("tl.where({0} / {1} < 0, tl.ceil({0} / {1}), tl.floor({0} / {1}))")(x, attrs, dtype)
        if is_float(dtype)
        else (f"{x[0].at(PRODUCT)} // {x[1].at(UNARY)}", PRODUCT)
    ),
    "remainder": _remainder,
    "fmod": lambda x, attrs, dtype: (
        (f"_fmod({x[0].text}, {x[1].text})", ATOM)
        if is_float(dtype)
        else (f"{x[0].at(PRODUCT)} % {x[1].at(UNARY)}", PRODUCT)
    ),
    "pow": _power,
    "square": _square,
    # The select between a product and a subtraction keeps the compiler from forming a fused multiply-add.
    "rounded": _text('tl.where({0} == {0}, {0}, float("nan"))'),
    "maximum": _extremum("maximum"),
    "minimum": _extremum("minimum"),
    "where": lambda x, attrs, dtype: (f"tl.where({x[0].text}, {x[1].text}, {x[2].text})", ATOM),
    "eq": _infix("==", COMPARE),
    "ne": _infix("!=", COMPARE),
    "lt": _infix("<", COMPARE),
    "le": _infix("<=", COMPARE),
    "gt": _infix(">", COMPARE),
    "ge": _infix(">=", COMPARE),
    "logical_and": _logical("&"),
    "logical_or": _logical("|"),
    "logical_xor": _logical("^"),
    "bitwise_and": _infix("&", BITS, BITS),
    "bitwise_or": _infix("|", BITS, BITS + 1),
    "bitwise_xor": _infix("^", BITS, BITS + 1),
    "shift_left": _infix("<<", BITS, UNARY),
    "shift_right": _infix(">>", BITS, UNARY),
    "logical_not": _text("{0} == 0", COMPARE),
    "bitwise_not": _text("~{0}", UNARY),
    "low_part": lambda x, attrs, dtype: (f"{x[0].at(SUM)} - {x[0].at(ATOM)}.to(tl.float16).to(tl.float32)", SUM),
    "neg": _text("-{0}", UNARY),
    "reciprocal": _text("1.0 / {0}", PRODUCT),
    "exp": _call("tl.exp"),
    "exp2": _call("tl.exp2"),
    "log": _call("tl.log"),
    "log2": _call("tl.log2"),
    "log10": _text("tl.log2({0}) * 0.30102999566398120", PRODUCT),
    "sqrt": _call("tl.sqrt"),
    "rsqrt": _call("tl.rsqrt"),
    "sin": _call("tl.sin"),
    "cos": _call("tl.cos"),
    "tan": _text("tl.sin({0}) / tl.cos({0})", PRODUCT),
    "tanh": _call("_tanh"),
    "sinh": _text("0.5 * (_expm1({0}) - _expm1(-{0}))", PRODUCT),
    "cosh": _text("0.5 * (tl.exp({0}) + tl.exp(-{0}))", PRODUCT),
    "atan": _call("_atan"),
    "asin": _text("_atan({0} / tl.sqrt((1.0 - {0}) * (1.0 + {0})))"),
    "acos": _text("2.0 * _atan(tl.sqrt((1.0 - {0}) / (1.0 + {0})))", PRODUCT),
    "atan2": _call("_atan2"),
    "copysign": _text("tl.where(({1} < 0) | (1.0 / {1} < 0), -tl.abs({0}), tl.abs({0}))"),
    "asinh": _call("_asinh"),
    "acosh": _call("_acosh"),
    "atanh": _text("0.5 * _log1p(2.0 * {0} / (1.0 - {0}))", PRODUCT),
    "hypot": _call("_hypot"),
    "fmax": lambda x, attrs, dtype: (f"tl.maximum({x[0].text}, {x[1].text})", ATOM),
    "fmin": lambda x, attrs, dtype: (f"tl.minimum({x[0].text}, {x[1].text})", ATOM),
    "erf": _call("tl.erf"),
    "erfc": _call("_erfc"),
    **{name: _call(f"_{name}") for name in SPECIAL_FUNCTIONS},
    "sigmoid": _call("tl.sigmoid"),
    "log1p": _call("_log1p"),
    "expm1": _call("_expm1"),
    "abs": _abs,
    "floor": _identity_for_integers("floor"),
    "ceil": _identity_for_integers("ceil"),
    "trunc": lambda x, attrs, dtype: (
        _text("tl.where({0} < 0, tl.ceil({0}), tl.floor({0}))")(x, attrs, dtype)
        if is_float(dtype)
        else (x[0].text, x[0].precedence)
    ),
    "round": lambda x, attrs, dtype: (
        (f"_round_half_even({x[0].text})", ATOM) if is_float(dtype) else (x[0].text, x[0].precedence)
    ),
    "sign": _sign,
    "signbit": _signbit,
    "isnan": _text("{0} != {0}", COMPARE),
    "isinf": _text('tl.abs({0}) == float("inf")', COMPARE),
    "isfinite": _text('tl.abs({0}) < float("inf")', COMPARE),
    "relu": _relu,
    "relu6": _text("tl.where({0} < 0, 0.0, tl.where({0} > 6.0, 6.0, {0}))"),
    "silu": _text("{0} * tl.sigmoid({0})", PRODUCT),
    "gelu": _text("0.5 * {0} * (1.0 + tl.erf({0} * 0.7071067811865476))", PRODUCT),
    "gelu_tanh": _text(
        "{0} * tl.sigmoid(1.5957691216057308 * ({0} + 0.044715 * {0} * {0} * {0}))",
        PRODUCT,
    ),
    "mish": _call("_mish"),
    "hardswish": _text("{0} * tl.minimum(tl.maximum({0} + 3.0, 0.0), 6.0) / 6.0", PRODUCT),
    "hardsigmoid": _text("tl.clamp({0} + 3.0, 0.0, 6.0, propagate_nan=tl.PropagateNan.ALL) / 6.0", PRODUCT),
    "log_sigmoid": _text("tl.minimum({0}, 0.0) - _log1p(tl.exp(-tl.abs({0})))", SUM),
    "softsign": _text("{0} / (1.0 + tl.abs({0}))", PRODUCT),
    "leaky_relu": _text("tl.where({0} < 0, {0} * {slope}, {0})"),
    "elu": _text("{scale} * tl.where({0} < 0, {alpha} * _expm1({0} * {inner}), {0})", PRODUCT),
    "softplus": _text(
        "tl.where({0} * {beta} > {threshold}, {0}, "
        "(tl.maximum({0} * {beta}, 0.0) + _log1p(tl.exp(-tl.abs({0} * {beta})))) / {beta})"
    ),
    "hardshrink": _text("tl.where(tl.abs({0}) > {lambd}, {0}, 0.0)"),
    "softshrink": _text("tl.where({0} > {lambd}, {0} - {lambd}, tl.where({0} < -{lambd}, {0} + {lambd}, 0.0))"),
    "smooth_l1_loss": _text(
        "tl.where(tl.abs({0}) < {beta}, 0.5 * {0} * {0} / {beta}, tl.abs({0}) - 0.5 * {beta})",
    ),
    "huber_loss": _text("tl.where(tl.abs({0}) <= {beta}, 0.5 * {0} * {0}, {beta} * (tl.abs({0}) - 0.5 * {beta}))"),
    # xlogy(y, y) - y * x, which is NaN for negative y and for y = 0 with infinite x.
    "kl_div": _text("tl.where({1} == 0, 0.0, {1} * tl.log({1})) - {1} * {0}", SUM),
    "kl_div_log": _text("tl.exp({1}) * ({1} - {0})", PRODUCT),
}
"""Formula of each function. Operands already have the dtype in which the function computes."""

REPEATS_OPERAND = frozenset(
    "square rounded silu gelu gelu_tanh hardswish relu relu6 leaky_relu elu softplus isnan sign trunc log_sigmoid softsign "
    "tan sinh cosh hardshrink softshrink smooth_l1_loss huber_loss kl_div kl_div_log remainder floor_div fmod pow "
    "trunc_div atanh asin acos copysign".split()
)
"""Functions whose formula uses an operand several times, so that it should be a variable."""


FLOAT64_HELPERS = {"_tanh(": "_tanh64(", "_expm1(": "_expm1_64("}
"""Helpers with float32 polynomials, and their float64 replacements."""
FLOAT32_ONLY_HELPERS = ("_atan", "_atan2", "_erfc", *(f"_{name}" for name in SPECIAL_FUNCTIONS))
"""Helpers without a float64 replacement."""


def render(fn: str, operands: Operands, attrs: Attrs, dtype: str) -> tuple[str, int]:
    """The expression of a function, and its precedence.

    Raises:
        KeyError: the function has no formula for this dtype.
    """
    text, precedence = FORMULAS[fn](operands, attrs, dtype)
    if dtype == "float64":
        for narrow, wide in FLOAT64_HELPERS.items():
            text = text.replace(narrow, wide)
        if any(f"{helper}(" in text for helper in FLOAT32_ONLY_HELPERS):
            raise KeyError(f"{fn} in float64")
    return text, precedence
