"""Operations of complex values on pairs of real values.

Each function gets an :class:`Emitter` and the arguments of the operator, where complex tensors and numbers are pairs, and real
tensors are nodes. It returns a pair, or a node for a real result.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from mtmc_lsp.capture.worker.loops.pairs.emitter import Emitter, Pair, Part, aten, is_node, real_dtype

PER_PART = frozenset(
    "expand view reshape _unsafe_view permute transpose t unsqueeze squeeze select slice alias detach clone contiguous "
    "lift_fresh lift_fresh_copy sum mean cumsum flip roll index index_select gather constant_pad_nd pad repeat tril triu "
    "split split_with_sizes chunk unsafe_split unbind diagonal movedim flatten unflatten unfold view_as expand_as narrow "
    "as_strided _reshape_alias neg squeeze_copy select_backward slice_backward".split()
)
"""Operations of one complex tensor that do the same to both parts."""
SEVERAL = frozenset(
    "where cat stack select_scatter slice_scatter copy index_put index_add scatter diagonal_scatter".split()
)
"""Operations of several tensors that do the same to both parts."""
CREATING = frozenset(
    "zeros ones empty full zeros_like ones_like empty_like full_like new_zeros new_ones new_empty new_full".split()
)
"""Operations that create a complex tensor from sizes and a number."""
VIEWS = frozenset("view_as_real view_as_complex _to_copy _neg_view".split())
"""Operations between complex and real values."""
PRODUCTS = frozenset("mm bmm matmul mv dot".split())
"""Products of matrices."""


def runs_on_pairs(name: str) -> bool:
    """Whether an operation of complex values has a form on pairs that a kernel can run step by step."""
    return name in OPERATIONS or name in PER_PART or name in SEVERAL or name in CREATING or name in VIEWS


def pair_of(item: Any) -> Pair:
    """An operand as a pair: real ones have no imaginary part."""
    if isinstance(item, Pair):
        return item
    if isinstance(item, complex):
        return Pair(item.real or None, item.imag or None)
    return Pair(item, None)


def product(e: Emitter, a: Any, b: Any) -> Pair:
    """``a * b``."""
    return _bilinear(e, pair_of(a), pair_of(b), e.mul)


def _bilinear(e: Emitter, a: Pair, b: Pair, multiply: Callable[[Part, Part], Part]) -> Pair:
    re = e.sub(multiply(a.re, b.re), multiply(a.im, b.im))
    return Pair(re, e.add(multiply(a.re, b.im), multiply(a.im, b.re)))


def matrix_product(e: Emitter, target: Any, a: Any, b: Any) -> Pair:
    """A product of matrices or vectors."""
    return _bilinear(e, pair_of(a), pair_of(b), lambda x, y: None if x is None or y is None else e(target, x, y))


def _add(e: Emitter, a: Any, b: Any, alpha: Any = 1) -> Pair:
    x, y = pair_of(a), pair_of(b)
    y = y if alpha == 1 else product(e, y, alpha)
    return Pair(e.add(x.re, y.re), e.add(x.im, y.im))


def _sub(e: Emitter, a: Any, b: Any, alpha: Any = 1) -> Pair:
    x, y = pair_of(a), pair_of(b)
    y = y if alpha == 1 else product(e, y, alpha)
    return Pair(e.sub(x.re, y.re), e.sub(x.im, y.im))


def _rsub(e: Emitter, a: Any, b: Any, alpha: Any = 1) -> Pair:
    return _sub(e, b, a, alpha)


def _div(e: Emitter, a: Any, b: Any) -> Pair:
    x, y = pair_of(a), pair_of(b)
    if y.im is None:
        return Pair(e.div(x.re, y.re), e.div(x.im, y.re))
    if not is_node(y.re) and not is_node(y.im):
        return product(e, x, 1 / complex(y.re or 0.0, y.im))
    # As torch does, scale by the larger part: squares of parts could overflow.
    c, d = y.re if is_node(y.re) else e.zeros_like(y.im), y.im
    is_swapped = e(aten.lt.Tensor, e(aten.abs.default, c), e(aten.abs.default, d))
    larger, smaller = e(aten.where.self, is_swapped, d, c), e(aten.where.self, is_swapped, c, d)
    ratio = e.div(smaller, larger)
    scale = e(aten.reciprocal.default, e.add(larger, e.mul(smaller, ratio)))
    one = e(aten.ones_like.default, ratio)
    u, v = e(aten.where.self, is_swapped, ratio, one), e(aten.where.self, is_swapped, one, ratio)
    re = e.add(e.mul(x.re, u), e.mul(x.im, v))
    im = e.sub(e.mul(x.im, u), e.mul(x.re, v))
    return Pair(e.mul(re, scale), e.mul(im, scale))


def _exp(e: Emitter, x: Pair) -> Pair:
    if x.im is None:
        return Pair(e(aten.exp.default, x.re), None)
    return _polar(e, None if x.re is None else e(aten.exp.default, x.re), x.im)


def _polar(e: Emitter, radius: Part, angle: Part) -> Pair:
    cos, sin = e(aten.cos.default, angle), e(aten.sin.default, angle)
    return Pair(cos, sin) if radius is None else Pair(e.mul(radius, cos), e.mul(radius, sin))


def _abs(e: Emitter, x: Pair) -> Part:
    if x.re is None or x.im is None:
        return e(aten.abs.default, x.im if x.re is None else x.re)
    return e(aten.hypot.default, x.re, x.im)


def _angle(e: Emitter, x: Pair) -> Part:
    re, im = e.both(x)
    return e(aten.atan2.default, im, re)


def _log(e: Emitter, x: Pair) -> Pair:
    return Pair(e(aten.log.default, _abs(e, x)), _angle(e, x))


def _sgn(e: Emitter, x: Pair) -> Pair:
    size = _abs(e, x)
    # The sign of 0 is 0.
    divisor = e(aten.where.self, e(aten.eq.Scalar, size, 0), e(aten.ones_like.default, size), size)
    return Pair(e.div(x.re, divisor), e.div(x.im, divisor))


def _power(e: Emitter, x: Pair, exponent: Any) -> Any:
    if not isinstance(exponent, (int, float)) or exponent not in (-2, -1, 1, 2, 3, 4):
        return NotImplemented
    result = x
    for _ in range(abs(int(exponent)) - 1):
        result = product(e, result, x)
    return result if exponent > 0 else _div(e, 1.0, result)


def _reciprocal(e: Emitter, x: Pair) -> Pair:
    return _div(e, 1.0, x)


def _conj(e: Emitter, x: Pair) -> Pair:
    return Pair(x.re, e.neg(x.im))


def _same(e: Emitter, x: Pair, *_: Any, **__: Any) -> Pair:
    return x


def _real(e: Emitter, x: Pair) -> Part:
    return e.both(x).re


def _imag(e: Emitter, x: Pair) -> Part:
    return e.both(x).im


def _complex(e: Emitter, re: Part, im: Part) -> Pair:
    return Pair(re, im)


def _equal(e: Emitter, a: Any, b: Any) -> Part:
    (x, y), (u, v) = e.both(pair_of(a)), pair_of(b)
    return e(aten.logical_and.default, *(e(aten.eq.Tensor, p, 0.0 if q is None else q) for p, q in ((x, u), (y, v))))


def _not_equal(e: Emitter, a: Any, b: Any) -> Part:
    return e(aten.logical_not.default, _equal(e, a, b))


def _masked_fill(e: Emitter, x: Any, mask: Any, number: Any) -> Any:
    if is_node(number) or (isinstance(number, Pair) and any(map(is_node, number))):
        return NotImplemented
    filling = pair_of(number)
    return Pair(
        *(e(aten.masked_fill.Scalar, part, mask, value or 0.0) for part, value in zip(e.both(x), filling, strict=True))
    )


def _linear(e: Emitter, x: Any, weight: Any, bias: Any = None) -> Pair:
    result = matrix_product(e, aten.linear.default, x, weight)
    return result if bias is None else _add(e, result, bias)


def _addmm(e: Emitter, addend: Any, a: Any, b: Any) -> Pair:
    return _add(e, addend, matrix_product(e, aten.mm.default, a, b))


OPERATIONS: dict[str, Callable[..., Any]] = {
    "mul": product,
    "add": _add,
    "sub": _sub,
    "rsub": _rsub,
    "div": _div,
    "true_divide": _div,
    "reciprocal": _reciprocal,
    "exp": _exp,
    "log": _log,
    "polar": _polar,
    "abs": _abs,
    "angle": _angle,
    "sgn": _sgn,
    "pow": _power,
    "square": lambda e, x: product(e, x, x),
    "_conj": _conj,
    "conj": _conj,
    "_conj_physical": _conj,
    "conj_physical": _conj,
    "resolve_conj": _same,
    "resolve_neg": _same,
    "real": _real,
    "imag": _imag,
    "complex": _complex,
    "eq": _equal,
    "ne": _not_equal,
    "masked_fill": _masked_fill,
    "linear": _linear,
    "addmm": _addmm,
}
"""The operations that do something else to each part, by name."""


def of_each(e: Emitter, target: Any, pairs: list[Pair], call: Callable[[int], tuple[Any, Any]]) -> Pair:
    """The same operation on the real parts and on the imaginary parts.

    Args:
        call: the arguments of the real (0) or the imaginary (1) part.
    """
    parts: list[Part] = []
    for number in (0, 1):
        if all(pair[number] is None for pair in pairs):
            parts.append(None)
            continue
        args, kwargs = call(number)
        parts.append(e(target, *args, **kwargs))
    return Pair(*parts)


def created(e: Emitter, target: Any, args: Any, kwargs: dict[str, Any], dtype: torch.dtype) -> Pair:
    """A new tensor of one number."""
    name = target.__name__.split(".")[0]
    number: Any = {"ones": 1.0, "ones_like": 1.0, "new_ones": 1.0}.get(name, 0.0)
    given = list(args)
    if "full" in name:
        number = given[1]
    number = complex(number)
    parts: list[Part] = []
    for value in (number.real, number.imag):
        if "full" in name:
            given[1] = value
            parts.append(e(target, *given, **{**kwargs, "dtype": real_dtype(dtype)}))
        elif value == (1.0 if "ones" in name else 0.0):
            parts.append(e(target, *given, **{**kwargs, "dtype": real_dtype(dtype)}))
        else:
            parts.append(None)
    return Pair(*parts)
