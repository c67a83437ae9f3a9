"""Sources of device functions for the special functions of ``torch.special``, in float32.

The rational approximations of the Bessel and Airy functions and of ``ndtri`` are those of PyTorch (S. Moshier, Cephes). The other
polynomials are Chebyshev interpolants, computed with 40 digits. An error is relative, in units of the last place of float32,
except near zeros of a function, where it is that of the function's neighbourhood.
"""

from __future__ import annotations

from collections.abc import Sequence

TERMS_PER_LINE = 4


def _horner(name: str, variable: str, coefficients: Sequence[float]) -> str:
    """Lines that assign a polynomial to ``name``; the coefficient of the highest power comes first."""
    value, lines = f"{coefficients[0]!r}", []
    rest = list(coefficients[1:])
    while rest:
        part, rest = rest[:TERMS_PER_LINE], rest[TERMS_PER_LINE:]
        for coefficient in part:
            inner = f"({value})" if " " in value else value
            value = f"{coefficient!r} + {variable} * {inner}"
        lines.append(f"    {name} = {value}\n")
        value = name
    return "".join(lines)


_ERFCX_TAIL = (
    0.17087277, -0.82215223, 1.48851587, -1.13520398, 0.27886807, -0.18628806, 0.09678418, 0.37409196, 1.00002368,
    -1.26551223,
)  # fmt: skip
_ERFINV_MIDDLE = (
    2.81022636e-08, 3.43273939e-07, -3.5233877e-06, -4.39150654e-06, 0.00021858087, -0.00125372503, -0.00417768164,
    0.246640727, 1.50140941,
)  # fmt: skip
_ERFINV_TAIL = (
    -0.000200214257, 0.000100950558, 0.00134934322, -0.00367342844, 0.00573950773, -0.0076224613, 0.00943887047,
    1.00167406, 2.83297682,
)  # fmt: skip
_NDTRI_MIDDLE = (-59.9633501, 98.0010754, -56.6762857, 13.9312609, -1.23916584)
_NDTRI_MIDDLE_BELOW = (
    1.0, 1.95448858, 4.67627913, 86.3602421, -225.462688, 200.260212, -82.0372256, 15.9056225, -1.18331621,
)  # fmt: skip
_NDTRI_TAIL = (
    4.05544892, 31.5251095, 57.1628192, 44.0805074, 14.6849562, 2.18663307, -0.140256079, -0.0350424627,
    -0.000857456785,
)  # fmt: skip
_NDTRI_TAIL_BELOW = (
    1.0, 15.7799883, 45.3907635, 41.3172038, 15.0425386, 2.50464946, -0.142182923, -0.0380806408, -0.000933259481,
)  # fmt: skip
_NDTRI_FAR = (
    3.23774892, 6.91522889, 3.93881025, 1.33303461, 0.20148539, 0.0123716635, 0.000301581554, 2.65806975e-06,
    6.23974539e-09,
)  # fmt: skip
_NDTRI_FAR_BELOW = (
    1.0, 6.02427039, 3.67983564, 1.37702099, 0.216236994, 0.0134204006, 0.000328014465, 2.89247865e-06,
    6.79019408e-09,
)  # fmt: skip
_LGAMMA_NEAR = (
    -3.631552195e-5, 7.787131894e-5, -5.903239958e-5, 0.0001313883442, -0.0004190058351, 0.0009436406074,
    -0.002104907779, 0.004991792679, -0.01238447297, 0.03296559716, -0.1003172978, 0.4227843268,
)  # fmt: skip

_ERFCX = f'''@triton.jit
def _erfcx(x):
    """exp(x * x) * erfc(x) (W. Press et al., Numerical Recipes in C, 6.2)."""
    a = tl.abs(x)
    t = 1.0 / (1.0 + 0.5 * a)
{_horner("p", "t", _ERFCX_TAIL)}\
    tail = t * tl.exp(p)
    return tl.where(x < 0.0, 2.0 * tl.exp(x * x) - tail, tail)
'''

_ERFINV = f'''@triton.jit
def _erfinv(x):
    """The inverse of erf (M. Giles, Approximating the erfinv function, 2010)."""
    w = -tl.log((1.0 - x) * (1.0 + x))
    u = w - 2.5
{_horner("p", "u", _ERFINV_MIDDLE)}\
    v = tl.sqrt(tl.maximum(w, 5.0)) - 3.0
{_horner("q", "v", _ERFINV_TAIL)}\
    value = x * tl.where(w < 5.0, p, q)
    return tl.where(tl.abs(x) < 1.0, value, tl.where(tl.abs(x) == 1.0, x * float("inf"), float("nan")))
'''

