"""Pointwise functions as Triton expressions, with PyTorch's results for NaN, infinities and integers.

``tl.math`` functions that the interpreter lacks (libdevice) are spelled out, as small helper functions where a formula would
not be readable; :data:`HELPERS` holds their source and the writer adds those that are used.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from mtmc_lsp.core.dtypes import is_float
from mtmc_lsp.micro.builtin.code import ATOM, BITS, COMPARE, PRODUCT, SUM, TRITON_DTYPES, UNARY, Code, literal

HELPERS: dict[str, str] = {
    "_tanh": '''@triton.jit
def _tanh(x):
    """tanh to a few ulp: an odd polynomial near zero, where the exponential form cancels."""
    e = tl.exp(-2.0 * tl.abs(x))
    large = (1.0 - e) / (1.0 + e)
    s = x * x
    small = tl.abs(x) * (1.0 + s * (-0.33333334 + s * (0.13333331 + s * (-0.05396779 + s * (0.02181148 - s * 0.0083)))))
    return tl.where(x < 0.0, -1.0, 1.0) * tl.where(tl.abs(x) < 0.35, small, large)
''',
    "_log1p": '''@triton.jit
def _log1p(x):
    """log(1 + x) without losing small x (W. Kahan's correction of the rounding of 1 + x)."""
    u = 1.0 + x
    safe = tl.where(u == 1.0, 2.0, u)
    corrected = tl.log(safe) * (x / (safe - 1.0))
    return tl.where(u == 1.0, x, tl.where(u == float("inf"), u, corrected))
''',
    "_expm1": '''@triton.jit
def _expm1(x):
    """exp(x) - 1 without losing small x: a Taylor polynomial near zero, where the difference cancels."""
    small = x * (1.0 + x * (0.5 + x * (0.16666667 + x * (0.041666667 + x * (0.0083333333 + x * 0.0013888889)))))
    return tl.where(tl.abs(x) < 0.3, small, tl.exp(x) - 1.0)
''',
    "_tf32": '''@triton.jit
def _tf32(x):
    """x rounded to the ten bits of TF32, as libraries do: tensor cores by themselves cut the others off, at twice the error."""
    rounded = ((x.to(tl.uint32, bitcast=True) + 0x1000) & 0xFFFFE000).to(tl.float32, bitcast=True)
    return tl.where(x == x, rounded, x)
''',
    "_mish": '''@triton.jit
def _mish(x):
    """x * tanh(log(1 + exp(x))) without a logarithm: with e = exp(x) the tanh is (e * e + 2 * e) / (e * e + 2 * e + 2)."""
    e = tl.exp(tl.minimum(x, 20.0))
    n = e * (e + 2.0)
    return x * (n / (n + 2.0))
''',
    "_tanh64": '''@triton.jit
def _tanh64(x):
    """tanh in double precision, by exp(x) - 1 that does not cancel."""
    e = _expm1_64(-2.0 * tl.abs(x))
    return tl.where(x < 0.0, e, -e) / (2.0 + e)
''',
    "_expm1_64": '''@triton.jit
def _expm1_64(x):
    """exp(x) - 1 in double precision without losing small x (W. Kahan's correction by the logarithm of the rounded power)."""
    u = tl.exp(x)
    # So small a power is nothing beside 1, and once it is subnormal its logarithm is no longer x.
    plain = (u == 1.0) | (u < 1e-20) | (u == float("inf"))
    safe = tl.where(plain, 2.0, u)
    corrected = (safe - 1.0) * (x / tl.log(safe))
    return tl.where(u == 1.0, x, tl.where(plain, u - 1.0, corrected))
''',
    "_atan": '''@triton.jit
def _atan(x):
    """atan to a few ulp: folded to below tan(pi / 8), then an odd polynomial (S. Moshier, Cephes)."""
    a = tl.abs(x)
    steep, middle = a > 2.414213562, a > 0.4142135624
    t = tl.where(steep, -1.0 / a, tl.where(middle, (a - 1.0) / (a + 1.0), a))
    z = t * t
    p = t + t * z * (-0.333329491539 + z * (0.199777106478 + z * (-0.138776856032 + z * 0.0805374449538)))
    angle = p + tl.where(steep, 1.5707963267948966, tl.where(middle, 0.7853981633974483, 0.0))
    return tl.where(x < 0.0, -angle, angle)
''',
    "_atan2": '''@triton.jit
def _atan2(y, x):
    """The angle of (x, y): atan of the smaller over the larger, mirrored into its octant; signs of zeros count."""
    a, b = tl.abs(x), tl.abs(y)
    small, large = tl.minimum(a, b), tl.maximum(a, b)
    ratio = tl.where(small == large, tl.where(large == 0.0, 0.0, 1.0), small / large)
    angle = _atan(ratio)
    angle = tl.where(b > a, 1.5707963267948966 - angle, angle)
    angle = tl.where((x < 0.0) | (1.0 / x < 0.0), 3.141592653589793 - angle, angle)
    angle = tl.where((y < 0.0) | (1.0 / y < 0.0), -angle, angle)
    return tl.where((x != x) | (y != y), float("nan"), angle)
''',
    "_round_half_even": '''@triton.jit
def _round_half_even(x):
    """Round to the nearest integer, halves to even, as torch.round does."""
    down = tl.floor(x)
    rest = x - down
    odd = down - 2.0 * tl.floor(down * 0.5)
    up = (rest > 0.5) | ((rest == 0.5) & (odd == 1.0))
    return tl.where(up, down + 1.0, down)
''',
    "_pow": '''@triton.jit
def _pow(x, y):
    """x ** y for real y: the sign of a negative base follows the parity of an integral exponent."""
    whole = tl.floor(y) == y
    odd = whole & (y - 2.0 * tl.floor(y * 0.5) == 1.0)
    size = tl.exp2(y * tl.log2(tl.abs(x)))
    signed = tl.where(x < 0.0, tl.where(whole, tl.where(odd, -size, size), float("nan")), size)
    return tl.where(y == 0.0, 1.0, signed)
''',
    "_uniform": '''@triton.jit
def _uniform(seed, start, BLOCK: tl.constexpr):
    """Uniform in [0, 1) for the BLOCK elements from ``start``, a multiple of 4, on: four from each Philox counter."""
    a, b, c, d = tl.rand4x(seed, (start // 4 + tl.arange(0, BLOCK // 4)).to(tl.int32))
    return tl.reshape(tl.join(tl.join(a, c), tl.join(b, d)), [BLOCK])
''',
    "_uniform_at": '''@triton.jit
def _uniform_at(seed, at):
    """Uniform in [0, 1) for the elements ``at``: the same numbers as in a run of them."""
    a, b, c, d = tl.rand4x(seed, (at // 4).to(tl.int32))
    lane = at % 4
    return tl.where(lane < 2, tl.where(lane == 0, a, b), tl.where(lane == 2, c, d))
''',
    "_unit_scale": '''@triton.jit
def _unit_scale(largest):
    """The power of two that brings ``largest`` into [64, 128), and its inverse: exact, also for 0 and subnormals."""
    exponent = (largest.to(tl.int32, bitcast=True) >> 23) & 255
    up = tl.minimum(260 - exponent, 252)
    return (up << 23).to(tl.float32, bitcast=True), ((254 - up) << 23).to(tl.float32, bitcast=True)
''',
    "_max_nan": """@triton.jit
def _max_nan(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)
""",
    "_min_nan": """@triton.jit
def _min_nan(a, b):
    return tl.minimum(a, b, propagate_nan=tl.PropagateNan.ALL)
""",
    "_log_add_exp": '''@triton.jit
def _log_add_exp(a, b):
    """log(exp(a) + exp(b)), the larger of the two taken out; equal infinities stay as they are."""
    top = tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)
    distance = tl.where(a == b, 0.0, -tl.abs(a - b))
    return top + tl.log(1.0 + tl.exp(distance))
''',
    "_multiply": """@triton.jit
def _multiply(a, b):
    return a * b
""",
}

Operands = Sequence[Code]
Attrs = Mapping[str, object]
Formula = Callable[[Operands, Attrs, str], "tuple[str, int]"]


def _call(name: str) -> Formula:
    return lambda x, attrs, dtype: (f"{name}({', '.join(operand.text for operand in x)})", ATOM)


def _infix(symbol: str, precedence: int, right: int | None = None) -> Formula:
    """A left-associative operator; the right operand must bind more tightly."""
    tight = precedence + 1 if right is None else right
    return lambda x, attrs, dtype: (f"{x[0].at(precedence)} {symbol} {x[1].at(tight)}", precedence)


def _text(template: str, precedence: int = ATOM) -> Formula:
    """A template over ``{0}``, ``{1}`` (bracketed operands) and the attributes by name."""

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
        return f"tl.floor({x[0].at(PRODUCT)} / {x[1].at(UNARY)})", ATOM
    # Triton's integer division truncates; PyTorch's floors.
    a, b = x[0].at(UNARY), x[1].at(UNARY)
    return f"{a} // {b} - tl.where(({a} % {b} != 0) & (({a} < 0) != ({b} < 0)), 1, 0)", SUM


def _remainder(x: Operands, attrs: Attrs, dtype: str) -> tuple[str, int]:
    a, b = x[0].at(UNARY), x[1].at(UNARY)
    if is_float(dtype):
        return f"{a} - {b} * tl.floor({a} / {b})", SUM
    return f"{a} % {b} + tl.where(({a} % {b} != 0) & (({a} < 0) != ({b} < 0)), {b}, 0)", SUM


def _logical(symbol: str) -> Formula:
    """Truth values as they are, all else compared with zero."""

    def render(x: Operands, attrs: Attrs, dtype: str) -> tuple[str, int]:
        parts = [o.at(BITS + 1) if o.dtype == "bool" else f"({o.at(BITS)} != 0)" for o in x]
        return f" {symbol} ".join(parts), BITS

    return render


def _sign(x: Operands, attrs: Attrs, dtype: str) -> tuple[str, int]:
    if is_float(dtype):
        return _text("tl.where({0} > 0, 1.0, tl.where({0} < 0, -1.0, {0} * 0))")(x, attrs, dtype)
    return _text("tl.where({0} > 0, 1, tl.where({0} < 0, -1, 0))")(x, attrs, dtype)


def _relu(x: Operands, attrs: Attrs, dtype: str) -> tuple[str, int]:
    zero = "0.0" if is_float(dtype) else "0"
    return _text(f"tl.where({{0}} < 0, {zero}, {{0}})")(x, attrs, dtype)


def _abs(x: Operands, attrs: Attrs, dtype: str) -> tuple[str, int]:
    return f"tl.abs({x[0].text})", ATOM


def _identity_for_integers(name: str) -> Formula:
    return lambda x, attrs, dtype: (
        (f"tl.{name}({x[0].text})", ATOM) if is_float(dtype) else (x[0].text, x[0].precedence)
    )


FORMULAS: dict[str, Formula] = {
    "cast": _cast,
    "add": _infix("+", SUM, SUM),
    "sub": _infix("-", SUM),
    "mul": _infix("*", PRODUCT),
    "div": _infix("/", PRODUCT),
    "floor_div": _floor_div,
    "trunc_div": lambda x, attrs, dtype: (
        _text("tl.where({0} / {1} < 0, tl.ceil({0} / {1}), tl.floor({0} / {1}))")(x, attrs, dtype)
        if is_float(dtype)
        else (f"{x[0].at(PRODUCT)} // {x[1].at(UNARY)}", PRODUCT)
    ),
    "remainder": _remainder,
    "fmod": lambda x, attrs, dtype: (
        _text("{0} - {1} * tl.where({0} / {1} < 0, tl.ceil({0} / {1}), tl.floor({0} / {1}))", SUM)(x, attrs, dtype)
        if is_float(dtype)
        else (f"{x[0].at(PRODUCT)} % {x[1].at(UNARY)}", PRODUCT)
    ),
    "pow": _power,
    "square": _square,
    # A select between a product and a difference keeps the compiler from fusing them.
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
    "low_half": lambda x, attrs, dtype: (f"{x[0].at(SUM)} - {x[0].at(ATOM)}.to(tl.float16).to(tl.float32)", SUM),
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
    "asinh": _text(
        "tl.where({0} < 0, -1.0, 1.0) * _log1p(tl.abs({0}) + {0} * {0} / (1.0 + tl.sqrt({0} * {0} + 1.0)))", PRODUCT
    ),
    "acosh": _text("_log1p({0} - 1.0 + tl.sqrt(({0} - 1.0) * ({0} + 1.0)))"),
    "atanh": _text("0.5 * _log1p(2.0 * {0} / (1.0 - {0}))", PRODUCT),
    "hypot": _text("tl.sqrt({0} * {0} + {1} * {1})"),
    "fmax": lambda x, attrs, dtype: (f"tl.maximum({x[0].text}, {x[1].text})", ATOM),
    "fmin": lambda x, attrs, dtype: (f"tl.minimum({x[0].text}, {x[1].text})", ATOM),
    "erf": _call("tl.erf"),
    "erfc": _text("1.0 - tl.erf({0})", SUM),
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
    "hardsigmoid": _text("tl.minimum(tl.maximum({0} + 3.0, 0.0), 6.0) / 6.0", PRODUCT),
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
    "kl_div": _text("tl.where({1} > 0, {1} * (tl.log({1}) - {0}), 0.0 * {1})"),
    "kl_div_log": _text("tl.exp({1}) * ({1} - {0})", PRODUCT),
    "bce_logits": _text("tl.maximum({0}, 0.0) - {0} * {1} + _log1p(tl.exp(-tl.abs({0})))", SUM),
}
"""Function name to the expression it becomes; the operands already have the dtype the function computes in."""

REPEATS_OPERAND = frozenset(
    "square rounded silu gelu gelu_tanh hardswish relu relu6 leaky_relu elu softplus isnan sign trunc log_sigmoid softsign "
    "tan sinh cosh hardshrink softshrink smooth_l1_loss huber_loss kl_div kl_div_log bce_logits remainder floor_div fmod pow "
    "trunc_div asinh atanh acosh hypot asin acos copysign".split()
)
"""Functions whose formula names an operand more than once, so it should be a variable."""


IN_DOUBLE = {"_tanh(": "_tanh64(", "_expm1(": "_expm1_64("}
"""Helpers whose polynomials are for float32, and what stands for them in float64."""


def render(fn: str, operands: Operands, attrs: Attrs, dtype: str) -> tuple[str, int]:
    """The expression of a function, and its precedence.

    Raises:
        KeyError: it has none in this dtype.
    """
    text, precedence = FORMULAS[fn](operands, attrs, dtype)
    if dtype == "float64":
        for narrow, wide in IN_DOUBLE.items():
            text = text.replace(narrow, wide)
        if "_atan(" in text or "_atan2(" in text:
            raise KeyError(f"{fn} in float64")
    return text, precedence


def helpers_used(text: str) -> list[str]:
    """Names of the helper functions that ``text`` calls, callees first."""
    return [name for name in HELPERS if f"{name}(" in text or f", {name}" in text]
