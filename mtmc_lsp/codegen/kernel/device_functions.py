"""Sources of small device functions for generated kernels; the coder adds those that a kernel calls."""

from __future__ import annotations

import re

from mtmc_lsp.codegen.kernel.special_functions import SPECIAL_HELPERS

HELPERS: dict[str, str] = {
    "_tanh": '''@triton.jit
def _tanh(x):
    """tanh to a few ulp: an odd polynomial near zero, where the exponential form loses precision by cancellation."""
    e = tl.exp(-2.0 * tl.abs(x))
    large = (1.0 - e) / (1.0 + e)
    s = x * x
    small = tl.abs(x) * (1.0 + s * (-0.33333334 + s * (0.13333331 + s * (-0.05396779 + s * (0.02181148 - s * 0.0083)))))
    return tl.where(x < 0.0, -1.0, 1.0) * tl.where(tl.abs(x) < 0.35, small, large)
''',
    "_log1p": '''@triton.jit
def _log1p(x):
    """log(1 + x), accurate for small x (W. Kahan's correction of the rounding error of 1 + x)."""
    u = 1.0 + x
    safe = tl.where(u == 1.0, 2.0, u)
    corrected = tl.log(safe) * (x / (safe - 1.0))
    return tl.where(u == 1.0, x, tl.where(u == float("inf"), u, corrected))
''',
    "_expm1": '''@triton.jit
def _expm1(x):
    """exp(x) - 1, accurate for small x: a Taylor polynomial near zero avoids cancellation."""
    small = x * (1.0 + x * (0.5 + x * (0.16666667 + x * (0.041666667 + x * (0.0083333333 + x * 0.0013888889)))))
    return tl.where(tl.abs(x) < 0.3, small, tl.exp(x) - 1.0)
''',
    "_tf32": '''@triton.jit
def _tf32(x):
    """x rounded to the 10-bit TF32 significand, as libraries do. Tensor cores alone truncate, with twice the error."""
    rounded = ((x.to(tl.uint32, bitcast=True) + 0x1000) & 0xFFFFE000).to(tl.float32, bitcast=True)
    return tl.where(x == x, rounded, x)
''',
    "_mish": '''@triton.jit
def _mish(x):
    """x * tanh(log(1 + exp(x))) without a logarithm: with e = exp(x) the tanh is n / (n + 2), n = e * e + 2 * e."""
    e = tl.exp(tl.minimum(x, 20.0))
    n = e * (e + 2.0)
    return x * (n / (n + 2.0))
''',
    "_tanh64": '''@triton.jit
def _tanh64(x):
    """tanh in double precision, from an exp(x) - 1 without cancellation."""
    e = _expm1_64(-2.0 * tl.abs(x))
    return tl.where(x < 0.0, e, -e) / (2.0 + e)
''',
    "_expm1_64": '''@triton.jit
def _expm1_64(x):
    """exp(x) - 1 in double precision, accurate for small x (W. Kahan's correction by the log of the rounded exp(x))."""
    u = tl.exp(x)
    # Below 1e-20 the exponential is negligible against 1, and the logarithm of a subnormal is no longer x.
    plain = (u == 1.0) | (u < 1e-20) | (u == float("inf"))
    safe = tl.where(plain, 2.0, u)
    corrected = (safe - 1.0) * (x / tl.log(safe))
    return tl.where(u == 1.0, x, tl.where(plain, u - 1.0, corrected))
''',
    "_atan": '''@triton.jit
def _atan(x):
    """atan to a few ulp: range reduction to below tan(pi / 8), then an odd polynomial (S. Moshier, Cephes)."""
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
    """The angle of (x, y): atan(smaller / larger), mirrored into its octant; respects signed zeros."""
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
    """Round to the nearest integer, ties to even, as torch.round does."""
    down = tl.floor(x)
    remainder = x - down
    odd = down - 2.0 * tl.floor(down * 0.5)
    up = (remainder > 0.5) | ((remainder == 0.5) & (odd == 1.0))
    whole = tl.where(up, down + 1.0, down)
    # Negative values that round to zero give -0.
    return tl.where(x < 0.0, -tl.abs(whole), whole)
''',
    "_pow": '''@triton.jit
def _pow(x, y):
    """x ** y for real y as in C: for a negative base, the parity of an integral exponent gives the sign."""
    whole = tl.floor(y) == y
    odd = whole & (y - 2.0 * tl.floor(y * 0.5) == 1.0)
    base = tl.abs(x)
    size = tl.exp2(y * tl.log2(base))
    signed = tl.where(odd & ((x < 0.0) | (1.0 / x < 0.0)), -size, size)
    signed = tl.where((x < 0.0) & (base < float("inf")) & (tl.floor(y) != y), float("nan"), signed)
    one = (y == 0.0) | (x == 1.0) | ((base == 1.0) & (tl.abs(y) == float("inf")))
    return tl.where(one, 1.0, signed)
''',
    "_hypot": '''@triton.jit
def _hypot(x, y):
    """sqrt(x * x + y * y), scaled by the larger value to avoid overflow; infinite if either is infinite, as in C."""
    a, b = tl.abs(x), tl.abs(y)
    large = tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)
    ratio = tl.where(large == 0.0, 0.0, tl.minimum(a, b) / large)
    endless = (a == float("inf")) | (b == float("inf"))
    return tl.where(endless, float("inf"), large * tl.sqrt(1.0 + ratio * ratio))
''',
    "_asinh": '''@triton.jit
def _asinh(x):
    """asinh, accurate for small x and for x whose square overflows."""
    a = tl.abs(x)
    near = tl.where(a > 1e9, 1.0, a)
    small = _log1p(near + near * near / (1.0 + tl.sqrt(near * near + 1.0)))
    size = tl.where(a > 1e9, tl.log(a) + 0.6931471805599453, small)
    return tl.where(x < 0.0, -size, size)
''',
    "_acosh": '''@triton.jit
def _acosh(x):
    """acosh, accurate near 1 and for x whose square overflows; NaN below 1."""
    t = x - 1.0
    return tl.where(x > 1e9, tl.log(x) + 0.6931471805599453, _log1p(t + tl.sqrt(t) * tl.sqrt(t + 2.0)))
''',
    "_erfc": '''@triton.jit
def _erfc(x):
    """1 - erf(x) to a few ulp, without cancellation (W. Press et al., Numerical Recipes in C, 6.2)."""
    a = tl.abs(x)
    t = 1.0 / (1.0 + 0.5 * a)
    p = 1.48851587 + t * (-0.82215223 + t * 0.17087277)
    p = -0.18628806 + t * (0.27886807 + t * (-1.13520398 + t * p))
    p = -1.26551223 + t * (1.00002368 + t * (0.37409196 + t * (0.09678418 + t * p)))
    tail = t * tl.exp(p - a * a)
    return tl.where(x < 0.0, 2.0 - tail, tail)
''',
    "_fmod": '''@triton.jit
def _fmod(x, y):
    """Remainder of x / y with the sign of x; corrects quotients that were rounded across an integer."""
    a, b = tl.abs(x), tl.abs(y)
    remainder = tl.fma(-b, tl.floor(a / b), a)
    remainder = tl.where(remainder < 0.0, remainder + b, tl.where(remainder >= b, remainder - b, remainder))
    remainder = tl.where((b == float("inf")) & (a < b), a, remainder)
    return tl.where(x < 0.0, -remainder, remainder)
''',
    "_remainder": '''@triton.jit
def _remainder(x, y):
    """Remainder of x / y with the sign of y."""
    remainder = _fmod(x, y)
    return tl.where((remainder != 0.0) & ((remainder < 0.0) != (y < 0.0)), remainder + y, remainder)
''',
    "_floor_div": '''@triton.jit
def _floor_div(x, y):
    """floor of the exact quotient x / y, as in Python; the remainder shows where the rounded quotient is off by one."""
    remainder = _fmod(x, y)
    whole = (x - remainder) / y
    whole = _round_half_even(tl.where((remainder != 0.0) & ((remainder < 0.0) != (y < 0.0)), whole - 1.0, whole))
    return tl.where(y == 0.0, x / y, whole)
''',
    "_uniform": '''@triton.jit
def _uniform(seed, start, BLOCK: tl.constexpr):
    """Uniform numbers in [0, 1) for BLOCK elements from ``start``, a multiple of 4: each Philox counter gives four."""
    a, b, c, d = tl.rand4x(seed, (start // 4 + tl.arange(0, BLOCK // 4)).to(tl.int32))
    return tl.reshape(tl.join(tl.join(a, c), tl.join(b, d)), [BLOCK])
''',
    "_uniform_at": '''@triton.jit
def _uniform_at(seed, at):
    """Uniform numbers in [0, 1) for the elements ``at``; the same numbers as from ``_uniform``."""
    a, b, c, d = tl.rand4x(seed, (at // 4).to(tl.int32))
    lane = at % 4
    return tl.where(lane < 2, tl.where(lane == 0, a, b), tl.where(lane == 2, c, d))
''',
    "_unit_scale": '''@triton.jit
def _unit_scale(largest):
    """The power of two that scales ``largest`` to [64, 128), and its inverse. Exact, also for 0 and subnormals."""
    exponent = (largest.to(tl.int32, bitcast=True) >> 23) & 255
    up = tl.minimum(260 - exponent, 252)
    return (up << 23).to(tl.float32, bitcast=True), ((254 - up) << 23).to(tl.float32, bitcast=True)
''',
    "_half_scale": '''@triton.jit
def _half_scale(largest):
    """The power of two that scales ``largest`` to [2**14, 2**15), and its inverse. Exact, also for 0 and subnormals."""
    exponent = (largest.to(tl.int32, bitcast=True) >> 23) & 255
    up = tl.minimum(268 - exponent, 252)
    return (up << 23).to(tl.float32, bitcast=True), ((254 - up) << 23).to(tl.float32, bitcast=True)
''',
    "_to_half": '''@triton.jit
def _to_half(x, factor):
    """x * factor in float16; what is too small keeps its sign, so that its product with an infinity is no NaN."""
    half = (x * factor).to(tl.float16)
    return tl.where((half == 0.0) & (x != 0.0), tl.where(x > 0.0, 2.0**-24, -(2.0**-24)).to(tl.float16), half)
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
    """log(exp(a) + exp(b)), shifted by the larger value to avoid overflow; keeps equal infinities."""
    top = tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)
    distance = tl.where(a == b, 0.0, -tl.abs(a - b))
    return top + tl.log(1.0 + tl.exp(distance))
''',
    "_multiply": """@triton.jit
def _multiply(a, b):
    return a * b
""",
    "_add": """@triton.jit
def _add(a, b):
    return a + b
""",
    "_affine": '''@triton.jit
def _affine(a1, b1, a2, b2):
    """The update a1 * x + b1, and then a2 * x + b2, as one."""
    return a1 * a2, a2 * b1 + b2
''',
    "_row_of": '''@triton.jit
def _row_of(x, chosen):
    """The row of x where ``chosen`` holds."""
    return tl.sum(tl.where(chosen, x, 0), axis=0, keep_dims=True).to(x.dtype)
''',
    "_latest": '''@triton.jit
def _latest(a1, b1, a2, b2):
    """The later one of two updates that replace x by b, or leave it where a is 1."""
    return a1 * a2, tl.where(a2 == 0, b2, b1)
''',
    "_and_or": '''@triton.jit
def _and_or(a1, b1, a2, b2):
    """The update (a1 & x) | b1, and then (a2 & x) | b2, as one."""
    return a1 & a2, (a2 & b1) | b2
''',
    "_max_plus": '''@triton.jit
def _max_plus(d1, k1, d2, k2):
    """The update max(x + d1, k1), and then max(x + d2, k2), as one."""
    return d1 + d2, _max_nan(k1 + d2, k2)
''',
    "_min_plus": '''@triton.jit
def _min_plus(d1, k1, d2, k2):
    """The update min(x + d1, k1), and then min(x + d2, k2), as one."""
    return d1 + d2, _min_nan(k1 + d2, k2)
''',
    "_log_add_exp_plus": '''@triton.jit
def _log_add_exp_plus(d1, k1, d2, k2):
    """The update log(exp(x + d1) + exp(k1)), and then that with d2 and k2, as one."""
    return d1 + d2, _log_add_exp(k1 + d2, k2)
''',
    "_affine_2x2": '''@triton.jit
def _affine_2x2(a11, a12, a21, a22, a1, a2, b11, b12, b21, b22, b1, b2):
    """The update A @ x + a of two numbers, and then B @ x + b, as one."""
    c11, c12 = b11 * a11 + b12 * a21, b11 * a12 + b12 * a22
    c21, c22 = b21 * a11 + b22 * a21, b21 * a12 + b22 * a22
    return c11, c12, c21, c22, b11 * a1 + b12 * a2 + b1, b21 * a1 + b22 * a2 + b2
''',
    "_join_leading_bits": '''@triton.jit
def _join_leading_bits(acc, leading):
    """Restore sums: add the separately stored leading bits to the remainders."""
    even, odd = tl.split(tl.reshape(acc, [acc.shape[0], acc.shape[1] // 2, 2]))
    even += (leading << 16).to(tl.float32, bitcast=True)
    odd += (leading & -65536).to(tl.float32, bitcast=True)
    return tl.reshape(tl.join(even, odd), acc.shape)
''',
    "_split_leading_bits": '''@triton.jit
def _split_leading_bits(acc, leading):
    """Split sums into a remainder and 16 leading bits; one 32-bit word holds the leading bits of two neighbours."""
    acc = _join_leading_bits(acc, leading)
    even, odd = tl.split(tl.reshape(acc, [acc.shape[0], acc.shape[1] // 2, 2]))
    leading_even = even.to(tl.int32, bitcast=True) & -65536
    leading_odd = odd.to(tl.int32, bitcast=True) & -65536
    # Exact: both operands have the same exponent, or the difference is zero.
    even -= leading_even.to(tl.float32, bitcast=True)
    odd -= leading_odd.to(tl.float32, bitcast=True)
    return tl.reshape(tl.join(even, odd), acc.shape), ((leading_even >> 16) & 65535) | leading_odd
''',
    "_significand": '''@triton.jit
def _significand(x):
    """x as a float64 significand in [0.75, 1.5) and a binary exponent; zero, infinities and NaN are unchanged."""
    x = x.to(tl.float64)
    bits = x.to(tl.int64, bitcast=True)
    stored = ((bits >> 52) & 2047).to(tl.int32)
    usual = (stored > 0) & (stored < 2047)
    size = ((bits & -9218868437227405313) | 4607182418800017408).to(tl.float64, bitcast=True)
    large = tl.abs(size) >= 1.5
    size = tl.where(large, size * 0.5, size)
    return tl.where(usual, size, x), tl.where(usual, stored - 1023 + large.to(tl.int32), 0)
''',
    "_scaled": '''@triton.jit
def _scaled(size, exponent):
    """size * 2**exponent in two steps, so that no intermediate overflows unless the result does."""
    exponent = tl.minimum(tl.maximum(exponent, -1800), 1800)
    half = exponent >> 1
    first = ((half + 1023).to(tl.int64) << 52).to(tl.float64, bitcast=True)
    second = ((exponent - half + 1023).to(tl.int64) << 52).to(tl.float64, bitcast=True)
    return size * first * second
''',
    "_sums_of_2": '''@triton.jit
def _sums_of_2(a1, a2, b1, b2):
    """Add two pairs, for one reduction of two tiles."""
    return a1 + b1, a2 + b2
''',
    "_sums_of_3": '''@triton.jit
def _sums_of_3(a1, a2, a3, b1, b2, b3):
    """Add three pairs, for one reduction of three tiles."""
    return a1 + b1, a2 + b2, a3 + b3
''',
    "_sums_of_4": '''@triton.jit
def _sums_of_4(a1, a2, a3, a4, b1, b2, b3, b4):
    """Add four pairs, for one reduction of four tiles."""
    return a1 + b1, a2 + b2, a3 + b3, a4 + b4
''',
    **SPECIAL_HELPERS,
}


def helpers_used(text: str) -> list[str]:
    """Names of the helper functions that ``text`` uses, in the order of ``HELPERS``."""
    return [name for name in HELPERS if re.search(rf"(?<!\w){name}\(|, {name}\b", text)]