_NDTRI = f'''@triton.jit
def _ndtri(x):
    """The inverse of the normal distribution function."""
    mirrored = x > 1.0 - 0.13533528323661269189
    y = tl.where(mirrored, 1.0 - x, x)
    c = y - 0.5
    d = c * c
{_horner("p", "d", _NDTRI_MIDDLE)}\
{_horner("q", "d", _NDTRI_MIDDLE_BELOW)}\
    middle = (c + c * (d * p / q)) * 2.50662827463100050242
    s = tl.sqrt(-2.0 * tl.log(tl.minimum(y, 0.13533528323661269189)))
    z = 1.0 / s
{_horner("p", "z", _NDTRI_TAIL)}\
{_horner("q", "z", _NDTRI_TAIL_BELOW)}\
{_horner("far_p", "z", _NDTRI_FAR)}\
{_horner("far_q", "z", _NDTRI_FAR_BELOW)}\
    tail = s - tl.log(s) / s - z * tl.where(s < 8.0, p / q, far_p / far_q)
    value = tl.where(y > 0.13533528323661269189, middle, tl.where(mirrored, tail, -tail))
    value = tl.where(x == 0.0, -float("inf"), tl.where(x == 1.0, float("inf"), value))
    return tl.where((x >= 0.0) & (x <= 1.0), value, float("nan"))
'''

_LGAMMA = f'''@triton.jit
def _lgamma(x):
    """log(abs(gamma(x))): a polynomial with zeros at 1 and 2, Stirling's series from 3 on; mirrored below 0."""
    a = tl.abs(x)
    u = tl.where(a < 1.0, a, tl.where(a < 3.0, a - 1.0, 1.0))
    t = u - 1.0
{_horner("p", "t", _LGAMMA_NEAR)}\
    large = tl.where(a < 3.0, 3.0, a)
    r = 1.0 / large
    s = r * r
    series = r * (0.0833333333 + s * (-0.00277777778 + s * (0.000793650794 - s * 0.000595238095)))
    far = (large - 0.5) * (tl.log(large) - 1.0) + (0.4189385332 + series)
    size = tl.where(a < 3.0, u * t * p, far)
    f = a - tl.floor(a)
    f = tl.minimum(f, 1.0 - f)
    mirrored = 1.1447298858494 - tl.log(tl.where(a < 1.0, 1.0, a) * tl.sin(3.141592653589793 * f)) - size
    value = tl.where(x < 0.0, mirrored, size - tl.log(tl.where(a < 1.0, a, 1.0)))
    return tl.where((a == float("inf")) | ((x < 0.0) & (f == 0.0)), float("inf"), value)
'''

_DIGAMMA = '''@triton.jit
def _digamma(x):
    """The derivative of lgamma: recurrence up to 6, then the asymptotic series; mirrored for x < 0."""
    y = tl.where(x < 0.0, 1.0 - x, x)
    z = tl.where(y < 6.0, y + 6.0, y)
    s = 1.0 / (z * z)
    value = tl.log(z) - 0.5 / z - s * (0.0833333333 - s * (0.00833333333 - s * (0.00396825397 - s * 0.00416666667)))
    below = 1.0 / y + 1.0 / (y + 1.0) + 1.0 / (y + 2.0) + 1.0 / (y + 3.0) + 1.0 / (y + 4.0) + 1.0 / (y + 5.0)
    value = tl.where(y < 6.0, value - below, value)
    r = x - tl.ceil(x)
    r = tl.where(r < -0.5, r + 1.0, r)
    angle = 3.141592653589793 * r
    cotangent = 3.141592653589793 * tl.cos(angle) / tl.sin(angle)
    mirrored = value - tl.where(tl.abs(r) < 1e-4, 1.0 / r, cotangent)
    return tl.where(x < 0.0, tl.where(r == 0.0, float("nan"), mirrored), value)
'''

