"""Functions and reductions of special values (NaN, infinities, zeros, extremes) match PyTorch."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

import pytest
import torch

from mtmc_lsp.core.dtypes import EPSILON, SHORT, round_to_dtype
from tests.codegen.checker import Checker, greedy
from tests.codegen.test_families import LOOPED, left_to_torch

FLOATS = ("f32", "f16", "f64")
"""bfloat16 is excluded: kernels compute it in float32, and Triton's interpreter is wrong for it."""
INTEGERS = ("i32", "i64", "i16", "i8", "u8")


def calls(names: str, form: str) -> dict[str, str]:
    return {name: form.format(name) for name in names.split()}


OF_ONE: dict[str, dict[str, str]] = {
    "powers and roots": {
        **calls("exp exp2 expm1 log log2 log10 log1p sqrt rsqrt square reciprocal", "torch.{}(x)"),
        **{f"power {n}": f"x ** {n}" for n in ("0", "2", "3", "4", "7", "-1", "-2", "0.5", "-0.5", "1.5")},
        "power of 2": "2.0 ** x",
        "power of -2": "(-2.0) ** x",
    },
    "angles": calls("sin cos tan atan asin acos sinh cosh tanh asinh acosh atanh sinc deg2rad", "torch.{}(x)"),
    "errors": {**calls("sigmoid erf erfc logit", "torch.{}(x)"), "entr": "torch.special.entr(x)"},
    "roundings": {
        **calls(
            "abs neg floor ceil trunc round sign sgn frac isnan isinf isfinite logical_not nan_to_num", "torch.{}(x)"
        ),
        "decimals": "torch.round(x, decimals=1)",
        "as bool": "x.to(torch.bool)",
        "as int32": "torch.nan_to_num(x, 0.0, 0.0, 0.0).clamp(-1e4, 1e4).to(torch.int32)",
    },
    "activations": {
        **calls("relu gelu silu mish elu selu celu softplus softsign hardswish hardsigmoid hardtanh relu6", "F.{}(x)"),
        **calls("hardshrink softshrink tanhshrink leaky_relu logsigmoid", "F.{}(x)"),
        "gelu by tanh": "F.gelu(x, approximate='tanh')",
        "softplus, steep": "F.softplus(x, beta=3.0, threshold=5.0)",
        "threshold": "F.threshold(x, 0.5, 20.0)",
        "clamp": "torch.clamp(x, -1.5, 2.0)",
        "clamp below": "torch.clamp(x, min=0.5)",
        "at a tenth": "x >= 0.1",
        "is a tenth": "x == 0.1",
    },
}
OF_TWO: dict[str, dict[str, str]] = {
    "arithmetic": {
        **calls("add sub mul div rsub addcdiv addcmul", "torch.{}(x, y)"),
        "addcdiv": "torch.addcdiv(x, x, y)",
        "addcmul": "torch.addcmul(y, x, torch.sign(x))",
        "lerp": "torch.lerp(x, y, 0.3)",
        "lerp, near the end": "torch.lerp(x, y, 0.7)",
        "lerp by a tensor": "torch.lerp(x, y, y)",
    },
    "quotients": {
        **calls("fmod remainder floor_divide", "torch.{}(x, y)"),
        "truncating": "torch.div(x, y, rounding_mode='trunc')",
        "flooring": "torch.div(x, y, rounding_mode='floor')",
    },
    "choices": {
        **calls("maximum minimum fmax fmin copysign heaviside", "torch.{}(x, y)"),
        "clamp": "torch.clamp(x, y, y + 1)",
        "where": "torch.where(x > y, x, y)",
    },
    "comparisons": {
        **calls("eq ne lt le gt ge isclose logical_and logical_or logical_xor", "torch.{}(x, y)"),
    },
    "functions": {
        **calls("atan2 hypot pow logaddexp logaddexp2 xlogy", "torch.{}(x, y)"),
        "xlog1py": "torch.special.xlog1py(x, y)",
    },
}
OF_INTEGERS: dict[str, str] = {
    **calls("abs neg sign square exp sqrt sigmoid tanh relu floor round logical_not reciprocal isnan", "torch.{}(x)"),
    **calls(
        "add sub mul div maximum minimum remainder floor_divide fmod eq lt ge logical_and logical_xor", "torch.{}(x, y)"
    ),
    "truncating": "torch.div(x, y, rounding_mode='trunc')",
    "flooring": "torch.div(x, y, rounding_mode='floor')",
    "and": "x & y",
    "or": "x | y",
    "xor": "x ^ y",
    "not": "~x",
    "left": "x << (y & 7)",
    "right": "x >> (y & 7)",
    "scalar": "x * 3 + 100",
    "power 2": "x ** 2",
    "power 3": "x ** 3",
    "mixed with float": "x * 0.5 + y",
    "floor of a number": "x // 3",
    "remainder of a number": "x % 3",
    "clamp": "torch.clamp(x, 1, 5)",
    "where": "torch.where(x > y, x, y)",
    "above a half": "x > 0.5",
    "threshold": "F.threshold(x, 2, 20)",
}
OF_BOOLS: dict[str, str] = {
    "plus": "x + y",
    "times": "x * y",
    "and": "x & y",
    "or": "x | y",
    "xor": "x ^ y",
    "not": "~x",
    "maximum": "torch.maximum(x, y)",
    "minimum": "torch.minimum(x, y)",
    "less": "x < y",
    "less or equal": "x <= y",
    "equal": "x == y",
    "plus a number": "x + 1",
    "times a number": "x * 2.5",
    "as float": "x.float() - y.float()",
    "where": "torch.where(x, 2, y)",
    "divided": "x / (y + 1)",
}
REDUCED: dict[str, dict[str, str]] = {
    "places": {
        **calls("argmax argmin amax", "x.{}(-1)"),
        **calls("max min", "*x.{}(-1)"),
        "computed": "(x * 2).argmax(-1)",
        "kept": "*x.max(-1, keepdim=True)",
    },
    "extremes": {**calls("amax amin", "x.{}(-1)"), "aminmax": "*torch.aminmax(x, dim=-1)"},
    "columns": {**calls("argmax argmin", "x.{}(0)"), **calls("max min", "*x.{}(0)")},
    "all": {**calls("argmax argmin max min", "x.{}()")},
    "sums": {**calls("sum prod mean any all nansum nanmean", "x.{}(-1)"), "count": "torch.count_nonzero(x, -1)"},
    "variances": {
        **calls("var std", "x.{}(-1)"),
        "biased": "x.var(-1, correction=0)",
        "by 2": "x.std(-1, correction=2)",
    },
    "exponentials": {"logsumexp": "x.logsumexp(-1)", **calls("softmax log_softmax", "torch.{}(x, -1)")},
    "norms": {"2": "x.norm(dim=-1)", "1": "x.norm(p=1, dim=-1)", "largest": "x.norm(p=float('inf'), dim=-1)"},
    **{name: {name: f"torch.{name}(x, -1)"} for name in ("cumsum", "cumprod", "logcumsumexp")},
}
REDUCED_INTEGERS: dict[str, dict[str, str]] = {
    "places": {**calls("argmax argmin", "x.{}(-1)"), **calls("max min", "*x.{}(-1)")},
    "columns": {**calls("argmax argmin", "x.{}(0)"), **calls("max min", "*x.{}(0)")},
    "sums": {**calls("sum prod amax amin any all", "x.{}(-1)"), "count": "torch.count_nonzero(x, -1)"},
    "cumsum": {"cumsum": "x.cumsum(-1)"},
    "mean": {"mean": "x.mean(-1, dtype=torch.float32)"},
}
REDUCED_BOOLS = {**calls("max min", "*x.{}(-1)"), **calls("sum any all amax amin prod", "x.{}(-1)")}
WAYS: tuple[dict[str, object], ...] = (
    {},
    {"rows": 4},
    LOOPED,
    {"rows": 1, "block": 4, "loop": True, "split": 4},
    {"rows": 2, "block": 4, "loop": True, "split": 2},
)
"""Configurations: whole rows, several rows at once, blocks of columns, and split rows."""
ROUNDINGS = 64.0
"""Tolerance in units of the dtype's epsilon."""
MORE_ROUNDINGS = {
    "pow": 512.0,
    "power 4": 512.0,
    "power 7": 512.0,
    "power 1.5": 512.0,
    "power of 2": 512.0,
    "power of -2": 512.0,
}
"""The exponent multiplies the rounding error of the logarithm."""
CANCELLING = frozenset("gelu tanhshrink logit logaddexp logaddexp2 sinc fmod remainder addcmul".split()) | {
    "gelu by tanh",
    "lerp by a tensor",
}
"""Functions that subtract values as large as their arguments, also in PyTorch: small results are rounding errors."""
SIGNED_ZEROS = frozenset("abs neg floor ceil trunc round copysign sqrt add mul div atan2 nan_to_num relu".split())
ONLY_IN_TORCH = {"f64": frozenset("atan asin acos atan2 erfc".split())}
"""Functions without a formula for a dtype."""


