"""Lowers the functions of ``torch.special`` that are not one function of one tensor: orthogonal polynomials and ``polygamma``."""

from __future__ import annotations

from collections.abc import Callable

from mtmc_lsp.core.dtypes import compute_dtype, is_float
from mtmc_lsp.ir.lower import Call, lowering

MOST_STEPS = 16
"""The highest degree of a polynomial that is written out."""
CHEBYSHEV = ("chebyshev_polynomial_t", "chebyshev_polynomial_u", "chebyshev_polynomial_v", "chebyshev_polynomial_w")
OTHERS = ("hermite_polynomial_h", "hermite_polynomial_he", "laguerre_polynomial_l", "legendre_polynomial_p")


class _Terms:
    """Arithmetic on primitives of one dtype."""

    def __init__(self, c: Call, dtype: str) -> None:
        self._b, self._dtype = c.b, dtype

    def add(self, x: str, y: str | float) -> str:
        return self._b.pointwise("add", x, y, dtype=self._dtype)

    def sub(self, x: str | float, y: str | float) -> str:
        return self._b.pointwise("sub", x, y, dtype=self._dtype)

    def mul(self, x: str, y: str | float) -> str:
        return self._b.pointwise("mul", x, y, dtype=self._dtype)

    def div(self, x: str, y: float) -> str:
        return self._b.pointwise("div", x, y, dtype=self._dtype)


@lowering(*(f"special_{prefix}{name}" for name in CHEBYSHEV for prefix in ("", "shifted_")))
@lowering(*(f"special_{name}" for name in OTHERS))
def polynomial(c: Call) -> str:
    """A polynomial of fixed degree by PyTorch's recurrence; beyond degree 6, PyTorch computes some of them by cosines."""
    if c.overload != "n_scalar":
        raise c.fail("a degree that is not a number")
    degree = c.integer(1, "n")
    if degree > MOST_STEPS:
        raise c.fail(f"a degree above {MOST_STEPS}")
    d = compute_dtype(c.out.dtype)
    x, terms, name = c.b.cast(c.tensor(0), d), _Terms(c, d), c.op.removeprefix("special_")
    if degree <= 0:
        return c.b.expand(c.b.constant(float(degree == 0), c.out.dtype), c.out.shape)
    if name.startswith("shifted_"):
        x, name = terms.sub(terms.add(x, x), 1.0), name.removeprefix("shifted_")
    first, step = _recurrence(terms, x, name)
    before: str | float = 1.0
    value = first
    for k in range(1, degree):
        before, value = value, step(k, value, before)
    return c.b.cast(value, c.out.dtype)


def _recurrence(terms: _Terms, x: str, name: str) -> tuple[str, Callable[[int, str, str | float], str]]:
    """The polynomial of degree 1, and the one of degree k + 1 from those of degrees k and k - 1."""
    twice = terms.add(x, x)
    scaled = _scaled(terms)
    if name in CHEBYSHEV:
        first = {"t": x, "u": twice, "v": terms.sub(twice, 1.0), "w": terms.add(twice, 1.0)}[name[-1]]
        return first, lambda k, q, p: terms.sub(terms.mul(twice, q), p)
    if name == "hermite_polynomial_h":
        return twice, lambda k, q, p: terms.sub(terms.mul(twice, q), scaled(p, 2.0 * k))
    if name == "hermite_polynomial_he":
        return x, lambda k, q, p: terms.sub(terms.mul(x, q), scaled(p, float(k)))
    if name == "legendre_polynomial_p":
        return x, lambda k, q, p: terms.div(
            terms.sub(terms.mul(terms.mul(x, 2.0 * k + 1.0), q), scaled(p, float(k))), k + 1.0
        )
    first = terms.sub(1.0, x)
    return first, lambda k, q, p: terms.div(
        terms.sub(terms.mul(terms.add(first, 2.0 * k), q), scaled(p, float(k))), k + 1.0
    )


def _scaled(terms: _Terms) -> Callable[[str | float, float], str | float]:
    return lambda p, factor: p * factor if isinstance(p, float) else terms.mul(p, factor)


@lowering("polygamma")
def polygamma(c: Call) -> str:
    """The derivative of ``digamma``, which training needs; others are series and stay torch calls."""
    order, d = c.integer(0, "n"), c.out.dtype
    if order not in (0, 1):
        raise c.fail("an order above 1")
    x = c.tensor(1)
    return c.b.pointwise("trigamma" if order else "digamma", x if is_float(c.b.dtype(x)) else c.b.cast(x, d), dtype=d)


@lowering("angle")
def angle(c: Call) -> str:
    """Pi for negative numbers, 0 for others, NaN for NaN."""
    x, d = c.tensor(0), c.out.dtype
    wide = compute_dtype(d)
    negative = c.b.pointwise("lt", x, 0, dtype="bool", operand_dtype=wide)
    value = c.b.pointwise("where", negative, 3.141592653589793, 0.0, dtype=d)
    same = c.b.pointwise("eq", x, x, dtype="bool", operand_dtype=wide)
    return c.b.pointwise("where", same, value, x, dtype=d)