_TRIGAMMA = '''@triton.jit
def _trigamma(x):
    """The derivative of digamma: recurrence, then the asymptotic series; mirrored for x < 0.5."""
    y = tl.where(x < 0.5, 1.0 - x, x)
    value = 1.0 / (y * y)
    for k in tl.static_range(1, 6):
        value += 1.0 / ((y + k) * (y + k))
    z = y + 6.0
    s = 1.0 / (z * z)
    value += (1.0 + 0.5 / z + s * (0.166666667 - s * (0.0333333333 - s * 0.0238095238))) / z
    sine = tl.sin(3.141592653589793 * x)
    return tl.where(x < 0.5, 9.869604401089358 / (sine * sine) - value, value)
'''

_I0_NEAR = (
    0.000826629768,
    0.007594827873,
    0.07137508912,
    0.4443194353,
    1.777809795,
    3.999995983,
    4.000000192,
    0.9999999985,
)
_I0_FAR = (
    0.002910134285, -0.01165174602, 0.01790832876, -0.01369656558, 0.006030590558, -0.001310450367, 0.0006658253927,
    0.001738074386, 0.01246738066, 0.3989422783,
)  # fmt: skip
_I1_NEAR = (5.028282836e-5, 0.000547614811, 0.005940339449, 0.04443762546, 0.2222239677, 0.6666664478, 1.00000001, 0.5)
_I1_FAR = (
    -0.00326073793, 0.01321743164, -0.0206250774, 0.01606418196, -0.007227732861, 0.001597511246, -0.000902217358,
    -0.002902567502, -0.03740140418, 0.3989422832,
)  # fmt: skip
_K0_NEAR = (3.9003623e-6, 0.0001180802163, 0.002615061957, 0.03489206115, 0.2306960999, 0.4227843341, -0.5772156649)
_K0_FAR = (
    -0.0003678811296, 0.001853494736, -0.004405978368, 0.00724717784, -0.0111473127, 0.02199401886, -0.07833046601,
    1.253314124,
)  # fmt: skip
_K1_NEAR = (-4.53288133e-5, -0.001109917503, -0.01918592354, -0.1815738556, -0.6727845541, 0.1544313435, 1.0)
_K1_FAR = (
    0.0004538023238, -0.00230465148, 0.005565026819, -0.009465211089, 0.01567348215, -0.03667402326, 0.2349944023,
    1.253314153,
)  # fmt: skip


def _first_kind(name: str, doc: str, factor: str, near: str, far: str, order: int) -> str:
    return f'''@triton.jit
def {name}(x):
    """{doc}"""
    a = tl.abs(x)
    u = 0.0625 * a * a
{_horner("p", "u", _I1_NEAR if order else _I0_NEAR)}\
    large = tl.where(a < 4.0, 4.0, a)
    v = 4.0 / large
{_horner("q", "v", _I1_FAR if order else _I0_FAR)}\
    q = {far}
    return {factor}tl.where(a < 4.0, {near}, q)
'''


def _second_kind(name: str, doc: str, near: str, far: str, order: int) -> str:
    return f'''@triton.jit
def {name}(x):
    """{doc}"""
    small = tl.minimum(x, 2.0)
    u = 0.25 * small * small
{_horner("p", "u", _K1_NEAR if order else _K0_NEAR)}\
    large = tl.where(x <= 2.0, 2.0, x)
    v = 2.0 / large
{_horner("q", "v", _K1_FAR if order else _K0_FAR)}\
    value = tl.where(x <= 2.0, {near}, {far})
    return tl.where(x < 0.0, float("nan"), tl.where(x == 0.0, float("inf"), value))
'''


_K0_VALUE = "p - tl.log(0.5 * small) * _i0(small)"
_K1_VALUE = "p / small + tl.log(0.5 * small) * _i1(small)"
_FAR_BY_EXP = "tl.exp(-large) * q / tl.sqrt(large)"


def _oscillating(order: int, p: tuple[Sequence[float], ...]) -> str:
    """The factors of the sine and the cosine of J and Y beyond 5."""
    return f'''@triton.jit
def _bessel_factors{order}(x):
    """The factors of the two oscillations of J{order} and Y{order} for x > 5."""
    z = 5.0 / x * (5.0 / x)
{_horner("a", "z", p[0])}\
{_horner("b", "z", p[1])}\
{_horner("c", "z", p[2])}\
{_horner("d", "z", p[3])}\
    return a / b * (0.79788456080286535588 / tl.sqrt(x)), 5.0 / x * (c / d) * (0.79788456080286535588 / tl.sqrt(x))
'''