def numbers(short: str) -> list[float]:
    """The special values of a dtype, and some ordinary ones."""
    kind = getattr(torch, SHORT[short])
    if short == "bool":
        return [False, True]
    if not kind.is_floating_point:
        ends = torch.iinfo(kind)
        few = [0, 1, 2, 3, 7, 100, ends.max, ends.max - 1, ends.max // 2 + 1]
        return [*few, *(n for n in (-1, -2, -3, -7, -100, ends.min, ends.min + 1) if n >= ends.min)]
    ends = torch.finfo(kind)
    sizes = [
        0.0,
        0.1,
        0.3,
        0.5,
        1.0,
        1.5,
        2.0,
        2.5,
        3.0,
        6.0,
        19.5,
        21.0,
        90.0,
        1000.0,
        ends.max,
        ends.max / 2,
        float("inf"),
    ]
    # Their squares, sums and reciprocals leave the dtype's range.
    sizes += [ends.max**0.5 * 8, ends.tiny, ends.tiny**0.5 / 64, ends.smallest_normal / 4, ends.eps, ends.eps**0.5]
    return [*sizes, *(-size for size in sizes), float("nan")]


def special(short: str) -> torch.Tensor:
    """The special values of a dtype."""
    wide = torch.float64 if short[0] == "f" else None
    return torch.tensor(numbers(short), dtype=wide).to(getattr(torch, SHORT[short]))


def pairs(short: str) -> tuple[torch.Tensor, torch.Tensor]:
    """All pairs of special values."""
    x, y = torch.meshgrid(special(short), special(short), indexing="ij")
    return x.reshape(-1).contiguous(), y.reshape(-1).contiguous()


def rows(short: str) -> torch.Tensor:
    """Rows of eleven values: NaN, infinities, both, equal values, extremes of the dtype."""
    kind = getattr(torch, SHORT[short])
    if short == "bool":
        return torch.tensor([[False] * 11, [True] * 11, [False] * 10 + [True], [True] + [False] * 10])
    if not kind.is_floating_point:
        low, high = torch.iinfo(kind).min, torch.iinfo(kind).max
        made = [[low] * 11, [high] * 11, [0] * 11, [0] * 5 + [high] * 6, [3, low, low, high, high, 1, 0, high, 5, 7, 2]]
        return torch.tensor([*made, [1, 2, 3, 2, 1, 2, 3, 2, 1, 2, 1]]).to(kind)
    inf, nan, most = float("inf"), float("nan"), torch.finfo(kind).max
    made = [
        [-inf] * 11,
        [inf] * 11,
        [nan] * 11,
        [0.5] * 11,
        [1.0, 2.0, nan, 3.0, 4.0, nan, inf, 5.0, -inf, 2.0, nan],
        [1.0, inf, 2.0, 3.0, inf, 1.0, 2.0, inf, 1.0, nan, 1.0],
        [inf, -inf, 2.0, 3.0, -inf, 1.0, 2.0, inf, 1.0, 1.0, 1.0],
        [-inf, -inf, -inf, -inf, -inf, -inf, -inf, -inf, -inf, -inf, nan],
        [-inf, -inf, -inf, -inf, -inf, -inf, -3.0, -inf, -3.0, -inf, -inf],
        [nan, 1.0, 2.0, 3.0, 1.0, 2.0, 3.0, 1.0, 2.0, 3.0, 1.0],
        [0.25, -1.0, 2.0, -3.0, 2.5, 2.0, -3.0, 1.0, 2.0, 2.5, 1.0],
        [-0.0, 0.0, -0.0, 0.0, -0.0, 0.0, 0.0, -0.0, 0.0, 0.0, -0.0],
        [most, -most, 1.0, most, 0.0, 1.0, -most, most / 2, -1.0, 0.0, most],
    ]
    return torch.tensor(made, dtype=torch.float64).to(kind)


def shown(text: str, inputs: Mapping[str, torch.Tensor], short: str) -> str:
    """Source of the user's file."""
    words = " ".join(
        f"{name}={short}[{','.join(['N', *map(str, value.shape[1:])])}]{'' if short[0] == 'f' or short == 'bool' else '@1..9'}"
        for name, value in inputs.items()
    )
    size = len(next(iter(inputs.values())))
    head = f"import torch\nimport torch.nn.functional as F\n\n# mtmc: {words} N={size}\n"
    return f"{head}def f({', '.join(inputs)}):\n    return {text}\n"


def alike(
    name: str, result: torch.Tensor, reference: torch.Tensor, exact: torch.Tensor, largest: torch.Tensor | float
) -> torch.Tensor:
    """Elements that match PyTorch, or PyTorch in float64, which overflows and cancels less."""
    if not reference.is_floating_point():
        return result == reference
    epsilon = EPSILON[str(reference.dtype).removeprefix("torch.")]
    rounding, least = MORE_ROUNDINGS.get(name, ROUNDINGS) * epsilon, 4 * torch.finfo(reference.dtype).tiny
    close = torch.isclose(result.double(), reference.double(), rtol=rounding, atol=least, equal_nan=True)
    if exact.shape == reference.shape:
        close |= torch.isclose(
            result.double(), exact.to(reference.dtype).double(), rtol=rounding, atol=least, equal_nan=True
        )
    if name in CANCELLING:
        close |= (result.double() - reference.double()).abs() <= 8 * epsilon * largest
    if name in MORE_ROUNDINGS:
        close |= (reference.abs() > (1.0 - rounding) * torch.finfo(reference.dtype).max) & (
            result == reference * math.inf
        )
    if name in SIGNED_ZEROS:
        close &= (torch.signbit(result) == torch.signbit(reference)) | (reference != 0.0)
    return close


def check(
    checker: Checker, table: Mapping[str, str], inputs: dict[str, torch.Tensor], short: str, *ways: dict[str, object]
) -> None:
    """Check all functions of a table with several kernel configurations."""
    table = {name: text for name, text in table.items() if name not in ONLY_IN_TORCH.get(short, ())}
    inputs = {
        name: value for name, value in inputs.items() if any(re.search(rf"\b{name}\b", t) for t in table.values())
    }
    text = shown(f"{', '.join(table.values())},", inputs, short)
    capture = checker.capture(text)
    space: dict[str, object] = {}
    exec(text, space)
    function: Any = space["f"]
    reference = function(**inputs)
    wide = {name: value.double() if value.is_floating_point() else value for name, value in inputs.items()}
    exact = function(**wide)
    largest = torch.stack([v.double().abs().reshape(-1) for v in inputs.values()]).amax(0).clamp(1.0)
    names = [name for name, call in table.items() for _ in range(1 + call.startswith("*"))]
    for config in ways:
        candidate = greedy(capture, config)
        assert left_to_torch(capture, candidate) == set()
        result = checker.results(capture, candidate, inputs)
        wrong = []
        for name, a, b, c in zip(names, result, reference, exact, strict=True):
            assert (a.dtype, a.shape) == (b.dtype, b.shape)
            bad = ~alike(name, a, b, c, largest if largest.shape == b.shape else 1.0)
            places = [tuple(place.tolist()) for place in bad.nonzero()]
            of = [[v[p[:1]].tolist() if p else "all" for v in inputs.values()] for p in places]
            wrong += [
                f"{name} of {x} is {a[p].item()} instead of {b[p].item()}" for p, x in zip(places, of, strict=True)
            ]
        assert not wrong, f"{len(wrong)} wrong with {config}:\n" + "\n".join(wrong) + "\n" + candidate.source


@pytest.mark.parametrize("short", FLOATS)
@pytest.mark.parametrize("group", OF_ONE)
def test_functions_of_one_special_value_match_pytorch(checker: Checker, group: str, short: str) -> None:
    check(checker, OF_ONE[group], {"x": special(short)}, short, {})


@pytest.mark.parametrize("short", FLOATS)
@pytest.mark.parametrize("group", OF_TWO)
def test_functions_of_two_special_values_match_pytorch(checker: Checker, group: str, short: str) -> None:
    x, y = pairs(short)
    if group == "quotients":
        # Remainders of quotients with more digits than the dtype need long division, which kernels do not implement.
        kept = ((x / y).abs() < 0.125 / EPSILON[SHORT[short]]) | ~torch.isfinite(x) | ~torch.isfinite(y) | (y == 0)
        x, y = x[kept], y[kept]
    check(checker, OF_TWO[group], {"x": x, "y": y}, short, {})


@pytest.mark.parametrize("short", INTEGERS)
def test_integer_functions_wrap_around_as_in_pytorch(checker: Checker, short: str) -> None:
    x, y = pairs(short)
    # Division by zero raises, and the minimum divided by -1 traps.
    kept = (y != 0) & ~((y == -1) & (x == torch.iinfo(x.dtype).min))
    check(checker, OF_INTEGERS, {"x": x[kept], "y": y[kept]}, short, {})


def test_functions_of_booleans_match_pytorch(checker: Checker) -> None:
    x, y = pairs("bool")
    check(checker, OF_BOOLS, {"x": x, "y": y}, "bool", {})


@pytest.mark.parametrize("short", FLOATS)
@pytest.mark.parametrize("group", REDUCED)
def test_reductions_of_special_values_match_pytorch(checker: Checker, group: str, short: str) -> None:
    reference = rows(short)
    # Sums, differences and products of extreme values overflow or cancel, depending on the order of evaluation.
    reference = reference[:-1] if group in ("variances", "cumprod", "cumsum", "sums", "norms") else reference
    check(checker, REDUCED[group], {"x": reference}, short, *WAYS)


@pytest.mark.parametrize("short", INTEGERS)
@pytest.mark.parametrize("group", REDUCED_INTEGERS)
def test_reductions_of_integers_match_pytorch(checker: Checker, group: str, short: str) -> None:
    check(checker, REDUCED_INTEGERS[group], {"x": rows(short)}, short, *WAYS)


def test_reductions_of_booleans_match_pytorch(checker: Checker) -> None:
    check(checker, REDUCED_BOOLS, {"x": rows("bool")}, "bool", *WAYS)


@pytest.mark.parametrize("group", ["all", "places", "variances", "exponentials"])
def test_float64_reduction_kernels_compile(checker: Checker, group: str) -> None:
    """Only the compiler checks that a loop variable keeps its type."""
    capture = checker.capture(shown(f"{', '.join(REDUCED[group].values())},", {"x": rows("f64")}, "f64"))
    for config in WAYS[2:]:
        assert checker.compile_errors(capture, greedy(capture, config)) == []


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_numbers_compared_with_16_bit_floats_are_rounded_to_16_bits(dtype: str) -> None:
    for number in (0.1, -0.1, 1.0 / 3.0, 65519.0, 65520.0, 1e9, 3.0e-8, 5e-324, 0.0, 1.0 + 2.0**-8, math.inf):
        reference = torch.tensor(number, dtype=getattr(torch, dtype)).item()
        assert round_to_dtype(number, dtype) == (reference if dtype != "float32" else number)