_FACTORS0 = (
    (0.000796936729, 0.0828352392, 1.23953372, 5.44725003, 8.747165, 5.30324038, 1.0),
    (0.000924408811, 0.0856288474, 1.25352744, 5.4709774, 8.76190883, 5.30605288, 1.0),
    (-0.0113663839, -1.28252719, -19.5539544, -93.2060152, -177.681168, -147.077505, -51.4105327, -6.05014351),
    (64.3178256, 856.430026, 3882.40184, 7240.46774, 5930.72701, 2062.09332, 242.00574),
)
_FACTORS1 = (
    (0.000762125616, 0.0731397057, 1.12719608, 5.11207951, 8.4240459, 5.21451599, 1.0),
    (0.000571323128, 0.0688455909, 1.10514233, 5.07386386, 8.39985554, 5.20982849, 1.0),
    (0.0510862595, 4.98213873, 75.8238284, 366.779609, 710.856305, 597.489612, 211.688757, 25.2070206),
    (74.2373277, 1056.44886, 4986.41058, 9562.31892, 7997.0416, 2826.19279, 336.093608),
)
_J0_NEAR = (-4.79443221e09, 1.95617492e12, -2.49248344e14, 9.70862251e15)
_J0_BELOW = (
    499.563147, 173785.402, 48440965.8, 1.11855537e10, 2.1127752e12, 3.1051823e14, 3.18121956e16, 1.71086294e18,
)  # fmt: skip
_J1_NEAR = (-899971226.0, 4.52228298e11, -7.27494245e13, 3.68295733e15)
_J1_BELOW = (
    620.836478, 256987.257, 83514679.1, 2.21511595e10, 4.74914122e12, 7.84369608e14, 8.95222336e16, 5.3227862e18,
)  # fmt: skip
_Y0_NEAR = (
    15592.4368, -14663929.6, 5.43526477e09, -9.82136066e11, 8.75906394e13, -3.46628303e15, 4.42733269e16, -1.849508e16,
)  # fmt: skip
_Y0_BELOW = (1041.28354, 626107.33, 268919633.0, 8.64002487e10, 2.02979613e13, 3.17157753e15, 2.50596256e17)
_Y1_NEAR = (1.26320475e09, -6.47355876e11, 1.14509512e14, -8.12770256e15, 2.02439476e17, -7.78877196e17)
_Y1_BELOW = (
    594.301592, 235564.093, 73481194.4, 1.87601316e10, 3.88231277e12, 6.20557727e14, 6.87141087e16, 3.97270608e18,
)  # fmt: skip

_BESSEL = {
    "_bessel_factors0": _oscillating(0, _FACTORS0),
    "_bessel_factors1": _oscillating(1, _FACTORS1),
    "_bessel_j0_near": f'''@triton.jit
def _bessel_j0_near(x):
    """J0 for abs(x) <= 5."""
    z = x * x
{_horner("p", "z", _J0_NEAR)}\
{_horner("q", "z", _J0_BELOW)}\
    return (z - 5.78318596294678452118) * (z - 30.4712623436620863991) * p / q
''',
    "_bessel_j1_near": f'''@triton.jit
def _bessel_j1_near(x):
    """J1 for abs(x) <= 5."""
    z = x * x
{_horner("p", "z", _J1_NEAR)}\
{_horner("q", "z", _J1_BELOW)}\
    return p / q * x * (z - 14.6819706421238932572) * (z - 49.2184563216946036703)
''',
    "_bessel_j0": '''@triton.jit
def _bessel_j0(x):
    """The Bessel function of the first kind of order 0."""
    a = tl.abs(x)
    p, q = _bessel_factors0(tl.where(a <= 5.0, 5.0, a))
    far = p * tl.cos(a - 0.78539816339744830962) - q * tl.sin(a - 0.78539816339744830962)
    return tl.where(a <= 5.0, _bessel_j0_near(tl.minimum(a, 5.0)), far)
''',
    "_bessel_j1": '''@triton.jit
def _bessel_j1(x):
    """The Bessel function of the first kind of order 1."""
    a = tl.abs(x)
    p, q = _bessel_factors1(tl.where(a <= 5.0, 5.0, a))
    far = p * tl.cos(a - 2.35619449019234492885) - q * tl.sin(a - 2.35619449019234492885)
    return tl.where(a <= 5.0, _bessel_j1_near(tl.where(a <= 5.0, x, 0.0)), tl.where(x < 0.0, -far, far))
''',
    "_bessel_y0": f'''@triton.jit
def _bessel_y0(x):
    """The Bessel function of the second kind of order 0."""
    small = tl.minimum(x, 5.0)
    z = small * small
{_horner("n", "z", _Y0_NEAR)}\
{_horner("d", "z", _Y0_BELOW)}\
    near = n / d + 0.63661977236758134308 * tl.log(small) * _bessel_j0_near(small)
    p, q = _bessel_factors0(tl.where(x <= 5.0, 5.0, x))
    far = p * tl.sin(x - 0.78539816339744830962) + q * tl.cos(x - 0.78539816339744830962)
    value = tl.where(x <= 5.0, near, far)
    return tl.where(x < 0.0, float("nan"), tl.where(x == 0.0, -float("inf"), value))
''',
    "_bessel_y1": f'''@triton.jit
def _bessel_y1(x):
    """The Bessel function of the second kind of order 1."""
    small = tl.minimum(x, 5.0)
    z = small * small
{_horner("n", "z", _Y1_NEAR)}\
{_horner("d", "z", _Y1_BELOW)}\
    near = small * (n / d) + 0.63661977236758134308 * (_bessel_j1_near(small) * tl.log(small) - 1.0 / small)
    p, q = _bessel_factors1(tl.where(x <= 5.0, 5.0, x))
    far = p * tl.sin(x - 2.35619449019234492885) + q * tl.cos(x - 2.35619449019234492885)
    value = tl.where(x <= 5.0, near, far)
    return tl.where(x < 0.0, float("nan"), tl.where(x == 0.0, -float("inf"), value))
''',
}

SPECIAL_HELPERS: dict[str, str] = {
    "_erfcx": _ERFCX,
    "_erfinv": _ERFINV,
    "_ndtri": _NDTRI,
    "_lgamma": _LGAMMA,
    "_digamma": _DIGAMMA,
    "_trigamma": _TRIGAMMA,
    "_i0": _first_kind(
        "_i0",
        "The modified Bessel function of the first kind of order 0.",
        "",
        "p",
        "tl.exp(large) * q / tl.sqrt(large)",
        0,
    ),
    "_i0e": _first_kind("_i0e", "i0(x) * exp(-abs(x)).", "", "p * tl.exp(-a)", "q / tl.sqrt(large)", 0),
    "_i1": _first_kind(
        "_i1",
        "The modified Bessel function of the first kind of order 1.",
        "",
        "x * p",
        "tl.where(x < 0.0, -1.0, 1.0) * (tl.exp(large) * q / tl.sqrt(large))",
        1,
    ),
    "_i1e": _first_kind(
        "_i1e",
        "i1(x) * exp(-abs(x)).",
        "",
        "x * p * tl.exp(-a)",
        "tl.where(x < 0.0, -q, q) / tl.sqrt(large)",
        1,
    ),
    "_modified_bessel_k0": _second_kind(
        "_modified_bessel_k0", "The modified Bessel function of the second kind of order 0.", _K0_VALUE, _FAR_BY_EXP, 0
    ),
    "_modified_bessel_k1": _second_kind(
        "_modified_bessel_k1", "The modified Bessel function of the second kind of order 1.", _K1_VALUE, _FAR_BY_EXP, 1
    ),
    "_scaled_modified_bessel_k0": _second_kind(
        "_scaled_modified_bessel_k0", "K0(x) * exp(x).", f"({_K0_VALUE}) * tl.exp(small)", "q / tl.sqrt(large)", 0
    ),
    "_scaled_modified_bessel_k1": _second_kind(
        "_scaled_modified_bessel_k1", "K1(x) * exp(x).", f"({_K1_VALUE}) * tl.exp(small)", "q / tl.sqrt(large)", 1
    ),
    **_BESSEL,
    "_spherical_bessel_j0": '''@triton.jit
def _spherical_bessel_j0(x):
    """sin(x) / x, by a Taylor polynomial near zero."""
    z = x * x
    near = 1.0 + z * (-0.166666667 + z * (0.00833333333 + z * (-0.000198412698 + z * 2.75573192e-06)))
    value = tl.where(tl.abs(x) < 0.5, near, tl.sin(x) / tl.where(x == 0.0, 1.0, x))
    return tl.where(tl.abs(x) == float("inf"), 0.0, value)
''',
}
"""Source of each function. Functions that others call are among them."""
